"""A run or a checkpoint as one page, filled into `report_page.html`.

A page is sections of blocks: a `str` is a note, a list is numbered, the rest are the classes here,
which the template draws by their names; it escapes all texts.
"""

import collections
import dataclasses
import functools
import itertools
import json
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from mx_jax.checkpoint.foreign import read as read_weights
from mx_jax.checkpoint.weights import Weights
from mx_jax.checkpoint.writers import check_apart, replacing
from mx_jax.inspect import statistics
from mx_jax.inspect.facts import HEADS, TensorFacts, facts_of, size
from mx_jax.inspect.records import Memory, Record, Scalar, from_json

FilePath = str | os.PathLike[str]
Series = Mapping[str, Sequence[tuple[int, float]]]

# Lines, rows and columns that a reader can tell apart; sentences on a checkpoint.
_LINES, _ROWS, _COLUMNS, _SENTENCES = 12, 30, 12, 60
# Layers of a scan that a sentence names; of more it says how many.
_NAMED = 6
# Beyond these a sentence on a tensor says so: dB below the median of a format, share of zeros
# above it.
_LOST_DB, _MORE_ZEROS = 6.0, 0.2
# A number that is a part of a path: layers.3.up, Dense_3, blk.3.attn_q.
_NUMBER = re.compile(r"(?<![^./_])\d+(?![^./_])")
# The column of a map for tensors of no layer, before all others.
_NO_LAYER = -1
# Exponents of scales that say nothing of how large values are.
_ENDS = {-127: "at 2^-127, as zeros are", 128: "with NaN"}
# Of the bars of a histogram, in pixels.
_BAR, _BAR_HEIGHT, _WIDEST = 10, 36, 400


def report(
    source: Memory | Weights | FilePath,
    out: FilePath,
    *,
    reference: Mapping[str, Any] | FilePath | None = None,
    title: str | None = None,
) -> None:
    """Write one HTML page on a run or a checkpoint, with all that it shows inside: light and dark,
    no script.

    Of a run it has what is out of the ordinary, in the order in which it happened; numbers such as
    the loss; the SQNR of each layer and the error of its products, over time; the layers with the
    lowest SQNR; where values saturate; and which exponents scales have.

    Of a checkpoint it has what is out of the ordinary; the SQNR against a reference, layer by
    layer, and the tensors with the lowest; how many codes are at their format's limit and how many
    values are zero; the exponents of scales; and a table of all tensors.

    Args:
      source: what a capture recorded, or a file that `Jsonl` wrote; or a checkpoint: what
        `checkpoint.read` gave, or a file or folder that it reads.
      out: path of the page.
      reference: weights in high precision, for a checkpoint's errors: a checkpoint too, or arrays
        by name. Tensors are compared with those of the same name.
      title: what run or checkpoint it is.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: a line that is no record, a damaged checkpoint, a reference of another shape or
        for a run, or nothing at all; or an `out` that is read.

    Examples:
      >>> import tempfile, pathlib, jax.numpy as jnp, mx_jax
      >>> layer = mx_jax.inspect.capture(lambda x, w: mx_jax.matmul(x, w, recipe="mxfp8"))
      >>> _ = layer(jnp.ones((4, 64)), jnp.ones((64, 8)))
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     page = pathlib.Path(folder) / "run.html"
      ...     mx_jax.inspect.report(layer.records, page)
      ...     print(page.read_text().splitlines()[0])
      <!DOCTYPE html>
    """
    for one in (source, reference):
        path = one.path if isinstance(one, Weights) else one
        if isinstance(path, str | os.PathLike):
            check_apart(Path(out), Path(path), "report: ")
    compared = None
    if reference is not None:
        path = reference.path if isinstance(reference, Weights) else reference
        compared = os.fspath(path) if isinstance(path, str | os.PathLike) else "the given arrays"
    if isinstance(source, str | os.PathLike):
        source = _read(Path(source))
    if isinstance(source, Weights):
        if not source:
            raise ValueError(f"report: needs tensors, got none in {source!r}")
        exact = read_weights(reference) if isinstance(reference, str | os.PathLike) else reference
        found = facts_of(source, source, exact, operation="report")
        text = checkpoint_page(str(source.path) if title is None else title, found, compared)
    elif compared is not None:
        raise ValueError(
            "report: a reference belongs to a checkpoint, got the records of a run and "
            f"reference={compared!r}; what a run lost its records tell: leave it out"
        )
    else:
        text = _run_page("Run" if title is None else title, source)
    with replacing(Path(out)) as file:
        file.write(text.encode())


