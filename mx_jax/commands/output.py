"""How commands print: tables, lines for people, and whether a progress bar is seen."""

import sys
from collections.abc import Collection, Iterable, Sequence

from rich.box import HEAVY_HEAD, Box
from rich.console import Console
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
    for row in rows:
        table.add_row(*row)
    console().print(table)


def say(text: str) -> None:
    """A line for people, past what another program reads."""
    print(f"mx_jax: {text}", file=sys.stderr)


def watched() -> bool:
    """Whether somebody sees a progress bar."""
    return sys.stderr.isatty()
