"""Every GPU kernel lowers where JAX's integers have 64 bits, as it does where they have 32."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest

import mx_jax
from mx_jax.backends.calls import MatmulCall, QuantizeBothCall
from mx_jax.backends.pallas_gpu import PALLAS_GPU
from mx_jax.formats import MXFP4, MXFP8_E4M3, BlockFormat
from mx_jax.testing.cases import MatmulCase, QuantizeCase
from tests.backends.mosaic import needs_newer_mosaic

# Several tiles along every axis, and several steps.
M, N, K = 300, 260, 1024


def product(lhs: BlockFormat | None, rhs: BlockFormat, rows: int = 40) -> jax.Array:
    """By weights that are not packed."""
    case = MatmulCase(lhs=lhs, rhs=rhs, m=(rows,), n=(N,), k=(K,), dtype="bfloat16")
    call = case.call
    assert isinstance(call, MatmulCall)
    w = mx_jax.quantize(jnp.ones((N, K), jnp.bfloat16), rhs)
    x = jnp.ones((rows, K), jnp.bfloat16)
    return PALLAS_GPU.run(call, x if lhs is None else mx_jax.quantize(x, lhs), w)


def both_casts() -> tuple[mx_jax.MXArray, ...]:
    first, second = (
        QuantizeCase(format=MXFP8_E4M3, shape=(M, N), axis=axis, dtype="bfloat16").call
        for axis in (-1, -2)
    )
    call = QuantizeBothCall(first=first, second=second)
    return PALLAS_GPU.run(call, jnp.ones((M, N), jnp.bfloat16), (None, None), None)


@needs_newer_mosaic
@pytest.mark.parametrize(
    ("capability", "run", "kernel"),
    [
        ((8, 0), lambda: product(None, MXFP4), "mx_jax_mma_mxfp4"),
        ((9, 0), lambda: product(None, MXFP4), "mx_jax_wgmma_mxfp4"),
        ((10, 0), lambda: product(None, MXFP4), "mx_jax_mma_mxfp4"),
        ((10, 0), lambda: product(MXFP8_E4M3, MXFP8_E4M3, M), "mx_jax_tcgen05_float8_e4m3fn"),
        ((9, 0), both_casts, "mx_jax_quantize"),
    ],
)
def test_lowers(capability: tuple[int, int], run: Callable[[], object], kernel: str):
    with mx_jax.testing.target("cuda", capability), jax.enable_x64(True):
        text = jax.jit(run).trace().lower(lowering_platforms=("cuda",)).as_text()
    assert kernel in text
