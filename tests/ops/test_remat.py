"""jax.checkpoint quantizes no more than a program without it, if codes and scales are kept."""

import collections
import dataclasses
from collections.abc import Callable
from typing import Any

import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import mx_jax
from mx_jax import recipes
from mx_jax.backends.calls import QuantizeBothCall
from mx_jax.jaxpr.read import walk
from mx_jax.ops.programs import QUANTIZED
from mx_jax.recipes import Recipe
from tests.needs import needs_library
from tests.quick import quick

POLICIES: dict[str, Any] = {
    "nothing": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_saveable,
    "products": mx_jax.save_products,
    "quantized": mx_jax.save_quantized,
    "both": jax.checkpoint_policies.save_from_both_policies(
        mx_jax.save_quantized, jax.checkpoint_policies.dots_saveable
    ),
}
X = jax.ShapeDtypeStruct((32, 64), jnp.float32)
W = jax.ShapeDtypeStruct((64, 64), jnp.float32)
KEPT = dataclasses.replace(recipes.mxfp8(), name="codes kept", residuals="quantized")


def counts(function: Callable[..., Any], *args: Any) -> collections.Counter[str]:
    """How often a program does what: names, primitives."""
    result = collections.Counter()
    for site in walk(jax.make_jaxpr(function)(*args)):
        name = site.eqn.primitive.name
        result[site.eqn.params.get("name") or name] += site.times
        work = site.eqn.params.get("work")
        result["both"] += site.times * isinstance(getattr(work, "call", None), QuantizeBothCall)
        if name == "convert_element_type":
            aval: Any = site.eqn.outvars[0].aval
            result[f"to {aval.dtype}"] += site.times
    return result


def casts(function: Callable[..., Any], *args: Any) -> int:
    """Casts of one operand; those of groups encode in plain JAX."""
    result = counts(function, *args)
    return result["mx_quantize"] + result["both"] + result["to uint8"]


def layer(x: jax.Array, w: jax.Array, recipe: Recipe) -> jax.Array:
    """Whose gradient needs the product: without gelu nothing would be computed again."""
    key = jax.random.key(0) if recipe.is_stochastic else None
    return jax.nn.gelu(mx_jax.matmul(x, w, recipe=recipe, key=key))


def gradients(function: Callable[..., Any]) -> Callable[..., Any]:
    return jax.grad(lambda *args: function(*args).sum(), (0, 1))


def step(recipe: Recipe, policy: str | None) -> Callable[..., Any]:
    """Both gradients of a layer under a policy; None: without rematerialization."""

    def run(x: jax.Array, w: jax.Array) -> jax.Array:
        return layer(x, w, recipe)

    return gradients(run if policy is None else jax.checkpoint(run, policy=POLICIES[policy]))


@pytest.mark.parametrize(
    ("recipe", "policy", "expected"),
    [
        # Two operands forward; g twice, w and x along their other axes backward.
        (recipes.mxfp8(), None, 6),
        (recipes.mxfp8(), "nothing", 8),
        # JAX's own policies see `lax.dot_general` alone.
        (recipes.mxfp8(), "dots", 8),
        (recipes.mxfp8(), "products", 6),
        (recipes.mxfp8(), "quantized", 6),
        (recipes.mxfp8(), "both", 6),
        # Policies save the operands that were quantized, and dots are none.
        (KEPT, None, 6),
        (KEPT, "nothing", 8),
        (KEPT, "dots", 8),
        (KEPT, "products", 8),
        (KEPT, "quantized", 6),
        (KEPT, "both", 6),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_casts_of_a_step_on_the_reference(recipe: Recipe, policy: str | None, expected: int):
    with mx_jax.only_backend("reference"):
        assert casts(step(recipe, policy), X, W) == expected
        assert counts(step(recipe, policy), X, W)["both"] == 1


@pytest.mark.parametrize("name", ["nvfp4_pretraining", "mxfp4_stochastic", "float8_tensorwise"])
def test_other_recipes_quantize_as_without(name: str):
    """With a transform, a tensor scale, stochastic rounding."""
    recipe = recipes.from_name(name)
    with mx_jax.only_backend("reference"):
        plain, kept = (counts(step(recipe, policy), X, W) for policy in (None, "quantized"))
    assert kept[QUANTIZED] == plain[QUANTIZED] > 0


@pytest.mark.parametrize("policy", ["nothing", "quantized"])
def test_casts_of_flax_layers(policy: str):
    class Block(linen.Module):
        @linen.compact
        def __call__(self, x):
            return linen.gelu(mx_jax.nn.linen.Dense(64, recipe="mxfp8")(x))

    block = linen.remat(Block, policy=POLICIES[policy])()
    expected = {"nothing": 8, "quantized": 6}[policy]
    with mx_jax.only_backend("reference"):
        variables = jax.eval_shape(block.init, jax.random.key(0), X)
        assert casts(gradients(lambda v, x: block.apply(v, x)), variables, X) == expected

        module = mx_jax.nn.nnx.Linear(64, 64, recipe="mxfp8", rngs=nnx.Rngs(0))
        graph, state = nnx.split(module)

        def apply(state: Any, x: jax.Array) -> jax.Array:
            run = nnx.remat(lambda module, x: jax.nn.gelu(module(x)), policy=POLICIES[policy])
            return run(nnx.merge(graph, state), x)

        assert casts(gradients(apply), state, X) == expected


@pytest.mark.slow(but="quantized")
@pytest.mark.parametrize("policy", ["nothing", "quantized"])
def test_groups_are_kept_too(policy: str):
    def run(x: jax.Array, w: jax.Array) -> jax.Array:
        sizes = jnp.array([8, 24])
        return jax.nn.gelu(mx_jax.ragged_dot(x, w, sizes, recipe="float8_tensorwise"))

    experts = jax.ShapeDtypeStruct((2, *W.shape), W.dtype)
    with mx_jax.only_backend("reference"):
        plain = casts(gradients(run), X, experts)
        again = casts(gradients(jax.checkpoint(run, policy=POLICIES[policy])), X, experts)
    assert plain > 0
    assert (again == plain) == (policy == "quantized")


@needs_library
@pytest.mark.parametrize(("policy", "expected"), [("nothing", 2), ("quantized", 1)])
def test_two_casts_in_one_are_kept_too(policy: str, expected: int):
    def run(x: jax.Array, w: jax.Array) -> jax.Array:
        rows, columns = mx_jax.quantize_both(x, "mxfp8_e4m3")
        return jnp.sin(rows.dequantize() + columns.dequantize() + w[0])

    with mx_jax.only_backend("cpu_ffi"):
        result = counts(gradients(jax.checkpoint(run, policy=POLICIES[policy])), X, W)
    assert result["both"] == expected


def test_the_same_gradients(rng: np.random.Generator):
    recipe = recipes.mxfp4()
    x, w = (jnp.asarray(rng.standard_normal(s.shape), s.dtype) for s in (X, W))
    plain, kept = (quick(step(recipe, policy))(x, w) for policy in (None, "quantized"))
    jax.tree.map(np.testing.assert_array_equal, kept, plain)
