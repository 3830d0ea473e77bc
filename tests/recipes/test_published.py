"""Published recipes: what the sources say of signs and scales, and products made by hand from it.

The format, rule and rounding of each operand are in docs/recipes.md, which test_page.py compares.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import mx_jax
from mx_jax import recipes
from mx_jax.recipes import Recipe
from tests.quick import quick, with_gradients


def test_fixed_signs():
    """NVFP4's are those of a public reference, the same every time; others have none."""
    transform = recipes.nvfp4_pretraining().grad_weight.transform
    assert transform is not None and transform.signs is not None
    assert "".join("+-"[sign < 0] for sign in transform.signs) == "+++-+------+-+--"
    transform = recipes.mxfp4_hadamard().grad_weight.transform
    assert transform is not None and transform.signs == (1,) * transform.size
    assert not recipes.mxfp4_hadamard().is_stochastic


def test_three_quarters_have_floors_scale():
    """RCEIL of 3/4 x is FLOOR of x, unless a block's largest value is a power of two."""
    x = np.random.default_rng(0).standard_normal((512, 32), np.float32)
    x = np.ldexp(x, np.arange(-8, 8).repeat(32)[:, None])
    rceil = mx_jax.quantize(x * 0.75, "mxfp4", scale_rule="rceil")
    floor = mx_jax.quantize(x, "mxfp4", scale_rule="floor")
    np.testing.assert_array_equal(rceil.scales, floor.scales)
    top = np.abs(x * 0.75).max(1) / np.asarray(rceil.scale_values, np.float32)[:, 0]
    assert 3 <= float(top.min()) < 3.2 and 5.8 < float(top.max()) <= 6
    power = mx_jax.quantize(jnp.full(32, 0.75), "mxfp4", scale_rule="rceil")
    assert int(power.scales[0]) == int(mx_jax.quantize(jnp.ones(32), "mxfp4").scales[0]) - 1


@pytest.fixture(scope="module")
def arrays() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """x [m, k], w [k, n], g [m, n]; sizes that leave partial blocks."""
    rng = np.random.default_rng(0)
    x, w, g = (rng.standard_normal(s, np.float32) for s in ((48, 144), (144, 80), (48, 80)))
    return x, w / np.float32(12), g


def test_nvfp4_keeps_rows_that_the_smallest_normal_scale_loses():
    """A row five to six decades below the largest: scales of 2^-6 would make zeros of it."""
    x = np.ones((2, 16), np.float32)
    x[1:] *= 6e-7
    names = "nvfp4_pretraining", "nvfp4_unbiased", "nvfp4_four_over_six"
    made = [recipes.from_name(name) for name in names]
    products = [product for r in made for product in (r.output, r.grad_input, r.grad_weight)]
    rules = {spec.scale_rule for product in products for spec in (product.lhs, product.rhs)}
    assert len(rules) == 3
    for rule in rules:
        kept = quick(functools.partial(mx_jax.cast, format="nvfp4", scale_rule=rule))(x)
        np.testing.assert_allclose(kept[1:], 6e-7, rtol=0.3, err_msg=str(rule))
    assert not np.any(mx_jax.cast(x, "nvfp4")[1:])


def run(recipe: Recipe, *operands: np.ndarray) -> Any:
    """Output, grad_input, grad_weight."""
    return quick(with_gradients(functools.partial(mx_jax.matmul, recipe=recipe)))(*operands)


def cast(x: Any, entry: tuple[Any, ...], axis: int) -> jax.Array:
    return quick(lambda x: mx_jax.cast(x, entry[0], axis=axis, scale_rule=entry[1]))(x)


def close(actual: Any, left: jax.Array, right: jax.Array) -> None:
    """The product of left and right, to float32's rounding of sums."""
    expected = np.asarray(left, np.float64) @ np.asarray(right, np.float64)
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=2e-5)