def _read(path: Path) -> Memory | Weights:
    """A checkpoint, which is a folder or a file of numbers; or the lines that `Jsonl` wrote."""
    is_checkpoint = path.is_dir()
    if not is_checkpoint:
        with path.open("rb") as file:
            # safetensors begins with a length in 64 bits, GGUF with a version in 32: neither uses
            # all of its bytes. JSON has no zero bytes.
            is_checkpoint = 0 in file.read(8)
    if is_checkpoint:
        return read_weights(path)
    memory = Memory()
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            memory.write(from_json(json.loads(line)))
        except ValueError as error:
            raise ValueError(f"report: {path}, line {number}: {error}") from error
    return memory


@functools.cache
def _template() -> Any:
    import jinja2  # only those who write a page wait for it

    text = Path(__file__).with_name("report_page.html").read_text(encoding="utf-8")
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(text)


def page(title: str, lead: str, sections: Mapping[str, Sequence[Any]]) -> str:
    """A page as text: a title, a line below it, and blocks by headings."""
    return _template().render(title=title, lead=lead, sections=sections).lstrip()


class Bad(str):
    """A text that is out of the ordinary: a block or a cell."""


@dataclasses.dataclass(frozen=True)
class Table:
    """A table of texts, `Bad`, `Share` or `Histogram`; `left` columns are aligned to the left."""

    heads: Sequence[str]
    rows: Sequence[Sequence[Any]]
    left: int = 2
    narrow: bool = False


@dataclasses.dataclass(frozen=True)
class Share:
    """A cell of a map, darker where a share is larger: 0 to 1, on a scale of roots."""

    value: float
    numbers: bool = True

    @property
    def depth(self) -> float:
        """Of the color."""
        return math.sqrt(min(max(self.value, 0), 1)) if math.isfinite(self.value) else 1

    @property
    def text(self) -> str:
        """Two digits, as `0.25`, `8.1`, `42` and `100`."""
        number = 100 * self.value
        return "" if not self.numbers else f"{number:.2g}" if number < 10 else f"{number:.0f}"


def _share_map(
    head: str, shares: Mapping[str, Mapping[int, float]], columns: Mapping[int, str], numbers: bool
) -> Table:
    """Shares by name and column, those names first that have most."""
    ranked = sorted(shares, key=lambda name: -max(shares[name].values()))[:_ROWS]
    rows = [
        (name, *(Share(own[at], numbers) if at in own else "" for at in columns))
        for name in ranked
        for own in (shares[name],)
    ]
    return Table((head, *columns.values()), rows, left=1, narrow=not numbers)


