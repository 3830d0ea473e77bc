"""The page of a checkpoint, and the facts of tensors on it: error, saturation, zeros, scales."""

import collections
import dataclasses
import math
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from mx_jax.checkpoint.files import progress_bar
from mx_jax.checkpoint.scales import Plausibility, effective_scales, plausibility
from mx_jax.checkpoint.weights import Stored, Weights
from mx_jax.inspect import report_page
from mx_jax.inspect.statistics import sqnr_db
from mx_jax.mxarray import MXArray

# Sentences of a page.
_SENTENCES = 60
# Beyond these a sentence says so: dB below the median of a format, share of zeros above it.
_LOST_DB, _MORE_ZEROS = 6.0, 0.2
# A number that is a part of a path: layers.3.up, Dense_3, blk.3.attn_q.
_NUMBER = re.compile(r"(?<![^./_])\d+(?![^./_])")
# The column of a map for tensors of no layer, before all others.
_NO_LAYER = -1
_HEADS = ("tensor", "format", "shape", "size", "bits", "amax", "zeros %", "at limit %", "SQNR dB")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorFacts:
    """Facts of one tensor, plain values that JSON holds."""

    name: str
    stored: str | None  # layout of a quantized weight, else None
    format: str  # of its blocks, or its dtype
    shape: tuple[int, ...]
    nbytes: int  # in the file
    plausibility: Plausibility  # its values, and what is out of the ordinary
    # How many blocks have a scale in `[2^e, 2^(e+1))`, by e; None of plain arrays.
    scales: dict[int, int] | None
    zero_scales: int  # how many blocks have the scale zero
    sqnr_db: float | None  # against the reference, in dB; None without one

    @property
    def bits(self) -> float:
        return self.nbytes * 8 / max(1, math.prod(self.shape))

    @property
    def stored_as(self) -> str:
        """Its format and, of a quantized weight, its layout."""
        return self.format if self.stored is None else f"{self.format} ({self.stored})"

    def texts(self, missing: str) -> tuple[str, ...]:
        """The cells of a row, of `_HEADS`; `missing` where there is no number."""
        return (
            self.name,
            self.stored_as,
            "x".join(map(str, self.shape)) or "()",
            size(self.nbytes),
            f"{self.bits:.4g}",
            f"{self.plausibility.amax:.4g}",
            f"{self.plausibility.zeros * 100:.2f}",
            missing if self.scales is None else f"{self.plausibility.saturated * 100:.2f}",
            missing if self.sqnr_db is None else f"{self.sqnr_db:.2f}",
        )

    def as_json(self) -> dict[str, Any]:
        """For `json.dumps`: no number that JSON does not have."""
        facts: dict[str, Any] = dataclasses.asdict(self) | {"bits": self.bits}
        facts |= facts.pop("plausibility")
        known = {k: not isinstance(x, float) or math.isfinite(x) for k, x in facts.items()}
        return {key: value if known[key] else None for key, value in facts.items()}


def facts_of(
    weights: Weights,
    names: Iterable[str],
    reference: Mapping[str, Any] | None = None,
    *,
    operation: str,
    progress: bool = False,
) -> list[TensorFacts]:
    """Facts of tensors of a checkpoint, of which one at a time is in memory."""
    # What the reference does not have is not compared, nor are weights for rotated inputs, whose
    # values are others on purpose.
    rows, found = {name: weights.stored[name] for name in names}, []
    with progress_bar("read", sum(row.nbytes for row in rows.values()), progress) as step:
        for name, row in rows.items():
            exact = None
            if reference is not None and name in reference and row.rotation is None:
                whole = isinstance(reference, Weights)
                exact = reference.stored[name].look() if whole else reference[name]
            try:
                found.append(_facts(name, row, row.look(), exact))
            except ValueError as error:
                text = str(error) if name in str(error) else f"{name}: {error}"
                raise ValueError(f"{operation}: {text}") from error
            step(name, row.nbytes)
    return found


def _facts(
    name: str, stored: Stored, value: MXArray | jax.Array | np.ndarray, reference: object
) -> TensorFacts:
    exponents, zero_scales = _exponents(value) if isinstance(value, MXArray) else (None, 0)
    sqnr = None
    if reference is not None and (values := values_of(value)).dtype.kind == "f":
        sqnr = sqnr_db(values_of(reference), values)
    return TensorFacts(
        name=name,
        stored=stored.layout,
        format=value.format.name if isinstance(value, MXArray) else value.dtype.name,
        shape=tuple(value.shape),
        nbytes=stored.nbytes,
        plausibility=plausibility(value),
        scales=exponents,
        zero_scales=zero_scales,
        sqnr_db=sqnr,
    )


