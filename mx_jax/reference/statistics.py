"""Statistics of a cast, in plain jnp: what every backend must match, counts exactly.

Sums and maxima, so that those of vmap's lanes and of shards add up. Squares are of values over the
power of two of the largest one: gradients of 1e-25 have an SQNR too.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from mx_jax.codecs import blocks as block_shapes
from mx_jax.codecs import float32
from mx_jax.codecs.explicit_axes import explicit_sharding
from mx_jax.mxarray import MXArray

Raw = dict[str, jax.Array]

# float32's exponent field of 1.
_ONE = 127
# Values of half of that field, and what float32 counts exactly.
_HALF, _EXACT = 16, 2**24
EXPONENTS = 256
"""How many values that field has."""


def of_cast(before: jax.Array, after: MXArray, axis: int) -> Raw:
    """What the statistics of a cast need.

    Args:
      before: values.
      after: what they became.
      axis: along which channels are counted.

    Returns:
      By name: `amax` and `channel_amax`, of finite values; `exponents`, how many scales have which,
      by float32's field of it; counts, uint32, of elements that are `saturated` or an `underflow`,
      of `bad_blocks` and of what they are out of, `size` and `blocks`; `signal` and `noise`, sums
      of squares over that of the power of two of amax. Subnormal values are counted as what they
      are; where XLA flushes them, as it does on CPU, they are zeros in these sums.
    """
    x, values = before.astype(jnp.float32), finite_values(after)
    # Of patterns: comparisons of floats take subnormals for zeros.
    size, left = _magnitude(x), _magnitude(values)
    others = tuple(other for other in range(x.ndim) if other != axis % x.ndim)
    largest = jnp.max(jnp.where(size < float32.INF, size, 0), axis=others)
    channels = float32.from_bits(largest)
    amax = float32.from_bits(jnp.max(largest))
    # Where codes are the largest, of either sign; NaN and Inf count too.
    element = after.format.element
    half = after.codes & (element.sign_code - 1)
    if element.kind == "int":
        half = jnp.where((after.codes & element.sign_code) != 0, element.sign_code - half, half)
    at_limit = half >= element.max_code
    bad, inside = block_shapes.split(size >= float32.INF, after.blocks)
    bad = jnp.any(bad, axis=inside)
    signal = relative(x, amax)
    noise = signal - relative(values, amax)
    # Finite only where both are.
    both = jnp.isfinite(noise)
    return {
        "amax": amax,
        "size": jnp.full((), x.size, jnp.uint32),
        "exponents": _exponents(after),
        "underflow": count((size != 0) & (left == 0)),
        "saturated": count(at_limit & (size <= float32.INF) & (size > left)),
        "bad_blocks": count(bad),
        "blocks": jnp.full((), bad.size, jnp.uint32),
        "signal": total(jnp.where(both, signal * signal, 0)),
        "noise": total(jnp.where(both, noise * noise, 0)),
        "channel_amax": in_one_piece(channels),
    }


def finite_values(after: MXArray) -> jax.Array:
    """What an operand stands for, in float32: finite codes stay finite."""
    element = after.format.element
    values = dataclasses.replace(after, primal=None).dequantize(jnp.float32)
    # One less than the pattern of Inf is the largest number; arithmetic would flush subnormals.
    bits = float32.float32_bits(values)
    infinite = (bits & float32.ABS) == float32.INF
    finite = float32.from_bits(bits - infinite.astype(bits.dtype))
    if not element.has_inf:
        return finite
    half = after.codes & (element.sign_code - 1)
    return jnp.where(half == element.max_code + 1, values, finite)


def _magnitude(x: jax.Array) -> jax.Array:
    """Patterns of |x|, in the order of numbers: Inf is above them, NaN above Inf."""
    return float32.float32_bits(x) & float32.ABS


def _exponents(after: MXArray) -> jax.Array:
    """How many scales have which exponent, by float32's field of it."""
    # Of both halves of the field a row of 0 and 1; their product counts pairs of halves. That is 32
    # comparisons a scale, not 256, and no scatter.
    bits = float32.float32_bits(in_one_piece(after.scale_values).astype(jnp.float32))
    field = (bits >> 23) & 0xFF
    half = jnp.arange(_HALF, dtype=field.dtype)
    high, low = (
        # Both of one rank: `jax_numpy_rank_promotion` may forbid others.
        (part[..., None] == lax.broadcast_to_rank(half, part.ndim + 1)).astype(jnp.float32)
        for part in (field // _HALF, field % _HALF)
    )
    # float32 counts no further, so that huge arrays are counted by rows.
    rows = tuple(range(field.ndim - 1)) if field.size > _EXACT else ()
    along = tuple(range(len(rows), field.ndim))
    counts = lax.dot_general(high, low, ((along, along), (rows, rows)))
    return jnp.sum(counts.astype(jnp.uint32), axis=rows, dtype=jnp.uint32).ravel()


def relative(x: jax.Array, amax: jax.Array) -> jax.Array:
    """x over the power of two of amax: less than 4, and as exact as x."""
    return x * power(-exponent(amax))


def exponent(amax: jax.Array) -> jax.Array:
    """The exponent of the power of two that values are divided by."""
    return jnp.clip(float32.float32_bits(amax) >> 23, 1, 253) - _ONE


def power(exponent: jax.Array) -> jax.Array:
    """2**exponent; 0 where that is no normal number."""
    return float32.from_bits(jnp.maximum(exponent + _ONE, 0) << 23)


def in_one_piece(x: jax.Array) -> jax.Array:
    """x replicated, if its aval says that it is sharded: sorting needs it whole."""
    if explicit_sharding(x) is None:
        return x
    return jax.sharding.reshard(x, PartitionSpec(*(None,) * x.ndim))


def total(x: jax.Array) -> jax.Array:
    """The sum of all entries."""
    # Two short sums err less than a long one.
    return jnp.sum(jnp.sum(x, axis=-1)) if x.ndim else x


def count(x: jax.Array) -> jax.Array:
    """How many entries are true."""
    # Rows in float32, exact as long as they are short: XLA's CPU sums it twice as fast.
    wide = x.ndim == 0 or x.shape[-1] > _EXACT
    rows = x if wide else jnp.sum(x.astype(jnp.float32), axis=-1).astype(jnp.uint32)
    return jnp.sum(rows, dtype=jnp.uint32)
