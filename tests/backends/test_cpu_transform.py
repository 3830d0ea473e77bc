"""Hadamard transforms by the compiled handler: the reference's within rounding, in its place."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import mx_jax
from mx_jax import recipes
from mx_jax.ops.operands import transformed, turned_back
from mx_jax.reference import hadamard
from tests.needs import needs_library

pytestmark = needs_library

RNG = np.random.default_rng(0)


def drawn(shape: tuple[int, ...], dtype: str, size: int) -> tuple[jax.Array, jax.Array]:
    signs = jnp.asarray(RNG.choice([-1, 1], size), jnp.int32)
    return jnp.asarray(RNG.normal(size=shape), dtype), signs


def is_near(found: jax.Array, exact: np.ndarray, size: int) -> bool:
    """Within the rounding of log2(size) sums of what may be as long as all of a group."""
    bound = (np.log2(size) + 2) * 2.0**-24 * np.sqrt(size) * np.abs(exact).max(initial=1)
    return bool((np.abs(np.asarray(found, np.float64) - exact) <= bound).all())


@pytest.mark.parametrize("size", [2, 4, 8, 16, 32, 64, 128, 1024])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_values_of_the_reference(size: int, dtype: str):
    for shape, axis in [
        ((3, 2 * size), 1),
        ((5, size + 3), 1),
        ((size, 7), 0),
        ((2 * size + 1, 33), 0),
        ((2, 3 * size - 1, 2, 3), 1),
        ((size + 1,), 0),
        ((0, size), 1),
    ]:
        x, signs = drawn(shape, dtype, size)
        turned = transformed(x, signs, axis)
        as_float64 = np.moveaxis(np.asarray(x, np.float64), axis, -1)
        missing = -x.shape[axis] % size
        padded = np.pad(as_float64, [(0, 0)] * (x.ndim - 1) + [(0, missing)])
        groups = padded.reshape(*padded.shape[:-1], padded.shape[-1] // size, size)
        # Over sqrt(size) in float64, which float32's matrix rounds.
        square = np.sign(hadamard.matrix(size)).astype(np.float64) / np.sqrt(size)
        exact = (groups * np.asarray(signs, np.float64) @ square).reshape(padded.shape)
        assert turned.dtype == jnp.float32
        assert is_near(turned, np.moveaxis(exact, -1, axis), size), (shape, axis)
        back = turned_back(turned, signs, x.shape[axis], axis)
        assert back.shape == x.shape
        assert is_near(back, np.asarray(x, np.float64), size), (shape, axis)


def test_infinity_and_nan_stay_in_their_groups():
    x, signs = drawn((4, 64), "float32", 32)
    x = x.at[0, 3].set(jnp.inf).at[1, 40].set(jnp.nan)
    turned = np.asarray(transformed(x, signs, 1))
    assert np.isinf(turned[0, :32]).all() and np.isfinite(turned[0, 32:]).all()
    assert np.isnan(turned[1, 32:]).all() and np.isfinite(turned[1, :32]).all()


def test_who_transforms():
    """The handler on one device, XLA's own dot where devices share the program."""
    recipe = recipes.mxfp4_stochastic()
    x, w = jnp.ones((64, 64)), jnp.ones((64, 96))
    step = jax.jit(
        jax.grad(
            lambda w, x: mx_jax.matmul(x, w, recipe=recipe, key=jax.random.key(0)).sum(), (0, 1)
        )
    )
    assert step.lower(w, x).as_text().count("@mx_jax_cpu_transform") == 2
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    cut = jax.device_put(x, NamedSharding(mesh, PartitionSpec("data")))
    assert "mx_jax_cpu_transform" not in step.lower(w, cut).as_text()


def test_groups_that_are_too_large():
    x, signs = drawn((4096,), "float32", 2048)
    text = mx_jax.inspect.explain_call(lambda x: transformed(x, signs, 0), x)
    assert "cpu_ffi: turns groups of at most 1024, got size=2048" in text
