"""Where products lie on meshes with explicit axes.

A product that contracts an axis sharded in both operands is refused by JAX there, unless it says
where the sum goes. A forward product passes on what its caller said; a gradient goes where its
operand lies.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from mx_jax.axes import ProductAxes
from mx_jax.backends.calls import AnyOperand, Operand
from mx_jax.codecs.explicit_axes import (
    explicit_sharding,
    has_explicit_axes,
    partitions,
    with_partitions,
)
from mx_jax.mxarray import MXArray
from mx_jax.packed import PackedMXArray
from mx_jax.sharding.movement import Part, parts_of, spec_of
from mx_jax.sharding.partition import Factors


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


def stored(operand: AnyOperand) -> tuple[Part, ...]:
    """Where an operand's type says that it lies; packed weights by their first array."""
    if isinstance(operand, PackedMXArray):
        return parts_of(PartitionSpec(*operand.partitions()), operand.ndim)
    sharding = explicit_sharding(operand.codes if isinstance(operand, MXArray) else operand)
    return ((),) * operand.ndim if sharding is None else parts_of(sharding, operand.ndim)


def packed_by_shards(
    multiply: Callable[..., jax.Array],
    lhs: Operand,
    rhs: PackedMXArray,
    axes: ProductAxes,
    out_dtype: np.dtype,
    out_sharding: Any,
    reduced: np.dtype,
) -> jax.Array:
    """A product by packed weights on explicit mesh axes: each device multiplies what it has.

    The other operand is brought to where the weights lie.

    Args:
      multiply: a product of one device's operands, given the dtype of what it gives.
      lhs: the left operand.
      rhs: the weights.
      axes: of both.
      out_dtype: of the product.
      out_sharding: where its caller wants it; None: where operands lie.
      reduced: in which sums are added up.

    Raises:
      ValueError: a block of lhs that would have a part on each of two devices.
    """
    factors = Factors.of(axes)
    lies = dict(zip(factors.rhs, stored(rhs), strict=True))
    taken = {name for part in lies.values() for name in part}
    for factor, part in zip(factors.lhs, stored(lhs), strict=True):
        free = tuple(name for name in part if name not in taken)
        lies.setdefault(factor, free)
    summed = tuple(name for factor in lies if factor[0] == "k" for name in lies[factor])
    lhs, left = _brought(lhs, tuple(lies[factor] for factor in factors.lhs))

    def local(lhs: Operand, rhs: PackedMXArray) -> jax.Array:
        product = multiply(lhs, rhs.local(), out_dtype=reduced if summed else out_dtype)
        return lax.psum(product, summed).astype(out_dtype) if summed else product

    right = jax.tree.map(lambda array: jax.typeof(array).sharding.spec, rhs)
    out = spec_of(tuple(lies[factor] for factor in factors.out))
    product = jax.shard_map(local, in_specs=(left, right), out_specs=out)(lhs, rhs)
    return product if out_sharding is None else jax.sharding.reshard(product, out_sharding)


def _brought(x: Operand, parts: tuple[Part, ...]) -> tuple[Operand, Any]:
    """An operand whose arrays lie so, and their specs."""
    mesh, whole = jax.sharding.get_abstract_mesh(), x.shape
    if isinstance(x, MXArray):
        x = dataclasses.replace(x, primal=None)
        for axis, size in x.blocks:
            shard = whole[axis] // math.prod(mesh.shape[name] for name in parts[axis])
            if parts[axis] and (not isinstance(size, int) or shard % size):
                raise ValueError(
                    f"matmul: packed weights are cut where lhs has a part of a block, got shard "
                    f"size={shard} along axis={axis % x.ndim}, mesh axes={parts[axis]}, with "
                    f"block={size} of lhs={x!r}; cut the weights along their units, or leave lhs "
                    "in high precision"
                )

    def spec(array: jax.Array) -> PartitionSpec:
        lengths = zip(parts, array.shape, whole, strict=True)
        return spec_of(tuple(p if own > 1 or all_ == 1 else () for p, own, all_ in lengths))

    specs = jax.tree.map(spec, x)
    return jax.tree.map(jax.sharding.reshard, x, specs), specs
