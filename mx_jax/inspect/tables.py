"""Tables of results, as text and for rich."""

from collections.abc import Sequence

from rich.markup import escape
from rich.table import Table

Rows = Sequence[Sequence[str]]


def aligned(rows: Rows) -> str:
    """Lines of text whose columns are aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def rich_table(title: str, heads: Sequence[str], rows: Rows, caption: str) -> Table:
    """A table for rich; numbers, which are all but the first column, on the right."""
    table = Table(title=escape(title), caption=escape(caption))
    for index, head in enumerate(heads):
        table.add_column(head, justify="right" if index else "left")
    for row in rows:
        table.add_row(*map(escape, row))
    return table
