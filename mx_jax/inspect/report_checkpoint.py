"""The page of a checkpoint: error by tensor, worst tensors, saturation, zeros, scales."""

import collections
import math
import re
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from mx_jax.inspect.report_page import Bad, Histogram, Lines, Sentences, Share, Table, page
from mx_jax.inspect.tensor_facts import TensorFacts, size

# What a reader can tell apart: lines, rows, sentences, and columns of a map with numbers in them.
_LINES, _ROWS, _SENTENCES, _COLUMNS = 12, 30, 60, 12
# Beyond these a sentence says so: dB below the median of a format, share of zeros above it.
_LOST_DB, _MORE_ZEROS = 6.0, 0.2
# A number that is a part of a path: layers.3.up, Dense_3, blk.3.attn_q.
_NUMBER = re.compile(r"(?<![^./_])\d+(?![^./_])")
# The column of a map for tensors of no layer, before all others.
_NO_LAYER = -1
_HEADS = ("tensor", "format", "shape", "size", "bits", "amax", "zeros %", "at limit %", "SQNR dB")


def checkpoint_page(title: str, found: Sequence[TensorFacts], reference: str | None = None) -> str:
    """The page of tensors as text, and what they were compared with, if anything."""
    plural = "tensor" if len(found) == 1 else "tensors"
    lead = f"{len(found)} {plural}, {size(sum(facts.nbytes for facts in found))}"
    compared = reference is not None
    if compared:
        count = sum(facts.sqnr_db is not None for facts in found)
        lead += f"; {count} compared with those of the same name in {reference}"
    quantized = [facts for facts in found if facts.scales is not None]
    limit, zeros = "codes with the largest magnitude of their format", "values that are zero"
    sentences = _findings(found)
    sections = {
        "Out of the ordinary": [Sentences(sentences) if sentences else "nothing"],
        "Formats": [_formats(found)],
        "Error by tensor": _errors(found, compared),
        "Worst tensors": _worst(found, compared),
        "Saturation": _map(quantized, lambda facts: facts.look.saturated, limit),
        "Zeros": _map(found, _zeros, zeros),
        "Scales": _scales(quantized),
        "Tensors": [_tensors(found)],
    }
    return page(title, lead, sections)


def place_of(name: str) -> tuple[str, int | None]:
    """What kind of tensor it is, and of which layer: the first number in its path.

    Examples:
      >>> from mx_jax.inspect.report_checkpoint import place_of
      >>> place_of("model.layers.7.mlp.experts.12.up_proj.weight")
      ('model.layers.*.mlp.experts.*.up_proj.weight', 7)
      >>> place_of("lm_head.weight")
      ('lm_head.weight', None)
    """
    number = _NUMBER.search(name)
    return _NUMBER.sub("*", name), None if number is None else int(number[0])


def _findings(found: Sequence[TensorFacts]) -> list[str]:
    """Sentences on what a reader should look at."""
    sentences = [f"{facts.name}: {text}" for facts in found for text in facts.look.warnings]
    quantized = [facts for facts in found if facts.scales is not None]
    sqnr, zeros = _medians(found, _sqnr), _medians(quantized, _zeros)
    for facts in found:
        median = sqnr.get(facts.kept_as, math.nan)
        if (lost := _sqnr(facts)) is not None and median - lost > _LOST_DB:
            sentences.append(
                f"{facts.name}: its SQNR is {lost:.1f} dB, the median of {facts.kept_as} "
                f"{median:.1f} dB"
            )
    for facts in quantized:
        median = zeros[facts.kept_as]
        if facts.look.zeros - median > _MORE_ZEROS:
            sentences.append(
                f"{facts.name}: {facts.look.zeros:.0%} of its values are zero, the median of "
                f"{facts.kept_as} is {median:.0%}"
            )
    left = len(sentences) - _SENTENCES
    return [*sentences[:_SENTENCES], *([f"and {left} more"] if left > 0 else [])]


def _sqnr(facts: TensorFacts) -> float | None:
    """Of what lost something."""
    sqnr = facts.sqnr_db
    return sqnr if sqnr is not None and math.isfinite(sqnr) else None


def _zeros(facts: TensorFacts) -> float:
    return facts.look.zeros


def _medians(
    found: Sequence[TensorFacts], of: Callable[[TensorFacts], float | None]
) -> dict[str, float]:
    """The median of a fact by format, of tensors that have it."""
    own: dict[str, list[float]] = collections.defaultdict(list)
    for facts in found:
        if (value := of(facts)) is not None:
            own[facts.kept_as].append(value)
    return {kept: statistics.median(values) for kept, values in own.items()}


