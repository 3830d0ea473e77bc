"""Products on meshes with explicit axes: types say where they lie, automatic axes compute them."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from mx_jax.backends.calls import AnyOperand
from mx_jax.codecs.explicit_axes import (
    explicit_sharding,
    has_explicit_axes,
    partitions,
    with_partitions,
)
from mx_jax.mxarray import MXArray
from mx_jax.packed import PackedMXArray
from mx_jax.sharding.movement import Part, parts_of, spec_of, type_of
from mx_jax.specs import MatmulRecipe


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


def product_spec(
    lhs: AnyOperand, rhs: AnyOperand, dimension_numbers: Any, out_sharding: Any
) -> PartitionSpec:
    """Where `jax.lax.dot_general` would have a product lie, by what types say of its operands.

    Sums of packed weights that are cut along what is contracted lie on all of its devices.

    Raises:
      Exception: of JAX, as its own product does: an axis that both operands shard is contracted,
        and nothing says where the sum goes.
    """
    mesh: Any = jax.sharding.get_abstract_mesh()
    types = []
    for x, contracting in zip((lhs, rhs), dimension_numbers[0], strict=True):
        parts = stored(x)
        if isinstance(rhs, PackedMXArray) and out_sharding is None:
            parts = tuple(() if a in contracting else part for a, part in enumerate(parts))
        place = NamedSharding(mesh, spec_of(parts))
        types.append(jax.ShapeDtypeStruct(x.shape, np.float32, sharding=place))
    product: Any = jax.make_jaxpr(
        lambda x, y: lax.dot_general(x, y, dimension_numbers, out_sharding=out_sharding)
    )(*types)
    return product.out_avals[0].sharding.spec


def gathering(recipe: MatmulRecipe, rhs: AnyOperand) -> MatmulRecipe:
    """A recipe for a product of automatic axes that were explicit: there codes are what moves, so
    that it has to name axes of which values are wanted, or none."""
    gather = recipe.gather
    if gather is None or any(type_of(name) is not AxisType.Explicit for name in gather.on_mesh()):
        return recipe
    own = dataclasses.replace(gather, rhs=spec_of(stored(rhs)))
    return dataclasses.replace(recipe, gather=None if gather.as_codes and gather.axes else own)
