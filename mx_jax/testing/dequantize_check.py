"""What every backend's dequantize must give: the reference's values, bit for bit."""

import jax
import jax.numpy as jnp
import numpy as np

from mx_jax import formats
from mx_jax.backends.calls import DequantizeCall
from mx_jax.backends.target import Backend
from mx_jax.codecs.blocks import scales_shape
from mx_jax.mxarray import MXArray
from mx_jax.testing.cases import QUANTIZE_CASES, QuantizeCase
from mx_jax.testing.compare import assert_bitwise_equal

# Rules and roundings leave no trace in what is dequantized; every format, dtype and axis does.
DEQUANTIZE_CASES: tuple[QuantizeCase, ...] = (
    *(
        QuantizeCase(format=format, shape=(6, 80), dtype=dtype)
        for format in formats.BLOCK_FORMATS
        for dtype in ("float32", "bfloat16")
    ),
    QuantizeCase(format=formats.MXFP8_E5M2, shape=(5, 64), dtype="float16"),
    *(
        case
        for case in QUANTIZE_CASES
        if case.scale_rule is None and case.rounding == "nearest" and case.shape != (6, 80)
    ),
)


def check_dequantize(backend: Backend, case: QuantizeCase) -> None:
    """Compare values with the reference's: every code, under every kind of scale."""
    call = dequantize_call(case)
    x = draw_any_codes(np.random.default_rng(0), call)
    actual, expected = jax.jit(lambda x: (backend.run(call, x), x.dequantize(call.dtype)))(x)
    assert_bitwise_equal(actual, expected, what="values")


def dequantize_call(case: QuantizeCase) -> DequantizeCall:
    """The way back from a case, to the dtype it came from."""
    call = case.call
    return DequantizeCall(
        shape=call.shape, dtype=call.dtype, format=call.format, blocks=call.blocks
    )


def draw_any_codes(rng: np.random.Generator, call: DequantizeCall) -> MXArray:
    """Uniformly drawn codes and scales: NaN too, and the smallest and the largest."""
    format, counts = call.format, scales_shape(call.shape, call.blocks)
    if format.scale.is_float32:
        scales = (2.0 ** rng.uniform(-30, 30, counts)).astype(np.float32)
    else:
        scales = rng.integers(0, 256, counts, np.uint8)
    tensor_scale = None
    if format.tensor_scale:
        tensor_scale = jnp.full((1,) * len(call.shape), 0.01, jnp.float32)
    return MXArray(
        codes=jnp.asarray(rng.integers(0, 1 << format.element.bits, call.shape, np.uint8)),
        scales=jnp.asarray(scales),
        tensor_scale=tensor_scale,
        format=format,
        blocks=call.blocks,
        dtype=call.dtype,
    )
