"""How results print: aligned text, tables of rich, and names of a pytree's leaves."""

from collections.abc import Iterable, Sequence
from typing import Any

import jax
from rich.box import HEAVY_HEAD, Box
from rich.markup import escape
from rich.table import Table


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Lines of text whose columns are aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def rich_table(
    title: str,
    heads: Sequence[str],
    rows: Iterable[Sequence[str]],
    left: int = 1,
    box: Box = HEAVY_HEAD,
) -> Table:
    """A table for rich; `left`: how many columns begin at the left, as names do."""
    table = Table(title=escape(title), title_justify="left", box=box)
    for index, head in enumerate(heads):
        table.add_column(head, justify="right" if index >= left else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(escape, row))
    return table


def named_leaves(tree: object) -> list[tuple[str, Any]]:
    """Leaves by their paths, joined by `/`; boxes of Flax end in `value`, which is no name."""
    found = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        boxed = path and path[-1] == jax.tree_util.GetAttrKey("value")
        own = path[:-1] if boxed else path
        found.append((jax.tree_util.keystr(own, simple=True, separator="/"), leaf))
    return found
