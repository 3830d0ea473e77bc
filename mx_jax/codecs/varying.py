"""What differs from shard to shard below shard_map."""

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax


def varying(x: jax.Array) -> frozenset[str]:
    """The shard_map axes along which a value differs, under either of JAX's names for them."""
    kind: Any = jax.typeof(x)
    return frozenset(kind.vma if hasattr(kind, "vma") else kind.mat.varying)


def vary_alike(arrays: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
    """The same values, each differing along the axes of all of them, as JAX wants of operands."""
    found = [varying(x) for x in arrays]
    axes = frozenset[str]().union(*found)
    return tuple(
        lax.pcast(x, tuple(sorted(axes - own)), to="varying") if axes - own else x
        for x, own in zip(arrays, found, strict=True)
    )
