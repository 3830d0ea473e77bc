"""Layers with a recipe, of linen and of nnx: Flax's parameters, Flax's numbers in high precision.

What both give is stated once and asked of each; what one alone has follows.
"""

import functools
import re
from typing import Any

import flax.linen as flax_nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx as flax_nnx
from jax import lax

from mx_jax import recipes
from mx_jax.nn import linen, nnx
from mx_jax.testing.compare import assert_bitwise_equal
from mx_jax.testing.draw import draw_few_octaves
from tests.nn.layers import (
    CASES,
    DENSE,
    EINSUM,
    HIGH,
    MXFP4,
    Case,
    Linen,
    Nnx,
    assert_trees_equal,
    stochastic,
    weighted_sum,
)
from tests.quick import quick

KEY = jax.random.key(0)


both = pytest.mark.parametrize("flaxs", [Linen(), Nnx()], ids=["linen", "nnx"])
cases = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
some_cases = pytest.mark.slow(but="dense|einsum")


def tame(flaxs: Linen, case: Case) -> dict[str, Any]:
    """Parameters whose products with x need no rounding."""
    rng = np.random.default_rng(1)
    shapes = flaxs.params(flaxs.build(case), case.drawn())
    return {name: jnp.asarray(draw_few_octaves(rng, shapes[name].shape)) for name in sorted(shapes)}


def value_and_grads(run: Any, params: Any, x: Any) -> Any:
    """Output, and the gradients of a loss by parameters and input."""

    def loss(params: Any, x: Any) -> Any:
        y = run(params, x)
        return weighted_sum(y), y

    gradients, y = quick(jax.grad(loss, argnums=(0, 1), has_aux=True))(params, x)
    return y, gradients


@some_cases
@both
@cases
def test_parameters_are_flaxs(flaxs: Linen, case: Case):
    """Names, shapes, dtypes and, from the same key, values."""
    without = [{"use_bias": False}] if case is DENSE else []
    for options in ({}, *without):
        options |= {"param_dtype": jnp.bfloat16}
        ours, flax = (
            flaxs.params(flaxs.build(case, recipe, **options), case.drawn())
            for recipe in (HIGH, None)
        )
        assert_trees_equal(ours, flax)
        assert set(ours) == {"kernel", *(["bias"] if options.get("use_bias", True) else [])}


@some_cases
@both
@cases
def test_high_precision_is_flax(flaxs: Linen, case: Case):
    """Outputs and gradients, bit for bit, from Flax's parameters."""
    x = np.random.default_rng(0).standard_normal(case.x, np.float32)
    params = flaxs.params(flaxs.build(case), x)
    ours, flax = (
        value_and_grads(flaxs.run(flaxs.build(case, recipe)), params, x) for recipe in (HIGH, None)
    )
    assert_trees_equal(ours, flax)


@some_cases
@both
@cases
def test_mxfp4_is_einsum(flaxs: Linen, case: Case):
    """And its gradients."""

    params, x, ours = tame(flaxs, case), case.drawn(), flaxs.run(flaxs.build(case, MXFP4))
    by_hand = lambda params, x: case.multiply(x, params, MXFP4)  # noqa: E731
    ours, expected = (value_and_grads(run, params, x) for run in (ours, by_hand))
    assert_trees_equal(ours, expected)


@both
def test_an_mxarray_kernel_in_an_unmodified_layer(flaxs: Linen):
    """Through __jax_array__: the values of the codes, multiplied in high precision."""
    params, x, run = tame(flaxs, DENSE), DENSE.drawn(), flaxs.run(flaxs.build(DENSE))
    kernel = DENSE.stored(params["kernel"], "mxint8")
    actual, expected = (run(params | {"kernel": k}, x) for k in (kernel, kernel.dequantize()))
    assert_bitwise_equal(actual, expected)


