"""A run or a checkpoint as one page."""

import collections
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mx_jax.checkpoint.files import check_apart, replacing
from mx_jax.checkpoint.foreign import read as read_weights
from mx_jax.checkpoint.weights import Weights
from mx_jax.inspect import report_page, statistics
from mx_jax.inspect.records import Memory, Record, Scalar, from_json
from mx_jax.inspect.report_checkpoint import checkpoint_page, facts_of

FilePath = str | os.PathLike[str]
# Layers of a scan that a sentence names; of more it says how many.
_NAMED = 6


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
      >>> import tempfile, pathlib, jax, jax.numpy as jnp, mx_jax
      >>> layer = jax.jit(lambda x, w: mx_jax.matmul(x, w, recipe="mxfp8"))
      >>> with mx_jax.inspect.capture() as records:
      ...     _ = layer(jnp.ones((4, 64)), jnp.ones((64, 8)))
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     page = pathlib.Path(folder) / "run.html"
      ...     mx_jax.inspect.report(records, page)
      ...     print(page.read_text().splitlines()[0])
      <!DOCTYPE html>
    """
    for one in (source, reference):
        path = one.path if isinstance(one, Weights) else one
        if isinstance(path, str | os.PathLike):
            check_apart(Path(out), Path(path), "report: ")
    if isinstance(source, str | os.PathLike):
        source = read_weights(source) if _is_checkpoint(Path(source)) else read(source)
    if isinstance(source, Weights):
        text = _of_checkpoint(source, reference, title)
    elif reference is not None:
        raise ValueError(
            "report: a reference belongs to a checkpoint, got the records of a run and "
            f"reference={_named(reference)!r}; what a run lost its records tell: leave it out"
        )
    else:
        text = run_page("Run" if title is None else title, source)
    with replacing(Path(out)) as file:
        file.write(text.encode())


def _is_checkpoint(path: Path) -> bool:
    """Whether a path is a folder or a file of numbers, not of lines."""
    if path.is_dir():
        return True
    with path.open("rb") as file:
        # safetensors begins with a length in 64 bits, GGUF with a version in 32: neither uses all
        # of its bytes. JSON has no zero bytes.
        return 0 in file.read(8)


def _of_checkpoint(
    weights: Weights, reference: Mapping[str, Any] | FilePath | None, title: str | None
) -> str:
    if not weights:
        raise ValueError(f"report: needs tensors, got none in {weights!r}")
    exact = read_weights(reference) if isinstance(reference, str | os.PathLike) else reference
    found = facts_of(weights, weights, exact, operation="report")
    return checkpoint_page(
        str(weights.path) if title is None else title,
        found,
        None if reference is None else _named(reference),
    )


def _named(reference: Mapping[str, Any] | FilePath) -> str:
    if isinstance(reference, Weights):
        return str(reference.path)
    if isinstance(reference, Mapping):
        return "the given arrays"
    return os.fspath(reference)


def read(path: FilePath) -> Memory:
    """The records of a file of `Jsonl`; ValueError of a line that is none."""
    memory = Memory()
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
        try:
            memory.write(from_json(json.loads(line)))
        except ValueError as error:
            raise ValueError(f"report: {path}, line {number}: {error}") from error
    return memory


def run_page(title: str, memory: Memory) -> str:
    """The page of a run as text; ValueError if nothing was captured."""
    found = memory.all()
    if not found and not memory.scalars:
        raise ValueError(f"report: needs records, got none in records={memory!r}")
    plots = [row.plot for row in statistics.TABLE if row.plot is not None]
    sections = {
        "Out of the ordinary": [findings(found, memory.scalars)],
        "Numbers": _numbers(memory),
        **{plot.heading: _over_time(found, plot) for plot in plots},
        "Worst layers": [_worst(found)],
        "Saturation": _saturation(found),
        "Scales": _scales(found),
    }
    return report_page.page(title, _lead(memory, found), sections)


def findings(records: Sequence[Record], scalars: Mapping[str, Sequence[Scalar]]) -> list[str]:
    """Sentences on what a reader should look at, what comes first in the run first."""
    # Layers of one scan share a sentence: that of the first of them, which names the others.
    found = [pair for name, own in scalars.items() for pair in _of_numbers(name, own)]
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
    found += [
        (step, text + _others([*layers[group]][1:])) for group, (step, text) in sentences.items()
    ]
    return [sentence for _, sentence in sorted(found, key=lambda pair: pair[0])]


def _others(indices: Sequence[tuple[int, ...]]) -> str:
    """The layers of the same scan that a sentence holds for too."""
    names = ", ".join("".join(f"[{number}]" for number in index) for index in sorted(indices))
    if len(indices) > _NAMED:
        names = f"{len(indices)} other layers of its scan"
    return f"; so {'do' if len(indices) > 1 else 'does'} {names}" if indices else ""


def _of_numbers(name: str, own: Sequence[Scalar]) -> list[tuple[int, str]]:
    """Steps and sentences: where a number leaves its best, and where it is none."""
    found = []
    finite = [number for number in own if math.isfinite(number.value)]
    if finite:
        best = min(finite, key=lambda number: number.value)
        over = [n.step for n in finite if n.step > best.step and n.value > 3 * abs(best.value)]
        if over:
            found.append((over[0], f"{name} is three times its best from step {over[0]} on"))
    broken = next((number.step for number in own if not math.isfinite(number.value)), None)
    if broken is not None:
        found.append((broken, f"{name} is not finite from step {broken} on"))
    return found


def _lead(memory: Memory, records: Sequence[Record]) -> str:
    numbers = (number for own in memory.scalars.values() for number in own)
    steps = {record.step for record in (*records, *numbers)}
    names = {_name(record): record.tag.side is None for record in records}
    products = sum(names.values())
    span = (
        f"step {min(steps)}"
        if len(steps) == 1
        else f"{len(steps)} steps, {min(steps)} to {max(steps)}"
    )
    return f"{span}; {len(names) - products} operands of {products} products"


def _numbers(memory: Memory) -> list[Any]:
    blocks: list[Any] = []
    for name, own in memory.scalars.items():
        points = sorted((number.step, number.value) for number in own)
        blocks.append(report_page.Lines({name: points}, name))
        broken = sum(not math.isfinite(number.value) for number in own)
        if broken:
            blocks.append(report_page.Bad(f"{name}: {broken} of {len(own)} are not finite"))
    return blocks or ["none; inspect.scalar records them"]


def _name(record: Record) -> str:
    call = f" call {record.tag.call}" if record.tag.call else ""
    return f"{record.path} {record.tag.product} {record.tag.tensor}{call}"


def _over_time(records: Sequence[Record], plot: statistics.Plot) -> list[Any]:
    """The lines of those that are worst at their worst."""
    series: dict[str, list[tuple[int, float]]] = collections.defaultdict(list)
    for record in records:
        if plot.number in record.stats:
            series[_name(record)].append((record.step, record.stats[plot.number]))
    if not series:
        return ["not captured"]
    lines = report_page.worst_lines(series, plot.unit, sign=plot.sign)
    return [f"the {min(len(series), report_page.LINES)} worst of {len(series)}", lines]


def _worst(records: Sequence[Record]) -> report_page.Table:
    """Operands by the lowest SQNR that they had."""
    known = (x for x in records if x.tag.side and not math.isnan(x.stats.get("sqnr_db", math.nan)))
    lowest: dict[str, Record] = {}
    for record in sorted(known, key=lambda record: record.stats["sqnr_db"]):
        lowest.setdefault(_name(record), record)
    rows = [
        (
            name,
            f"{record.tag.format} ({record.tag.rule})",
            str(record.step),
            *(column.text(record.stats, 4) for column in statistics.headed()),
            ", ".join(f"{i}: {amax:.3g}" for i, amax in record.stats.get("channels", [])[:3]),
        )
        for name, record in [*lowest.items()][: report_page.ROWS]
    ]
    heads = ("operand", "format", "step", *(column.heading for column in statistics.headed()))
    return report_page.Table((*heads, "largest channels"), rows)


def _saturation(records: Sequence[Record]) -> list[Any]:
    """A map: operands by steps, those first that saturate most."""
    found: dict[str, dict[int, float]] = collections.defaultdict(dict)
    for record in records:
        if "saturation" in record.stats:
            found[_name(record)][record.step] = record.stats["saturation"]
    if not found:
        return ["not captured"]
    steps = sorted({step for own in found.values() for step in own})
    shown = {
        steps[round(i * (len(steps) - 1) / (report_page.COLUMNS - 1))]
        for i in range(report_page.COLUMNS)
    }
    columns = {step: str(step) for step in sorted(shown)}
    return ["% of values, by step", report_page.share_map("operand", found, columns, numbers=True)]


def _scales(records: Sequence[Record]) -> list[Any]:
    last = {_name(record): record for record in records if record.tag.side is not None}
    rows = [
        (name, record.tag.format, report_page.Histogram(record.stats["scales"]))
        for name, record in sorted(last.items())
        if record.stats.get("scales")
    ][: 3 * report_page.ROWS]
    return ["at the last step", report_page.Table(("operand", "format", "exponents"), rows)]
