"""How commands print: tables, lines for people, and whether a progress bar is seen."""

import itertools
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence

from rich.box import HEAVY_HEAD, Box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table


def console() -> Console:
    """Where tables go."""
    # Through a pipe there is no terminal to fit, and a cut table would be of no use. Names of
    # tensors are printed, and a bracket in one is no markup.
    return Console(width=None if sys.stdout.isatty() else 160, highlight=False, markup=False)


def print_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    left: Collection[str],
    title: str | None = None,
    box: Box | None = HEAVY_HEAD,
) -> None:
    """Print rows of cells; `left`: the columns that begin at the left, as names do."""
    table = Table(title_justify="left", title=title, box=box)
    for column in columns:
        table.add_column(column, justify="left" if column in left else "right", overflow="fold")
    held = [tuple(row) for row in rows]
    for row in held:
        table.add_row(*row)
    out = console()
    needs = Measurement.get(out, out.options.update(max_width=_WIDEST), table)
    if not sys.stdout.isatty():
        out.width = max(out.width, needs.maximum)
    if needs.minimum <= out.width:  # lines break between words
        out.print(table)
        return
    for line in _stacked(columns, held, left, title):
        out.print(line, soft_wrap=True)


# More than any table needs.
_WIDEST = 10_000


def _stacked(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    left: Collection[str],
    title: str | None,
) -> Iterator[str]:
    """Lines of a table that is wider than the terminal: two a row, names above its numbers."""
    names = len([*itertools.takewhile(lambda column: column in left, columns)])
    names = names if 0 < names < len(columns) else 1
    below = [[row[at] for row in (columns, *rows)] for at in range(names, len(columns))]
    widths = [max(map(len, cells)) for cells in below]
    if title is not None:
        yield title
    for row in (columns, *rows):
        yield "  ".join(row[:names])
        cells = zip(columns[names:], row[names:], widths, strict=True)
        aligned = (x.ljust(n) if column in left else x.rjust(n) for column, x, n in cells)
        yield "  " + "  ".join(aligned).rstrip()


def say(text: str) -> None:
    """A line for people, past what another program reads."""
    print(f"mx_jax: {text}", file=sys.stderr)


def watched() -> bool:
    """Whether somebody sees a progress bar."""
    return sys.stderr.isatty()