@both
@cases
def test_dtype_is_that_of_the_computation(flaxs: Linen, case: Case):
    params, run = tame(flaxs, case), flaxs.run(flaxs.build(case, MXFP4, dtype=jnp.bfloat16))
    for kernel in (params["kernel"], case.stored(params["kernel"], "mxfp4")):
        stored = params | {"kernel": kernel}
        assert jax.eval_shape(run, stored, case.drawn()).dtype == jnp.bfloat16


@both
def test_bfloat16_is_flaxs_in_high_precision(flaxs: Linen):
    options: dict[str, Any] = {"dtype": jnp.bfloat16}
    if isinstance(flaxs, Nnx):
        options["preferred_element_type"] = jnp.float32
    ours, flax = (
        value_and_grads(
            flaxs.run(flaxs.build(DENSE, recipe, **options)), tame(flaxs, DENSE), DENSE.drawn()
        )
        for recipe in (HIGH, None)
    )
    assert ours[0].dtype == options.get("preferred_element_type", jnp.bfloat16)
    assert_trees_equal(ours, flax)


@both
def test_operations_of_the_user_are_respected(flaxs: Linen):
    calls = []

    def dot(*args: Any, **options: Any) -> Any:
        calls.append(options)
        return lax.dot_general(*args, **options)

    def einsum(*args: Any, **options: Any) -> Any:
        calls.append(options)
        return jnp.einsum(*args, **options)

    chosen = [
        (DENSE, {"dot_general": dot}),
        (CASES["general"], {"dot_general": dot}),
        (CASES["general"], {"dot_general_cls": lambda: dot}),
        (EINSUM, {"einsum_op": einsum})
        if isinstance(flaxs, Nnx)
        else (DENSE, {"dot_general_cls": lambda: dot}),
    ]
    for case, options in chosen:
        params, x = tame(flaxs, case), case.drawn()
        actual = flaxs.run(flaxs.build(case, MXFP4, **options))(params, x)
        assert_bitwise_equal(actual, flaxs.run(flaxs.build(case))(params, x))
    assert len(calls) == 4


@both
@cases
def test_a_promote_dtype_of_the_user_is_respected(flaxs: Linen, case: Case):
    layer = flaxs.build(case, MXFP4, promote_dtype=flaxs.promotes)
    y = jax.eval_shape(flaxs.run(layer), tame(flaxs, case), case.drawn())
    assert y.dtype == jnp.float16


@both
@cases
def test_the_recipe_is_required(flaxs: Linen, case: Case):
    name, *arguments = case.nnx if isinstance(flaxs, Nnx) else case.linen
    options = {"rngs": flax_nnx.Rngs(0)} if isinstance(flaxs, Nnx) else {}
    with pytest.raises(TypeError, match="recipe"):
        getattr(nnx if options else linen, name)(*arguments, **options)


# linen --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layer", [linen.Dense, linen.DenseGeneral])
def test_copies_and_equality(layer: Any):
    """A clone with another recipe has it; equal recipes make equal layers."""
    original = layer(3, recipe=MXFP4)
    assert original.clone(recipe=recipes.mxint8()).dot_general.recipe == recipes.mxint8()
    assert original.dot_general.recipe == MXFP4
    assert layer(3, recipe="mxfp4") == layer(3, recipe=recipes.mxfp4()) == original
    assert original != layer(3, recipe=recipes.mxfp8())


