"""Pages of reports: one file, light and dark, nothing fetched, no script."""

import html
import string
from collections.abc import Mapping, Sequence

_PAGE = string.Template("""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>$title</title>
<style>
:root { color-scheme: light dark; --text: #222; --page: #fff; --line: #ddd; --bar: #4571a8;
  --dim: #666; --bad: #b00; --cell: 176, 0, 0; }
@media (prefers-color-scheme: dark) { :root { --text: #ddd; --page: #181a1d; --line: #3a3d42;
  --bar: #7aa7dd; --dim: #9aa0a6; --bad: #ff7a70; --cell: 255, 110, 100; } }
body { font: 14px/1.4 system-ui, sans-serif; margin: 2em; color: var(--text);
  background: var(--page); }
h1 { font-size: 1.2em; }
h2 { font-size: 1.05em; margin-top: 2em; }
table { border-collapse: collapse; }
th, td { padding: 0.25em 0.8em; text-align: right; border-bottom: 1px solid var(--line); }
th { position: sticky; top: 0; background: var(--page); }
.left1 :is(th, td):nth-child(-n+1), .left2 :is(th, td):nth-child(-n+2),
.left3 :is(th, td):nth-child(-n+3) { text-align: left; }
td:not(:last-child) { white-space: nowrap; }
.narrow { overflow-x: auto; }
.narrow :is(th, td):nth-child(n+2) { padding: 0.25em 1px; min-width: 1.4em; text-align: center; }
.narrow td div { height: 1.3em; }
.dim { color: var(--dim); }
.bad { color: var(--bad); font-weight: bold; }
rect { fill: var(--bar); }
text { font-size: 9px; fill: var(--dim); }
.plot text { font-size: 11px; }
.plot line { stroke: var(--line); }
.plot polyline { fill: none; stroke-width: 1.5; }
.key { display: inline-block; margin-right: 1em; }
</style>
</head>
<body>
<h1>$title</h1>
$body
</body>
</html>
""")
# Of a histogram, in pixels.
_BAR, _HEIGHT, _MARGIN, _WIDEST = 10, 36, 12, 400
# Exponents of scales that say nothing of how large values are.
_ENDS = {-127: "at 2^-127, as zeros are", 128: "with NaN"}


def page(title: str, sections: Mapping[str, str], lead: str = "") -> str:
    """A page as text.

    Args:
      title: plain text.
      sections: HTML by headings in plain text.
      lead: HTML above them.
    """
    body = "\n".join(
        f"<h2>{html.escape(name)}</h2>\n{content}" for name, content in sections.items()
    )
    return _PAGE.substitute(title=html.escape(title), body=f"{lead}{body}")


def dim(text: str) -> str:
    """A paragraph of plain text that is no news, as HTML."""
    return f'<p class="dim">{html.escape(text)}</p>'


def told(sentences: Sequence[str]) -> str:
    """A list of sentences in plain text, as HTML."""
    if not sentences:
        return dim("nothing")
    return "<ol>" + "".join(f"<li>{html.escape(text)}</li>" for text in sentences) + "</ol>"


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], left: int = 2) -> str:
    """A table; heads are plain text, cells are HTML; so many columns are aligned to the left."""
    head = "".join(f"<th>{html.escape(name)}</th>" for name in heads)
    lines = ("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    body = "\n".join(lines)
    head = f"<thead><tr>{head}</tr></thead>"
    return f'<table class="left{left}">\n{head}\n<tbody>\n{body}\n</tbody>\n</table>'


def bad(text: str) -> str:
    """Plain text that is out of the ordinary, as HTML; none where there is none."""
    return f'<span class="bad">{html.escape(text)}</span>' if text else ""


def histogram(counts: Mapping[int, int]) -> str:
    """Bars from the smallest power of two to the largest, and in words what is no power of two:
    blocks of zeros, which have the least scale, and blocks with NaN."""
    bars = {e: n for e, n in counts.items() if e not in _ENDS}
    ends = ", ".join(f"{n} {_ENDS[e]}" for e, n in sorted(counts.items()) if e in _ENDS)
    drawn = _bars(bars) if bars else ""
    return f'{drawn}<div class="dim">{ends}</div>' if ends else drawn


def _bars(counts: Mapping[int, int]) -> str:
    first, last, most = min(counts), max(counts), max(counts.values())
    step = min(_BAR, max(2, _WIDEST // (last - first + 1)))
    width = max((last - first + 1) * step, 70)
    bars = "".join(
        f'<rect x="{(e - first) * step}" y="{_HEIGHT - height:.1f}" width="{step - 1}" '
        f'height="{height:.1f}"><title>2^{e}: {n}</title></rect>'
        for e, n in sorted(counts.items())
        for height in (max(1.0, n / most * _HEIGHT),)
    )
    return (
        f'<svg width="{width}" height="{_HEIGHT + _MARGIN}">{bars}'
        f'<text x="0" y="{_HEIGHT + _MARGIN - 2}">2^{first}</text>'
        f'<text x="{width}" y="{_HEIGHT + _MARGIN - 2}" text-anchor="end">2^{last}</text></svg>'
    )
