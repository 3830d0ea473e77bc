"""matmul against jnp.matmul: vectors, matrices, batches that broadcast."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mx_jax
from mx_jax import recipes
from mx_jax.ops import product
from mx_jax.testing.compare import assert_bitwise_equal
from mx_jax.testing.draw import draw_few_octaves

SHAPES = (
    *(((40,), (40,)), ((40,), (40, 3)), ((2, 40), (40,)), ((2, 40), (40, 3))),
    *(((4, 2, 40), (40,)), ((4, 2, 40), (40, 3)), ((5, 4, 2, 40), (40, 3))),
    *(((40,), (4, 40, 3)), ((40,), (5, 4, 40, 3)), ((2, 40), (4, 40, 3))),
    *(((4, 2, 40), (4, 40, 3)), ((1, 2, 40), (4, 40, 3)), ((4, 2, 40), (1, 40, 3))),
    *(((5, 1, 2, 40), (4, 40, 3)), ((5, 4, 2, 40), (4, 40, 3))),
)


def draw(rng: np.random.Generator) -> list[tuple[np.ndarray, np.ndarray]]:
    """Whole numbers, whose products sum exactly in any order."""
    return [
        (np.round(draw_few_octaves(rng, left) * 8), np.round(draw_few_octaves(rng, right) * 8))
        for left, right in SHAPES
    ]


def test_high_precision_is_jnp(rng: np.random.Generator):
    pairs = draw(rng)
    recipe = recipes.high_precision()

    @jax.jit
    def run(pairs):
        ours = [mx_jax.matmul(lhs, rhs, recipe=recipe) for lhs, rhs in pairs]
        return ours, [jnp.matmul(lhs, rhs) for lhs, rhs in pairs]

    for shapes, actual, expected in zip(SHAPES, *run(pairs), strict=True):
        assert_bitwise_equal(actual, expected, what=str(shapes))


@pytest.mark.parametrize(
    ("left", "right", "message"),
    [
        ((), (3,), "both operands need an axis, got lhs.shape=(), rhs.shape=(3,)"),
        ((3,), (), "both operands need an axis, got lhs.shape=(3,), rhs.shape=()"),
        (
            (2, 40),
            (41, 3),
            "contracting sizes must agree, got lhs.shape=(2, 40) with k=40 and rhs.shape=(41, 3) "
            "with k=41",
        ),
        ((40,), (41,), "got lhs.shape=(40,) with k=40 and rhs.shape=(41,) with k=41"),
        (
            (5, 2, 40),
            (4, 40, 3),
            "leading axes must broadcast, got lhs batch=(5,) and rhs batch=(4,)",
        ),
    ],
    ids=str,
)
def test_errors(left, right, message):
    lhs, rhs = np.ones(left, np.float32), np.ones(right, np.float32)
    with pytest.raises(ValueError, match=re.escape(message)):
        mx_jax.matmul(lhs, rhs, recipe=recipes.mxfp8())


def test_an_mxarray_is_not_broadcast():
    w = mx_jax.quantize(np.ones((1, 40, 3), np.float32), "mxfp4", axis=1)
    message = "an MXArray is not broadcast, got batch=(1,) where the product has batch=(4,)"
    with pytest.raises(ValueError, match=re.escape(message)):
        mx_jax.matmul(np.ones((4, 2, 40), np.float32), w, recipe=recipes.mxfp8())


def test_concrete_operands_are_one_program(monkeypatch: pytest.MonkeyPatch):
    """Without `custom_vjp`, which takes longer than a small product; a gradient still has it."""

    def refuse(*_: object) -> None:
        raise AssertionError("differentiated")

    monkeypatch.setattr(product, "_differentiable", refuse)
    x, w = jnp.ones((4, 64)), jnp.ones((64, 8))
    assert (mx_jax.matmul(x, w, recipe="mxfp8") == 64).all()
    with pytest.raises(AssertionError, match="differentiated"):
        jax.grad(lambda w: mx_jax.matmul(x, w, recipe="mxfp8").sum())(w)
