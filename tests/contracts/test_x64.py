"""`jax_enable_x64` changes nothing: the same bits from float32 inputs, and no 64-bit arrays."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mx_jax
from mx_jax import recipes
from tests.quick import quick

# Each kind of element and scale.
FORMATS = ["mxfp8_e4m3", "mxfp6_e3m2", "mxfp4_2d", "mxint8", "nvfp4", "float8_rowwise_e4m3"]
# Each kind of operand: MX, NVFP4, float8, stochastic, with random signs.
RECIPES = ["mxfp8", "nvfp4", "float8_rowwise", "mxfp4_stochastic"]
BACKENDS = ["cpu_ffi", "reference"]

GENERATOR = np.random.default_rng(0)
X = GENERATOR.normal(size=(6, 64)).astype(np.float32)
W = GENERATOR.normal(size=(64, 6)).astype(np.float32)
EXPERTS = GENERATOR.normal(size=(2, 64, 6)).astype(np.float32)


def same_bits(function: Any, *operands: np.ndarray) -> None:
    """The same leaves, dtypes included, with 64-bit types and without."""
    want = quick(function)(*operands)
    with jax.enable_x64(True):
        got = quick(function)(*operands)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for left, right in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert left.dtype == right.dtype
        np.testing.assert_array_equal(
            np.asarray(left).view(np.uint8), np.asarray(right).view(np.uint8)
        )


def wide_arrays(function: Any, *operands: np.ndarray) -> list[str]:
    """Types of 64 bits in the traced function that are no scalars."""
    with jax.enable_x64(True):
        return sorted(
            set(re.findall(r"\b[fiu]64\[[0-9,]+\]", str(jax.make_jaxpr(function)(*operands))))
        )


def test_x64_is_on():
    with jax.enable_x64(True):
        assert jnp.ones(1).dtype == jnp.float64


@pytest.mark.slow(but="mxfp8|mxfp4_2d|nvfp4-cpu|float8_rowwise_e4m3-reference")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("format", FORMATS)
def test_casts(format: str, backend: str):
    def casts(x: jax.Array) -> Any:
        q = mx_jax.quantize(x, format)
        return q, *(mx_jax.dequantize(q, dtype) for dtype in ("float32", "bfloat16", "float16"))

    with mx_jax.only_backend(backend):
        same_bits(casts, X)


@pytest.mark.parametrize("backend", BACKENDS)
def test_stochastic_rounding(backend: str):
    def rounded(x: jax.Array) -> Any:
        return mx_jax.quantize(x, "mxfp4", rounding="stochastic", key=jax.random.key(0))

    with mx_jax.only_backend(backend):
        same_bits(rounded, X)


def training(name: str) -> Any:
    recipe = recipes.from_name(name)

    def gradients(x: jax.Array, w: jax.Array) -> Any:
        key = jax.random.key(0) if recipe.is_stochastic else None
        product, pullback = jax.vjp(lambda x, w: mx_jax.matmul(x, w, recipe=recipe, key=key), x, w)
        return product, pullback(product)

    return gradients


@pytest.mark.slow(but="mxfp8")
@pytest.mark.parametrize(
    "name", [*RECIPES[:2], *(pytest.param(name, marks=pytest.mark.slow) for name in RECIPES[2:])]
)
def test_products_and_gradients(name: str):
    same_bits(training(name), X, W)


def test_products_of_the_reference():
    with mx_jax.only_backend("reference"):
        same_bits(training("mxfp8"), X, W)


def test_packed_weights():
    def product(x: jax.Array, w: jax.Array) -> Any:
        packed = mx_jax.pack_weights(mx_jax.quantize(w, "mxfp4", axis=0))
        return mx_jax.matmul(x, packed, recipe=recipes.weight_only("mxfp4"))

    same_bits(product, X, W)


def test_ragged_dot():
    def product(x: jax.Array, experts: jax.Array) -> Any:
        sizes = jnp.array([1, 4], jnp.int32)
        return mx_jax.ragged_dot(x, experts, sizes, recipe=recipes.mxfp8())

    same_bits(product, X, EXPERTS)


@pytest.mark.slow(but="mxfp8$|nvfp4$|quartet$|deepseek|tensorwise|stochastic")
@pytest.mark.parametrize("name", sorted({recipes.from_name(name).name for name in recipes.names()}))
def test_no_array_is_64_bits_wide(name: str):
    assert wide_arrays(training(name), X, W) == []


@pytest.mark.parametrize("format", FORMATS)
def test_no_array_of_a_cast_is_64_bits_wide(format: str):
    """But for one number a block, where GPUs divide."""
    for backend in BACKENDS:
        with mx_jax.only_backend(backend):
            found = wide_arrays(lambda x: mx_jax.quantize(x, format).dequantize(jnp.bfloat16), X)
            has_divisions = mx_jax.formats.block_format(format).scale.kind != "exponent"
            divided = [x for x in found if has_divisions and re.fullmatch(r"f64\[.*1\]", x)]
            assert found == divided


def test_float64_is_refused():
    wanted = r"float32, bfloat16.*got dtype=float64, shape=\(6, 64\); convert it first, e.g. "
    with jax.enable_x64(True):
        x = jnp.asarray(X, jnp.float64)
        with pytest.raises(TypeError, match=f"quantize: needs {wanted}"):
            mx_jax.quantize(x, "mxfp4")
        with pytest.raises(TypeError, match=f"lhs must be {wanted}"):
            mx_jax.matmul(x, W, recipe=recipes.mxfp8())