def by_deepgemm(x: np.ndarray, block: tuple[int, int], power_of_two: bool) -> np.ndarray:
    """DeepGEMM's cast of a matrix in whole blocks, back in float32: amax / 448, or above it 2^n."""
    rows, columns = x.shape[0] // block[0], x.shape[1] // block[1]
    tiles = x.reshape(rows, block[0], columns, block[1])
    scale = np.abs(tiles).max((1, 3), keepdims=True) / np.float32(448)
    if power_of_two:
        mantissa, exponent = np.frexp(scale)
        scale = np.ldexp(np.float32(1), exponent - (mantissa == 0.5))
    codes = (tiles / scale).astype(ml_dtypes.float8_e4m3fn)
    return (codes.astype(np.float32) * scale).reshape(x.shape)


@pytest.mark.parametrize(
    ("name", "power_of_two"), [("deepseek_v3", False), ("deepseek_v3_1", True)]
)
def test_deepseek_by_hand(name: str, power_of_two: bool):
    """Squares give both products of w the same values; x is kept in lines of the output's."""
    rng = np.random.default_rng(0)
    x, w, g = (rng.standard_normal(s, np.float32) for s in ((128, 256), (256, 128), (128, 128)))
    y, dx, dw = run(recipes.from_name(name), x, w, g)
    by = functools.partial(by_deepgemm, power_of_two=power_of_two)
    line, tall, square = (1, 128), (128, 1), (128, 128)
    close(y, by(x, line), by(w, square))
    close(dx, by(g, line), by(w, square).T)
    close(dw, by(by(x, line), tall).T, by(g, tall))
    flattered = by(x, tall).T @ by(g, tall)
    differs = np.abs(np.asarray(dw) - flattered).max() > 1e-3
    # Powers of two move between blocks without rounding.
    assert differs != power_of_two


def test_int8_by_hand(arrays: tuple[np.ndarray, ...]):
    """Each operand along the axis that its product contracts; g too, but for `grad_weight=None`."""
    (x, w, g), recipe = arrays, recipes.int8_rowwise()

    def by(x: np.ndarray, axis: int) -> np.ndarray:
        scale = np.abs(x).max(axis, keepdims=True).astype(np.float64) / 127
        return np.rint(x / scale) * scale

    y, dx, dw = run(recipe, x, w, g)
    close(y, by(x, 1), by(w, 0))
    close(dx, by(g, 1), by(w, 1).T)
    close(dw, by(x, 0).T, by(g, 0))
    *_, high = run(recipe.with_(grad_weight=None), x, w, g)
    close(high, x.T, g)
    drawn = recipe.with_(gradients={"rounding": "stochastic"})  # warnings are errors: none clips
    assert (
        drawn.grad_input.is_stochastic
        and drawn.grad_weight.is_stochastic
        and not drawn.output.is_stochastic
    )


@pytest.mark.slow(but="mxfp4-even")
@pytest.mark.parametrize(
    ("format", "rule", "meant"),
    [("mxfp4", None, "rceil"), ("mxfp4", "even", "even"), ("nvfp4", None, "amax")],
)
def test_qat_by_hand(format: str, rule: str | None, meant: str, arrays):
    """The gradient of the function that was computed, each rounding taken as the identity."""
    x, w, g = arrays
    x_cast, w_cast = cast(x, (format, meant), 1), cast(w, (format, meant), 0)
    y, dx, dw = run(recipes.qat(format, rule), x, w, g)
    close(y, x_cast, w_cast)
    close(dx, g, w_cast.T)
    close(dw, x_cast.T, g)


def test_qat_takes_a_rule():
    with pytest.raises(ValueError, match="scale rule 'amax' fills scales of kind element, but"):
        recipes.qat("mxfp4", "amax")
    trained, served = recipes.qat("mxfp6_e2m3", "even"), recipes.weight_only("mxfp6_e2m3", "even")
    assert trained.output.rhs == served.output.rhs


def test_a_high_precision_forward_is_exact(arrays):
    x, w, _ = arrays
    y = mx_jax.matmul(x, w, recipe=recipes.mxfp4_backward(), key=jax.random.key(1))
    np.testing.assert_array_equal(y, jnp.matmul(x, w))
