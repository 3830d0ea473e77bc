"""The block Hadamard transform: its matrix, its signs, and what it is along an axis."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mx_jax
from mx_jax import recipes
from mx_jax.codecs.lowering import Lowering, lowering
from mx_jax.reference import hadamard
from mx_jax.reference.hadamard import Hadamard
from tests.quick import quick

SIGNS = np.array([1, -1, -1, 1], np.float32)


def sylvester(size: int) -> np.ndarray:
    """(-1)^(number of ones in i & j) / sqrt(size)."""
    ones = [[(i & j).bit_count() for j in range(size)] for i in range(size)]
    return ((-1.0) ** np.array(ones) / math.sqrt(size)).astype(np.float32)


@pytest.mark.parametrize("size", [2, 4, 16, 128])
def test_matrix(size: int):
    matrix = hadamard.matrix(size)
    assert matrix.dtype == np.float32
    np.testing.assert_array_equal(matrix, sylvester(size))


@pytest.mark.parametrize("size", [-2, 0, 1, 3, 12])
def test_a_size_is_a_power_of_two_above_one(size: int):
    with pytest.raises(ValueError, match=f"must be a power of two above 1, got size={size}"):
        Hadamard(size=size, signs=None)


def test_signs_are_one_each():
    assert Hadamard(size=2, signs=(1, -1)).signs == (1, -1)
    for signs in ((1,), (1, -1, 1), (1, 0), (2, 1)):
        with pytest.raises(ValueError, match="needs size=2 signs of 1 or -1, got signs="):
            Hadamard(size=2, signs=signs)
    with pytest.raises(TypeError, match="size must be an int, got size=True"):
        Hadamard(size=True, signs=None)


def test_transform_along_an_axis():
    """In float32, from any dtype; what fills the last group up is transformed with it."""
    x = np.random.default_rng(0).integers(-8, 8, (3, 6, 2)).astype(np.float32)
    padded = np.pad(x, ((0, 0), (0, 2), (0, 0))).reshape(3, 2, 4, 2)
    expected = np.einsum("agij,ik->agkj", padded * SIGNS[:, None], sylvester(4)).reshape(3, 8, 2)
    apply = quick(hadamard.apply, static_argnames="axis")
    result = apply(jnp.bfloat16(x), np.asarray(SIGNS), axis=1)
    assert result.dtype == jnp.float32
    np.testing.assert_array_equal(result, expected)
    with lowering(Lowering("tpu")):
        fast = apply(jnp.bfloat16(x), np.asarray(SIGNS), axis=1)
    assert fast.dtype == jnp.float32
    np.testing.assert_array_equal(fast, expected)
    # By default along the last axis; shorter than a group too. No operand's rank is promoted.
    few = x[:1, :3]
    with jax.numpy_rank_promotion("raise"):
        last = apply(few, np.asarray(SIGNS))
    expected = np.pad(few, ((0, 0), (0, 0), (0, 2))) * SIGNS @ sylvester(4)
    np.testing.assert_array_equal(last, expected)
    for shape, filled in (((5,), (8,)), ((2, 3, 5), (2, 3, 8))):
        out = jax.eval_shape(hadamard.apply, jnp.ones(shape), jnp.asarray(SIGNS))
        assert out.shape == filled


def test_weights_that_are_constants_of_the_program():
    """XLA computes what depends on them alone when it compiles, by an evaluator of its own."""
    rng, transform = np.random.default_rng(0), Hadamard(size=32, signs=(1,) * 32)
    x, w = (rng.standard_normal(shape, np.float32) for shape in ((4, 64), (64, 32)))
    recipe = recipes.mxfp4().with_(
        output=dataclasses.replace(recipes.mxfp4().output, transform=transform)
    )
    with mx_jax.only_backend("reference"):
        inside = jax.jit(lambda x: mx_jax.matmul(x, w, recipe=recipe))(x)
        as_argument = jax.jit(lambda x, w: mx_jax.matmul(x, w, recipe=recipe))(x, w)
    np.testing.assert_allclose(inside, as_argument, rtol=1e-5, atol=1e-4)
