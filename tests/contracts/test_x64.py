"""`jax_enable_x64` changes nothing: the same bits from float32 inputs, and no 64-bit arrays.

The library promotes no dtype and no rank silently either, so users may forbid JAX to.
"""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mx_jax
from mx_jax import recipes
from mx_jax.testing.compare import assert_bitwise_equal
from tests.quick import quick

# Each kind of element and scale.
FORMATS = ["mxfp8_e4m3", "mxfp6_e3m2", "mxfp4_2d", "mxint8", "nvfp4", "float8_rowwise_e4m3"]
FORMATS += ["float8_blockwise_2d_e4m3"]
# Each kind of operand: MX, NVFP4, float8, stochastic, with random signs.
RECIPES = ["mxfp8", "nvfp4", "float8_rowwise", "mxfp4_stochastic"]

GENERATOR = np.random.default_rng(0)
X = GENERATOR.normal(size=(6, 64)).astype(np.float32)
W = GENERATOR.normal(size=(64, 6)).astype(np.float32)
EXPERTS = GENERATOR.normal(size=(2, 64, 6)).astype(np.float32)


def wide_arrays(function: Any, *operands: np.ndarray) -> list[str]:
    """Types of 64 bits in the traced function that are no scalars."""
    with jax.enable_x64(True):
        return sorted(
            set(re.findall(r"\b[fiu]64\[[0-9,]+\]", str(jax.make_jaxpr(function)(*operands))))
        )


def cast(format: str) -> Any:
    def casts(x: jax.Array) -> Any:
        q = mx_jax.quantize(x, format)
        back = (mx_jax.dequantize(q, dtype) for dtype in ("float32", "bfloat16", "float16"))
        return q, mx_jax.cast(x, format), *back

    return casts


def stochastic(x: jax.Array) -> Any:
    return mx_jax.quantize(x, "mxfp4", rounding="stochastic", key=jax.random.key(0))


def training(name: str) -> Any:
    recipe = recipes.from_name(name)

    def gradients(x: jax.Array, w: jax.Array) -> Any:
        key = jax.random.key(0) if recipe.is_stochastic else None
        product, pullback = jax.vjp(lambda x, w: mx_jax.matmul(x, w, recipe=recipe, key=key), x, w)
        return product, pullback(product)

    return gradients


def packed(x: jax.Array, w: jax.Array) -> Any:
    weights = mx_jax.pack_weights(mx_jax.quantize(w, "mxfp4", axis=0))
    return mx_jax.matmul(x, weights, recipe=recipes.weight_only("mxfp4"))


def ragged(x: jax.Array, experts: jax.Array) -> Any:
    sizes = jnp.array([1, 4], jnp.int32)
    return mx_jax.ragged_dot(x, experts, sizes, recipe=recipes.mxfp8())


PROGRAMS = {
    **{f"cast {format}": (cast(format), X) for format in FORMATS},
    "stochastic": (stochastic, X),
    **{f"step {name}": (training(name), X, W) for name in RECIPES},
    "packed": (packed, X, W),
    "ragged": (ragged, X, EXPERTS),
}
OF_THE_REFERENCE = [name for name in PROGRAMS if re.match("cast|stochastic|step mxfp8", name)]


@pytest.mark.slow(but="e4m3|2d|cast nvfp4-None|^stochastic|mxfp8-|packed|ragged")
@pytest.mark.parametrize(
    ("name", "backend"),
    [*((name, None) for name in PROGRAMS), *((name, "reference") for name in OF_THE_REFERENCE)],
)
def test_same_bits(name: str, backend: str | None):
    """And the same leaves and dtypes."""
    function, *operands = PROGRAMS[name]
    with mx_jax.only_backend(backend):
        expected = quick(function)(*operands)
        with jax.enable_x64(True):
            actual = quick(function)(*operands)
    jax.tree.map(assert_bitwise_equal, actual, expected)


@pytest.mark.slow(but="mxfp8$|nvfp4$|deepseek|tensorwise|stochastic")
@pytest.mark.parametrize("name", sorted({recipes.from_name(name).name for name in recipes.names()}))
def test_no_array_is_64_bits_wide(name: str):
    assert wide_arrays(training(name), X, W) == []


@pytest.mark.parametrize("format", FORMATS)
def test_no_array_of_a_cast_is_64_bits_wide(format: str):
    """But for one number a block, where GPUs divide."""
    for backend in ("cpu_ffi", "reference"):
        with mx_jax.only_backend(backend):
            wide = wide_arrays(lambda x: mx_jax.quantize(x, format).dequantize(jnp.bfloat16), X)
            has_divisions = mx_jax.formats.block_format(format).scale.kind != "exponent"
            divided = [x for x in wide if has_divisions and re.fullmatch(r"f64\[.*1\]", x)]
            assert wide == divided


def test_float64_is_refused():
    wanted = r"float32, bfloat16.*got dtype=float64, shape=\(6, 64\); convert it first, e.g. "
    with jax.enable_x64(True):
        x = jnp.asarray(X, jnp.float64)
        with pytest.raises(TypeError, match=f"quantize: needs {wanted}"):
            mx_jax.quantize(x, "mxfp4")
        with pytest.raises(TypeError, match=f"lhs must be {wanted}"):
            mx_jax.matmul(x, W, recipe=recipes.mxfp8())


@pytest.fixture
def strict():
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


def test_strictness_is_on(strict: None):
    with pytest.raises(ValueError, match="dtype promotion"):
        _ = jnp.ones(2, jnp.bfloat16) + jnp.ones(2)
    with pytest.raises(ValueError, match="rank"):
        _ = jnp.ones((2, 2)) + jnp.ones(2)


@pytest.mark.parametrize("name", PROGRAMS)
def test_nothing_is_promoted(name: str, strict: None):
    """While it is traced, and while calls are lowered."""
    run, *operands = PROGRAMS[name]
    jax.jit(run).lower(*(jnp.asarray(x, jnp.bfloat16) for x in operands))
