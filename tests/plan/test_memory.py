"""What a plan says is kept is what programs of small steps keep."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import mx_jax
from mx_jax import recipes
from mx_jax.plan.step import Model, Setup, block_residuals, memory, transformer
from mx_jax.recipes import Recipe
from tests.plan.test_traffic import (
    DOWN,
    EXPERT_UP,
    HIDDEN,
    LAYERS,
    MODEL,
    POLICIES,
    TOKENS,
    UP,
    WIDTH,
)

ROWS = 64
KEPT = recipes.mxfp8().with_(name="codes kept", residuals="quantized")


def kept_bytes(setup: Setup, recipe: Recipe) -> int:
    """Bytes that a block of `MODEL` holds on to, without its weights."""

    def block(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        # What a nonlinear function keeps of its own is not a linear layer's.
        act = (lambda x: x) if setup.remat == "none" else jnp.sin
        h = act(mx_jax.matmul(act(x), up, recipe=recipe))
        return x + mx_jax.matmul(h, down, recipe=recipe)

    if setup.remat != "none":
        block = jax.checkpoint(block, policy=POLICIES[setup.remat])
    x = jnp.ones((ROWS, WIDTH), setup.dtype)
    up, down = jnp.ones((UP.k, UP.n), setup.dtype), jnp.ones((DOWN.k, DOWN.n), setup.dtype)
    with mx_jax.only_backend("reference"):
        _, pullback = jax.vjp(block, x, up, down)
    own = {leaf.unsafe_buffer_pointer() for leaf in (up, down)}
    leaves = {leaf.unsafe_buffer_pointer(): leaf for leaf in arrays(pullback)}
    return sum(leaf.nbytes for pointer, leaf in leaves.items() if pointer not in own)


@pytest.mark.slow(but="mxfp8-")
@pytest.mark.parametrize("remat", list(POLICIES))
@pytest.mark.parametrize(
    "recipe",
    [recipes.high_precision(), recipes.mxfp8(), KEPT, recipes.weight_only("mxfp4")],
    ids=lambda recipe: recipe.name,
)
def test_residuals_are_what_a_block_keeps(recipe: Recipe, remat: str):
    setup = Setup(tokens=ROWS, dtype=np.dtype(np.float32), remat=remat)
    assert block_residuals(MODEL, setup, recipe) == kept_bytes(setup, recipe)


def arrays(tree: Any) -> list[jax.Array]:
    """The leaves that lie on a device; newest JAX keeps constants as NumPy's."""
    return [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)]


def test_rows_that_came_as_codes_are_kept_as_codes():
    recipe, sizes = recipes.mxfp6(), jnp.array([ROWS, 0])
    setup = Setup(tokens=2 * ROWS, expert=4, dtype=np.dtype(np.float32))
    spec = recipe.fwd.lhs
    assert spec is not None

    def product(x: jax.Array, w: jax.Array) -> jax.Array:
        rows = mx_jax.quantize(x, spec.format, scale_rule=spec.scale_rule)
        return mx_jax.ragged_dot(rows, w, sizes, recipe=recipe)

    x, w = jnp.ones((ROWS, EXPERT_UP.k)), jnp.ones((2, EXPERT_UP.k, EXPERT_UP.n))
    with mx_jax.only_backend("reference"):
        _, pullback = jax.vjp(product, x, w)
    leaves = {leaf.unsafe_buffer_pointer(): leaf for leaf in arrays(pullback)}
    own = {w.unsafe_buffer_pointer()}
    kept = [leaf for pointer, leaf in leaves.items() if pointer not in own and leaf.size > 2]
    model = Model(params=EXPERT_UP.params, layers=1, width=WIDTH, linears=(EXPERT_UP,))
    assert block_residuals(model, setup, recipe) == sum(leaf.nbytes for leaf in kept)
    # Two of eight experts on each device.
    assert memory(model, setup, recipe).parameters == 4 * 2 * EXPERT_UP.k * EXPERT_UP.n


def test_parameters_and_moments_are_what_a_device_holds():
    devices = np.array(jax.devices()[:8]).reshape(2, 2, 2)
    mesh = jax.sharding.Mesh(devices, ("data", "fsdp", "model"))
    params = {
        own.name: jax.device_put(
            jnp.ones((LAYERS, own.k, own.n), jnp.float32),
            NamedSharding(mesh, PartitionSpec(None, "fsdp", "model")),
        )
        for own in (UP, DOWN)
    }
    state = optax.adam(1e-3).init(params)

    def on_a_device(tree: Any) -> int:
        return sum(
            leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(tree) if leaf.ndim
        )

    found = memory(MODEL, Setup(data=2, fsdp=2, model=2, tokens=TOKENS), recipes.mxfp8())
    assert found.parameters == found.gradients == on_a_device(params)
    assert found.optimizer == on_a_device(state)
    assert found.total == 4 * found.parameters + found.residuals


def test_inputs_lie_on_the_devices_that_read_them():
    """Columns read all features of their tokens, rows their part of them."""
    one = Setup(tokens=TOKENS)
    whole, recipe = block_residuals(MODEL, one, recipes.mxfp8()), recipes.mxfp8()
    assert whole == TOKENS * (WIDTH + HIDDEN) * 2
    for setup, expected in (
        (dataclasses.replace(one, data=2, fsdp=2), whole / 4),
        (dataclasses.replace(one, model=2), TOKENS * (WIDTH + HIDDEN / 2) * 2),
        (dataclasses.replace(one, model=2, sequence=True), whole / 2),
        # What goes into a block.
        (
            dataclasses.replace(one, model=2, sequence=True, remat="nothing_saveable"),
            TOKENS / 2 * WIDTH * 2,
        ),
    ):
        assert block_residuals(MODEL, setup, recipe) == expected


def test_a_known_model_comes_out():
    """Llama 3 70B, by its published sizes."""
    found = transformer(70_553_706_496, 80, width=8192, kv_width=1024, vocabulary=128256)
    assert [(own.k, own.n) for own in found.linears] == [
        (8192, 10240),
        (8192, 8192),
        (8192, 2 * 28672),
        (28672, 8192),
    ]
    assert found.other_params == 2 * 128256 * 8192 + 161 * 8192
    assert found.assumed == ("hidden=28,672, what the parameters leave for a gated MLP",)


def test_what_is_not_said_is_assumed():
    found = transformer(1e9, 16)
    assert abs(found.linear_params - 1e9) < 0.02e9
    assert [line.partition("=")[0] for line in found.assumed] == ["width", "kv_width", "hidden"]
