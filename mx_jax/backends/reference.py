"""The reference as a backend: plain jnp, takes every single call on every platform."""

from mx_jax.backends import calls
from mx_jax.backends.target import Backend, Late, Offer
from mx_jax.codecs.rounding import draw_bits
from mx_jax.mxarray import decode
from mx_jax.reference import hadamard, matmul, quantize

_statistics = Late("mx_jax.reference.statistics")

_RUNS = {
    calls.MatmulCall: lambda lhs, rhs, call: matmul.scaled_matmul(
        lhs, rhs, call.dimension_numbers, call.out_dtype, call.precision
    ),
    # XLA's own ragged product of dequantized operands.
    calls.RaggedCall: lambda lhs, rhs, group_sizes, call: matmul.scaled_ragged_dot(
        lhs, rhs, group_sizes, call.contracting, call.out_dtype, call.precision
    ),
    calls.QuantizeCall: lambda x, bits, tensor_scale, call: quantize.quantize(
        x, call.format, call.blocks, call.scale_rule, call.rounding, bits, tensor_scale
    ),
    calls.DequantizeCall: lambda x, call: decode(x, call.dtype, saturates=call.saturates),
    calls.PackCall: lambda x, call: x,
    calls.AttendCall: lambda queries, keys, values, position, call: matmul.attend(
        queries, keys, values, position, call.tokens
    ),
    calls.CastStatisticsCall: lambda x, array, call: _statistics.of_cast(x, array, call.axis),
    calls.RandomBitsCall: lambda key, call: draw_bits(key.get(), call.shape, call.width),
    calls.TransformCall: lambda x, signs, call: hadamard.apply(x, signs, call.axis),
}

# Dequantize to float32, then XLA's own dot: defines what the others must give. Of a pair of casts
# that nobody does in one, `primitive` makes two.
REFERENCE = Backend(
    name="reference",
    epsilon_bound=2.0,
    table=tuple(
        Offer(call=call, rejects=lambda call, target: None, run=run) for call, run in _RUNS.items()
    ),
)