class Histogram:
    """A cell: bars by powers of two, and in words blocks of zeros, or with NaN, that have none."""

    def __init__(self, counts: Mapping[int, int]):
        inside = {e: n for e, n in sorted(counts.items()) if e not in _ENDS}
        self.ends = ", ".join(f"{counts[e]} {text}" for e, text in _ENDS.items() if e in counts)
        self.bars: list[dict[str, Any]] = []
        if inside:
            first, span = min(inside), max(inside) - min(inside) + 1
            most = max(inside.values())
            self.step = min(_BAR, max(2, _WIDEST // span))
            self.width = max(span * self.step, 70)
            for e, n in inside.items():
                height = max(1.0, n / most * _BAR_HEIGHT)
                bar = {"exponent": e, "count": n, "x": (e - first) * self.step, "height": height}
                self.bars.append(bar)


class Lines:
    """Lines over steps, those that are worst at their worst, with what each is called below.

    The sign is 1 if low is bad, -1 if high is. What is not finite is a gap. The axis is logarithmic
    where all are positive, and the largest over 100 times the smallest.
    """

    WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 234, 64, 712, 22, 210

    def __init__(self, series: Series, unit: str, along: str = "step", sign: int = 1):
        def worst(name: str) -> float:
            return min((sign * v for _, v in series[name] if math.isfinite(v)), default=math.inf)

        series = {name: series[name] for name in sorted(series, key=worst)[:_LINES]}
        self.unit, self.along, self.named = unit, along, list(series) != [unit]
        self.drawn: list[tuple[str, str, list[Any]]] = []
        points = [point for own in series.values() for point in own if math.isfinite(point[1])]
        if not points:
            return
        steps, values = zip(*points, strict=True)
        self.first, self.last, low, high = min(steps), max(steps), min(values), max(values)
        logarithmic = low > 0 and high > 100 * low
        if low == high:
            # One value has an axis around it, in its own size.
            around = abs(low) / 2 or 1.0
            low, high = low - around, high + around
        scaled = math.log10 if logarithmic else float
        bottom, top = scaled(low), scaled(high)

        def placed(step: int, value: float) -> tuple[float, float, int, float]:
            right = (step - self.first) / max(self.last - self.first, 1)
            down = (top - scaled(value)) / (top - bottom)
            x = self.LEFT + right * (self.RIGHT - self.LEFT)
            return x, self.TOP + down * (self.BOTTOM - self.TOP), step, value

        # Five lines across, with their values.
        self.ticks = []
        for share in (0, 0.25, 0.5, 0.75, 1):
            value = top + share * (bottom - top)
            y = self.TOP + share * (self.BOTTOM - self.TOP)
            self.ticks.append((y, 10.0**value if logarithmic else value))
        for number, (name, own) in enumerate(series.items()):
            # Tells twelve lines apart on light pages and on dark ones: neighbours' hues are far.
            color = f"hsl({(210 + 150 * number) % 360}, 60%, 50%)"
            runs = itertools.groupby(own, key=lambda point: math.isfinite(point[1]))
            drawn = [[placed(*point) for point in run] for finite, run in runs if finite]
            self.drawn.append((name, color, drawn))


# A run ------------------------------------------------------------------------------------------


def _run_page(title: str, memory: Memory) -> str:
    found, scalars = memory.all(), memory.scalars
    if not found and not scalars:
        raise ValueError(f"report: needs records, got none in records={memory!r}")
    steps = {record.step for record in (*found, *itertools.chain(*scalars.values()))}
    span = f"{len(steps)} steps, {min(steps)} to {max(steps)}"
    span = f"step {min(steps)}" if len(steps) == 1 else span
    names = {_name(record): record.tag.side is None for record in found}
    products = sum(names.values())
    numbers: list[Any] = []
    for name, own in scalars.items():
        points = sorted((number.step, number.value) for number in own)
        numbers.append(Lines({name: points}, name))
        broken = sum(not math.isfinite(number.value) for number in own)
        if broken:
            numbers.append(Bad(f"{name}: {broken} of {len(own)} are not finite"))
    last = {_name(record): record for record in found if record.tag.side is not None}
    scales = [
        (name, record.tag.format, Histogram(record.stats["scales"]))
        for name, record in sorted(last.items())
        if record.stats.get("scales")
    ][: 3 * _ROWS]
    plots = [row.plot for row in statistics.TABLE if row.plot is not None]
    sections = {
        "Out of the ordinary": [findings(found, scalars)],
        "Numbers": numbers or ["none; step.scalar(name, value) of a captured step records them"],
        **{plot.heading: _over_time(found, plot) for plot in plots},
        "Worst layers": [_worst_operands(found)],
        "Saturation": _saturation(found),
        "Scales": ["at the last step", Table(("operand", "format", "exponents"), scales)],
    }
    lead = f"{span}; {len(names) - products} operands of {products} products"
    return page(title, lead, sections)


def findings(records: Sequence[Record], scalars: Mapping[str, Sequence[Scalar]]) -> list[str]:
    """Sentences on what a reader should look at, what comes first in the run first."""
    found: list[tuple[int, str]] = []
    # Where a number leaves its best, and where it is none.
    for name, own in scalars.items():
        finite = [number for number in own if math.isfinite(number.value)]
        best = min(finite, key=lambda number: number.value) if finite else None
        for number in finite:
            if best and number.step > best.step and number.value > 3 * abs(best.value):
                sentence = f"{name} is three times its best from step {number.step} on"
                found.append((number.step, sentence))
                break
        broken = next((number.step for number in own if not math.isfinite(number.value)), None)
        if broken is not None:
            found.append((broken, f"{name} is not finite from step {broken} on"))
    # Layers of one scan share a sentence: that of the first of them, which names the others.
    sentences: dict[tuple[str, str], tuple[int, str]] = {}
    layers: dict[tuple[str, str], dict[tuple[int, ...], None]] = {}
    first: dict[tuple[str, str], dict[str, float]] = collections.defaultdict(dict)
    for record in records:
        tag, stats = record.tag, record.stats
        before = first[record.path, str(tag)]
        for number, value in stats.items():
            if isinstance(value, int | float) and math.isfinite(value):
                before.setdefault(number, value)
        what = f"{record.path}: the {tag.tensor} of {tag.product} ({tag.format})"
        for row in statistics.TABLE:
            known = row.columns and row.columns[0].number in stats
            if known and (text := row.finding(stats, before)):
                group = row.name, tag.path
                sentence = f"{what} {text}, first at step {record.step}"
                sentences.setdefault(group, (record.step, sentence))
                layers.setdefault(group, {})[record.index] = None
    for group, (step, text) in sentences.items():
        _, *others = layers[group]
        if others:
            named = ", ".join("".join(f"[{i}]" for i in index) for index in sorted(others))
            if len(others) > _NAMED:
                named = f"{len(others)} other layers of its scan"
            text += f"; so {'do' if len(others) > 1 else 'does'} {named}"
        found.append((step, text))
    return [sentence for _, sentence in sorted(found, key=lambda pair: pair[0])]


def _name(record: Record) -> str:
    call = f" call {record.tag.call}" if record.tag.call else ""
    return f"{record.path} {record.tag.product} {record.tag.tensor}{call}"


def _over_time(records: Sequence[Record], plot: statistics.Plot) -> list[Any]:
    series: dict[str, list[tuple[int, float]]] = collections.defaultdict(list)
    for record in records:
        if plot.number in record.stats:
            series[_name(record)].append((record.step, record.stats[plot.number]))
    if not series:
        return ["not captured"]
    lines = Lines(series, plot.unit, sign=plot.sign)
    return [f"the {min(len(series), _LINES)} worst of {len(series)}", lines]


def _worst_operands(records: Sequence[Record]) -> Table:
    """Operands by the lowest SQNR that they had."""
    known = (x for x in records if x.tag.side and not math.isnan(x.stats.get("sqnr_db", math.nan)))
    lowest: dict[str, Record] = {}
    for record in sorted(known, key=lambda record: record.stats["sqnr_db"]):
        lowest.setdefault(_name(record), record)
    columns = [column for row in statistics.TABLE for column in row.columns]
    columns.sort(key=lambda column: column.heading != "dB")  # what they are sorted by first
    rows = [
        (
            name,
            f"{record.tag.format} ({record.tag.rule})",
            str(record.step),
            *(column.text(record.stats, 4) for column in columns),
            ", ".join(f"{i}: {amax:.3g}" for i, amax in record.stats.get("channels", [])[:3]),
        )
        for name, record in [*lowest.items()][:_ROWS]
    ]
    headings = (column.heading for column in columns)
    return Table(("operand", "format", "step", *headings, "largest channels"), rows)


def _saturation(records: Sequence[Record]) -> list[Any]:
    """A map: operands by steps, those first that saturate most."""
    found: dict[str, dict[int, float]] = collections.defaultdict(dict)
    for record in records:
        if "saturation" in record.stats:
            found[_name(record)][record.step] = record.stats["saturation"]
    if not found:
        return ["not captured"]
    steps = sorted({step for own in found.values() for step in own})
    shown = {steps[round(i * (len(steps) - 1) / (_COLUMNS - 1))] for i in range(_COLUMNS)}
    columns = {step: str(step) for step in sorted(shown)}
    return ["% of values, by step", _share_map("operand", found, columns, numbers=True)]


# A checkpoint -----------------------------------------------------------------------------------


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
    tensors = [
        (
            *facts.texts(""),
            Histogram(facts.scales) if facts.scales else "",
            Bad("; ".join(warnings)) if warnings else "",
        )
        for facts in found
        for warnings in (facts.plausibility.warnings,)
    ]
    sections = {
        "Out of the ordinary": [_tensor_findings(found, quantized)],
        "Formats": [_formats(found)],
        "Error by tensor": error if reference is None else _errors(found),
        "Worst tensors": worst if reference is None else _worst_tensors(found),
        "Saturation": _map(quantized, lambda facts: facts.plausibility.saturated, limit),
        "Zeros": _map(found, lambda facts: facts.zeros, zeros),
        "Scales": _scales(quantized),
        "Tensors": [Table((*HEADS, "scales", "out of the ordinary"), tensors, left=3)],
    }
    return page(title, lead, sections)


def place_of(name: str) -> tuple[str, int | None]:
    """What kind of tensor it is, as `layers.*.up`, and of which layer: the first number."""
    number = _NUMBER.search(name)
    return _NUMBER.sub("*", name), None if number is None else int(number[0])


def _grouped(
    found: Sequence[TensorFacts], key: Callable[[TensorFacts], Any]
) -> dict[Any, list[TensorFacts]]:
    groups: dict[Any, list[TensorFacts]] = collections.defaultdict(list)
    for facts in found:
        groups[key(facts)].append(facts)
    return groups


def _usual(
    found: Sequence[TensorFacts], of: Callable[[TensorFacts], float | None]
) -> dict[str, float]:
    """The median of a fact by format, of tensors that have it."""
    values: dict[str, list[float]] = collections.defaultdict(list)
    for facts in found:
        if (value := of(facts)) is not None:
            values[facts.stored_as].append(value)
    return {stored_as: median(own) for stored_as, own in values.items()}


def _tensor_findings(found: Sequence[TensorFacts], quantized: Sequence[TensorFacts]) -> list[str]:
    sentences = [f"{facts.name}: {text}" for facts in found for text in facts.plausibility.warnings]
    sqnr = _usual(found, lambda facts: facts.finite_sqnr_db)
    for facts in found:
        own, usual = facts.finite_sqnr_db, sqnr.get(facts.stored_as, math.nan)
        if own is not None and usual - own > _LOST_DB:
            sentences.append(
                f"{facts.name}: its SQNR is {own:.1f} dB, the median of {facts.stored_as} "
                f"{usual:.1f} dB"
            )
    zeros = _usual(quantized, lambda facts: facts.zeros)
    for facts in quantized:
        usual = zeros[facts.stored_as]
        if facts.zeros - usual > _MORE_ZEROS:
            sentences.append(
                f"{facts.name}: {facts.zeros:.0%} of its values are zero, the median of "
                f"{facts.stored_as} is {usual:.0%}"
            )
    left = len(sentences) - _SENTENCES
    return [*sentences[:_SENTENCES], *([f"and {left} more"] if left > 0 else [])]


def _formats(found: Sequence[TensorFacts]) -> Table:
    usual, rows = _usual(found, lambda facts: facts.finite_sqnr_db), []
    for stored_as, group in _grouped(found, lambda facts: facts.stored_as).items():
        nbytes = sum(facts.nbytes for facts in group)
        elements = sum(math.prod(facts.shape) for facts in group)
        bits = f"{nbytes * 8 / max(1, elements):.4g}"
        middle = f"{usual[stored_as]:.2f}" if stored_as in usual else ""
        rows.append((stored_as, len(group), f"{elements:,}", size(nbytes), bits, middle))
    return Table(("format", "tensors", "values", "size", "bits", "median SQNR dB"), rows, left=1)


def _errors(found: Sequence[TensorFacts]) -> list[Any]:
    """A line for each kind of tensor along the layers: those that are worst at their worst."""
    series: dict[str, dict[int, float]] = collections.defaultdict(dict)
    for facts in found:
        kind, layer = place_of(facts.name)
        if layer is not None and (sqnr := facts.finite_sqnr_db) is not None:
            # Of experts, say, the worst.
            series[kind][layer] = min(series[kind].get(layer, math.inf), sqnr)
    same = sum(facts.sqnr_db == math.inf for facts in found)
    unchanged = [f"{same} of {len(found)} tensors are equal to the reference"] if same else []
    if not series:
        return ["no tensor with an error has a layer's number in its name", *unchanged]
    plot = Lines({kind: sorted(own.items()) for kind, own in series.items()}, "dB", "layer")
    shown = f"{len(plot.drawn)} of {len(series)}"
    return [f"SQNR by layer; {shown} kinds of tensors, the worst first", plot, *unchanged]


def _worst_tensors(found: Sequence[TensorFacts]) -> list[Any]:
    lost = [(sqnr, f) for f in found if (sqnr := f.sqnr_db) is not None and sqnr < math.inf]
    ranked = sorted(lost, key=lambda pair: pair[0])[:_ROWS]
    if not ranked:
        return ["nothing was compared, or nothing differs"]
    note = f"the lowest SQNR; {len(ranked)} of {len(lost)} that differ"
    return [note, Table(HEADS, [facts.texts("") for _, facts in ranked], left=3)]


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
    table = _share_map("kind", shares, columns, numbers=len(layers) <= _COLUMNS)
    kinds = f"{len(table.rows)} of {len(shares)} kinds of tensors"
    return [f"% of {what}, by layer; {kinds}", table]


def _scales(found: Sequence[TensorFacts]) -> list[Any]:
    """Histograms of each kind of tensor, over its layers."""
    kinds = _grouped(found, lambda facts: (place_of(facts.name)[0], facts.stored_as))
    if not kinds:
        return ["nothing is quantized"]
    rows = []
    for (kind, stored_as), group in list(kinds.items())[: 3 * _ROWS]:
        counts = sum((collections.Counter(facts.scales) for facts in group), collections.Counter())
        rows.append((kind, stored_as, len(group), Histogram(counts)))
    note = f"blocks by the power of two of their scale; {len(rows)} of {len(kinds)} kinds"
    return [note, Table(("kind", "format", "tensors", "exponents"), rows)]
