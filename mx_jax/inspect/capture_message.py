"""Statistics of a product as one array: a callback costs for each array that it is given."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

# What is packed is of these; arrays of users go as they are.
_WORD = np.dtype(np.uint32)


@dataclasses.dataclass(frozen=True)
class Layout:
    """What a message holds, in its order.

    Attributes:
      tree: how the leaves hang together.
      leaves: shape and dtype of each that is packed, scalars first; None for one that is handed
        over as it is.
    """

    tree: Any
    leaves: tuple[tuple[tuple[int, ...], np.dtype] | None, ...]


def pack(content: Any, large: frozenset[str]) -> tuple[jax.Array, list[jax.Array], Layout]:
    """Arrays of 32 bits as one, and those of some names as they are.

    Args:
      content: a pytree.
      large: keys of dicts whose arrays are not copied.

    Returns:
      Words, uint32; the large arrays; how to read them.
    """
    paths, tree = jax.tree.flatten_with_path(content)
    scalars, arrays, whole, leaves = [], [], [], []
    for path, leaf in paths:
        if any(getattr(key, "key", None) in large for key in path):
            whole.append(leaf)
            leaves.append(None)
            continue
        words = scalars if leaf.ndim == 0 else arrays
        words.append(jnp.ravel(lax.bitcast_convert_type(leaf, jnp.uint32)))
        leaves.append((leaf.shape, np.dtype(leaf.dtype)))
    return jnp.concatenate([*scalars, *arrays]), whole, Layout(tree, tuple(leaves))


def unpack(words: Any, whole: list[Any], layout: Layout) -> Any:
    """The content of a message: NumPy arrays, and numbers of Python, which NumPy reads together."""
    words, rest = np.asarray(words, _WORD), iter(whole)
    start = sum(leaf is not None and not leaf[0] for leaf in layout.leaves)
    dtypes = {leaf[1] for leaf in layout.leaves if leaf is not None and not leaf[0]}
    numbers = {dtype: words[:start].view(dtype).tolist() for dtype in dtypes}
    found, place = [], 0
    for leaf in layout.leaves:
        if leaf is None:
            found.append(np.asarray(next(rest)))
            continue
        shape, dtype = leaf
        if not shape:
            found.append(numbers[dtype][place])
            place += 1
            continue
        end = start + math.prod(shape)
        own = words[start:end].view(dtype)
        found.append(own if len(shape) == 1 else own.reshape(shape))
        start = end
    return jax.tree.unflatten(layout.tree, found)