def values_of(value: object) -> np.ndarray:
    """Values on the host: floats in float32 or wider, integers as they are."""
    if isinstance(value, MXArray):
        return np.asarray(value.dequantize(np.float32))
    array = np.asarray(value)
    if array.dtype.kind in "biu" or array.dtype == np.float64:
        return array
    return array.astype(np.float32)


def size(nbytes: float, digits: int = 4) -> str:
    """Bytes with a decimal unit, as `12.3 MB`."""
    units = ["B", "kB", "MB", "GB", "TB"]
    while nbytes >= 1000 - 0.5 * 10.0 ** (3 - digits) and len(units) > 1:
        nbytes, units = nbytes / 1000, units[1:]
    return f"{nbytes:.{digits}g} {units[0]}"


def _exponents(x: MXArray) -> tuple[dict[int, int], int]:
    """Blocks by the exponent of what their codes are multiplied by, and those without one."""
    with np.errstate(divide="ignore"):
        scales = np.abs(effective_scales(x))
    known = scales[np.isfinite(scales) & (scales > 0)]
    # frexp's fraction is in [0.5, 1).
    exponents, counts = np.unique(np.frexp(known)[1] - 1, return_counts=True)
    found = {int(e): int(n) for e, n in zip(exponents, counts, strict=True)}
    return found, int((scales == 0).sum())


def checkpoint_page(title: str, found: Sequence[TensorFacts], reference: str | None = None) -> str:
    """The page of tensors as text, and what they were compared with, if anything."""
    plural = "tensor" if len(found) == 1 else "tensors"
    lead = f"{len(found)} {plural}, {size(sum(facts.nbytes for facts in found))}"
    if reference is not None:
        count = sum(facts.sqnr_db is not None for facts in found)
        lead += f"; {count} compared with those of the same name in {reference}"
    quantized = [facts for facts in found if facts.scales is not None]
    limit, zeros = "codes with the largest magnitude of their format", "values that are zero"
    error = ["no reference was given: reference= of weights in high precision gives it"]
    worst = ["no reference was given"]
    sections = {
        "Out of the ordinary": [_findings(found, quantized)],
        "Formats": [_formats(found)],
        "Error by tensor": error if reference is None else _errors(found),
        "Worst tensors": worst if reference is None else _worst(found),
        "Saturation": _map(quantized, lambda facts: facts.plausibility.saturated, limit),
        "Zeros": _map(found, _zeros, zeros),
        "Scales": _scales(quantized),
        "Tensors": [_tensors(found)],
    }
    return report_page.page(title, lead, sections)


def place_of(name: str) -> tuple[str, int | None]:
    """What kind of tensor it is, as `layers.*.up`, and of which layer: the first number."""
    number = _NUMBER.search(name)
    return _NUMBER.sub("*", name), None if number is None else int(number[0])


def _findings(found: Sequence[TensorFacts], quantized: Sequence[TensorFacts]) -> list[str]:
    sentences = [f"{facts.name}: {text}" for facts in found for text in facts.plausibility.warnings]
    sqnr, zeros = _medians(found, _sqnr), _medians(quantized, _zeros)
    for facts in found:
        median = sqnr.get(facts.stored_as, math.nan)
        if (lost := _sqnr(facts)) is not None and median - lost > _LOST_DB:
            sentences.append(
                f"{facts.name}: its SQNR is {lost:.1f} dB, the median of {facts.stored_as} "
                f"{median:.1f} dB"
            )
    for facts in quantized:
        median = zeros[facts.stored_as]
        if _zeros(facts) - median > _MORE_ZEROS:
            sentences.append(
                f"{facts.name}: {_zeros(facts):.0%} of its values are zero, the median of "
                f"{facts.stored_as} is {median:.0%}"
            )
    left = len(sentences) - _SENTENCES
    return [*sentences[:_SENTENCES], *([f"and {left} more"] if left > 0 else [])]


def _sqnr(facts: TensorFacts) -> float | None:
    """Of what lost something."""
    sqnr = facts.sqnr_db
    return sqnr if sqnr is not None and math.isfinite(sqnr) else None


def _zeros(facts: TensorFacts) -> float:
    return facts.plausibility.zeros


