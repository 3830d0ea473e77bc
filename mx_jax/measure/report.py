"""What was measured, as a table, and what it switches on."""

import math
from collections.abc import Iterable, Sequence

from rich.table import Table

from mx_jax.backends.evidence.rows import Row

ON = "on"


def switched_on(row: Row, rows: Iterable[Row]) -> bool:
    """Whether a kernel takes what a row stands for: every row of that must say so."""
    alike = [other for other in rows if (other.backend, other.work) == (row.backend, row.work)]
    return all(other.switches_on for other in alike)


def verdict(row: Row, rows: Iterable[Row]) -> str:
    """On or off, and why."""
    if row.failed:
        return f"off: failed: {row.failed}"
    if not row.is_right:
        return "off: wrong numbers"
    if not row.switches_on:
        return "off: right, not faster"
    return ON if switched_on(row, rows) else "off: right and faster, but not at another size"


def table(rows: Sequence[Row]) -> Table:
    """A line for each row, with its verdict; casts have a copy where products have bfloat16."""
    found = Table(title="Kernels beside what computes without them", title_justify="left")
    for name in ("kernel", "of", "shape"):
        found.add_column(name)
    for name in ("error over allowed", "x plain path", "x unpacking", "x bfloat16, copy"):
        found.add_column(name, justify="right")
    found.add_column("verdict")
    for row in rows:
        found.add_row(
            f"{row.backend} {row.kernel}".strip(),
            str(row.work),
            " x ".join(map(str, row.shape)),
            *map(_number, (row.error, row.over_plain, row.over_unpacking, row.over_bfloat16)),
            verdict(row, rows),
        )
    return found


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def summary(rows: Sequence[Row]) -> list[str]:
    """What was switched on, each kind of call once with its speed, or that nothing was."""
    works = dict.fromkeys((row.backend, row.work) for row in rows if switched_on(row, rows))
    lines = []
    for backend, work in works:
        alike = [row for row in rows if (row.backend, row.work) == (backend, work)]
        speeds = [row.over_plain or 0.0 for row in alike]
        sizes = _sizes(speeds, work.rows, work.lowest_rows)
        lines.append(f"{backend}: {work}, {_class(work.size)}{sizes}")
    return lines


def _class(most: float) -> str:
    """Of sizes: their end is a power of two."""
    if math.isinf(most):
        return "larger"
    return f"up to 2^{int(math.log2(most))} elements"


def _sizes(speeds: Sequence[float], most: float, least: int) -> str:
    if math.isinf(most):
        rows = f", {least} rows and more"
    else:
        rows = ", 1 row" if most == 1 else f", {least} to {most:g} rows"
    return f"{rows}: {min(speeds):.2g} times the plain path's speed"
