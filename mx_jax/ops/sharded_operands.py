"""Operands on several devices: those whose types say where they are sharded, and those that move.

On a mesh with explicit axes types carry shardings, and automatic axes compute the product. A recipe
with `gather` moves operands to a product: as codes, or before their cast.
"""

import dataclasses
from collections.abc import Sequence
from itertools import chain
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from mx_jax.axes import SIDES, Axes
from mx_jax.backends.calls import AnyOperand
from mx_jax.backends.target import is_unsplit
from mx_jax.codecs.blocks import Blocks
from mx_jax.codecs.explicit_axes import Spec, explicit_sharding
from mx_jax.codecs.rounding import DerivedKey
from mx_jax.formats import WHOLE
from mx_jax.mxarray import MXArray
from mx_jax.ops.arguments import Key
from mx_jax.packed import PackedMXArray
from mx_jax.reference.hadamard import Hadamard
from mx_jax.reference.quantize import find_tensor_scale
from mx_jax.sharding.movement import (
    STAY,
    Gather,
    Movement,
    Moves,
    Part,
    parts_of,
    spec_of,
    type_of,
    with_maxima,
)
from mx_jax.specs import MatmulRecipe, OperandSpec, Residuals


def stored(operand: AnyOperand) -> tuple[Part, ...]:
    """Where an operand's type says that it lies; packed weights lie whole."""
    if isinstance(operand, PackedMXArray):
        return ((),) * operand.ndim
    sharding = explicit_sharding(operand.codes if isinstance(operand, MXArray) else operand)
    return ((),) * operand.ndim if sharding is None else parts_of(sharding, operand.ndim)


def product_spec(
    lhs: AnyOperand,
    rhs: AnyOperand,
    dimension_numbers: lax.DotDimensionNumbers,
    out_sharding: Spec | None,
    recipe: MatmulRecipe,
) -> PartitionSpec:
    """Where `jax.lax.dot_general` would have a product lie, by what types say of its operands.

    Sums of transformed operands, whose groups may end on another device, lie on all of its devices.

    Raises:
      Exception: of JAX, as its own product does: an axis that both operands shard is contracted,
        and nothing says where the sum goes.
    """
    mesh: Any = jax.sharding.get_abstract_mesh()
    is_summed = recipe.output.transform is not None
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
    recipe: MatmulRecipe,
    lhs: AnyOperand,
    rhs: AnyOperand,
    dimension_numbers: lax.DotDimensionNumbers,
    out: PartitionSpec,
) -> MatmulRecipe:
    """A recipe for a product of automatic axes that were explicit: it says what types said of the
    axes that it gathers, and where the compiler cannot be told of codes (TPUs), of all."""
    names = frozenset[str]() if recipe.gather is None else recipe.gather.on_mesh()
    if any(type_of(name) is not AxisType.Explicit for name in names):
        return recipe
    if not names and not is_unsplit():
        return recipe
    from mx_jax.sharding import partition  # late: one device needs none

    axes = []
    for x, contracting, batch in zip((lhs, rhs), *dimension_numbers, strict=True):
        kept = (axis for axis in range(x.ndim) if axis not in (*contracting, *batch))
        axes.append(Axes(tuple(batch), tuple(kept), tuple(contracting)))
    *of_operands, of_product = partition.product_factors(*axes)
    pairs = zip(of_operands, (lhs, rhs), strict=True)
    lies = [dict(zip(factors, stored(x), strict=True)) for factors, x in pairs]
    sizes = dict(zip(chain(*of_operands), (*lhs.shape, *rhs.shape), strict=True))
    wanted = dict(zip(of_product, parts_of(out, len(of_product)), strict=True))
    devices = jax.sharding.get_abstract_mesh().shape
    parts, _ = partition.split_product(devices, partition.Factors(sizes, {}), lies, wanted)
    split = {name: factor for factor, part in parts.items() for name in part}
    moved, places = set[str](), []
    # An operand moves where a mesh axis splits what the other one alone has, in the product too.
    for where in lies:
        mine = {*chain(*where.values())} & {*split} & (names or {*split})
        along = {
            name
            for name in mine
            if split[name] not in where and name in wanted.get(split[name], ())
        }
        moved |= along
        places.append(spec_of(tuple(where.values())) if along else None)
    left, right = places
    gather = Gather(tuple(sorted(moved)), lhs=left, rhs=right or PartitionSpec())
    return dataclasses.replace(recipe, gather=gather if moved else None)


