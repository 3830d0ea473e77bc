"""What ragged_dot refuses, and the texts that say why."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

import mx_jax
from mx_jax.formats import MXFP4, NVFP4, WHOLE
from mx_jax.ops.ragged_dot import ragged_dot
from mx_jax.recipes import Hadamard, MatmulSpec, operand
from tests.extending.least_error import LEAST_ERROR
from tests.recipes.uniform import uniform

M, K, N, GROUPS = 12, 16, 8, 3
SPEC = operand(MXFP4.with_block(8), scale_rule="even")

RECIPE = uniform(SPEC)
X, W, SIZES = np.ones((M, K), np.float32), np.ones((GROUPS, K, N), np.float32), [4, 4, 4]
BAD_ARGUMENTS = {
    "rank of lhs": ((X[None], W, SIZES), ValueError, r"lhs \[m, k\].*lhs.shape=\(1, 12, 16\)"),
    "rank of rhs": ((X, W[0], SIZES), ValueError, r"rhs \[g, k, n\].*rhs.shape=\(16, 8\)"),
    "rank of sizes": ((X, W, [SIZES]), ValueError, r"\[g\].*group_sizes.shape=\(1, 3\)"),
    "k": ((X[:, 1:], W, SIZES), ValueError, "contracting sizes must agree, here k=15 and k=16"),
    "g": ((X, W, [6, 6]), ValueError, "every group needs a matrix, here g=2 and g=3"),
    "float sizes": ((X, W, [4.0, 4.0, 4.0]), TypeError, "must be integers, got dtype=float32"),
    "sizes beyond int32": (
        (X, W, np.array([4, 2**32, 4])),
        ValueError,
        r"must lie in 0..2147483647, got 4294967296 among 3.*numpy.clip\(group_sizes, 0, lhs",
    ),
    "huge sizes": ((X, W, [4, 2**70, 4]), ValueError, "must lie in 0..2147483647, got 11805"),
    "negative sizes": ((X, W, [4, -1, 4]), ValueError, "must lie in 0..2147483647, got -1"),
    "bool sizes": ((X, W, [True] * 3), TypeError, "must be integers, got dtype=bool"),
    "lhs dtype": ((X.astype(int), W, SIZES), TypeError, "lhs must be float32.*dtype=int64"),
    "rhs dtype": ((X, W.astype(int), SIZES), TypeError, "rhs must be float32.*dtype=int64"),
}


@pytest.mark.parametrize(("arguments", "error", "text"), BAD_ARGUMENTS.values(), ids=BAD_ARGUMENTS)
def test_bad_arguments(arguments, error, text: str):
    with pytest.raises(error, match=text):
        ragged_dot(*arguments, recipe=RECIPE)


@pytest.mark.parametrize(("side", "blocked"), [("lhs", 0), ("rhs", 2)])
def test_blocks_along_another_axis(side: str, blocked: int):
    operands = {"lhs": X, "rhs": W}
    operands[side] = mx_jax.quantize(operands[side], "mxfp4", axis=blocked)
    text = (
        f"ragged_dot: {side} is contracted along axis=1, but this .*axis={blocked}; "
        "quantize it with axis=1"
    )
    with pytest.raises(ValueError, match=text):
        ragged_dot(**operands, group_sizes=SIZES, recipe=RECIPE)


FOUR_OVER_SIX = operand(NVFP4.with_block(WHOLE), scale_rule="four_over_six")
BAD_RECIPES = {
    "name": ("mxfp9", "ragged_dot: unknown recipe name='mxfp9' .did"),
    "rule of values": (
        uniform(FOUR_OVER_SIX),
        r"grad_weight.lhs of recipe 'uniform'.*block=\(1, WHOLE\) of format=nvfp4.*'four_over_six'",
    ),
    "rule of values over rows": (
        uniform(operand(dataclasses.replace(MXFP4, block=(WHOLE, 8)), scale_rule=LEAST_ERROR)),
        r"output.lhs of recipe 'uniform'.*block=\(WHOLE, 8\) of format=mxfp4.*'least_error'",
    ),
}


@pytest.mark.parametrize(("recipe", "text"), BAD_RECIPES.values(), ids=BAD_RECIPES)
def test_bad_recipes(recipe, text: str):
    with pytest.raises(ValueError, match=text):
        ragged_dot(X, W, SIZES, recipe=recipe)


def test_a_transform_does_not_take_an_mxarray():
    hadamard = Hadamard(size=4, signs=(1, 1, 1, 1))
    output = MatmulSpec(lhs=SPEC, rhs=SPEC, transform=hadamard)
    weights = jax.eval_shape(lambda w: mx_jax.quantize(w, SPEC.format, axis=1), W)
    run = functools.partial(ragged_dot, recipe=uniform(SPEC, output=output))
    with pytest.raises(ValueError, match=r"an MXArray no longer allows, got format=mxfp4"):
        jax.eval_shape(run, X, weights, SIZES)
