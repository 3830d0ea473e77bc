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
from mx_jax.packed import PackedMXArray, Quantized
from mx_jax.sharding.gather import Gather
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
    lhs: AnyOperand,
    rhs: AnyOperand,
    dimension_numbers: Any,
    out_sharding: Any,
    recipe: MatmulRecipe,
) -> PartitionSpec:
    """Where `jax.lax.dot_general` would have a product lie, by what types say of its operands.

    Sums of packed weights that are cut along what is contracted lie on all of its devices, and so
    do those of transformed operands, whose groups may end on another device.

    Raises:
      Exception: of JAX, as its own product does: an axis that both operands shard is contracted,
        and nothing says where the sum goes.
    """
    mesh: Any = jax.sharding.get_abstract_mesh()
    is_summed = isinstance(rhs, PackedMXArray) or recipe.fwd.transform is not None
    types = []
    for x, contracting in zip((lhs, rhs), dimension_numbers[0], strict=True):
        parts = stored(x)
        if is_summed and out_sharding is None:
            parts = tuple(() if a in contracting else part for a, part in enumerate(parts))
        place = NamedSharding(mesh, spec_of(parts))
        types.append(jax.ShapeDtypeStruct(x.shape, np.float32, sharding=place))
    product: Any = jax.make_jaxpr(
        lambda x, y: lax.dot_general(x, y, dimension_numbers, out_sharding=out_sharding)
    )(*types)
    return product.out_avals[0].sharding.spec


def gathering(
    recipe: MatmulRecipe, lhs: AnyOperand, rhs: AnyOperand, dimension_numbers: Any, out: Any
) -> MatmulRecipe:
    """A recipe for a product of automatic axes that were explicit: there codes are what moves, so
    that it has to name axes of which values are wanted.

    Args:
      recipe: as it came.
      lhs: the left operand.
      rhs: the right one.
      dimension_numbers: as in `jax.lax.dot_general`, no axis counted from the end.
      out: where the product lies.
    """
    gather = recipe.gather
    if gather is None or any(type_of(name) is not AxisType.Explicit for name in gather.on_mesh()):
        return recipe
    as_told = dataclasses.replace(gather, rhs=spec_of(stored(rhs)))
    own = None if gather.as_codes and gather.axes else as_told
    if not gather.axes and not isinstance(lhs, Quantized) and not isinstance(rhs, Quantized):
        own = _of_values(lhs, rhs, dimension_numbers, out)
    return dataclasses.replace(recipe, gather=own)


def _of_values(lhs: Any, rhs: Any, dimension_numbers: Any, out: Any) -> Gather:
    """Values move, once, where the product has a mesh axis from the other operand."""
    (lhs_contracting, _), batches = dimension_numbers
    first_n = lhs.ndim - len(lhs_contracting)
    parts = parts_of(out, first_n + rhs.ndim - len(lhs_contracting) - len(batches[0]))
    wanted = parts[first_n:], parts[len(batches[0]) : first_n]
    names, places = set[str](), []
    for x, batch, others in zip((lhs, rhs), batches, wanted, strict=True):
        lies = stored(x)
        own = {name for axis, part in enumerate(lies) if axis not in batch for name in part}
        moved = own & {name for part in others for name in part}
        names |= moved
        places.append(spec_of(lies) if moved else None)
    left, right = places
    return Gather(tuple(sorted(names)), lhs=left, rhs=right or PartitionSpec(), as_codes=False)
