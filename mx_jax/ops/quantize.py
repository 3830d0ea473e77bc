"""The public casts: checked once, with straight-through gradients. Weights cast to be stored; what
reads or steps what is stored: attention over a cache, optimizers' moments."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypedDict, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from mx_jax.axes import Axes
from mx_jax.backends.calls import AttendCall
from mx_jax.backends.primitive import bind
from mx_jax.backends.target import on_devices_of
from mx_jax.codecs.blocks import check_parts
from mx_jax.codecs.float32 import canonical_dtype
from mx_jax.codecs.rounding import DerivedKey, Rounding
from mx_jax.codecs.straight_through import straight_through
from mx_jax.formats import BlockSize, Whole, check_block_size
from mx_jax.formats.block import FormatLike
from mx_jax.mxarray import MXArray, unlinked
from mx_jax.ops.arguments import (
    Key,
    as_axes,
    as_quantizable,
    blocks_along,
    check_key,
    check_tensor_scale,
)
from mx_jax.ops.packing import pack_weights
from mx_jax.ops.product import (
    cast_array,
    cast_both,
    cast_call,
    dequantize_operand,
    one_program,
    zero_cotangents,
)
from mx_jax.packed import PackedMXArray, PackedRows, Rows, unpacked
from mx_jax.reference.scale_rules import ScaleRule
from mx_jax.specs import MatmulRecipe, OperandSpec, operand


def quantize(
    x: jax.typing.ArrayLike,
    format: FormatLike,
    *,
    axis: int = -1,
    block_size: BlockSize | None = None,
    scale_rule: ScaleRule | str | None = None,
    rounding: Rounding | str = "nearest",
    key: Key = None,
    tensor_scale: jax.typing.ArrayLike | None = None,
) -> MXArray:
    """Quantize x to a block format.

    Per block, `scale = rule(max |x|)` and `codes = round(x / scale)`, rounded once from the exact
    quotient and saturated (OCP MX v1.0, section 6.3). A block with NaN or Inf becomes NaN. The
    gradient is the identity: `quantize(x).dequantize()` passes cotangents straight through to x,
    through `vmap` too. Codes that leave jit, scan or another transformation are integers: a
    gradient by x is an error there.

    Args:
      x: float32, bfloat16 or float16, any shape; float8 and narrower count as bfloat16.
      format: a `BlockFormat`, its name (`"mxfp8_e4m3"`, `"mxfp4"`, ...), or a dtype that only one
        block format stores.
      axis: the axis that blocks lie along.
      block_size: elements of a block; default: the format's own (32 for MX). The last block may
        be partial.
      scale_rule: `"floor"` (the specification's, and the default), `"ceil"`, `"even"` or
        `"rceil"` for E8M0 scales; `"amax"` for NVFP4.
      rounding: `"nearest"` (ties to even), `"away"` (ties away from zero), `"toward_zero"` or
        `"stochastic"`.
      key: a PRNG key, for stochastic rounding and only for it.
      tensor_scale: for formats with one (NVFP4), the scale to use instead of amax / 2688: finite
        and positive; one number, or one for each position of x's first axes, e.g. of shape
        `[2, 1, 1]` for a batch of two matrices.

    Returns:
      An `MXArray` of x's shape.

    Raises:
      TypeError: x is not float32, bfloat16 or float16; the key is no PRNG key.
      ValueError: unknown names, axis out of range, block size below 1, a rule that does not fit
        the format, a key missing or not wanted.

    Examples:
      >>> import jax.numpy as jnp, mx_jax
      >>> x = mx_jax.quantize(jnp.array([1.0, 2.6, -0.3, 6.0]), "mxfp4")
      >>> x.codes, x.scales
      (Array([2, 5, 9, 7], dtype=uint8), Array([127], dtype=uint8))
      >>> x.dequantize()
      Array([ 1. ,  3. , -0.5,  6. ], dtype=float32)
    """
    spec = operand(format, scale_rule=scale_rule, rounding=rounding)
    array = as_quantizable(x, "quantize")
    spec = with_block_size(spec, block_size, "quantize")
    blocks = blocks_along(array.shape, axis, spec.format)
    check_key(key, spec, "quantize")
    scale = check_tensor_scale(tensor_scale, spec.format, array.shape, blocks)
    result = cast_array(array, spec, blocks, key, scale)
    # Only a traced x can have a gradient; holding on to any other would keep it alive for nothing.
    traced = array if isinstance(array, Tracer) else None
    return dataclasses.replace(result, primal=traced)


def with_block_size(spec: OperandSpec, block_size: BlockSize | None, operation: str) -> OperandSpec:
    """The spec with another size of blocks along the contracting axis; None: its format's own."""
    if block_size is None:
        return spec
    check_block_size(block_size, operation)
    size = block_size if isinstance(block_size, Whole) else int(block_size)
    return dataclasses.replace(spec, format=spec.format.with_block(size))


def dequantize(x: MXArray | PackedMXArray, dtype: jax.typing.DTypeLike | None = None) -> jax.Array:
    """The values of an MXArray: `decode(code) * scale`, exact in float32.

    Args:
      x: what `quantize` returned.
      dtype: a float dtype; default: the dtype that was quantized.

    Returns:
      An array of x's shape; one rounding from the exact value.

    Raises:
      TypeError: x is not an MXArray, or dtype is not a float.
      ValueError: an MXArray whose parts do not fit together.

    Examples:
      >>> import jax.numpy as jnp, mx_jax
      >>> q = mx_jax.quantize(jnp.array([0.1, 0.4, 2.6, 6.0], jnp.bfloat16), "mxfp4")
      >>> mx_jax.dequantize(q)
      Array([0, 0.5, 3, 6], dtype=bfloat16)
      >>> mx_jax.dequantize(q, "float32").dtype
      dtype('float32')
    """
    x = unpacked(x)
    if not isinstance(x, MXArray):
        raise TypeError(f"dequantize: needs an MXArray, got x of type {type(x).__name__}")
    check_parts(x, "dequantize")
    wanted = canonical_dtype(x.dtype if dtype is None else dtype)
    if not jnp.issubdtype(wanted, jnp.floating):
        raise TypeError(f"dequantize: needs a float dtype, got dtype={wanted.name}")
    values = _dequantize(unlinked(x), dtype=wanted)
    return values if x.primal is None else straight_through(values, x.primal)


@one_program("dtype")
def _dequantize(x: MXArray, *, dtype: np.dtype) -> jax.Array:
    return dequantize_operand(x, dtype, saturates=False)


class CastOptions(TypedDict, total=False):
    """`quantize`'s keyword arguments."""

    axis: int
    block_size: BlockSize | None
    scale_rule: ScaleRule | str | None
    rounding: Rounding | str
    key: Key
    tensor_scale: jax.typing.ArrayLike | None


def cast(x: jax.typing.ArrayLike, format: FormatLike, **options: Unpack[CastOptions]) -> jax.Array:
    """`quantize` and `dequantize` in one: x's values as the format represents them, x's dtype.

    The gradient is the identity.

    Args:
      x: float32, bfloat16 or float16.
      format: as `quantize` takes it.
      **options: `quantize`'s keyword arguments.

    Returns:
      An array like x.

    Examples:
      >>> import jax, jax.numpy as jnp, mx_jax
      >>> mx_jax.cast(jnp.array([0.3, 5.1]), "mxfp4")
      Array([0.5, 6. ], dtype=float32)
      >>> jax.grad(lambda x: mx_jax.cast(x, "mxfp4").sum())(jnp.array([0.3, 5.1]))
      Array([1., 1.], dtype=float32)
    """
    array = as_quantizable(x, "cast")
    values = dequantize(quantize(jax.lax.stop_gradient(array), format, **options))
    return straight_through(values, array)


def cast_cotangent(
    x: jax.typing.ArrayLike, format: FormatLike, **options: Unpack[CastOptions]
) -> jax.Array:
    """The identity, whose gradient is `cast` to the format: for seeing what low-precision
    gradients alone do.

    Args:
      x: float32, bfloat16 or float16.
      format: as `quantize` takes it.
      **options: `quantize`'s keyword arguments, applied to the cotangent.

    Returns:
      x, unchanged.

    Examples:
      >>> import jax, jax.numpy as jnp, mx_jax
      >>> weights = jnp.array([0.3, 5.1])
      >>> jax.grad(lambda x: (mx_jax.cast_cotangent(x, "mxfp4") * weights).sum())(weights)
      Array([0.5, 6. ], dtype=float32)
    """
    array = as_quantizable(x, "cast_cotangent")
    # Whatever is wrong with the options should be said where they are written, not in the
    # backward pass: quantizing the shape alone raises it.
    jax.eval_shape(lambda y: quantize(y, format, **options).codes, array)

    @jax.custom_vjp
    def identity(y: jax.Array, key: Key) -> jax.Array:
        return y

    def backward(key: Key, cotangent: jax.Array) -> tuple[jax.Array, Any]:
        return cast(cotangent, format, **{**options, "key": key}), zero_cotangents(key)

    identity.defvjp(lambda y, key: (y, key), backward)
    return identity(array, options.get("key"))


def quantize_both(
    x: jax.typing.ArrayLike,
    format: FormatLike,
    *,
    axes: tuple[int, int] = (-1, -2),
    block_size: BlockSize | None = None,
    scale_rule: ScaleRule | str | None = None,
    rounding: Rounding | str = "nearest",
    key: Key = None,
    tensor_scale: jax.typing.ArrayLike | None = None,
) -> tuple[MXArray, MXArray]:
    """Quantize x along two axes, as the two products that contract them want it.

    The same arrays as two calls of `quantize`, one for each axis; for stochastic rounding, with the
    two keys of `jax.random.split(key)`. Backends that can, read x only once. Training quantizes
    cotangents so: blocks of 32 along either axis (OCP MX v1.0, section 5.3). The gradient is the
    identity for both.

    Args:
      x: float32, bfloat16 or float16, with at least two axes.
      format: as `quantize` takes it.
      axes: two different axes that blocks lie along.
      block_size: elements of a block; default: the format's own.
      scale_rule: as `quantize` takes it.
      rounding: as `quantize` takes it.
      key: a PRNG key, for stochastic rounding and only for it.
      tensor_scale: for formats with one (NVFP4), the scale to use instead of amax / 2688.

    Returns:
      Two `MXArray`s of x's shape, blocked along `axes[0]` and along `axes[1]`.

    Raises:
      TypeError: x is not float32, bfloat16 or float16; the key is no PRNG key.
      ValueError: not two different axes, or whatever `quantize` raises.

    Examples:
      >>> import jax.numpy as jnp, mx_jax
      >>> rows, columns = mx_jax.quantize_both(jnp.ones((64, 96)), "mxfp8_e4m3")
      >>> rows.scales.shape, columns.scales.shape
      ((64, 3), (2, 96))
    """
    spec = operand(format, scale_rule=scale_rule, rounding=rounding)
    array = as_quantizable(x, "quantize_both")
    wanted = as_axes(axes, "quantize_both", "axes")
    if len(wanted) != 2:
        raise ValueError(f"quantize_both: needs two axes, got axes={axes}; see quantize for one")
    spec = with_block_size(spec, block_size, "quantize_both")
    pair = [blocks_along(array.shape, axis, spec.format) for axis in wanted]
    first, second = (axis % array.ndim for axis in wanted)
    if first == second:
        raise ValueError(
            f"quantize_both: needs two different axes, got axes={axes} for shape={array.shape}; "
            "use quantize for one"
        )
    check_key(key, spec, "quantize_both")
    keys = (None, None) if key is None else DerivedKey.of(key).split()
    scale = check_tensor_scale(tensor_scale, spec.format, array.shape, pair[0] + pair[1])
    casts = tuple(cast_call(array, spec, blocks, scale) for blocks in pair)
    results = cast_both(array, keys, scale, casts=casts)
    traced = array if isinstance(array, Tracer) else None
    first, second = (dataclasses.replace(codes, primal=traced) for codes in results)
    return first, second


def attend_matrices(
    tokens: int, shared: jax.Array, keys: Rows, values: Rows, position: jax.typing.ArrayLike
) -> jax.Array:
    """`softmax(q k^T / sqrt(features)) v`: see `mx_jax.reference.matmul.attend`."""
    keys_format, values_format = (getattr(rows, "format", None) for rows in (keys, values))
    if keys_format != values_format:
        keys, values = (
            dequantize(rows.unpacked()) if isinstance(rows, PackedRows) else rows
            for rows in (keys, values)
        )
        keys_format = None
    call = AttendCall(
        queries=shared.shape,
        keys=keys.shape,
        dtypes=tuple(np.dtype(x.dtype) for x in (shared, keys, values)),
        tokens=tokens,
        format=keys_format,
    )
    return bind(call, shared, keys, values, jnp.asarray(position))


# Weights that are stored --------------------------------------------------------------------------


def why_not_stored(recipe: MatmulRecipe) -> str | None:
    """Why a product by this recipe cannot read weights quantized before; None: it can."""
    spec = recipe.output.rhs
    if spec is None:
        return "its recipe leaves weights in high precision"
    if recipe.output.transform is not None:
        return "its recipe transforms weights in every product"
    if spec.random_bits:
        return "its recipe rounds weights anew in every product"
    if spec.tensor_scale == "row":
        return "its recipe gives each row of weights a tensor scale, which no layout holds"
    return None if spec.prescale == 1.0 else "its recipe scales weights before it casts them"


def store_weights(
    x: jax.Array,
    recipe: MatmulRecipe,
    axes: Axes,
    *,
    num_stacked: int,
    packed: bool,
    by: Callable[[jax.Array], MXArray] | None = None,
) -> MXArray | PackedMXArray:
    """A weight `[*stack, ...]` as the right operand of `recipe`'s product: codes of the same bits.

    Args:
      x: `[*stack, ...]`, float32, bfloat16 or float16.
      recipe: one without a reason of `why_not_stored`.
      axes: of one weight of the stack in its product.
      num_stacked: how many leading axes count weights; each has a tensor scale of its own.
      packed: whether to lay the codes out for this machine, where its kernels have a layout.
      by: another way to codes; a Python loop over the stack, so that it may look at values.
    """
    spec = recipe.output.rhs
    assert spec is not None

    with on_devices_of(x):
        if by is not None:
            stored = _each(by, x, num_stacked)
        else:
            cast = functools.partial(cast_array, spec=spec, blocks=axes.blocks(spec.format))
            for _ in range(num_stacked):
                cast = jax.vmap(cast)
            stored = cast(x)
    num_batch = num_stacked + len(axes.batch)
    if not packed or axes.batch != tuple(range(len(axes.batch))):
        return stored
    contracting = tuple(axis + num_stacked for axis in axes.contracting)
    if contracting != tuple(sorted(contracting)):
        return stored
    return pack_weights(stored, contracting=contracting, num_batch=num_batch, recipe=recipe)


def _each(by: Callable[[jax.Array], MXArray], x: jax.Array, num_stacked: int) -> MXArray:
    if not num_stacked:
        return by(x)
    parts = [_each(by, part, num_stacked - 1) for part in x]
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *parts)
