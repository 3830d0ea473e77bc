"""What a product does to each operand before it multiplies, and what of it the gradients keep."""

import dataclasses
import functools
import math
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from mx_jax.axes import Axes, ProductAxes, Side
from mx_jax.backends.calls import (
    AnyOperand,
    DequantizeCall,
    Operand,
    QuantizeBothCall,
    QuantizeCall,
    TransformCall,
)
from mx_jax.backends.primitive import bind
from mx_jax.backends.target import follow
from mx_jax.codecs.blocks import Blocks, varying_axes
from mx_jax.codecs.rounding import NEAREST
from mx_jax.mxarray import MXArray
from mx_jax.ops.arguments import Key, product_key
from mx_jax.ops.product import AnyResidual, Residual, note_cast, noted, one_program
from mx_jax.ops.remat import QUANTIZED
from mx_jax.ops.sharded_operands import place
from mx_jax.packed import PackedMXArray, Quantized
from mx_jax.reference.hadamard import Hadamard
from mx_jax.reference.random_bits import DerivedKey
from mx_jax.sharding.movement import STAY, Movement, Moves
from mx_jax.specs import MatmulRecipe, MatmulSpec, OperandSpec

X = TypeVar("X", bound=AnyOperand)
Turn = tuple[Hadamard | None, Key]
Sides = tuple[Side, Side]
SIDES: Sides = ("lhs", "rhs")
SWAPPED: Sides = ("rhs", "lhs")


def prepare_operands(
    lhs: AnyOperand,
    rhs: AnyOperand,
    spec: MatmulSpec,
    axes: ProductAxes,
    key: Key,
    moves: Moves = STAY,
    sides: Sides = SIDES,
) -> tuple[AnyOperand, AnyOperand]:
    """Both operands as the product takes them: transformed, and quantized by their specs."""
    # Each operand draws from its own key; a transform's signs, which both share, from a third.
    if moves == STAY:
        lhs, rhs, (lhs_key, rhs_key) = transform_operands(lhs, rhs, spec, axes, key)
        return (
            prepare(lhs, spec.lhs, axes.lhs, lhs_key, side=sides[0]),
            prepare(rhs, spec.rhs, axes.rhs, rhs_key, side=sides[1]),
        )
    lhs_key, rhs_key, _ = operand_keys(key)
    given = (
        (lhs, moves[0], spec.lhs, axes.lhs, lhs_key),
        (rhs, moves[1], spec.rhs, axes.rhs, rhs_key),
    )
    placed = [place(*own, spec.transform) for own in given]
    turned = transform_operands(placed[0].operand, placed[1].operand, spec, axes, key)[:2]
    results = []
    for found, x, (_, _, own, own_axes, _), side in zip(placed, turned, given, sides, strict=True):
        result = prepare(x, own, own_axes, found.key, found.tensor_scale, side)
        if found.move is not None and isinstance(result, MXArray):
            result = found.move.move_codes(result)
        results.append(result)
    return results[0], results[1]


def transform_operands(
    lhs: AnyOperand, rhs: AnyOperand, spec: MatmulSpec, axes: ProductAxes, key: Key
) -> tuple[Any, Any, tuple[Key, Key]]:
    """Both operands transformed along their contracted axes, and each one's key."""
    lhs_key, rhs_key, sign_key = operand_keys(key)
    if spec.transform is not None:
        lhs = _transform(lhs, spec.transform, sign_key, axes.lhs.block_axis)
        rhs = _transform(rhs, spec.transform, sign_key, axes.rhs.block_axis)
    return lhs, rhs, (lhs_key, rhs_key)


def operand_keys(key: Key) -> tuple[Key, Key, Key]:
    """Keys of the left operand, of the right one, and of the signs."""
    lhs, rhs, signs = (None,) * 3 if key is None else DerivedKey.of(key).split(3)
    return lhs, rhs, signs


def _transform(operand: AnyOperand, transform: Hadamard, key: Key, axis: int) -> jax.Array:
    if isinstance(operand, Quantized):
        raise ValueError(
            "matmul: the recipe transforms its operands before quantizing, which an MXArray no "
            f"longer allows, got format={operand.format.name}, shape={operand.shape}; pass "
            "dequantize(), or a recipe without transform"
        )
    return transformed(operand, transform, key, axis)


