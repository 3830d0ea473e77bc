"""One array quantized along two axes: in one call, where a backend reads it only once."""

import functools
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.core import Tracer

from mx_jax.backends.calls import QuantizeBothCall, QuantizeCall
from mx_jax.backends.select import find
from mx_jax.backends.target import follow
from mx_jax.codecs.blocks import Blocks, varying_axes
from mx_jax.codecs.rounding import Rounding
from mx_jax.formats import BlockSize
from mx_jax.mxarray import MXArray
from mx_jax.ops.checks import as_axes, as_quantizable, blocks_along, check_key, check_tensor_scale
from mx_jax.ops.keys import Key
from mx_jax.ops.quantize import draw_bits, quantize_operand, with_block_size, with_primal
from mx_jax.ops.remat import QUANTIZED
from mx_jax.reference.scale_rules import ScaleRule
from mx_jax.specs import OperandSpec, operand


class OperandCast(NamedTuple):
    """One of the two casts: how it quantizes, and where its blocks lie."""

    spec: OperandSpec
    blocks: Blocks


def quantize_both(
    x: jax.typing.ArrayLike,
    format: Any,
    *,
    axes: tuple[int, int] = (-1, -2),
    block_size: BlockSize | None = None,
    scale_rule: ScaleRule | str | None = None,
    rounding: Rounding | str = "nearest",
    key: jax.Array | None = None,
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
    pair = tuple(OperandCast(spec, blocks_along(array.shape, axis, spec.format)) for axis in wanted)
    first, second = (axis % array.ndim for axis in wanted)
    if first == second:
        raise ValueError(
            f"quantize_both: needs two different axes, got axes={axes} for shape={array.shape}; "
            "use quantize for one"
        )
    check_key(key, spec, "quantize_both")
    keys = (None, None) if key is None else tuple(jax.random.split(key))
    both = pair[0].blocks + pair[1].blocks
    scale = check_tensor_scale(tensor_scale, spec.format, array.shape, both)
    results = quantize_operand_both(array, (pair[0], pair[1]), (keys[0], keys[1]), scale)
    traced = array if isinstance(array, Tracer) else None
    return with_primal(results[0], traced), with_primal(results[1], traced)


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


def reads_once(
    x: jax.Array, casts: tuple[OperandCast, OperandCast], tensor_scale: jax.Array | None = None
) -> bool:
    """Whether a backend makes one call of two casts."""
    return find(both_call(x, casts, tensor_scale)) is not None


def quantize_operand_both(
    x: jax.Array,
    casts: tuple[OperandCast, OperandCast],
    keys: tuple[Key, Key],
    tensor_scale: jax.Array | None = None,
) -> tuple[MXArray, MXArray]:
    """Quantize a checked array twice: in one call if a backend takes both, else in two."""
    with follow(x):
        once = reads_once(x, casts)
        if once:
            return _quantize_both(x, keys, tensor_scale, casts=casts)
        first, second = (
            quantize_operand(x, *cast, key, tensor_scale)
            for cast, key in zip(casts, keys, strict=True)
        )
        return first, second


@functools.partial(jax.jit, static_argnames=("casts",), inline=True)
def _quantize_both(
    x: jax.Array,
    keys: tuple[Key, Key],
    tensor_scale: jax.Array | None,
    *,
    casts: tuple[OperandCast, OperandCast],
) -> tuple[MXArray, MXArray]:
    call = both_call(x, casts, tensor_scale)
    choice = find(call)
    assert choice is not None, "asked before, with the same answer"
    first, second = (
        None if key is None else draw_bits(key, single.random_shape, single.random_bits)
        for single, key in zip((call.first, call.second), keys, strict=True)
    )
    pair = choice.offer.run(x, (first, second), tensor_scale, call)
    return checkpoint_name(pair, QUANTIZED)
