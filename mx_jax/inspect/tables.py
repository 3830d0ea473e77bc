"""How results print: aligned text, and names of a pytree's leaves."""

from collections.abc import Sequence
from typing import Any

import jax


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Lines of text whose columns are aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def named_leaves(tree: object) -> list[tuple[str, Any]]:
    """Leaves by their paths, joined by `/`; boxes of Flax end in `value`, which is no name."""
    found = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        boxed = path and path[-1] == jax.tree_util.GetAttrKey("value")
        own = path[:-1] if boxed else path
        found.append((jax.tree_util.keystr(own, simple=True, separator="/"), leaf))
    return found
