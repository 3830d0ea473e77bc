"""A kernel that multiplies few rows by codes, which it decodes on their way to the matrix unit.

Codes go there without their scales. A block-diagonal lhs, which has a row for each block of 256
values along k, gives each block sums of its own, and scales multiply those in float32.

Whether the matrix unit keeps float8's subnormals is not documented, and nobody has run this: it is
given none. E2M1 comes as E5M2 of exponents at which all its values are normal; other elements are
converted to bfloat16 first, by conversions that XLA states to be exact.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from mx_jax.backends.calls import MatmulCall
from mx_jax.backends.pallas_tpu.weights import DEPTH, STEP, Columns, generation
from mx_jax.backends.pallas_tpu.words import call_kernel
from mx_jax.backends.sums import as_matrices
from mx_jax.backends.target import current_target
from mx_jax.formats import E2M1, E4M3, E8M0, INT8, BlockFormat
from mx_jax.formats.element import known_element, known_scale
from mx_jax.mxarray import MXArray
from mx_jax.packed import PackedMXArray

# Columns that a step reads, 2 MiB of bytes, and that one product has.
_COLUMNS, _LANES = 2048, 512
_float32, _uint8 = jnp.float32, jnp.uint8


def multiply(
    lhs: jax.Array, rhs: MXArray | PackedMXArray, call: MatmulCall, interpret: bool
) -> jax.Array:
    """The product `[*batch, *m, *n]` in `call.out_dtype`."""
    (x, m), format = as_matrices(lhs, call.lhs.axes), call.rhs.format
    assert isinstance(x, jax.Array) and format is not None
    if isinstance(rhs, PackedMXArray):
        arrays, n = rhs.arrays, rhs.kept
    else:
        codes, scales = map(call.rhs.axes.merge_groups, (rhs.codes, rhs.scales))
        arrays = Columns(codes=codes, scales=scales, tensor_scale=rhs.tensor_scale)
        _, n, _ = call.rhs.axes.sizes(call.rhs.shape)
    scale, dtype = arrays.tensor_scale, call.out_dtype
    within = dtype if scale is None else np.dtype("float32")
    out = _dot(x, arrays, format, within, interpret)[..., : math.prod(n)]
    out = out if scale is None else (out * scale.reshape(-1, 1, 1)).astype(dtype)
    batch = map(max, *(operand.axes.sizes(operand.shape)[0] for operand in (call.lhs, call.rhs)))
    return out.reshape(*batch, *m, *n)


def _dot(
    x: jax.Array, weights: Columns, format: BlockFormat, dtype: np.dtype, interpret: bool
) -> jax.Array:
    """Bfloat16 `x[batch, m, k]` by weights of one batch or as many: `[batch, m, n]`."""
    codes, scales = (part.reshape(-1, *part.shape[-2:]) for part in (weights.codes, weights.scales))
    m, k, n, batch = *x.shape[1:], codes.shape[2], max(len(x), len(codes))
    steps = codes.shape[1] * 8 // format.element.bits // STEP
    rows, blocks = 1 if m == 1 else m + -m % 8, scales.shape[1] // steps * DEPTH // STEP
    x, columns = jnp.pad(x, ((0, 0), (0, rows - m), (0, steps * STEP - k))), min(n, _COLUMNS)

    def spec(array: jax.Array) -> pl.BlockSpec:
        of_step, batched = array.shape[1] // steps, len(array) > 1
        return pl.BlockSpec((None, of_step, columns), lambda b, j, i: (b if batched else 0, i, j))

    of_x = pl.BlockSpec((None, rows, STEP), lambda b, j, i: (b if len(x) > 1 else 0, 0, i))
    (out,) = call_kernel(
        functools.partial(_kernel, decoder=_decoder(format)),
        *(x, codes, scales),
        results=[((batch, rows, n), dtype)],
        interpret=interpret,
        grid=(batch, pl.cdiv(n, columns), steps),
        in_specs=[of_x, spec(codes), spec(scales)],
        out_specs=[pl.BlockSpec((None, rows, columns), lambda b, j, i: (b, 0, j))],
        scratch_shapes=[pltpu.VMEM((blocks if m == 1 else rows, columns), _float32)],
    )
    return out[:, :m]


def _kernel(
    x_ref: Any, codes_ref: Any, scales_ref: Any, out_ref: Any, sums_ref: Any, *, decoder: "Decoder"
) -> None:
    """A step along k, of a tile of columns."""
    rows, columns = out_ref.shape
    count = STEP // DEPTH
    blocks, length = len(scales_ref) // count, len(codes_ref) // count

    @pl.when(pl.program_id(2) == 0)
    def _() -> None:
        sums_ref[...] = jnp.zeros_like(sums_ref)

    x = x_ref[...].astype(_float32) * _float32(2.0**decoder.exponent)
    lhs = [_block_diagonal(x[:, i * DEPTH : (i + 1) * DEPTH], blocks) for i in range(count)]
    for first in range(0, columns, _LANES):
        lanes = slice(first, min(first + _LANES, columns))
        sums, scales = sums_ref[:, lanes], decoder.scales(scales_ref[:, lanes])
        for i in range(count):
            values = decoder.values(codes_ref[i * length : (i + 1) * length, lanes])
            product = jnp.dot(lhs[i], values, preferred_element_type=_float32)
            factors = scales[i * blocks : (i + 1) * blocks]
            if rows == 1:
                sums += product * factors
                continue
            for b in range(blocks):
                sums += product[b * rows : (b + 1) * rows] * factors[b : b + 1]
        sums_ref[:, lanes] = sums

    @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
    def _() -> None:
        sums = sums_ref[...]
        out_ref[...] = (sums.sum(0, keepdims=True) if rows == 1 else sums).astype(out_ref.dtype)


def _block_diagonal(x: jax.Array, blocks: int) -> jax.Array:
    """`[m, k]` as bfloat16 `[blocks * m, k]`, whose rows have one block of x each, and zeros."""
    m, k = x.shape
    block_of = lax.broadcasted_iota(jnp.int32, (1, k), 1) // (k // blocks)
    if m == 1:
        diagonal = jnp.where(lax.broadcasted_iota(jnp.int32, (blocks, k), 0) == block_of, x, 0)
    else:
        diagonal = jnp.concatenate([jnp.where(block_of == b, x, 0) for b in range(blocks)])
    return diagonal.astype(jnp.bfloat16)


# Decoding -----------------------------------------------------------------------------------------


class Decoder(NamedTuple):
    """How bytes become what is multiplied."""

    values: Callable[[Any], Any]  # from codes to floats that the matrix unit takes
    scales: Callable[[Any], Any]  # to float32
    # Of the power of two that these lack and activations have instead: so nothing that counts
    # leaves float32's normal numbers.
    exponent: int


def _decoder(format: BlockFormat) -> Decoder:
    """Of a format, on the TPU that a program is for."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    kind = current_target().device_kind if device is None else device.device_kind
    converts = (generation(kind) or 0) >= 7
    decoders: dict[Any, Any] = {
        E2M1: (_e2m1, -2, 0),
        E4M3: (_from(jnp.float8_e4m3fn), 0, 1) if converts else (_e4m3_of_bias_11, 4, 1),
        INT8: (_from(jnp.int8), -6, -2),  # 64 times the values
    }
    values, lacking, moved = decoders[known_element(format.element)]
    if known_scale(format.scale) == E8M0:
        return Decoder(values, functools.partial(_e8m0, moved=moved), lacking - moved)
    return Decoder(values, _from(jnp.float8_e4m3fn, _float32), lacking)


