"""The page of a run: losses, error by layer over time, worst layers, saturation, histograms."""

import collections
import html
import math
from collections.abc import Sequence

from mx_jax.inspect.capture_record import Record, Scalar
from mx_jax.inspect.report_findings import findings
from mx_jax.inspect.report_page import bad, dim, histogram, page, table, told
from mx_jax.inspect.report_plots import cells, lines
from mx_jax.inspect.sinks import Memory

# Lines and rows that a reader can tell apart.
_LINES, _ROWS, _STEPS = 12, 30, 12


def run_page(title: str, memory: Memory) -> str:
    """The page as text.

    Args:
      title: what run it is.
      memory: what was captured.
    """
    found = memory.all()
    sections = {
        "Out of the ordinary": told(findings(found, memory.scalars)),
        "Numbers": _numbers(memory),
        "SQNR by layer": _over_time(found, "sqnr_db", "dB"),
        "Error of products by layer": _over_time(found, "error", "|exact - actual| / |exact|"),
        "Worst layers": _worst(found),
        "Saturation": _saturation(found),
        "Scales": _scales(found),
    }
    return page(title, sections, lead=f"<p>{html.escape(_lead(memory, found))}</p>\n")


def _lead(memory: Memory, records: Sequence[Record]) -> str:
    """How much the page is about."""
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


def _numbers(memory: Memory) -> str:
    plots = []
    for name, own in memory.scalars.items():
        broken = sum(not math.isfinite(number.value) for number in own)
        plots.append(lines({name: _points(own)}, name))
        if broken:
            plots.append(f"<p>{bad(f'{name}: {broken} of {len(own)} are not finite')}</p>")
    return "".join(plots) or dim("none told; inspect.scalar tells them")


def _points(scalars: Sequence[Scalar]) -> list[tuple[int, float]]:
    return sorted((number.step, number.value) for number in scalars)


def _name(record: Record) -> str:
    call = f" call {record.tag.call}" if record.tag.call else ""
    return f"{record.path} {record.tag.product} {record.tag.tensor}{call}"


def _over_time(records: Sequence[Record], stat: str, unit: str) -> str:
    """The lines of those that are worst at their worst."""
    series: dict[str, list[tuple[int, float]]] = collections.defaultdict(list)
    for record in records:
        if stat in record.stats:
            series[_name(record)].append((record.step, record.stats[stat]))
    if not series:
        return dim("not captured")
    sign = 1 if stat == "sqnr_db" else -1

    def worst(name: str) -> float:
        return min((sign * v for _, v in series[name] if math.isfinite(v)), default=math.inf)

    shown = sorted(series, key=worst)[:_LINES]
    left = f"the {len(shown)} worst of {len(series)}"
    return dim(left) + lines({name: series[name] for name in shown}, unit)


def _last(records: Sequence[Record]) -> dict[str, Record]:
    return {_name(record): record for record in records if record.tag.side is not None}


def _worst(records: Sequence[Record]) -> str:
    """Operands by the lowest SQNR that they had."""
    lowest: dict[str, Record] = {}
    for record in records:
        sqnr = record.stats.get("sqnr_db", math.nan)
        if not math.isnan(sqnr) and record.tag.side is not None:
            known = lowest.get(_name(record))
            if known is None or sqnr < known.stats["sqnr_db"]:
                lowest[_name(record)] = record
    ranked = sorted(lowest.items(), key=lambda pair: pair[1].stats["sqnr_db"])[:_ROWS]
    rows = [
        (
            html.escape(name),
            html.escape(f"{record.tag.format} ({record.tag.rule})"),
            str(record.step),
            *(_number(record, stat) for stat in ("sqnr_db", "amax", "outlier_ratio")),
            *(_percent(record, stat) for stat in ("underflow", "saturation")),
            _channels(record),
        )
        for name, record in ranked
    ]
    heads = ("operand", "format", "step", "SQNR dB", "amax", "outlier", "zero %", "saturated %")
    return table((*heads, "largest channels"), rows)


def _number(record: Record, stat: str) -> str:
    return f"{record.stats[stat]:.4g}" if stat in record.stats else ""


def _percent(record: Record, stat: str) -> str:
    return f"{100 * record.stats[stat]:.3g}" if stat in record.stats else ""


def _channels(record: Record) -> str:
    return ", ".join(f"{index}: {amax:.3g}" for index, amax in record.stats.get("channels", [])[:3])


def _saturation(records: Sequence[Record]) -> str:
    """A map: operands by steps, those first that saturate most."""
    found: dict[str, dict[int, float]] = collections.defaultdict(dict)
    for record in records:
        if "saturation" in record.stats:
            found[_name(record)][record.step] = record.stats["saturation"]
    if not found:
        return dim("not captured")
    steps = sorted({step for own in found.values() for step in own})
    steps = sorted({steps[round(i * (len(steps) - 1) / (_STEPS - 1))] for i in range(_STEPS)})
    ranked = sorted(found, key=lambda name: -max(found[name].values()))[:_ROWS]
    rows = [(html.escape(name), "", *cells([found[name].get(s) for s in steps])) for name in ranked]
    return dim("% of values, by step") + table(("operand", "", *map(str, steps)), rows)


def _scales(records: Sequence[Record]) -> str:
    rows = [
        (html.escape(name), html.escape(record.tag.format), histogram(record.stats["scales"]))
        for name, record in sorted(_last(records).items())
        if record.stats.get("scales")
    ][: 3 * _ROWS]
    return dim("at the last step") + table(("operand", "format", "exponents"), rows)
