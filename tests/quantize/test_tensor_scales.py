"""NVFP4 with a tensor scale for each matrix, and near the bottom of float32."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mx_jax
from mx_jax import MXArray, recipes
from mx_jax.testing.compare import bit_patterns
from tests.needs import CPU_BACKENDS, needs_library

GENERATOR = np.random.default_rng(0)
EXPERTS = GENERATOR.normal(size=(2, 64, 6)).astype(np.float32) * np.array([1.0, 1e4])[:, None, None]
EXPERTS = EXPERTS.astype(np.float32)
SCALES = np.array([1e-3, 10.0], np.float32).reshape(2, 1, 1)
TOKENS = GENERATOR.normal(size=(2, 3, 64)).astype(np.float32)
RECIPE = recipes.weight_only("nvfp4")


def experts() -> MXArray:
    return mx_jax.quantize(EXPERTS, "nvfp4", axis=1, tensor_scale=SCALES)


same = functools.partial(jax.tree.map, np.testing.assert_array_equal)


@pytest.mark.slow(but="cpu_ffi")
@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_each_matrix_has_a_tensor_scale(backend: str):
    with mx_jax.only_backend(backend):
        together = experts()
        assert together.tensor_scale is not None and together.tensor_scale.shape == (2, 1, 1)
        for i in range(2):
            alone = mx_jax.quantize(EXPERTS[i], "nvfp4", axis=0, tensor_scale=SCALES[i].reshape(()))
            same(together[i], alone)
            same(mx_jax.dequantize(together)[i], mx_jax.dequantize(alone))


@pytest.mark.slow(but="cpu_ffi")
@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_batched_products(backend: str):
    want = np.einsum("emk,ekn->emn", TOKENS, np.asarray(experts().dequantize(), np.float64))
    with mx_jax.only_backend(backend):
        got = mx_jax.matmul(TOKENS, experts(), recipe=RECIPE)
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-3)
        left = mx_jax.quantize(TOKENS, "nvfp4", tensor_scale=SCALES)
        both = mx_jax.matmul(left, experts(), recipe=recipes.nvfp4())
    want = np.einsum(
        "emk,ekn->emn", *(np.asarray(q.dequantize(), np.float64) for q in (left, experts()))
    )
    np.testing.assert_allclose(both, want, rtol=1e-5, atol=1e-3)


@needs_library
def test_packed_weights_of_a_batch():
    with mx_jax.only_backend("cpu_ffi"):
        packed = mx_jax.pack_weights(experts(), num_batch=1)
        assert not isinstance(packed, MXArray)
        left = mx_jax.quantize(TOKENS, "nvfp4", tensor_scale=SCALES)
        for lhs in (TOKENS, left):
            want = mx_jax.matmul(lhs, experts(), recipe=RECIPE)
            np.testing.assert_array_equal(mx_jax.matmul(lhs, packed, recipe=RECIPE), want)
        same(packed.unpack(), experts())


def test_experts_that_are_kept_axes():
    """Their scales cannot leave the sums: the product is the reference's."""
    got = mx_jax.einsum("mk,ekn->men", TOKENS[0], experts(), recipe=RECIPE)
    want = np.einsum("mk,ekn->men", TOKENS[0], experts().dequantize())
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-3)


@needs_library
def test_the_library_says_what_it_refuses():
    with mx_jax.only_backend("cpu_ffi"):
        with pytest.raises(ValueError, match=r"needs one tensor scale a matrix, got one for each"):
            mx_jax.einsum("mk,ekn->men", TOKENS[0], experts(), recipe=RECIPE)
        with pytest.raises(ValueError, match=r"scales of the first axes, got.*axes=\(2,\)"):
            mx_jax.dequantize(experts().transpose(1, 2, 0))
    values = experts().dequantize().transpose(1, 2, 0)
    np.testing.assert_array_equal(mx_jax.dequantize(experts().transpose(1, 2, 0)), values)


