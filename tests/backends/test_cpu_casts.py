"""Casts by compiled handlers are the reference's: beyond amax, transforms, tensor scales."""

import collections
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import mx_jax
from mx_jax import recipes
from mx_jax.ops.product import transformed
from mx_jax.recipes import Hadamard
from mx_jax.reference import hadamard
from mx_jax.testing.compare import assert_bitwise_equal
from tests.needs import needs_library

pytestmark = needs_library


# Squares of errors of the smallest are subnormal, which XLA takes for 0.
@pytest.mark.parametrize(("dtype", "size"), [("bfloat16", 1), ("float32", 1e-20)])
@pytest.mark.parametrize(("format", "axis"), [("nvfp4", -1), ("nvfp4", 0), ("nvfp4_2d", -1)])
def test_the_better_of_two_casts(format: str, axis: int, dtype: str, size: float):
    """Blocks of many sizes, some cut by the ends of axes; the same choice as the reference's."""
    x = size * jax.random.normal(jax.random.key(2), (3, 40, 88)) ** 3
    x = x.at[0, :16].set(0).at[1, 3, 5].set(jnp.nan).astype(dtype)
    cast = lambda x: mx_jax.quantize(x, format, axis=axis, scale_rule="four_over_six")  # noqa: E731
    found = {}
    for name in ("cpu_ffi", "reference"):
        with mx_jax.only_backend(name):
            found[name] = jax.jit(cast)(x)
    assert_bitwise_equal(found["cpu_ffi"].codes, found["reference"].codes)
    assert_bitwise_equal(found["cpu_ffi"].scales, found["reference"].scales)


def test_a_block_may_be_longer_than_its_axis():
    x = jax.random.normal(jax.random.key(3), (64, 48))
    cast = lambda size: mx_jax.quantize(  # noqa: E731
        x, "nvfp4", scale_rule="four_over_six", block_size=size
    )
    assert_bitwise_equal(cast(2**37).codes, cast(48).codes)


# Hadamard transforms by the compiled handler: the reference's within rounding, in its place.


RNG = np.random.default_rng(0)


def drawn(shape: tuple[int, ...], dtype: str, size: int) -> tuple[jax.Array, Hadamard]:
    signs = tuple(RNG.choice([-1, 1], size).tolist())
    return jnp.asarray(RNG.normal(size=shape), dtype), Hadamard(size=size, signs=signs)


def is_near(found: jax.Array, exact: np.ndarray, size: int) -> bool:
    """Within the rounding of log2(size) sums of what may be as long as all of a group."""
    bound = (np.log2(size) + 2) * 2.0**-24 * np.sqrt(size) * np.abs(exact).max(initial=1)
    return bool((np.abs(np.asarray(found, np.float64) - exact) <= bound).all())


@pytest.mark.parametrize(
    ("size", "dtype"),
    [
        *[(2, "float32"), (4, "bfloat16"), (8, "float16"), (16, "float32")],
        *[(32, "bfloat16"), (64, "float16"), (128, "float32"), (1024, "bfloat16")],
    ],
)
def test_the_values_of_the_reference(size: int, dtype: str):
    shapes = [((5, size + 3), 1), ((2 * size + 1, 33), 0)]
    if size == 16:
        shapes += [((2, 3 * size - 1, 2, 3), 1), ((size + 1,), 0), ((0, size), 1)]
    for shape, axis in shapes:
        x, transform = drawn(shape, dtype, size)
        turned = transformed(x, transform, None, axis)
        as_float64 = np.moveaxis(np.asarray(x, np.float64), axis, -1)
        missing = -x.shape[axis] % size
        padded = np.pad(as_float64, [(0, 0)] * (x.ndim - 1) + [(0, missing)])
        groups = padded.reshape(*padded.shape[:-1], padded.shape[-1] // size, size)
        # Over sqrt(size) in float64, which float32's matrix rounds.
        square = np.sign(hadamard.matrix(size)).astype(np.float64) / np.sqrt(size)
        exact = (groups * np.asarray(transform.signs, np.float64) @ square).reshape(padded.shape)
        assert turned.dtype == jnp.float32
        assert is_near(turned, np.moveaxis(exact, -1, axis), size), (shape, axis)


def test_infinity_and_nan_stay_in_their_groups():
    x, transform = drawn((4, 64), "float32", 32)
    x = x.at[0, 3].set(jnp.inf).at[1, 40].set(jnp.nan)
    turned = np.asarray(transformed(x, transform, None, 1))
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
    x, transform = drawn((4096,), "float32", 2048)
    text = str(mx_jax.inspect.explain(lambda x: transformed(x, transform, None, 0), x))
    assert "cpu_ffi: transforms groups of at most 1024, got size=2048" in text


@pytest.mark.parametrize("batch", [(), (3,)])
def test_a_program_has_calls_alone(batch: tuple[int, ...]):
    """What XLA compiled around each of them took ten times as long as all else."""

    def product(x, w):
        return mx_jax.matmul(x, w, recipe="nvfp4")

    for _ in batch:
        product = jax.vmap(product)
    with mx_jax.only_backend("cpu_ffi"):
        lowered = jax.jit(product).lower(jnp.ones((*batch, 8, 64)), jnp.ones((*batch, 64, 32)))
    text = lowered.as_text("hlo")
    kinds = collections.Counter(re.findall(r"^ .* = .*?[\])}] ([a-z-]+)\(", text, re.MULTILINE))
    assert kinds.pop("custom-call") == 2 + 1
    assert not set(kinds) - {"parameter", "constant", "call", "tuple", "get-tuple-element"}
