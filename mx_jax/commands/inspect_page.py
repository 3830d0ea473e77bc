"""The page that `inspect --html` writes: one file, nothing fetched, no script."""

import html
import string
from collections.abc import Mapping, Sequence

from mx_jax.commands.output import size
from mx_jax.commands.tensor_facts import TensorFacts

_PAGE = string.Template("""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>
body { font: 14px/1.4 system-ui, sans-serif; margin: 2em; color: #222; background: #fff; }
h1 { font-size: 1.2em; }
table { border-collapse: collapse; }
th, td { padding: 0.25em 0.8em; text-align: right; border-bottom: 1px solid #ddd; }
th:nth-child(-n+3), td:nth-child(-n+3) { text-align: left; }
th { position: sticky; top: 0; background: #fff; }
rect { fill: #4571a8; }
text { font-size: 9px; fill: #555; }
.bad { color: #b00; font-weight: bold; }
</style>
</head>
<body>
<h1>$title</h1>
<p>$count tensors, $size. Scales: blocks by the power of two of their scale.</p>
<table>
<thead><tr>$heads</tr></thead>
<tbody>
$rows
</tbody>
</table>
</body>
</html>
""")
_HEADS = (
    "tensor",
    "format",
    "shape",
    "size",
    "bits",
    "amax",
    "zeros %",
    "at limit %",
    "SQNR dB",
    "scales",
    "out of the ordinary",
)
# Of a histogram, in pixels.
_BAR, _HEIGHT, _MARGIN = 10, 36, 12


def page(title: str, found: Sequence[TensorFacts]) -> str:
    """The page as text.

    Args:
      title: what was looked at.
      found: its tensors.
    """
    return _PAGE.substitute(
        title=html.escape(title),
        count=len(found),
        size=size(sum(facts.nbytes for facts in found)),
        heads="".join(f"<th>{head}</th>" for head in _HEADS),
        rows="\n".join(map(_row, found)),
    )


def _row(facts: TensorFacts) -> str:
    odd = html.escape("; ".join(facts.look.warnings))
    cells = (
        *map(html.escape, facts.texts("")),
        _histogram(facts.scales) if facts.scales else "",
        f'<span class="bad">{odd}</span>' if odd else "",
    )
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def _histogram(counts: Mapping[int, int]) -> str:
    """Bars from the smallest power of two to the largest."""
    first, last, most = min(counts), max(counts), max(counts.values())
    width = max((last - first + 1) * _BAR, 70)
    bars = "".join(
        f'<rect x="{(e - first) * _BAR}" y="{_HEIGHT - height:.1f}" width="{_BAR - 1}" '
        f'height="{height:.1f}"><title>2^{e}: {n}</title></rect>'
        for e, n in sorted(counts.items())
        for height in (max(1.0, n / most * _HEIGHT),)
    )
    return (
        f'<svg width="{width}" height="{_HEIGHT + _MARGIN}">{bars}'
        f'<text x="0" y="{_HEIGHT + _MARGIN - 2}">2^{first}</text>'
        f'<text x="{width}" y="{_HEIGHT + _MARGIN - 2}" text-anchor="end">2^{last}</text></svg>'
    )