def test_both_casts_share_them():
    first, second = mx_jax.quantize_both(TOKENS, "nvfp4", tensor_scale=SCALES)
    same(first, mx_jax.quantize(TOKENS, "nvfp4", tensor_scale=SCALES))
    same(second, mx_jax.quantize(TOKENS, "nvfp4", axis=-2, tensor_scale=SCALES))


UNIT = np.random.default_rng(0).normal(size=(32, 128))
UNIT /= np.abs(UNIT).max()


# Its smallest normal number, and what is below 2^-100 when divided by 2688.
AMAXES = [1e-20, 1e-28, 3e-33, 1e-36, 1.1755e-38]


def of_amax(amax: float) -> np.ndarray:
    return (UNIT * amax).astype(np.float32)


def snr_db(x: np.ndarray) -> float:
    """In float64: float32 cannot square such errors."""
    values = np.asarray(mx_jax.dequantize(mx_jax.quantize(x, "nvfp4"))).astype(np.float64)
    exact = x.astype(np.float64)
    return 10 * np.log10((exact**2).sum() / ((values - exact) ** 2).sum())


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_tiny_tensors_lose_no_more_than_others(backend: str):
    with mx_jax.only_backend(backend):
        wanted = snr_db(of_amax(1.0))
        for amax in AMAXES:
            assert snr_db(of_amax(amax)) == pytest.approx(wanted, abs=0.1), amax


@jax.jit
def decode(q: MXArray) -> list[jax.Array]:
    """By the backend in context, which is part of jit's key."""
    return [mx_jax.dequantize(q, dtype) for dtype in (jnp.float32, jnp.bfloat16, jnp.float16)]


@needs_library
@pytest.mark.slow(but="3e-33-float32|1e-40-bfloat16")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("amax", [1e-28, 3e-33, 1.1755e-38, 1e-40])
def test_backends_agree(amax: float, dtype: str):
    x = jnp.asarray(of_amax(amax).astype(jnp.dtype(dtype)))
    key = jax.random.key(0)

    def casts():
        return (
            mx_jax.quantize(x, "nvfp4"),
            mx_jax.quantize(x, "nvfp4", scale_rule="amax_subnormal", axis=0),
            mx_jax.quantize(x, "nvfp4", rounding="stochastic", key=key),
            mx_jax.quantize(x, "nvfp4", tensor_scale=np.float32(2.0**-110)),
            *mx_jax.quantize_both(x, "nvfp4"),
            *jax.vmap(lambda x: mx_jax.quantize_both(x, "nvfp4"))(jnp.stack([x, 0 * x])),
        )

    def bits() -> Any:
        """Of codes, scales and values: subnormals are not flushed to zero."""
        arrays = casts()
        values = [decode(q) for q in arrays]
        return jax.tree.map(bit_patterns, (arrays, values))

    with mx_jax.only_backend("reference"):
        expected = bits()
    with mx_jax.only_backend("cpu_ffi"):
        same(bits(), expected)


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("rows", [3, 32])
@pytest.mark.parametrize(
    "amaxes", [(1e-16, 1e-17), (1e-17, 1e-16), (1e-35, 1.0), (1e20, 1e-40)], ids=str
)
def test_products_whose_scales_multiply_to_a_subnormal(
    amaxes: tuple[float, float], rows: int, backend: str
):
    """The sums are normal numbers, whatever the product of the two tensor scales is."""
    with mx_jax.only_backend(backend):
        left = mx_jax.quantize(of_amax(amaxes[0])[:rows], "nvfp4")
        right = mx_jax.quantize((UNIT.T[:, :8] * amaxes[1]).astype(np.float32), "nvfp4", axis=0)
        got = np.asarray(mx_jax.matmul(left, right, recipe="nvfp4")).astype(np.float64)
        values = [np.asarray(q.dequantize()).astype(np.float64) for q in (left, right)]
    bound = np.abs(values[0]) @ np.abs(values[1])
    assert (np.abs(got - values[0] @ values[1]) <= 1e-6 * bound).all()