def _from(source: Any, to: Any = jnp.bfloat16) -> Callable[[Any], Any]:
    return lambda bytes: pltpu.bitcast(bytes, source).astype(to)


def _e2m1(pairs: jax.Array) -> jax.Array:
    """E5M2, four times the values."""
    words, ones = pltpu.bitcast(pairs, jnp.uint32), 0x01010101
    second = (words >> 3) & jnp.uint32(0x0E * ones) | (words << 7) & jnp.uint32(0x80 * ones)
    halves = jnp.concatenate([words & jnp.uint32(0x8E * ones), second])
    codes = pltpu.bitcast(halves, _uint8)
    # From 1/2 on exponents begin at 16; of 1/2 the mantissa goes, of others it is inverted.
    codes = jnp.where(codes & _uint8(0x0E) != 0, codes ^ _uint8(0x42), codes)
    return pltpu.bitcast(codes, jnp.float8_e5m2)


def _e4m3_of_bias_11(codes: jax.Array) -> jax.Array:
    """A 16th of the values, by what TPUs before 7 convert: it has one NaN, 0x80, and no -0."""
    magnitude = codes & _uint8(0x7F)
    codes = jnp.where(magnitude == _uint8(0x7F), _uint8(0x80), codes)
    codes = jnp.where(magnitude == _uint8(0), _uint8(0), codes)
    return _from(jnp.float8_e4m3b11fnuz)(codes)


def _e8m0(scales: jax.Array, moved: int) -> jax.Array:
    """Times 2^moved: of normal numbers, others are zero."""
    exponent = scales.astype(jnp.int32)
    bits = jnp.clip(exponent + moved, 0, 255) << 23
    # For 2^128 the largest float32, half a unit in the last place too small; 255 is NaN.
    bits = jnp.where(exponent == 255, 0x7FC00000, jnp.minimum(bits, 0x7F7FFFFF))
    return lax.bitcast_convert_type(bits, _float32)
