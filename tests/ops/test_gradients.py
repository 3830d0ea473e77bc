"""Values and gradients of dot_general equal those computed by hand from dequantized operands.

By hand means: axes named by letters, each operand of each product quantized in its own layout along
that product's last contracting axis, then multiplied in float64 by NumPy. The data are such that
no float32 sum rounds, so MX results must agree bit for bit.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import numpy as np
import pytest

import mx_jax
from mx_jax import recipes
from mx_jax.recipes import MatmulSpec, OperandSpec, Recipe, Residuals, operand
from mx_jax.testing.backend_suite import exact_values
from mx_jax.testing.compare import assert_bitwise_equal
from mx_jax.testing.draw import Shape, draw_few_octaves
from tests.quick import quick, with_gradients
from tests.recipes.uniform import uniform
from tests.sharding.collectives import check


class Case(NamedTuple):
    """Operand shapes and dimension numbers of a `dot_general`."""

    lhs: Shape
    rhs: Shape
    contracting: tuple[Shape, Shape]
    batch: tuple[Shape, Shape] = ((), ())


CASES = {
    "plain": Case((40, 64), (64, 48), ((1,), (0,))),
    "ragged": Case((34, 70), (70, 37), ((1,), (0,))),
    "transposed": Case((70, 6), (5, 70), ((0,), (1,))),
    "odd_batch": Case((6, 2, 40, 3), (40, 3, 5, 2), ((2,), (0,)), ((3, 1), (1, 3))),
    "kept_around": Case((3, 40, 17), (33, 40, 2), ((1,), (1,))),
    "contracting": Case((6, 3, 40), (3, 40, 5), ((1, 2), (0, 1))),
    "contracting_crossed": Case((34, 6, 4), (4, 5, 34), ((2, 0), (0, 2))),
    "negative": Case((2, 6, 40), (40, 5, 2), ((-1,), (-3,)), ((-3,), (-1,))),
    "vectors": Case((70,), (70,), ((0,), (0,))),
    "row": Case((40,), (40, 37), ((0,), (0,))),
    "column": Case((37, 40), (40,), ((1,), (0,))),
    "batch_of_vectors": Case((40, 3), (3, 40), ((0,), (1,)), ((1,), (0,))),
}
NUM_ROWS = 2048

# Six operands in six ways: any two of them exchanged show.
DISTINCT = Recipe(
    name="distinct",
    output=MatmulSpec(lhs=operand("mxfp4", scale_rule="even"), rhs=operand("mxint8")),
    grad_input=MatmulSpec(lhs=operand("mxfp6_e2m3"), rhs=operand("mxfp4", scale_rule="floor")),
    grad_weight=MatmulSpec(lhs=operand("mxint8", scale_rule="ceil"), rhs=operand("mxfp6_e3m2")),
    residuals=Residuals.PRIMAL,
)
QUANTIZED = dataclasses.replace(DISTINCT, name="quantized", residuals="quantized")
HIGH_GRAD_WEIGHT = DISTINCT.with_(name="high_grad_weight", grad_weight=None)
QUANTIZED_HIGH_GRAD_WEIGHT = QUANTIZED.with_(name="quantized_high_grad_weight", grad_weight=None)
ONE_SIDED = dataclasses.replace(
    DISTINCT,
    name="one_sided",
    output=MatmulSpec(lhs=operand("mxfp4"), rhs=None),
    grad_input=MatmulSpec(lhs=None, rhs=operand("mxfp4")),
    grad_weight=MatmulSpec(lhs=operand("mxint8"), rhs=None),
)
SQUARE_BLOCKS = uniform(
    operand("mxfp4_2d", scale_rule="even"), "square_blocks", residuals=Residuals.QUANTIZED
)
RECIPES = (
    recipes.mxfp8_hybrid(),
    recipes.nvfp4(),
    recipes.weight_only("mxfp4"),
    recipes.float8_rowwise_with_gw_hp(),
    QUANTIZED,
    HIGH_GRAD_WEIGHT,
    QUANTIZED_HIGH_GRAD_WEIGHT,
    ONE_SIDED,
    SQUARE_BLOCKS,
)


class Letters:
    """The axes of a product by letter: batch and contracted letters are shared."""

    def __init__(self, case: Case):
        lhs = list("abcdefg"[: len(case.lhs)])
        rhs = list("ABCDEFG"[: len(case.rhs)])
        for left, right in zip(*case.contracting, strict=True):
            rhs[right] = lhs[left]
        for left, right in zip(*case.batch, strict=True):
            rhs[right] = lhs[left]
        self.batch = [lhs[axis] for axis in case.batch[0]]
        self.k = [lhs[axis] for axis in case.contracting[0]]
        self.m = [letter for letter in lhs if letter not in rhs]
        self.n = [letter for letter in rhs if letter not in lhs]
        self.lhs, self.rhs = "".join(lhs), "".join(rhs)
        self.out = "".join(self.batch + self.m + self.n)


def cast(x: np.ndarray, term: str, group: list[str], spec: OperandSpec | None) -> np.ndarray:
    """x as the product over the letters of `group` sees it, in float64."""
    if spec is None:
        return x.astype(np.float64)
    if not group:
        # A product over no axis is one over an axis of length one.
        return cast(x[..., None], term + "z", ["z"], spec)[..., 0]
    axis = term.index(group[-1])
    if spec.format.scale.kind != "exponent" or spec.format.block != (1, 32):
        return exact_values(quantize(x, spec, axis))
    # Blocks by hand: zero-pad the axis, cut it, one block a row. A fixed number of rows compiles
    # once for all cases.
    rows = np.moveaxis(x, axis, -1)
    length = rows.shape[-1]
    padding = [(0, 0)] * (x.ndim - 1) + [(0, -length % 32)]
    padded = np.pad(rows, padding)
    blocks = np.zeros((NUM_ROWS, 32), np.float32)
    blocks[: padded.size // 32] = padded.reshape(-1, 32)
    values = exact_values(quantize(blocks, spec, -1))[: padded.size // 32]
    return np.moveaxis(values.reshape(padded.shape)[..., :length], -1, axis)


def quantize(x: np.ndarray, spec: OperandSpec, axis: int) -> mx_jax.MXArray:
    options = {"scale_rule": spec.scale_rule, "rounding": spec.rounding}
    return mx_jax.quantize(x, spec.format, axis=axis, **options)


def by_hand(
    case: Case, recipe: Recipe, lhs: np.ndarray, rhs: np.ndarray, g: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The product and both cotangents, in float64."""
    to = Letters(case)
    left = cast(lhs, to.lhs, to.k, recipe.output.lhs)
    right = cast(rhs, to.rhs, to.k, recipe.output.rhs)
    product = np.einsum(f"{to.lhs},{to.rhs}->{to.out}", left, right)
    if recipe.residuals is Residuals.QUANTIZED:
        lhs, rhs = left.astype(np.float32), right.astype(np.float32)
    grad_input = np.einsum(
        f"{to.out},{to.rhs}->{to.lhs}",
        cast(g, to.out, to.n, recipe.grad_input.lhs),
        cast(rhs, to.rhs, to.n, recipe.grad_input.rhs),
    )
    grad_weight = np.einsum(
        f"{to.out},{to.lhs}->{to.rhs}",
        cast(g, to.out, to.m, recipe.grad_weight.lhs),
        cast(lhs, to.lhs, to.m, recipe.grad_weight.rhs),
    )
    return product, grad_input, grad_weight