def transformed(
    x: jax.Array, transform: Hadamard, key: Key, axis: int, back_to: int | None = None
) -> jax.Array:
    """`T(x)`, or its inverse of so many values along the axis: see `reference.hadamard`."""
    call = TransformCall(
        shape=x.shape,
        dtype=np.dtype(x.dtype),
        axis=axis % x.ndim,
        size=transform.size,
        length=back_to,
    )
    if transform.signs is not None:
        return bind(call, x, jnp.asarray(transform.signs, jnp.int32))
    assert key is not None, "random signs without a key"
    return bind(call, x, DerivedKey.of(key))


def prepare(
    operand: X,
    spec: OperandSpec | None,
    axes: Axes,
    key: Key,
    tensor_scale: jax.Array | None = None,
    side: Side = "lhs",
) -> X | MXArray:
    """One operand, quantized by its spec unless it is or stays what it was."""
    if spec is None or isinstance(operand, Quantized):
        return operand
    values, blocks = prescaled(operand, spec), axes.blocks(spec.format)
    own = f"{side}.{spec.format.name}.{spec.scale_rule.name}.axis{axes.block_axis}"
    with jax.named_scope(own):
        drawn = key if spec.random_bits else None
        codes = cast_operand(values, spec, blocks, drawn, tensor_scale)
    if noted.get() is not None:
        note_cast(side, values, codes, spec.scale_rule.name, axes.block_axis)
    return codes


def prescaled(x: jax.Array, spec: OperandSpec) -> jax.Array:
    """What an operand's spec quantizes: x times its prescale, in x's dtype."""
    if spec.prescale == 1.0:
        return x
    product = x * jnp.asarray(spec.prescale, x.dtype)
    # XLA would hand on float32 where float32 is read next, and other bits with it.
    return product if x.dtype == jnp.float32 else lax.optimization_barrier(product)


def unscaled(product: jax.Array, lhs: AnyOperand, rhs: AnyOperand, spec: MatmulSpec) -> jax.Array:
    """A product without the prescales of its operands; one that came quantized never had any."""
    sides = (lhs, spec.lhs), (rhs, spec.rhs)
    prescales = [own.prescale for x, own in sides if own and not isinstance(x, Quantized)]
    factor = 1.0 / math.prod(prescales)
    if factor == 1.0:
        return product
    # 16/9 is 1.78125 in bfloat16: every gradient would be 0.2 % too long.
    wide = jnp.promote_types(product.dtype, jnp.float32)
    return (product.astype(wide) * jnp.asarray(factor, wide)).astype(product.dtype)


def reuse(operand: AnyOperand, product: MatmulSpec, axes: Axes) -> Operand:
    """A saved operand, the right one of a backward product's spec."""
    # Codes are reused if their blocks also lie along the new contracting axis (square blocks).
    spec = product.rhs
    if isinstance(operand, PackedMXArray):
        operand = operand.unpack()
    if not isinstance(operand, MXArray):
        return operand
    if spec is None:
        return dequantize_operand(operand, operand.dtype, saturates=True)
    reusable = operand.format == spec.format and operand.blocks == axes.blocks(spec.format)
    if reusable and product.transform is None:
        return operand
    return dequantize_operand(operand, np.dtype(np.float32), saturates=True)


def reuse_moved(
    operand: AnyOperand, move: Movement | None, product: MatmulSpec, axes: Axes
) -> tuple[Operand, Movement | None]:
    """`reuse` of an operand that is sharded: its codes are gathered as they are, before it."""
    if move is not None and isinstance(operand, MXArray):
        operand, move = place(operand, move, product.rhs, axes, None).operand, None
    return reuse(operand, product, axes), move


def keep(
    recipe: MatmulRecipe, given: AnyOperand, turned: AnyOperand, taken: AnyOperand, axes: Axes
) -> AnyResidual:
    """What is kept of one operand: its codes alone, if they say it all."""
    masks = recipe.mask_clipped and isinstance(taken, MXArray)
    if isinstance(given, Quantized) or not (masks or recipe.fwd.transform):
        return taken
    clipped = None
    if masks:
        assert isinstance(taken, MXArray) and not isinstance(turned, Quantized)
        clips = beyond(turned, taken)
        with jax.enable_x64(False):  # else packbits adds in 64 bits
            bits = jnp.packbits(clips, axis=-1, bitorder="little")
        clipped = checkpoint_name(bits, QUANTIZED)
    return Residual(operand=taken, clipped=clipped, length=given.shape[axes.block_axis])


