"""Products under vmap on automatic axes: what the compiler moves are codes there too."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import mx_jax
from mx_jax.testing.compare import assert_bitwise_equal
from mx_jax.testing.draw import draw_few_octaves
from tests.quick import OPTIONS, with_gradients
from tests.sharding.collectives import gathered

P = PartitionSpec
BATCH, TOKENS, FEATURES, UNITS = 3, 128, 128, 32
MXFP4 = mx_jax.recipes.mxfp4()
# Codes and scales of one weight.
PACKED = FEATURES * UNITS * 17 // 32

AXES = {"fsdp": 4}


def draw(*shape: int) -> jax.Array:
    return jnp.asarray(draw_few_octaves(np.random.default_rng(len(shape)), shape))


def product(x: Any, w: Any) -> jax.Array:
    return mx_jax.matmul(x, w, recipe=MXFP4)


def step(axes: tuple[int | None, int | None]) -> Any:
    """A mapped product and its gradients, of integers where they need no rounding."""
    return with_gradients(jax.vmap(product, axes))


def k_first_in_batch(x: jax.Array, w: jax.Array) -> jax.Array:
    """Batched in a product that has a batch, and contracts first axes."""
    numbers = (((1,), (1,)), ((0,), (0,)))
    return mx_jax.dot_general(x, w, numbers, recipe=MXFP4)


X, W, XS = (P(None, "fsdp"), P("fsdp"), P("fsdp"))
CASES = {
    "one weight": (step((0, None)), (BATCH, TOKENS), (), X, W, 2 * PACKED),
    "a weight each": (step((0, 0)), (BATCH, TOKENS), (BATCH,), X, P(None, "fsdp"), 6 * PACKED),
    "one input": (step((None, 0)), (TOKENS,), (BATCH,), XS, P(None, "fsdp"), 6 * PACKED),
}


@pytest.mark.parametrize("case", CASES)
def test_codes_move(case: str, mesh: Mesh):
    run, many, each, lhs, rhs, moved = CASES[case]
    x, w = draw(*many, FEATURES), draw(*each, FEATURES, UNITS)
    places = tuple(NamedSharding(mesh, spec) for spec in (lhs, rhs, X))
    operands = jax.device_put((x, w, draw(BATCH, TOKENS, UNITS) / 2), places)
    with jax.set_mesh(mesh):
        lowered = jax.jit(run, out_shardings=(places[2], *places[:2])).lower(*operands)
        compiled = lowered.compile(compiler_options=OPTIONS)
    text = compiled.as_text() or ""
    assert gathered(text, "u8") == gathered(text) == moved
    with mx_jax.only_backend("reference"):
        expected = jax.jit(run, compiler_options=OPTIONS)(*map(np.asarray, operands))
    for actual, whole in zip(compiled(*operands), expected, strict=True):
        np.testing.assert_allclose(actual, whole, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("axes", [(0, None), (None, 0), (0, 0), (2, 3)], ids=str)
def test_batches_of_batches(axes: tuple[int | None, int | None], mesh: Mesh):
    """Operands that hold their contracted axes first, in products with a batch."""
    x, w = draw(2, FEATURES, TOKENS), draw(2, FEATURES, UNITS)
    x, w = (
        array if axis is None else jnp.stack([array, -array, 2 * array], axis)
        for array, axis in zip((x, w), axes, strict=True)
    )
    run = jax.vmap(k_first_in_batch, axes)
    expected = run(x, w)
    with jax.set_mesh(mesh):
        assert_bitwise_equal(jax.jit(run, compiler_options=OPTIONS)(x, w), expected)
