"""Plots of reports, as SVG without libraries: lines over steps, and maps of cells."""

import html
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

Series = Mapping[str, Sequence[tuple[int, float]]]

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 720, 234, 64, 24, 22
# Tells twelve lines apart on light pages and on dark ones; neighbours are far from each other.
_HUES = tuple((210 + 150 * number) % 360 for number in range(12))


class _Scale(NamedTuple):
    """From values to places along an axis, and back."""

    of: Callable[[float], float]
    back: Callable[[float], float]


_LINEAR = _Scale(lambda value: value, lambda place: place)
_LOGARITHMIC = _Scale(math.log10, lambda place: 10.0**place)


def lines(series: Series, unit: str, along: str = "step") -> str:
    """Lines over steps, with what each is called below; what is not finite is a gap.

    The axis is logarithmic where all values are positive and the largest is over 100 times the
    smallest.

    Args:
      series: pairs of step and value by name.
      unit: of the values.
      along: what is counted from the left to the right.
    """
    points = [p for own in series.values() for p in own if math.isfinite(p[1])]
    if not points:
        return '<p class="dim">no finite numbers</p>'
    first, last = min(step for step, _ in points), max(step for step, _ in points)
    low, high = min(value for _, value in points), max(value for _, value in points)
    scale = _LOGARITHMIC if low > 0 and high > 100 * low else _LINEAR
    if low == high:
        # One value has an axis around it, in its own size.
        around = abs(low) / 2 or 1.0
        low, high = low - around, high + around
    low, high = scale.of(low), scale.of(high)

    def at(step: int, value: float) -> str:
        x = _LEFT + (step - first) / max(last - first, 1) * (_WIDTH - _LEFT - 8)
        y = _TOP + (high - scale.of(value)) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)
        return f"{x:.1f},{y:.1f}"

    drawn, names = [], []
    for number, (name, own) in enumerate(series.items()):
        color = f"hsl({_HUES[number % len(_HUES)]}, 60%, 50%)"
        told = html.escape(name)
        drawn += [_line(run, at, color, f"{told}, {along}") for run in _runs(own)]
        names.append(f'<span class="key"><b style="color:{color}">&#9632;</b> {told}</span>')
    axes = _axes(low, high, scale)
    bottom = _HEIGHT - 6
    return (
        f'<svg class="plot" width="{_WIDTH}" height="{_HEIGHT}" role="img">{axes}{"".join(drawn)}'
        f'<text x="{_LEFT}" y="{bottom}">{along} {first}</text>'
        f'<text x="{_WIDTH - 8}" y="{bottom}" text-anchor="end">{along} {last}</text>'
        f'<text x="{_LEFT}" y="12">{html.escape(unit)}</text></svg>'
        f"<p>{' '.join(names) if list(series) != [unit] else ''}</p>"
    )


def _line(
    run: Sequence[tuple[int, float]], at: Callable[[int, float], str], color: str, told: str
) -> str:
    """A line through points that follow each other, each with its value beneath the pointer."""
    path = " ".join(at(*point) for point in run)
    points = [
        f'<circle cx="{x}" cy="{y}" r="2.5" style="fill:{color}"><title>{told} {step}: '
        f"{value:.4g}</title></circle>"
        for step, value in run
        for x, y in (at(step, value).split(","),)
    ]
    return f'<polyline style="stroke:{color}" points="{path}"/>{"".join(points)}'


def _axes(low: float, high: float, scale: _Scale) -> str:
    """Five lines across, with their values; low and high as the scale has them."""
    return "".join(
        f'<line x1="{_LEFT}" y1="{y:.1f}" x2="{_WIDTH - 8}" y2="{y:.1f}"/>'
        f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:.3g}</text>'
        for share in (0, 0.25, 0.5, 0.75, 1)
        for value in (scale.back(high + share * (low - high)),)
        for y in (_TOP + share * (_HEIGHT - _TOP - _BOTTOM),)
    )


def _runs(points: Sequence[tuple[int, float]]) -> list[list[tuple[int, float]]]:
    """Points in a row that are finite."""
    runs: list[list[tuple[int, float]]] = [[]]
    for step, value in points:
        if math.isfinite(value):
            runs[-1].append((step, value))
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]


def cells(shares: Sequence[float | None], numbers: bool = True) -> list[str]:
    """Cells of a map, darker where a share is larger: 0 to 1, on a scale of roots; per cents in
    them, or told where one points.
    """
    found = []
    for share in shares:
        if share is None:
            found.append("")
            continue
        depth = math.sqrt(min(max(share, 0), 1)) if math.isfinite(share) else 1
        found.append(
            f'<div style="background:rgba(var(--cell),{depth:.2f})" title="{share:.3%}">'
            f"{_percent(share) if numbers else ''}</div>"
        )
    return found


def _percent(share: float) -> str:
    """Two digits, as `0.25`, `8.1`, `42` and `100`."""
    number = 100 * share
    return f"{number:.2g}" if number < 10 else f"{number:.0f}"