def draw(case: Case, rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    """Operands and a cotangent of the product."""
    lhs, rhs = draw_few_octaves(rng, case.lhs), draw_few_octaves(rng, case.rhs)
    sizes = dict(zip(Letters(case).lhs + Letters(case).rhs, case.lhs + case.rhs, strict=True))
    return lhs, rhs, draw_few_octaves(rng, tuple(sizes[letter] for letter in Letters(case).out))


def compare(case: Case, recipe: Recipe, rng: np.random.Generator, jit=quick) -> None:
    arrays = draw(case, rng)
    numbers = case.contracting, case.batch
    run = with_gradients(lambda lhs, rhs: recipe.dot_general(lhs, rhs, numbers))
    actual = jit(run)(*arrays)
    expected = by_hand(case, recipe, *arrays)
    if is_exact(recipe):
        check(actual, [array.astype(np.float32) for array in expected])
        return
    for left, right in zip(actual, expected, strict=True):
        np.testing.assert_allclose(left, right, rtol=0, atol=2e-6 * np.abs(right).max())


def is_exact(recipe: Recipe) -> bool:
    """Whether no product of the recipe needs more bits than float32 has."""
    products = recipe.output, recipe.grad_input, recipe.grad_weight
    specs = [spec for product in products for spec in (product.lhs, product.rhs)]
    return all(spec is not None and spec.format.scale.kind == "exponent" for spec in specs)


@pytest.mark.slow(but="plain|odd_batch|kept_around|crossed|batch_of_vectors")
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_dimension_numbers(case: Case, rng: np.random.Generator):
    compare(case, DISTINCT, rng)


@pytest.mark.slow(but="mxfp8_hybrid|weight_only|^quantized$|square_blocks")
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_recipes(recipe: Recipe, rng: np.random.Generator):
    # Float scales round in every step: the order of steps that users get is the one to test.
    compare(CASES["plain"], recipe, rng, quick if is_exact(recipe) else jax.jit)


def test_quantized_residuals_in_odd_positions(rng: np.random.Generator):
    compare(CASES["odd_batch"], QUANTIZED, rng)


def test_residuals_quantized_keep_no_primal():
    """Residuals between the passes are uint8 codes and scales, not the float operands."""
    x, w = np.ones((64, 96), np.float32), np.ones((96, 32), np.float32)

    def kept(recipe: Recipe) -> list[str]:
        _, pullback = jax.vjp(lambda a, b: mx_jax.matmul(a, b, recipe=recipe), x, w)
        return sorted({str(leaf.dtype) for leaf in jax.tree.leaves(pullback)})

    assert kept(DISTINCT) == ["float32"]
    assert kept(QUANTIZED) == ["uint8"]


def test_square_blocks_are_transformed_anew(rng: np.random.Generator):
    """Codes that lie along both axes can be reused, but not where a product transforms them."""
    x, w, g = (rng.standard_normal((32, 32), np.float32) for _ in range(3))
    square = recipes.mxfp4().with_(weights={"format": "mxfp4_2d", "scale_rule": "even"})
    transform = recipes.mxfp4_hadamard().grad_weight.transform
    transformed = dataclasses.replace(square.grad_input, transform=transform)
    recipe = dataclasses.replace(square, grad_input=transformed, residuals="quantized")

    @functools.partial(quick, static_argnums=0)
    def grad_input(recipe: Recipe, w: jax.Array) -> jax.Array:
        return jax.vjp(lambda x: mx_jax.matmul(x, w, recipe=recipe), x)[1](g)[0]

    values = mx_jax.quantize(w.T, "mxfp4_2d", scale_rule="even").dequantize().T
    plain = dataclasses.replace(recipe, residuals="primal")
    assert_bitwise_equal(grad_input(recipe, w), grad_input(plain, values))