def keep_both(
    recipe: MatmulRecipe,
    lhs: AnyOperand,
    rhs: AnyOperand,
    axes: ProductAxes,
    key: Key,
    moves: Moves,
) -> tuple[AnyResidual, AnyResidual]:
    """Both operands of a dense product as it takes them."""
    spec = recipe.fwd
    check_whole_groups(recipe, lhs, axes.lhs, moves[0])
    check_whole_groups(recipe, rhs, axes.rhs, moves[1])
    left, right, (lhs_key, rhs_key) = transform_operands(lhs, rhs, spec, axes, key)
    taken = (
        prepare(left, spec.lhs, axes.lhs, lhs_key),
        prepare(right, spec.rhs, axes.rhs, rhs_key, side="rhs"),
    )
    return (
        keep(recipe, lhs, left, taken[0], axes.lhs),
        keep(recipe, rhs, right, taken[1], axes.rhs),
    )


def check_whole_groups(
    recipe: MatmulRecipe, x: AnyOperand, axes: Axes, move: Movement | None
) -> None:
    """Raise ValueError if a device of shard_map would transform a part of a group."""
    transform, k = recipe.fwd.transform, axes.block_axis
    if transform is None or move is None:
        return
    names = [name for name in move.stored[k] if name in move.manual]
    if names and x.shape[k] % transform.size:
        raise ValueError(
            f"gather: residuals=QUANTIZED of recipe {recipe.name!r} keeps what each device "
            f"transforms, but a group of {transform} would lie on two along axis={k % x.ndim}, got "
            f"shard size={x.shape[k]} along mesh axes={names} of shard_map; use "
            "residuals='primal', or shard another axis"
        )


def beyond(values: jax.Array, quantized: MXArray) -> jax.Array:
    """Which values lie beyond the largest code of their block."""
    element = quantized.format.element
    # On each value's own side of zero, and where the codes lie.
    largest = jnp.full_like(quantized.codes, element.max_code)
    if element.negative_extra:
        largest = jnp.where(values < 0, jnp.uint8(element.sign_code), largest)
    limit = dataclasses.replace(quantized, codes=largest, primal=None)
    return jnp.abs(values.astype(jnp.float32)) > jnp.abs(limit.dequantize(jnp.float32))


def as_taken(
    lhs: AnyResidual, rhs: AnyResidual, spec: MatmulSpec
) -> tuple[AnyOperand, AnyOperand, MatmulSpec]:
    """Operands as the product took them, and what is left to do: residuals are transformed."""
    left, right = (x.operand if isinstance(x, Residual) else x for x in (lhs, rhs))
    return left, right, dataclasses.replace(spec, transform=None)


def mask_clipped(
    recipe: MatmulRecipe,
    side: Side,
    axes: ProductAxes,
    cotangent: jax.Array,
    operand: AnyResidual,
    key: Key,
) -> jax.Array:
    """The cotangent of an operand before its transform, without what the recipe masks of
    clipped."""
    kept = isinstance(operand, Residual)
    if not kept and (not recipe.mask_clipped or isinstance(operand, Quantized)):
        return cotangent
    return _masked(recipe, side, axes, cotangent, operand, key)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _masked(
    recipe: MatmulRecipe,
    side: Side,
    axes: ProductAxes,
    cotangent: jax.Array,
    operand: AnyResidual,
    key: Key,
) -> jax.Array:
    fwd = recipe.fwd
    spec, own = (fwd.lhs, axes.lhs) if side == "lhs" else (fwd.rhs, axes.rhs)
    turn = fwd.transform, operand_keys(product_key(recipe, "fwd", key))[2]
    if isinstance(operand, Residual):
        return _turned_back(cotangent, operand.clips(), turn, operand.length, own.block_axis)
    assert not isinstance(operand, Quantized), "codes have nothing clipped"
    return cotangent if spec is None else _without_clipped(cotangent, operand, spec, own, turn)


