"""What all commands share: their place in --help, and how they print."""

import argparse
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TypeAlias

from rich.box import HEAVY_HEAD, Box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def add_parser(
    commands: Commands,
    run: Callable[[argparse.Namespace], int],
    name: str,
    *,
    help: str,
    text: str | None,
) -> argparse.ArgumentParser:
    """Add a command; `text`, such as its module's docstring, is a description, then examples."""
    description, examples, epilog = (text or "").partition("examples:")
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=help,
        description=description,
        epilog=examples + epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    return parser


def print_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    left: Collection[str],
    title: str | None = None,
    box: Box | None = HEAVY_HEAD,
) -> None:
    """Print rows of cells; `left`: the columns that begin at the left, as names do.

    In a terminal that is narrower than the table, names go on below themselves; numbers stay whole.
    """
    table = Table(title_justify="left", title=title, box=box)
    for column in columns:
        is_name = column in left
        table.add_column(
            column,
            justify="left" if is_name else "right",
            overflow="fold",
            no_wrap=not is_name,
        )
    for row in rows:
        table.add_row(*row)
    # Names of tensors are printed, and a bracket in one is no markup.
    out = Console(highlight=False, markup=False)
    # Through a pipe there is no terminal to fit, and a cut table would be of no use.
    if not sys.stdout.isatty():
        needs = Measurement.get(out, out.options.update(max_width=_WIDEST), table)
        out.width = max(out.width, needs.maximum)
    out.print(table)


# More than any table needs.
_WIDEST = 10_000


def say(text: str) -> None:
    """A line for people, past what another program reads."""
    print(f"mx_jax: {text}", file=sys.stderr)


def watched() -> bool:
    """Whether somebody sees a progress bar."""
    return sys.stderr.isatty()


def size(nbytes: float) -> str:
    """Bytes with a decimal unit, as `12.3 MB`."""
    units = ["B", "kB", "MB", "GB", "TB"]
    while nbytes >= 999.95 and len(units) > 1:
        nbytes, units = nbytes / 1000, units[1:]
    return f"{nbytes:.4g} {units[0]}"
