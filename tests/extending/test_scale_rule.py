"""The rule of `least_error.py` everywhere that a rule goes; nothing of mx_jax knows of it.

In products beside the format of `fp5.py`.

Places to touch: one, its function in that file (before: 8 to 9, for a rule of the library's own).
"""

from fractions import Fraction

import jax
import numpy as np
import pytest

import mx_jax
from mx_jax.formats import MXFP4, MXFP4_2D, BlockFormat
from mx_jax.recipes import operand
from mx_jax.testing.compare import assert_bitwise_equal
from tests.extending.fp5 import MXFP5
from tests.extending.least_error import LEAST_ERROR
from tests.recipes.uniform import uniform


def multiples(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Multiples of 1/4 up to 16: float32 adds them up without rounding, and their squares."""
    return (rng.integers(-64, 65, shape) / 4).astype(np.float32)


def lost(block: np.ndarray, exponent: int, format: BlockFormat) -> Fraction | int:
    """The squared error of a block under a scale of `2^exponent`."""
    element = format.element
    values = [Fraction(element.value(code)) for code in range(element.max_code + 1)]
    scale = Fraction(2) ** exponent
    return sum(
        (min(abs(abs(Fraction(float(x))) / scale - value) for value in values) * scale) ** 2
        for x in block.ravel()
    )


def byte(block: np.ndarray, format: BlockFormat) -> int:
    """FLOOR's scale or the next, whichever loses less; at a draw FLOOR's."""
    amax = np.float32(np.max(np.abs(block)))
    low = int(np.frexp(amax)[1]) - 1 - format.element.emax
    return 127 + low + (lost(block, low + 1, format) < lost(block, low, format))


@pytest.mark.parametrize("format", [MXFP4, MXFP5], ids=lambda format: format.name)
def test_scales(format: BlockFormat, rng: np.random.Generator):
    x = multiples(rng, (24, 40))
    x[0, :] = 0.25
    q = mx_jax.quantize(x, format, scale_rule=LEAST_ERROR)
    expected = [[byte(row[:32], format), byte(row[32:], format)] for row in x]
    np.testing.assert_array_equal(q.scales, expected)
    with mx_jax.only_backend("reference"):
        low = np.asarray(mx_jax.quantize(x, format, scale_rule="floor").scales)
    steps = np.asarray(q.scales).astype(int) - low
    assert set(steps.ravel()) == {0, 1}  # no rule of its own if it always took the same


def test_special_blocks():
    x = np.zeros((4, 32), np.float32)
    x[1, 0], x[2, 0], x[3] = np.nan, -np.inf, np.finfo(np.float32).max
    q = mx_jax.quantize(x, "mxfp4", scale_rule=LEAST_ERROR)
    # The squared errors of the last block are beyond float32, so they are alike.
    assert np.asarray(q.scales).ravel().tolist() == [0, 255, 255, 252]
    values = np.asarray(q.dequantize())
    assert (values[0] == 0).all() and np.isnan(values[1:3]).all()


@pytest.mark.slow
def test_everywhere_a_rule_goes(rng: np.random.Generator):
    """Both axes at once, under jit and vmap, in square blocks, beside the kernels' own rules."""
    x = multiples(rng, (32, 32))
    rows = mx_jax.quantize(x, "mxfp4", scale_rule=LEAST_ERROR)
    first, second = mx_jax.quantize_both(x, "mxfp4", axes=(-1, -2), scale_rule=LEAST_ERROR)
    assert_bitwise_equal(first.codes, rows.codes)
    assert np.asarray(second.scales)[0].tolist() == [byte(column, MXFP4) for column in x.T]
    cast = jax.jit(jax.vmap(lambda row: mx_jax.quantize(row, "mxfp4", scale_rule=LEAST_ERROR)))
    assert_bitwise_equal(cast(x).scales, rows.scales)
    square = mx_jax.quantize(x, MXFP4_2D, scale_rule=LEAST_ERROR)
    assert np.asarray(square.scales).tolist() == [[byte(x, MXFP4)]]


# A format, and the name or value of a rule.
ADDED = {"format": (MXFP5, "even"), "rule": (MXFP4, LEAST_ERROR)}


@pytest.mark.parametrize("added", ADDED)
def test_products_and_their_gradients(added: str, rng: np.random.Generator):
    format, rule = ADDED[added]
    recipe = uniform(operand(format, scale_rule=rule))
    name = getattr(rule, "name", rule)
    assert f"{format.name} ({name}, nearest)" in str(recipe)
    # Square and outside jit: every cast along an axis is compiled once.
    x, w, g = (multiples(rng, (32, 32)) for _ in range(3))

    def values(array: np.ndarray, axis: int) -> np.ndarray:
        q = mx_jax.quantize(array, format, axis=axis, scale_rule=rule)
        return np.asarray(q.dequantize(), np.float64)

    product, backward = jax.vjp(lambda x, w: mx_jax.matmul(x, w, recipe=recipe), x, w)
    dx, dw = backward(g)
    np.testing.assert_array_equal(product, values(x, 1) @ values(w, 0))
    np.testing.assert_array_equal(dx, values(g, 1) @ values(w, 1).T)
    np.testing.assert_array_equal(dw, values(x, 0).T @ values(g, 0))
