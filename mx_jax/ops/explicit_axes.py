"""Where products lie on meshes with explicit axes.

A product that contracts an axis sharded in both operands is refused by JAX there, unless it says
where the sum goes. A forward product passes on what its caller said; a gradient goes where its
operand lies.
"""

from collections.abc import Sequence
from typing import Any

from mx_jax.axes import ProductAxes
from mx_jax.codecs.explicit_axes import has_explicit_axes, partitions, with_partitions


def canonical_sharding(out_sharding: Any, axes: ProductAxes, empty: Sequence[int]) -> Any:
    """A product's sharding while operands without kept axes still have one of length one.

    Args:
      out_sharding: NamedSharding or PartitionSpec of the product as the caller sees it, or None.
      axes: of the canonical operands.
      empty: axes of their product that the caller does not see, in ascending order.

    Returns:
      The same for `[*batch, *m, *n]`; None on meshes without explicit axes.
    """
    if out_sharding is None or not has_explicit_axes():
        return None
    parts = partitions(out_sharding, axes.ndim - len(empty))
    for axis in empty:
        parts.insert(axis, None)
    return with_partitions(out_sharding, parts)


def permuted_sharding(out_sharding: Any, order: Sequence[int]) -> Any:
    """A product's sharding before its axes were permuted: axis i was to become `order[i]`.

    Args:
      out_sharding: NamedSharding or PartitionSpec after it, or None.
      order: for each axis of the product, which axis of the result it becomes.

    Returns:
      The same for the product; None on meshes without explicit axes.
    """
    if out_sharding is None or not has_explicit_axes():
        return None
    parts = partitions(out_sharding, len(order))
    return with_partitions(out_sharding, [parts[axis] for axis in order])