def _formats(found: Sequence[TensorFacts]) -> Table:
    own: dict[str, list[TensorFacts]] = collections.defaultdict(list)
    for facts in found:
        own[facts.kept_as].append(facts)
    usual, rows = _medians(found, _sqnr), []
    for kept, group in own.items():
        nbytes = sum(facts.nbytes for facts in group)
        elements = sum(math.prod(facts.shape) for facts in group)
        bits = f"{nbytes * 8 / max(1, elements):.4g}"
        median = f"{usual[kept]:.2f}" if kept in usual else ""
        rows.append((kept, len(group), f"{elements:,}", size(nbytes), bits, median))
    return Table(("format", "tensors", "values", "size", "bits", "median SQNR dB"), rows, left=1)


def _errors(found: Sequence[TensorFacts], compared: bool) -> list[Any]:
    """A line for each kind of tensor along the layers: those that are worst at their worst."""
    if not compared:
        return ["no reference was given: reference= of weights in high precision gives it"]
    series: dict[str, dict[int, float]] = collections.defaultdict(dict)
    for facts in found:
        kind, layer = place_of(facts.name)
        if layer is not None and (sqnr := _sqnr(facts)) is not None:
            # Of experts, say, the worst.
            series[kind][layer] = min(series[kind].get(layer, math.inf), sqnr)
    same = sum(facts.sqnr_db == math.inf for facts in found)
    unchanged = [f"{same} of {len(found)} tensors are equal to the reference"] if same else []
    if not series:
        return ["no tensor with an error has a layer's number in its name", *unchanged]
    shown = sorted(series, key=lambda kind: min(series[kind].values()))[:_LINES]
    note = f"SQNR by layer; {len(shown)} of {len(series)} kinds of tensors, the worst first"
    plot = Lines({kind: sorted(series[kind].items()) for kind in shown}, "dB", along="layer")
    return [note, plot, *unchanged]


def _worst(found: Sequence[TensorFacts], compared: bool) -> list[Any]:
    """Tensors by the lowest SQNR."""
    if not compared:
        return ["no reference was given"]
    lost = [(sqnr, f) for f in found if (sqnr := f.sqnr_db) is not None and sqnr < math.inf]
    ranked = sorted(lost, key=lambda pair: pair[0])[:_ROWS]
    if not ranked:
        return ["nothing was compared, or nothing differs"]
    note = f"the lowest SQNR; {len(ranked)} of {len(lost)} that differ"
    return [note, Table(_HEADS, [facts.texts("") for _, facts in ranked], left=3)]


def _map(
    found: Sequence[TensorFacts], share: Callable[[TensorFacts], float], what: str
) -> list[Any]:
    """Kinds of tensors by layers, those first that have most; of experts, say, the largest."""
    places: dict[str, dict[int, float]] = collections.defaultdict(dict)
    for facts in found:
        kind, layer = place_of(facts.name)
        column = _NO_LAYER if layer is None else layer
        places[kind][column] = max(places[kind].get(column, 0.0), share(facts))
    if not places:
        return ["nothing is quantized"]
    layers = sorted({layer for own in places.values() for layer in own})
    ranked = sorted(places, key=lambda kind: -max(places[kind].values()))[:_ROWS]
    numbers = len(layers) <= _COLUMNS
    rows = [
        (kind, *(Share(own[layer], numbers) if layer in own else "" for layer in layers))
        for kind in ranked
        for own in (places[kind],)
    ]
    heads = ("kind", *("-" if layer == _NO_LAYER else str(layer) for layer in layers))
    note = f"% of {what}, by layer; {len(ranked)} of {len(places)} kinds of tensors"
    return [note, Table(heads, rows, left=1, narrow=not numbers)]


def _scales(found: Sequence[TensorFacts]) -> list[Any]:
    """Histograms of each kind of tensor, over its layers."""
    kinds: dict[tuple[str, str], list[TensorFacts]] = collections.defaultdict(list)
    for facts in found:
        kinds[place_of(facts.name)[0], facts.kept_as].append(facts)
    if not kinds:
        return ["nothing is quantized"]
    rows = []
    for (kind, kept), group in list(kinds.items())[: 3 * _ROWS]:
        counts = sum((collections.Counter(facts.scales) for facts in group), collections.Counter())
        rows.append((kind, kept, len(group), Histogram(counts)))
    note = f"blocks by the power of two of their scale; {len(rows)} of {len(kinds)} kinds"
    return [note, Table(("kind", "format", "tensors", "exponents"), rows)]


def _tensors(found: Sequence[TensorFacts]) -> Table:
    rows = [
        (
            *facts.texts(""),
            Histogram(facts.scales) if facts.scales else "",
            Bad("; ".join(facts.look.warnings)) if facts.look.warnings else "",
        )
        for facts in found
    ]
    return Table((*_HEADS, "scales", "out of the ordinary"), rows, left=3)
