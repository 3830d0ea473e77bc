"""The reference as a backend: plain jnp, takes every single call on every platform."""

import functools

import jax

from mx_jax.backends.calls import (
    AttendCall,
    Call,
    CastStatisticsCall,
    DequantizeCall,
    MatmulCall,
    MomentCall,
    Operand,
    PackCall,
    QuantizeCall,
    RaggedCall,
    RandomBitsCall,
    TransformCall,
)
from mx_jax.backends.target import Backend, Offer, Target
from mx_jax.mxarray import MXArray, decode
from mx_jax.packed import Rows
from mx_jax.reference import hadamard, matmul, moments, quantize, ragged, random_bits, statistics
from mx_jax.reference.random_bits import DerivedKey


def _multiply(lhs: Operand, rhs: Operand, call: MatmulCall) -> jax.Array:
    return matmul.scaled_matmul(lhs, rhs, call.dimension_numbers, call.out_dtype, call.precision)


def _multiply_groups(
    lhs: Operand, rhs: Operand, group_sizes: jax.Array, call: RaggedCall
) -> jax.Array:
    """A product of rows in groups, by XLA's own ragged product of dequantized operands."""
    return ragged.scaled_ragged_dot(
        lhs, rhs, group_sizes, call.contracting, call.out_dtype, call.precision
    )


def _quantize(
    x: jax.Array,
    random_bits: jax.Array | None,
    tensor_scale: jax.Array | None,
    call: QuantizeCall,
) -> MXArray:
    return quantize.quantize(
        x,
        call.format,
        call.blocks,
        call.scale_rule,
        call.rounding,
        random_bits,
        tensor_scale,
    )


def _dequantize(x: MXArray, call: DequantizeCall) -> jax.Array:
    return decode(x, call.dtype, saturates=call.saturates)


def _as_it_is(x: MXArray, call: PackCall) -> MXArray:
    return x


def _attend(
    queries: jax.Array,
    keys: Rows,
    values: Rows,
    position: jax.typing.ArrayLike,
    call: AttendCall,
) -> jax.Array:
    return matmul.attend(queries, keys, values, position, call.tokens)


def _statistics(x: jax.Array, array: MXArray, call: CastStatisticsCall) -> statistics.Raw:
    return statistics.of_cast(x, array, call.axis)


def _random_bits(key: DerivedKey, call: RandomBitsCall) -> jax.Array:
    return random_bits.draw_bits(key.get(), call.shape, call.width)


def _transform(x: jax.Array, signs: jax.Array, call: TransformCall) -> jax.Array:
    if call.length is None:
        return hadamard.apply(x, signs, call.axis)
    return hadamard.invert(x, signs, call.length, call.axis)


def _step_moments(
    stored: tuple[moments.Stored, ...],
    added: jax.Array,
    factors: jax.Array,
    words: jax.Array,
    call: MomentCall,
) -> tuple[moments.Stored, ...]:
    return tuple(
        moments.step(own, added, factors[2 * i : 2 * i + 2], words[2 * i : 2 * i + 2], root, square)
        for i, (own, root, square) in enumerate(
            zip(stored, call.is_root, call.is_square, strict=True)
        )
    )


def _takes_all(call: Call, target: Target) -> None:
    return None


_offer = functools.partial(Offer, rejects=_takes_all)

# Dequantize to float32, then XLA's own dot: defines what the others must give. Of a pair of casts
# that nobody does in one, `ops` makes two.
REFERENCE = Backend(
    name="reference",
    epsilon_bound=2.0,
    table=(
        _offer(call=MatmulCall, run=_multiply),
        _offer(call=RaggedCall, run=_multiply_groups),
        _offer(call=QuantizeCall, run=_quantize),
        _offer(call=DequantizeCall, run=_dequantize),
        _offer(call=PackCall, run=_as_it_is),
        _offer(call=AttendCall, run=_attend),
        _offer(call=CastStatisticsCall, run=_statistics),
        _offer(call=RandomBitsCall, run=_random_bits),
        _offer(call=MomentCall, run=_step_moments),
        _offer(call=TransformCall, run=_transform, how="XLA float32 dot, HIGHEST"),
    ),
)