def moves_of(recipe: MatmulRecipe, lhs: AnyOperand, rhs: AnyOperand) -> Moves:
    """How operands move where no type says so: as their recipe does.

    Raises:
      ValueError: packed weights, which lie as one device wants them; inside shard_map, codes that
        would be kept under scales of one device's part.
    """
    gather = recipe.gather
    if gather is None:
        return STAY
    moves = gather.movement("lhs", lhs.ndim), gather.movement("rhs", rhs.ndim)
    for side, spec, move in zip(SIDES, (recipe.output.lhs, recipe.output.rhs), moves, strict=True):
        shared = spec is not None and (spec.format.tensor_scale or spec.format.block[1] is WHOLE)
        if shared and move and move.manual and recipe.residuals is Residuals.QUANTIZED:
            raise ValueError(
                f"gather: residuals=QUANTIZED keeps codes under scales of one device's part, got "
                f"{side} of recipe {recipe.name!r} gathered along mesh axes={move.manual} of "
                "shard_map; use residuals=PRIMAL, or jit without shard_map"
            )
    if moves[1] is not None and isinstance(rhs, PackedMXArray):
        raise ValueError(
            f"gather: packed weights are not gathered, got rhs={rhs!r} and gather axes="
            f"{gather.axes}; pass the MXArray"
        )
    return moves


def place(
    operand: AnyOperand,
    move: Movement | None,
    spec: OperandSpec | None,
    axes: Axes,
    key: Key,
    transform: Hadamard | None = None,
) -> tuple[Any, Movement | None, Key, jax.Array | None]:
    """An operand where it is to be quantized.

    Returns:
      The operand, gathered if it moves before its cast. How its codes move afterwards
      (`move_codes`); None: they stay. A key for its random bits: inside shard_map another one on
      each device that has a part of it. The tensor scale of all of it, where a device sees a part
      alone; None: the cast finds it.

    Raises:
      ValueError: inside shard_map, a quantized operand of which a block lies on two devices.
    """
    if move is None or isinstance(operand, PackedMXArray):
        return operand, None, key, None
    if isinstance(operand, MXArray):
        for axis in move.cut_axes(operand.shape, operand.blocks):
            if names := [name for name in move.stored[axis] if name in move.manual]:
                length, size = operand.shape[axis], dict(operand.blocks)[axis]
                raise ValueError(
                    f"gather: a block would lie on two devices along axis={axis % operand.ndim}, "
                    f"got shard size={length} with block={size} of {operand.format.name} along "
                    f"mesh axes={names}; pass dequantize(), or shard another axis"
                )
        return move.move_codes(operand), None, key, None
    if spec is None:
        return move.move(operand), None, key, None
    if spec.tensor_scale == "row" and move.manual:
        # Gathered codes cannot say of a device's one row that its scale is not that of all.
        return move.move(operand), None, key, None
    blocks, k = axes.blocks(spec.format), axes.block_axis
    cut = move.cut_axes(operand.shape, blocks)
    whole = [axis for axis, size in blocks if size is WHOLE and axis in cut]
    if whole and transform is None and not spec.scale_rule.reads_values:
        names = [name for axis, _ in blocks for name in move.stored[axis] if name in move.manual]
        operand = with_maxima(operand, blocks, whole[0], names)
        return operand, dataclasses.replace(move, maxima=whole[0]), _folded(key, move), None
    group = 1 if transform is None else transform.size
    if cut or (move.shard(operand.shape)[k] % group and move.stored[k]):
        return move.move(operand), None, key, None
    scale = agreed_scale(operand, spec, blocks, move.manual)
    return operand, move, _folded(key, move), scale


def _folded(key: Key, move: Movement) -> Key:
    """A key of each device's own, for the part that it has."""
    if key is None or not move.manual:
        return key
    return DerivedKey.of(key).fold_in(lax.axis_index(move.manual))


def agreed_scale(
    x: jax.Array, spec: OperandSpec, blocks: Blocks, axes: Sequence[str]
) -> jax.Array | None:
    """Inside shard_map the tensor scale is that of all parts; elsewhere a cast sees them all."""
    if not axes or not spec.format.tensor_scale:
        return None
    return find_tensor_scale(x, blocks, spec.scale_rule.largest_value(spec.format), axes)