def test_einsum_subscripts():
    """Given to the constructor or to the call; those that are no product of two are refused."""
    x = np.ones((2, 40), np.float32)
    layer, plain = linen.Einsum((40, 3), recipe=HIGH), flax_nn.Einsum((40, 3))
    variables = plain.init(KEY, x, "bd,de->be")
    assert_bitwise_equal(
        layer.apply(variables, x, " bd , de -> be "), plain.apply(variables, x, "bd,de->be")
    )
    for subscripts, message in (
        ("bd,de", "Einsum: needs explicit subscripts with '->', got 'bd,de'"),
        ("bd->b", "Einsum: needs exactly two operands, got 'bd->b'"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            layer.init(KEY, x, subscripts)


# nnx ----------------------------------------------------------------------------------------------


@pytest.mark.slow(but="dense")
@pytest.mark.parametrize("case", [DENSE, EINSUM], ids=["dense", "einsum"])
def test_nnx_draws_anew_at_every_call(case: Case):
    first, second = (Nnx().build(case, stochastic()) for _ in range(2))
    call, x = flax_nnx.jit(lambda layer, x: layer(x)), case.drawn()
    once, calls = call(first, x), call(first, x)
    assert not np.array_equal(once, calls)
    assert_bitwise_equal(call(second, x), once)


STREAMS = [{"default": 0}, {"params": 0, "quantize": 1}, {"default": 0, "params": 1}]


def key_of(layer: Any) -> bytes:
    return jax.random.key_data(layer.rngs.key[...]).tobytes()


@pytest.mark.parametrize("streams", STREAMS, ids=str)
def test_every_layer_has_another_stream(streams: dict[str, int]):
    """Rounding errors of two layers must not be those of one; a rebuilt model has the same.

    And the parameters are Flax's, also those of the layers that are built after it.
    """

    def layers() -> list[Any]:
        rngs = flax_nnx.Rngs(**streams)
        return [
            nnx.Linear(8, 4, recipe=stochastic(), rngs=rngs),
            nnx.Linear(8, 4, recipe=stochastic(), use_bias=False, rngs=rngs),
            nnx.LinearGeneral(8, 4, recipe=stochastic(), rngs=rngs),
            nnx.Einsum("bk,kn->bn", (8, 4), recipe=stochastic(), rngs=rngs),
        ]

    keys = list(map(key_of, layers()))
    assert len(set(keys)) == 4
    assert list(map(key_of, layers())) == keys
    plain = flax_nnx.Rngs(**streams)
    for layer, use_bias in zip(layers()[:2], (True, False), strict=True):
        flax = flax_nnx.Linear(8, 4, use_bias=use_bias, rngs=plain)
        assert_bitwise_equal(layer.kernel[...], flax.kernel[...])


@pytest.mark.slow(but="params")
@pytest.mark.parametrize("only", [..., "params"], ids=["all", "params"])
def test_layers_of_a_stack_have_different_streams(only: Any):
    """Made by nnx.vmap: also where only the parameters' stream is split."""

    axes = flax_nnx.StateAxes({"params": 0, ...: 0 if only is ... else None})

    @flax_nnx.split_rngs(splits=3, only=only)
    @flax_nnx.vmap(in_axes=(axes,), out_axes=0)
    def make(rngs: flax_nnx.Rngs):
        return [nnx.Linear(8, 4, recipe=stochastic(), rngs=rngs) for _ in range(2)]

    rngs = flax_nnx.Rngs(params=0, quantize=1)
    keys = [jax.random.key_data(layer.rngs.key[...]) for layer in (*make(rngs), *make(rngs))]
    assert len(np.unique(np.concatenate(keys), axis=0)) == 12


def test_a_layer_made_below_jit_has_the_stream_of_one_made_outside():
    def make(rngs: flax_nnx.Rngs):
        return [nnx.Linear(8, 4, recipe=stochastic(), rngs=rngs) for _ in range(2)]

    rngs = functools.partial(flax_nnx.Rngs, 0, quantize=1)
    keys = [key_of(layer) for layer in (*flax_nnx.jit(make)(rngs()), *make(rngs()))]
    assert keys[:2] == keys[2:] and keys[0] != keys[1]


@pytest.mark.parametrize("case", [DENSE, EINSUM], ids=["dense", "einsum"])
def test_a_missing_stream_is_named(case: Case):
    name, *arguments = case.nnx
    message = (
        f"{name}: recipe 'stochastic' draws random bits and needs the 'quantize' stream, got rngs "
        "with 'params', 'dropout'; pass rngs=nnx.Rngs(..., quantize=seed)"
    )
    rngs = flax_nnx.Rngs(params=0, dropout=1)
    with pytest.raises(ValueError, match=re.escape(message)):
        getattr(nnx, name)(*arguments, recipe=stochastic(), rngs=rngs)