def _turned_back(
    turned: jax.Array, clipped: jax.Array | None, turn: Turn, length: int, axis: int
) -> jax.Array:
    """`T^-1` of a cotangent without what belongs to clipped values, in the cotangent's dtype."""
    kept = turned if clipped is None else jnp.where(clipped, 0, turned)
    return _turned(kept, turn, axis, back_to=length).astype(turned.dtype)


def _without_clipped(
    cotangent: jax.Array, operand: jax.Array, spec: OperandSpec, axes: Axes, turn: Turn
) -> jax.Array:
    """`T^-1(T(cotangent) * [|T(operand)| is representable])`, with T the forward's transform."""
    axis, blocks = axes.block_axis, axes.blocks(spec.format)
    values = prescaled(_turned(operand, turn, axis), spec)
    # Scales are deterministic, and what lies beyond the largest code saturates however it is
    # rounded: the mask needs none of the forward's random bits.
    nearest = dataclasses.replace(spec, rounding=NEAREST)
    quantized = quantize_operand(values, nearest, blocks)
    turned, length = _turned(cotangent, turn, axis), cotangent.shape[axis]
    kept = _turned_back(turned, beyond(values, quantized), turn, length, axis)
    return kept.astype(cotangent.dtype)


def _turned(x: jax.Array, turn: Turn, axis: int, back_to: int | None = None) -> jax.Array:
    transform, key = turn
    return x if transform is None else transformed(x, transform, key, axis, back_to)


def cast_operand(
    x: jax.Array,
    spec: OperandSpec,
    blocks: Blocks,
    key: Key = None,
    tensor_scale: jax.Array | None = None,
) -> MXArray:
    """Quantize a checked array by its spec, on the backend that takes it on the machine in context.

    Whoever calls it outside a product says `with follow(x)`.
    """
    call = QuantizeCall(
        shape=x.shape,
        dtype=np.dtype(x.dtype),
        format=spec.format,
        blocks=blocks,
        scale_rule=spec.scale_rule,
        rounding=spec.rounding,
        scale_axes=varying_axes(tensor_scale),
    )
    drawn = None if key is None else DerivedKey.of(key)
    return checkpoint_name(bind(call, x, drawn, tensor_scale), QUANTIZED)


# Outside of a product, which is one program already.
quantize_operand = one_program("spec", "blocks")(cast_operand)


class OperandCast(NamedTuple):
    """One of the two casts: how it quantizes, and where its blocks lie."""

    spec: OperandSpec
    blocks: Blocks


def both_call(
    x: jax.Array, casts: tuple[OperandCast, OperandCast], tensor_scale: jax.Array | None = None
) -> QuantizeBothCall:
    """What backends see of two casts of a checked array."""
    first, second = (
        QuantizeCall(
            shape=x.shape,
            dtype=np.dtype(x.dtype),
            format=spec.format,
            blocks=blocks,
            scale_rule=spec.scale_rule,
            rounding=spec.rounding,
            scale_axes=varying_axes(tensor_scale),
        )
        for spec, blocks in casts
    )
    return QuantizeBothCall(first=first, second=second)


def quantize_operand_both(
    x: jax.Array,
    casts: tuple[OperandCast, OperandCast],
    keys: tuple[Key, Key],
    tensor_scale: jax.Array | None = None,
) -> tuple[MXArray, MXArray]:
    """Quantize a checked array twice: in one call where a backend takes both, else in two."""
    with follow(x):
        return _quantize_both(x, keys, tensor_scale, casts=casts)


@one_program("casts")
def _quantize_both(
    x: jax.Array,
    keys: tuple[Key, Key],
    tensor_scale: jax.Array | None,
    *,
    casts: tuple[OperandCast, OperandCast],
) -> tuple[MXArray, MXArray]:
    call = both_call(x, casts, tensor_scale)
    drawn = tuple(None if key is None else DerivedKey.of(key) for key in keys)
    return checkpoint_name(bind(call, x, drawn, tensor_scale), QUANTIZED)


def dequantize_operand(x: MXArray, dtype: np.dtype, *, saturates: bool) -> jax.Array:
    """`mxarray.decode`, on the backend that takes it."""
    call = DequantizeCall(
        shape=x.shape,
        dtype=dtype,
        format=x.format,
        blocks=x.blocks,
        scale_axes=varying_axes(x.tensor_scale),
        saturates=saturates,
    )
    return bind(call, dataclasses.replace(x, primal=None))