def _grouped(found: Sequence[TensorFacts], key: Callable[[TensorFacts], Any]) -> dict[Any, Any]:
    groups: dict[Any, list[TensorFacts]] = collections.defaultdict(list)
    for facts in found:
        groups[key(facts)].append(facts)
    return groups


def _medians(
    found: Sequence[TensorFacts], of: Callable[[TensorFacts], float | None]
) -> dict[str, float]:
    """The median of a fact by format, of tensors that have it."""
    values: dict[str, list[float]] = collections.defaultdict(list)
    for facts in found:
        if (value := of(facts)) is not None:
            values[facts.stored_as].append(value)
    return {stored_as: statistics.median(own) for stored_as, own in values.items()}


def _formats(found: Sequence[TensorFacts]) -> report_page.Table:
    usual, rows = _medians(found, _sqnr), []
    for stored_as, group in _grouped(found, lambda facts: facts.stored_as).items():
        nbytes = sum(facts.nbytes for facts in group)
        elements = sum(math.prod(facts.shape) for facts in group)
        bits = f"{nbytes * 8 / max(1, elements):.4g}"
        median = f"{usual[stored_as]:.2f}" if stored_as in usual else ""
        rows.append((stored_as, len(group), f"{elements:,}", size(nbytes), bits, median))
    return report_page.Table(
        ("format", "tensors", "values", "size", "bits", "median SQNR dB"), rows, left=1
    )


def _errors(found: Sequence[TensorFacts]) -> list[Any]:
    """A line for each kind of tensor along the layers: those that are worst at their worst."""
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
    plot = report_page.worst_lines(
        {kind: sorted(own.items()) for kind, own in series.items()}, "dB", "layer"
    )
    shown = f"{len(plot.drawn)} of {len(series)}"
    return [f"SQNR by layer; {shown} kinds of tensors, the worst first", plot, *unchanged]


def _worst(found: Sequence[TensorFacts]) -> list[Any]:
    lost = [(sqnr, f) for f in found if (sqnr := f.sqnr_db) is not None and sqnr < math.inf]
    ranked = sorted(lost, key=lambda pair: pair[0])[: report_page.ROWS]
    if not ranked:
        return ["nothing was compared, or nothing differs"]
    note = f"the lowest SQNR; {len(ranked)} of {len(lost)} that differ"
    return [note, report_page.Table(_HEADS, [facts.texts("") for _, facts in ranked], left=3)]


def _map(
    found: Sequence[TensorFacts], share: Callable[[TensorFacts], float], what: str
) -> list[Any]:
    """Kinds of tensors by layers, those first that have most; of experts, say, the largest."""
    shares: dict[str, dict[int, float]] = collections.defaultdict(dict)
    for facts in found:
        kind, layer = place_of(facts.name)
        column = _NO_LAYER if layer is None else layer
        shares[kind][column] = max(shares[kind].get(column, 0.0), share(facts))
    if not shares:
        return ["nothing is quantized"]
    layers = sorted({layer for own in shares.values() for layer in own})
    columns = {layer: "-" if layer == _NO_LAYER else str(layer) for layer in layers}
    table = report_page.share_map(
        "kind", shares, columns, numbers=len(layers) <= report_page.COLUMNS
    )
    kinds = f"{len(table.rows)} of {len(shares)} kinds of tensors"
    return [f"% of {what}, by layer; {kinds}", table]


def _scales(found: Sequence[TensorFacts]) -> list[Any]:
    """Histograms of each kind of tensor, over its layers."""
    kinds = _grouped(found, lambda facts: (place_of(facts.name)[0], facts.stored_as))
    if not kinds:
        return ["nothing is quantized"]
    rows = []
    for (kind, stored_as), group in list(kinds.items())[: 3 * report_page.ROWS]:
        counts = sum((collections.Counter(facts.scales) for facts in group), collections.Counter())
        rows.append((kind, stored_as, len(group), report_page.Histogram(counts)))
    note = f"blocks by the power of two of their scale; {len(rows)} of {len(kinds)} kinds"
    return [note, report_page.Table(("kind", "format", "tensors", "exponents"), rows)]


def _tensors(found: Sequence[TensorFacts]) -> report_page.Table:
    rows = [
        (
            *facts.texts(""),
            report_page.Histogram(facts.scales) if facts.scales else "",
            report_page.Bad("; ".join(warnings)) if warnings else "",
        )
        for facts in found
        for warnings in (facts.plausibility.warnings,)
    ]
    return report_page.Table((*_HEADS, "scales", "out of the ordinary"), rows, left=3)
