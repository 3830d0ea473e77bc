"""ragged_dot's three products against a loop over groups: mx_jax.quantize, then float64 sums."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest

import mx_jax
from mx_jax.formats import FLOAT8_TENSORWISE_E5M2, MXFP4, MXFP6_E3M2, MXFP8_E4M3, NVFP4, WHOLE
from mx_jax.ops.ragged_dot import ragged_dot
from mx_jax.recipes import Hadamard, MatmulSpec, Recipe, Residuals, operand
from tests.needs import slow
from tests.quick import quick, with_gradients
from tests.recipes.uniform import uniform

# One shape for every cast of the loop, so that each operand spec compiles once.
SIZE = 40
GROUP_SIZES = (13, 0, 1, 18)
HIGH = MatmulSpec(lhs=None, rhs=None)
SIGNS = (1, -1, -1, 1)


class Products(NamedTuple):
    output: np.ndarray
    grad_input: np.ndarray
    grad_weight: np.ndarray


def transform(x, hadamard):
    """Padded with zeros, signed and turned in float64; exact for small integers."""
    x = np.pad(x, [(0, 0), (0, -x.shape[1] % hadamard.size)])
    matrix = np.ones((1, 1))
    while len(matrix) < hadamard.size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]]) / np.sqrt(2)
    groups = x.reshape(-1, hadamard.size) * np.array(hadamard.signs)
    return (groups @ matrix).reshape(x.shape)


def cast_groups(operands, spec):
    """Each operand quantized along its last axis; one tensor scale for all of them."""
    if spec is None:
        return operands
    operands = [np.float32(x) * np.float32(spec.prescale) for x in operands]
    scale = None
    if spec.format.tensor_scale:
        largest_scale = spec.scale_rule.largest_scale or 448
        amax = max((np.abs(x).max() for x in operands if x.size), default=0)
        scale = np.float32(amax) / np.float32(largest_scale * spec.format.element.max)
    return [cast(x, spec, scale) for x in operands]


def cast(x, spec, tensor_scale=None):
    # Zeros behind the data join no block's amax: they only make shapes equal.
    padded = np.zeros((SIZE, -(-x.shape[1] // SIZE) * SIZE), np.float32)
    padded[: x.shape[0], : x.shape[1]] = x
    values = caster(spec)(padded, tensor_scale)
    return np.asarray(values)[: x.shape[0], : x.shape[1]].astype(np.float64)


@functools.cache
def caster(spec):
    def values(x, tensor_scale):
        options = {"scale_rule": spec.scale_rule, "tensor_scale": tensor_scale}
        return mx_jax.quantize(x, spec.format, **options).dequantize()

    return quick(values)


def products_of_groups(spec, lefts, rights):
    """Each `a b^T` of one of the three products, and the sum of its absolute terms."""
    lefts, rights = ([np.float64(x) for x in side] for side in (lefts, rights))
    if spec.transform is not None:
        lefts, rights = ([transform(x, spec.transform) for x in s] for s in (lefts, rights))
    pairs = zip(cast_groups(lefts, spec.lhs), cast_groups(rights, spec.rhs), strict=True)
    for a, b in pairs:
        prescales = math.prod(each.prescale for each in (spec.lhs, spec.rhs) if each is not None)
        yield a @ b.T / prescales, np.abs(a) @ np.abs(b).T / prescales


def loop(recipe, lhs, rhs, group_sizes, g) -> tuple[Products, Products]:
    """The products, group by group, and the sums of their absolute terms."""
    values = Products(np.zeros(g.shape), np.zeros(lhs.shape), np.zeros(rhs.shape))
    sums = Products(*(np.zeros_like(x) for x in values))
    ends = np.cumsum(group_sizes)
    rows = [slice(end - size, end) for size, end in zip(group_sizes, ends, strict=True)]
    xs, gs, ws = [lhs[i] for i in rows], [g[i] for i in rows], list(rhs)
    for kept, results in (
        (0, products_of_groups(recipe.output, xs, [w.T for w in ws])),
        (1, products_of_groups(recipe.grad_input, gs, ws)),
    ):
        for i, (value, total) in zip(rows, results, strict=True):
            values[kept][i], sums[kept][i] = value, total
    results = products_of_groups(recipe.grad_weight, [x.T for x in gs], [x.T for x in xs])
    for j, (value, total) in enumerate(results):
        values.grad_weight[j], sums.grad_weight[j] = value.T, total.T
    return values, sums


def run(recipe, lhs, rhs, group_sizes, g) -> Products:
    product = functools.partial(ragged_dot, group_sizes=np.array(group_sizes), recipe=recipe)
    results = quick(with_gradients(product))(*(jnp.asarray(x) for x in (lhs, rhs, g)))
    return Products(*(np.asarray(x, np.float64) for x in results))


def assert_close(actual: Products, expected: Products, sums: Products, num_added: int):
    for name in Products._fields:
        tolerance = 4 * 2.0**-24 * np.sqrt(num_added) * getattr(sums, name)
        difference = np.abs(getattr(actual, name) - getattr(expected, name))
        worst = np.unravel_index(np.argmax(difference - tolerance), difference.shape)
        assert (difference <= tolerance).all(), (name, worst, difference[worst], tolerance[worst])


def draw(rng, group_sizes, m=SIZE, k=SIZE, n=SIZE, integers=False):
    """lhs, rhs and cotangent whose groups differ in magnitude, garbage behind the last group."""

    def values(*shape):
        return rng.integers(-5, 6, shape) if integers else rng.standard_normal(shape)

    num_groups, used = len(group_sizes), sum(group_sizes)
    factor = np.repeat(3.0 ** np.arange(num_groups), group_sizes)[:, None]
    lhs, g = np.full((m, k), 1e30), np.full((m, n), -1e30)
    lhs[used + 1 :], g[used + 1 :] = np.nan, np.inf
    lhs[:used], g[:used] = values(used, k) * factor, values(used, n) / (1 if integers else factor)
    rhs = values(num_groups, k, n) * (1.0 + np.arange(num_groups))[:, None, None]
    return tuple(x.astype(np.float32) for x in (lhs, rhs, g))


def block(format, kept, contracting):
    return dataclasses.replace(format, block=(kept, contracting))


RECIPES: dict[str, Callable[[], Recipe]] = {
    "mxfp8": mx_jax.recipes.mxfp8,
    "mxfp6, grad_weight high": lambda: dataclasses.replace(
        uniform(operand(MXFP6_E3M2.with_block(8), scale_rule="even")), grad_weight=HIGH
    ),
    "nvfp4": mx_jax.recipes.nvfp4,
    "float8 rowwise": mx_jax.recipes.float8_rowwise,
    "float8 tensorwise": mx_jax.recipes.float8_tensorwise,
    "mxfp4, 4 x 8": lambda: uniform(operand(block(MXFP4, 4, 8), scale_rule="rceil")),
    "nvfp4, 8 x WHOLE": lambda: uniform(operand(block(NVFP4, 8, WHOLE))),
    "mxfp4, WHOLE x 8": lambda: uniform(operand(block(MXFP4, WHOLE, 8), scale_rule="floor")),
}


@pytest.mark.slow(but="mxfp8|mxfp4|high")
@pytest.mark.parametrize(
    "name",
    [slow(name) if "WHOLE" in name or "rowwise" in name else name for name in RECIPES],
)
def test_products_of_a_loop_over_groups(name: str, rng: np.random.Generator):
    recipe = RECIPES[name]()
    lhs, rhs, g = draw(rng, GROUP_SIZES)
    actual = run(recipe, lhs, rhs, GROUP_SIZES, g)
    expected, sums = loop(recipe, lhs, rhs, GROUP_SIZES, g)
    assert_close(actual, expected, sums, SIZE)


TRANSFORMED = {
    # Blocks of 8 and transforms of 4; blocks of 6 end where no transform does.
    "in blocks": operand(MXFP8_E4M3.with_block(8), scale_rule="rceil", prescale=0.75),
    "across blocks": operand(MXFP4.with_block(6), scale_rule="even"),
    "in groups": operand(FLOAT8_TENSORWISE_E5M2, prescale=0.75),
}


@pytest.mark.slow(but="groups")
@pytest.mark.parametrize("name", TRANSFORMED)
def test_transforms_stay_in_their_group(name: str, rng: np.random.Generator):
    spec = TRANSFORMED[name]
    both = MatmulSpec(lhs=spec, rhs=spec, transform=Hadamard(size=4, signs=SIGNS))
    recipe = uniform(spec, output=both, grad_input=both, grad_weight=both)
    lhs, rhs, g = draw(rng, GROUP_SIZES, integers=True)
    actual = run(recipe, lhs, rhs, GROUP_SIZES, g)
    expected, sums = loop(recipe, lhs, rhs, GROUP_SIZES, g)
    assert_close(actual, expected, sums, SIZE)


@pytest.fixture(scope="module")
def mxfp4_products():
    """One compiled program for every group size."""
    recipe = uniform(operand(MXFP4.with_block(8), scale_rule="even"))

    @quick
    def products(lhs, rhs, group_sizes, g):
        product = functools.partial(ragged_dot, group_sizes=group_sizes, recipe=recipe)
        return with_gradients(product)(lhs, rhs, g)

    return recipe, products


@pytest.mark.parametrize(
    "group_sizes",
    [(0, 0, 0), (0, 0, 30), (30, 0, 0), (8, 16, 6), (1, 1, 1), (7, 9, 14), (0, 1, 0), (10, 10, 10)],
)
def test_any_group_sizes_in_one_program(mxfp4_products, group_sizes, rng: np.random.Generator):
    recipe, products = mxfp4_products
    lhs, rhs, g = draw(rng, group_sizes, m=30, k=20, n=12)
    actual = Products(*(np.float64(x) for x in products(lhs, rhs, np.int32(group_sizes), g)))
    expected, sums = loop(recipe, lhs, rhs, group_sizes, g)
    assert_close(actual, expected, sums, 30)
    assert products._cache_size() == 1


def test_saved_codes_are_quantized_anew(rng: np.random.Generator):
    square = operand(block(MXFP4, 8, 8), scale_rule="rceil")
    line = operand(MXFP4.with_block(8), scale_rule="even")
    output = MatmulSpec(lhs=square, rhs=square)
    recipe = uniform(line, output=output, residuals=Residuals.QUANTIZED)
    lhs, rhs, g = draw(rng, GROUP_SIZES)
    actual = run(recipe, lhs, rhs, GROUP_SIZES, g)
    ends = np.cumsum(GROUP_SIZES)
    saved_lhs = np.zeros_like(lhs)
    for size, end in zip(GROUP_SIZES, ends, strict=True):
        saved_lhs[end - size : end] = cast(lhs[end - size : end], square)
    saved_rhs = np.stack([cast(w.T, square).T for w in rhs])
    output = loop(recipe, lhs, rhs, GROUP_SIZES, g)
    gradients = loop(recipe, saved_lhs, saved_rhs, GROUP_SIZES, g)
    expected, sums = (Products(y.output, *gs[1:]) for y, gs in zip(output, gradients, strict=True))
    assert_close(actual, expected, sums, SIZE)
