"""What tests of linen and of nnx layers share."""

from typing import Any

import jax
import jax.numpy as jnp

from mx_jax import recipes
from mx_jax.recipes import Recipe
from mx_jax.testing.compare import assert_bitwise_equal

HIGH, MXFP4 = recipes.high_precision(), recipes.mxfp4()


def assert_trees_equal(actual: Any, expected: Any) -> None:
    """The same tree with the same bits; the message names the leaf that differs."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(expected)]
    leaves = zip(paths, jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)
    for path, left, right in leaves:
        assert_bitwise_equal(left, right, what=path)


def weighted_sum(y: jax.Array) -> jax.Array:
    """A loss whose gradient by y differs from place to place, in whole numbers."""
    return jnp.sum(y * (jnp.arange(y.size) % 7 - 3).reshape(y.shape))


def stochastic() -> Recipe:
    """MXFP4 that draws random bits for every operand of every product."""
    return MXFP4.with_(scale_rule="rceil", rounding="stochastic", name="stochastic")
