"""Results as JSON for programs, Markdown for the docs and a table for the terminal."""

import argparse
import contextlib
import dataclasses
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

RESULTS = Path(__file__).parent / "results"
# Stands in a file's name for the device's.
DEVICE = "DEVICE"


@dataclasses.dataclass
class Sheet:
    """A table, whatever it will be written as.

    Attributes:
      title: its head.
      columns: names.
      rows: cells as text.
      notes: sentences below it.
    """

    title: str
    columns: Sequence[str]
    rows: list[Sequence[str]] = dataclasses.field(default_factory=list)
    notes: Sequence[str] = ()

    def markdown(self) -> str:
        """A section with a GitHub table; every column but the first is aligned right."""
        rules = ["---", *["---:"] * (len(self.columns) - 1)]
        lines = [f"## {self.title}", ""]
        lines += [f"| {' | '.join(row)} |" for row in (self.columns, rules, *self.rows)]
        return "\n".join([*lines, "", *self.notes, ""])

    def rich(self) -> Table:
        """For the terminal."""
        table = Table(title=self.title, title_justify="left")
        for index, column in enumerate(self.columns):
            table.add_column(column, justify="right" if index else "left")
        for row in self.rows:
            table.add_row(*row)
        return table


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Appends defaults, but where the help names one or the default is nothing."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if not action.default or "default" in (action.help or ""):
            return action.help
        return super()._get_help_string(action)


def parser(
    command: str, description: str | None, out: str | None = None
) -> argparse.ArgumentParser:
    """A parser with the options of every command.

    Args:
      command: the module's name in this package.
      description: the module's docstring; its first paragraph is shown.
      out: the file in RESULTS, if not `command`'s name with .json.
    """
    result = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{command}",
        description=(description or "").partition("\n\n")[0],
        formatter_class=_HelpFormatter,
    )
    result.add_argument(
        "--out",
        type=Path,
        default=RESULTS / (out or f"{command}.json"),
        metavar="FILE.json",
        help="where to write; the Markdown table lies beside it",
    )
    return result


def of_device(out: Path, device: str) -> Path:
    """A file of results with a device's name in the place of `DEVICE`."""
    return Path(str(out).replace(DEVICE, device))


def check_names(option: str, names: Iterable[str], known: Sequence[str]) -> None:
    """Raises SystemExit if an option has a name that is not known."""
    if unknown := sorted(set(names) - set(known)):
        raise SystemExit(f"{option}: unknown {', '.join(unknown)}; known: {', '.join(known)}")


def shape(text: str) -> tuple[int, int]:
    """`"4096x4096"` as a shape; an argparse type."""
    try:
        rows, columns = map(int, text.split("x"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"needs ROWSxCOLUMNS, got {text!r}") from None
    if rows < 1 or columns < 1:
        raise argparse.ArgumentTypeError(f"needs positive sizes, got {text!r}")
    return rows, columns


@contextlib.contextmanager
def progress(total: int) -> Iterator[Any]:
    """A bar on stderr; yields a function that names the next step."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description:<40}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as bar:
        task = bar.add_task("", total=total)
        started = False

        def step(description: str) -> None:
            nonlocal started
            bar.update(task, description=description, advance=1 if started else 0)
            started = True

        yield step


def last_line(trace: str) -> str:
    """The last line of a traceback, for a table."""
    return trace.strip().splitlines()[-1]


def number(value: float | None, digits: int) -> str:
    """A cell with a number, or with a dash where nothing was measured."""
    return "-" if value is None else f"{value:.{digits}f}"


def show(sheets: Sequence[Sheet]) -> None:
    """Print the sheets."""
    console = Console(width=None if sys.stdout.isatty() else 200, highlight=False)
    for sheet in sheets:
        console.print(sheet.rich())
        for note in sheet.notes:
            console.print(note)


def publish(command: str, options: argparse.Namespace, result: Any, sheets: Sequence[Sheet]):
    """Print the sheets that have rows, write the result as JSON and them as Markdown beside it."""
    sheets = [sheet for sheet in sheets if sheet.rows]
    show(sheets)
    out = options.out
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n")
    head = f"# benchmarks.{command}\n\n{_environment(result['environment'])}\n\n"
    out.with_suffix(".md").write_text(head + "\n".join(sheet.markdown() for sheet in sheets))
    print(f"written: {out}, {out.with_suffix('.md')}", file=sys.stderr)


def _environment(facts: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    return (
        f"{facts['date'][:10]}, commit {facts['commit']}; {facts['cpu']}, {facts['cores']} cores, "
        f"load {facts['load_average_1min']} at the start; Python {facts['python']}; {versions}."
    )
