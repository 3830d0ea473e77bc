"""mask_clipped: no gradient for what the forward product clipped, and for nothing else."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mx_jax
from mx_jax.formats import INT8_FULL, MXINT8
from mx_jax.ops.arguments import draw_bits
from mx_jax.recipes import Hadamard, MatmulSpec, OperandSpec, Recipe, Residuals, operand
from mx_jax.reference import hadamard
from tests.quick import quick

HIGH = MatmulSpec(lhs=None, rhs=None)


def masking(spec: OperandSpec | None, rhs: OperandSpec | None = None, **fwd) -> Recipe:
    return Recipe(
        name="masking",
        fwd=MatmulSpec(lhs=spec, rhs=rhs, **fwd),
        dlhs=HIGH,
        drhs=HIGH,
        residuals=Residuals.PRIMAL,
        mask_clipped=True,
    )


def passes(recipe: Recipe, x: np.ndarray, **options) -> np.ndarray:
    """Where the gradient of a row passes: with one column of ones, dx is 1 or 0."""

    @quick
    def gradient(x, w, **options):
        def total(x):
            return mx_jax.matmul(x[None], w, recipe=recipe, **options).sum()

        return jax.grad(total)(x)

    dx = gradient(x, np.ones((x.size, 1), np.float32), **options)
    assert set(np.asarray(dx).tolist()) <= {0.0, 1.0}
    return np.asarray(dx) == 1


def row(*values: float) -> np.ndarray:
    return np.pad(np.float32(values), (0, 32 - len(values)))


def test_at_the_largest_value_the_gradient_passes():
    """FLOOR's scale of 7 is 1: 6 and -6 are representable, 6.5 and 7 are clipped."""
    x = row(7, -7, 6.5, 6, -6, 5.9, 0)
    recipe = masking(operand("mxfp4", scale_rule="floor"))
    kept = passes(recipe, x)
    assert kept[:7].tolist() == [False, False, False, True, True, True, True] and kept[7:].all()
    assert passes(dataclasses.replace(recipe, mask_clipped=False), x).all()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_what_is_clipped_is_judged_after_the_prescale(dtype):
    """7 times 3/4 is 5.25, which fits; 5 times 3/2 is 7.5, which does not."""
    down = masking(operand("mxfp4", scale_rule="floor", prescale=0.75))
    up = masking(operand("mxfp4", scale_rule="floor", prescale=1.5))
    assert passes(down, row(7, 6.5).astype(dtype)).all()
    assert passes(up, row(5, 4, 3).astype(dtype))[:3].tolist() == [False, True, True]


def test_prescaled_as_the_forward_product_prescales():
    """In the operand's own dtype: what bfloat16 rounds up to 6 is at the limit, not beyond it."""
    x = jnp.bfloat16(row(7.96875))
    kept = passes(masking(operand("mxfp4", scale_rule="floor", prescale=0.75390625)), x)
    product = jnp.float32(x[0] * jnp.bfloat16(0.75390625))
    assert float(product) == 6.0 < float(x[0]) * 0.75390625
    assert kept.all()


@pytest.mark.parametrize("element", [MXINT8.element, INT8_FULL], ids=lambda element: element.name)
def test_integers_clip_on_both_sides(element):
    """1 + 63/64 is the largest; INT8_FULL reaches -2 below."""
    format = dataclasses.replace(MXINT8, element=element)
    x = row(1.99, 1.984375, 1.5, -1.984375, -1.99, -1.9999)
    kept = passes(masking(operand(format, scale_rule="floor")), x)
    below = element is INT8_FULL
    assert kept[:6].tolist() == [False, True, True, True, below, below]


@pytest.mark.parametrize("rounding", ["stochastic", "toward_zero", "away"])
def test_the_mask_does_not_depend_on_the_rounding(rounding: str):
    """Scales are deterministic, and what lies beyond the largest value saturates, however drawn."""
    x = np.random.default_rng(0).standard_normal(512).astype(np.float32)
    nearest = passes(masking(operand("mxfp4", scale_rule="floor")), x)
    assert 0 < (~nearest).sum() < 64
    spec = operand("mxfp4", scale_rule="floor", rounding=rounding)
    for seed in range(2 if rounding == "stochastic" else 1):
        options = {"key": jax.random.key(seed)} if rounding == "stochastic" else {}
        assert np.array_equal(passes(masking(spec), x, **options), nearest)


def test_the_right_operand_too_with_random_signs_and_drawn_bits():
    """dw = T^-1(T(x^T g) * [|T(w)| fits]), by hand."""
    spec = operand("mxfp4", scale_rule="gaussian", rounding="stochastic")
    recipe = masking(None, spec, transform=Hadamard(size=32, signs=None))
    rng = np.random.default_rng(0)
    x, w = (rng.standard_normal(s).astype(np.float32) for s in ((3, 64), (64, 4)))
    key = jax.random.key(5)
    product = functools.partial(mx_jax.matmul, recipe=recipe)
    dw = quick(jax.grad(lambda w, x, key: product(x, w, key=key).sum()))(w, x, key)
    sign_key = jax.random.split(jax.random.fold_in(key, 0), 3)[2]
    signs = jnp.where(draw_bits(sign_key, (32,), 32) < 0, -1.0, 1.0)
    assert set(np.asarray(signs)) == {1.0, -1.0}
    apply = jax.jit(hadamard.apply, static_argnames="axis")
    turned = apply(w, signs, axis=0)
    q = mx_jax.quantize(turned, "mxfp4", axis=0, scale_rule="gaussian")
    limit = 6 * np.repeat(np.exp2(np.asarray(q.scales, np.float64) - 127), 32, axis=0)
    fits = np.abs(np.asarray(turned, np.float64)) <= limit
    assert not fits.all()
    plain = np.broadcast_to(x.sum(0)[:, None], w.shape)
    invert = jax.jit(hadamard.invert, static_argnums=2, static_argnames="axis")
    expected = invert(np.where(fits, apply(plain, signs, axis=0), 0), signs, 64, axis=0)
    np.testing.assert_allclose(dw, expected, rtol=1e-5, atol=1e-5)


def test_ragged_rows_with_drawn_bits():
    spec = operand("mxfp4", scale_rule="floor", rounding="stochastic")
    recipe = masking(spec)
    x = np.stack([row(7, 6), row(3, 7)])
    w, key = np.ones((1, 32, 1), np.float32), jax.random.key(0)
    product = functools.partial(mx_jax.ragged_dot, recipe=recipe)
    dx = quick(jax.grad(lambda x, w, key: product(x, w, [2], key=key).sum()))(x, w, key)
    assert np.array_equal(dx, x != 7)
