"""Who passes stored weights to GPU kernels is warned once, and nobody else."""

import dataclasses
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import mx_jax
from mx_jax import recipes
from mx_jax.specs import Residuals
from tests.backends.mosaic import needs_mosaic

pytestmark = needs_mosaic


@pytest.mark.parametrize(("rows", "warns"), [(4, True), (1024, False)])
def test_stored_weights_warn_of_packing(rows: int, warns: bool):
    """Once; not where XLA multiplies, nor of packed weights, nor of what the product quantizes."""
    recipe = mx_jax.recipes.weight_only("mxfp4")
    x, w = jnp.ones((rows, 256), jnp.bfloat16), jnp.ones((256, 128))
    stored = mx_jax.quantize(w, "mxfp4", axis=0)

    def trace(w: Any) -> None:
        jax.jit(lambda x, w: mx_jax.matmul(x, w, recipe=recipe)).trace(x, w)

    with mx_jax.testing.target("cuda", (9, 0)):
        trace(stored)
        with mx_jax.prefer_backends("pallas_gpu"), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trace(w)
            trace(mx_jax.pack_weights(stored))
            assert not caught
            trace(stored)
            messages = [str(warning.message) for warning in caught]
    expected = (
        "matmul: weights are laid out for backend pallas_gpu at every call, which takes longer "
        "than a product of few rows: shape=(256, 128), format=mxfp4; lay them out once with "
        "mx_jax.pack_weights"
    )
    assert messages == [expected] * warns


@pytest.mark.parametrize(("rows", "warns"), [(4, True), (1024, False)])
def test_stored_weights_on_the_left_belong_on_the_right(rows: int, warns: bool):
    """Nothing packs them there, so every call lays them out."""
    recipe = recipes.high_precision()
    stored = mx_jax.quantize(jnp.ones((128, 256)), "mxfp4", axis=1)
    x = jnp.ones((256, rows), jnp.bfloat16)
    with (
        mx_jax.testing.target("cuda", (9, 0)),
        mx_jax.prefer_backends("pallas_gpu"),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        jax.jit(lambda w, x: mx_jax.matmul(w, x, recipe=recipe)).trace(stored, x)
    expected = (
        "matmul: the left operand is laid out for backend pallas_gpu at every call, which takes "
        "longer than a product of few rows: shape=(128, 256), format=mxfp4; put the weights on the "
        "right and pack them once with mx_jax.pack_weights"
    )
    assert [str(warning.message) for warning in caught] == [expected] * warns


def _left_alone() -> recipes.Recipe:
    """Activations in few bits by weights in high precision."""
    own = recipes.mxfp8()
    return own.with_(fwd=dataclasses.replace(own.fwd, rhs=None))


@pytest.mark.parametrize("recipe", [recipes.mxfp8(), _left_alone()], ids=["both", "left alone"])
@pytest.mark.parametrize("residuals", Residuals)
def test_operands_kept_for_gradients_are_no_stored_weights(
    recipe: recipes.Recipe, residuals: Residuals
):
    """Their codes differ with every step: nothing could be packed once."""
    recipe = recipe.with_(residuals=residuals)

    def dense(x: jax.Array, w: jax.Array) -> jax.Array:
        return mx_jax.matmul(x, w, recipe=recipe).sum()

    def groups(x: jax.Array, w: jax.Array) -> jax.Array:
        return mx_jax.ragged_dot(x, w[None], jnp.array([4]), recipe=recipe).sum()

    def quantized_here(x: jax.Array, w: jax.Array) -> jax.Array:
        codes = mx_jax.quantize(x, "mxfp8_e4m3")
        return mx_jax.matmul(codes, w, recipe=recipes.high_precision()).sum()

    given = [jax.ShapeDtypeStruct(shape, "bfloat16") for shape in ((4, 256), (256, 128))]
    with (
        mx_jax.testing.target("cuda", (9, 0)),
        mx_jax.prefer_backends("pallas_gpu"),
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("error", message=".*pack_weights")
        for loss in (dense, groups, quantized_here):
            jax.eval_shape(jax.grad(loss, (0, 1)), *given)
            jax.eval_shape(loss, *given)
