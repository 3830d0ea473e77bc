"""The handler that finds a tensor's largest finite block gives the reference's tensor scale."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mx_jax.backends.cpu_ffi import library, tensor_scale
from mx_jax.formats import NVFP4
from mx_jax.reference.quantize import quantize
from mx_jax.testing.cases import QuantizeCase
from mx_jax.testing.compare import assert_bitwise_equal

LOADED = library.load()
pytestmark = pytest.mark.skipif(isinstance(LOADED, str), reason=f"no handlers: {LOADED}")


@pytest.mark.parametrize(
    ("shape", "axis", "dtype"),
    [
        ((64, 96), -1, "float32"),
        ((64, 96), 0, "bfloat16"),
        ((3, 40, 50), 1, "float16"),
        ((3, 40, 50), 0, "float32"),
        ((40, 1), 0, "bfloat16"),
        ((41,), 0, "float32"),
    ],
)
def test_the_reference_s_scale(shape: tuple[int, ...], axis: int, dtype: str):
    call = QuantizeCase(format=NVFP4, shape=shape, axis=axis, dtype=dtype).call

    @jax.jit
    def both(x):
        scale = quantize(x, call.format, call.blocks, call.scale_rule).tensor_scale
        return tensor_scale.tensor_scale_of(x, call), scale

    rng = np.random.default_rng(0)
    x = rng.standard_normal(shape).astype(np.float32)
    for special in (0.0, np.inf, np.nan, -np.inf):
        # The largest value shares its block with what leaves the block out.
        x.flat[[3, 17 % x.size]] = 1e4, special
        for values in (x, np.full(shape, special, np.float32)):
            assert_bitwise_equal(*both(jnp.asarray(values, dtype)))


def test_batches_have_a_scale_each():
    call = QuantizeCase(format=NVFP4, shape=(8, 48)).call
    x = jax.random.normal(jax.random.key(0), (3, 8, 48)) * jnp.arange(1.0, 4.0)[:, None, None]
    many = jax.jit(jax.vmap(lambda x: tensor_scale.tensor_scale_of(x, call)))
    assert many.lower(x).as_text().count("@mx_jax_cpu_amax") == 1
    each = jnp.stack([tensor_scale.tensor_scale_of(matrix, call) for matrix in x])
    assert_bitwise_equal(many(x), each)


@pytest.mark.parametrize(
    ("shape", "dtype", "blocks", "message"),
    [
        (
            (8, 2),
            "int32",
            (-1, 16),
            r"amax must be int32 of shape \(8, 1\), got amax.shape=\(8, 2\)",
        ),
        ((8, 1), "float32", (-1, 16), "amax must be int32"),
        ((8, 1), "int32", (-2, 4), r"amax must be int32 of shape \(2, 1\)"),
        ((8, 1), "int32", (0, 4), "blocks need axes in -2..-1"),
        ((2, 2), "int32", (-2, 4, -1, 16), "needs one blocked axis, or whole neighbours"),
    ],
)
def test_wrong_calls(shape: tuple[int, ...], dtype: str, blocks: tuple[int, ...], message: str):
    result = jax.ShapeDtypeStruct(shape, dtype)
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"mx_jax amax: .*{message}"):
        jax.block_until_ready(
            jax.ffi.ffi_call(tensor_scale.TARGET, result)(
                jnp.ones((8, 32)), blocks=np.array(blocks, np.int64)
            )
        )
