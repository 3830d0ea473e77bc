"""A tensor scale for each matrix of a batch, as NVFP4 experts have them."""

from typing import Any

import jax
import numpy as np
import pytest

import mx_jax
from mx_jax import MXArray, recipes
from tests.needs import CPU_BACKENDS, needs_library
from tests.quick import quick

GENERATOR = np.random.default_rng(0)
EXPERTS = GENERATOR.normal(size=(2, 64, 6)).astype(np.float32) * np.array([1.0, 1e4])[:, None, None]
EXPERTS = EXPERTS.astype(np.float32)
SCALES = np.array([1e-3, 10.0], np.float32).reshape(2, 1, 1)
TOKENS = GENERATOR.normal(size=(2, 3, 64)).astype(np.float32)
RECIPE = recipes.weight_only("nvfp4")


def experts() -> MXArray:
    return mx_jax.quantize(EXPERTS, "nvfp4", axis=1, tensor_scale=SCALES)


def same(got: Any, want: Any) -> None:
    for left, right in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(left, right)


@pytest.mark.by_default("cpu_ffi")
@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_each_matrix_is_quantized_under_its_own(backend: str):
    with mx_jax.only_backend(backend):
        together = experts()
        assert together.tensor_scale is not None and together.tensor_scale.shape == (2, 1, 1)
        for i in range(2):
            alone = mx_jax.quantize(EXPERTS[i], "nvfp4", axis=0, tensor_scale=SCALES[i].reshape(()))
            same(together[i], alone)
            same(mx_jax.dequantize(together)[i], mx_jax.dequantize(alone))


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_vmap_computes_one_for_each(backend: str):
    with mx_jax.only_backend(backend):
        mapped = jax.vmap(lambda x: mx_jax.quantize(x, "nvfp4", axis=0))(EXPERTS)
        assert mapped.tensor_scale is not None and mapped.tensor_scale.shape == (2, 1, 1)
        given = mx_jax.quantize(EXPERTS, "nvfp4", axis=1, tensor_scale=mapped.tensor_scale)
        same(given, mapped)


@pytest.mark.by_default("cpu_ffi")
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
def test_the_library_says_why_it_refuses_experts_that_are_kept_axes():
    with (
        mx_jax.only_backend("cpu_ffi"),
        pytest.raises(ValueError, match=r"needs one tensor scale a matrix, got one for each"),
    ):
        mx_jax.einsum("mk,ekn->men", TOKENS[0], experts(), recipe=RECIPE)


def test_ragged_dot():
    tokens, sizes = np.asarray(TOKENS[0]), np.array([1, 2])
    got = quick(lambda x, w, sizes: mx_jax.ragged_dot(x, w, sizes, recipe=RECIPE))(
        tokens, experts(), sizes
    )
    values = np.asarray(experts().dequantize())
    want = np.stack([tokens[0] @ values[0], tokens[1] @ values[1], tokens[2] @ values[1]])
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-3)


def test_scales_of_other_axes_are_dequantized_by_the_reference():
    turned = experts().transpose(1, 2, 0)
    want = experts().dequantize().transpose(1, 2, 0)
    np.testing.assert_array_equal(mx_jax.dequantize(turned), want)


@needs_library
def test_the_library_says_why_it_refuses_scales_of_other_axes():
    with (
        mx_jax.only_backend("cpu_ffi"),
        pytest.raises(ValueError, match=r"tensor scales of the first axes, got.*axes=\(2,\)"),
    ):
        mx_jax.dequantize(experts().transpose(1, 2, 0))


def test_both_casts_share_them():
    first, second = mx_jax.quantize_both(TOKENS, "nvfp4", tensor_scale=SCALES)
    same(first, mx_jax.quantize(TOKENS, "nvfp4", tensor_scale=SCALES))
    same(second, mx_jax.quantize(TOKENS, "nvfp4", axis=-2, tensor_scale=SCALES))
