"""Stored weights in products by GPU kernels warn once, and nothing else warns."""

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mx_jax
from mx_jax import recipes
from mx_jax.specs import Residuals
from tests.backends.mosaic import needs_mosaic
from tests.quick import lowered

pytestmark = needs_mosaic


AT_EVERY_CALL = (
    "laid out for backend pallas_gpu at every call, which takes longer than a product of few rows: "
)


def warned(run: Callable[..., Any], *tracing: tuple[Any, ...]) -> list[str]:
    """Messages of traces for an H200 with the kernels preferred; without, the first has none."""
    with mx_jax.testing.target("cuda", (9, 0)):
        jax.jit(run).trace(*tracing[0])
        with mx_jax.prefer_backends("pallas_gpu"), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for operands in tracing:
                lowered(run, *operands, platform="cuda")
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize(("rows", "warns"), [(4, True), (1024, False)])
def test_stored_weights_warn_of_packing(rows: int, warns: bool):
    """Once; not where XLA multiplies, nor of packed weights, nor of what the product quantizes."""
    recipe = recipes.weight_only("mxfp4")
    x, w = jnp.ones((rows, 256), jnp.bfloat16), jnp.ones((256, 128))
    stored = mx_jax.quantize(w, "mxfp4", axis=0)
    with mx_jax.testing.target("cuda", (9, 0)), mx_jax.prefer_backends("pallas_gpu"):
        packed = mx_jax.pack_weights(stored)

    def product(x: jax.Array, w: Any) -> jax.Array:
        return mx_jax.matmul(x, w, recipe=recipe)

    assert not warned(product, (x, w), (x, packed))
    expected = (
        f"matmul: weights are {AT_EVERY_CALL}shape=(256, 128), format=mxfp4; lay them out once "
        "with mx_jax.pack_weights"
    )
    assert warned(product, (x, stored)) == [expected] * warns
    # Nothing packs them on the left, so every call lays them out.
    expected = (
        f"matmul: the left operand is {AT_EVERY_CALL}shape=(128, 256), format=mxfp4; put the "
        "weights on the right and pack them once with mx_jax.pack_weights"
    )
    left = lambda w, x: mx_jax.matmul(w, x, recipe=recipes.high_precision())  # noqa: E731
    assert warned(left, (stored.T, x.T)) == [expected] * warns


@pytest.mark.parametrize("differentiated", [False, True])
def test_stored_experts_warn_of_packing(differentiated: bool):
    """Once; not of packed experts, nor of those that the product or its gradients quantize."""
    # Of other shapes, so that nothing was traced before.
    rows, sizes = 16 if differentiated else 8, np.array([3, 4], np.int32)
    x, w = jnp.ones((rows, 64), jnp.bfloat16), jnp.ones((2, 64, 64), jnp.bfloat16)
    stored = mx_jax.quantize(w, "mxfp4", axis=1)

    def product(x: jax.Array, w: Any) -> jax.Array:
        return jnp.sum(mx_jax.ragged_dot(x, w, sizes, recipe="mxfp4")).astype(jnp.float32)

    run = jax.value_and_grad(product) if differentiated else product
    if differentiated:
        assert not warned(run, (x, w))
    else:
        with mx_jax.testing.target("cuda", (9, 0)), mx_jax.prefer_backends("pallas_gpu"):
            packed = mx_jax.pack_weights(stored, contracting=1, num_batch=1)
        assert not warned(run, (x, w), (x, packed))
    assert warned(run, (x, stored)) == [
        f"ragged_dot: weights are {AT_EVERY_CALL}shape=(2, 64, 64), format=mxfp4; lay them out "
        "once with mx_jax.pack_weights(..., contracting=1, num_batch=1)"
    ]


MXFP8 = recipes.mxfp8()
# Activations in few bits by weights in high precision.
LEFT_ALONE = MXFP8.with_(output=dataclasses.replace(MXFP8.output, rhs=None))


@pytest.mark.parametrize("recipe", [MXFP8, LEFT_ALONE], ids=["both", "left alone"])
@pytest.mark.parametrize("residuals", Residuals)
def test_operands_kept_for_gradients_are_no_stored_weights(
    recipe: recipes.Recipe, residuals: Residuals
):
    """Their codes differ with every step: nothing could be packed once."""
    recipe = dataclasses.replace(recipe, residuals=residuals)

    def dense(x: jax.Array, w: jax.Array) -> jax.Array:
        return mx_jax.matmul(x, w, recipe=recipe).sum()

    def groups(x: jax.Array, w: jax.Array) -> jax.Array:
        return mx_jax.ragged_dot(x, w[None], jnp.array([4]), recipe=recipe).sum()

    def quantized_here(x: jax.Array, w: jax.Array) -> jax.Array:
        codes = mx_jax.quantize(x, "mxfp8_e4m3")
        return mx_jax.matmul(codes, w, recipe=recipes.high_precision()).sum()

    shapes = [jax.ShapeDtypeStruct(shape, "bfloat16") for shape in ((4, 256), (256, 128))]
    with (
        mx_jax.testing.target("cuda", (9, 0)),
        mx_jax.prefer_backends("pallas_gpu"),
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("error", message=".*pack_weights")
        for loss in (dense, groups, quantized_here):
            jax.eval_shape(jax.grad(loss, (0, 1)), *shapes)
            jax.eval_shape(loss, *shapes)
