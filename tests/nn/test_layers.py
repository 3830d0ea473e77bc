"""Layers with a recipe, of linen and of nnx: Flax's parameters, Flax's numbers in high precision.

What both give is stated once and asked of each; what one alone has follows.
"""

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any

import flax.linen as flax_nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx as flax_nnx
from jax import lax

import mx_jax
from mx_jax import recipes
from mx_jax.nn import linen, nnx
from mx_jax.recipes import MatmulSpec, Recipe, operand
from mx_jax.testing.compare import assert_bitwise_equal
from mx_jax.testing.draw import draw_few_octaves
from tests.nn.layers import HIGH, MXFP4, assert_trees_equal, stochastic, weighted_sum
from tests.quick import quick

KEY = jax.random.key(0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A layer's name and arguments in both frameworks, and the product that it should be."""

    linen: tuple[Any, ...]
    nnx: tuple[Any, ...]
    x: tuple[int, ...]
    options: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    contracting: tuple[tuple[int, ...], tuple[int, ...]] = ((2,), (0,))
    batch: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())

    def drawn(self) -> np.ndarray:
        return draw_few_octaves(np.random.default_rng(0), self.x)

    def stored(self, kernel: Any, format: str) -> Any:
        return mx_jax.quantize(kernel, format, axis=self.contracting[1][-1])


AXIS = {"axis": (-2, -1)}
CASES = {
    "dense": Case(linen=("Dense", 24), nnx=("Linear", 40, 24), x=(3, 5, 40)),
    "general": Case(
        linen=("DenseGeneral", (4, 6)),
        nnx=("LinearGeneral", (3, 40), (4, 6)),
        options={"linen": AXIS, "nnx": AXIS},
        x=(5, 3, 40),
        contracting=((1, 2), (0, 1)),
    ),
    "batch": Case(
        linen=("DenseGeneral", 6),
        nnx=("LinearGeneral", 40, 6),
        options={"linen": {"batch_dims": (0,)}, "nnx": {"batch_axis": {0: 3}}},
        x=(3, 5, 40),
        contracting=((2,), (1,)),
        batch=((0,), (0,)),
    ),
    "einsum": Case(
        linen=("Einsum", (40, 4, 6), "btd,dhk->bthk"),
        nnx=("Einsum", "btd,dhk->bthk", (40, 4, 6), (4, 6)),
        x=(2, 5, 40),
    ),
}
DENSE, EINSUM = CASES["dense"], CASES["einsum"]


class Linen:
    """How linen's layers are made, initialized and run."""

    def build(self, case: Case, recipe: Recipe | None = None, **options: Any) -> Any:
        """With a recipe ours, without Flax's own."""
        name, *arguments = case.linen
        options |= case.options.get("linen", {})
        if recipe is None:
            return getattr(flax_nn, name)(*arguments, **options)
        return getattr(linen, name)(*arguments, recipe=recipe, **options)

    def params(self, layer: Any, x: Any) -> dict[str, Any]:
        return quick(layer.init)(KEY, x)["params"]

    def run(self, layer: Any) -> Callable[[Any, Any], jax.Array]:
        return lambda params, x: layer.apply({"params": params}, x)

    def promotes(self, *args: Any, **_: Any) -> Any:
        return [None if arg is None else jnp.asarray(arg, jnp.float16) for arg in args]


class Nnx(Linen):
    """The same of nnx."""

    def build(self, case: Case, recipe: Recipe | None = None, **options: Any) -> Any:
        name, *arguments = case.nnx
        options |= {"rngs": flax_nnx.Rngs(0)} | case.options.get("nnx", {})
        if recipe is None:
            return getattr(flax_nnx, name)(*arguments, **options)
        return getattr(nnx, name)(*arguments, recipe=recipe, **options)

    def params(self, layer: Any, x: Any) -> dict[str, Any]:
        return flax_nnx.to_pure_dict(flax_nnx.state(layer))

    def run(self, layer: Any) -> Callable[[Any, Any], jax.Array]:
        graph, state = flax_nnx.split(layer)

        def call(params: Any, x: Any) -> jax.Array:
            model = flax_nnx.merge(graph, state, copy=True)
            for name, value in params.items():
                getattr(model, name).set_value(value)
            return model(x)

        return call

    def promotes(self, args: Any, /, **options: Any) -> Any:
        return tuple(super().promotes(*args, **options))


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
def test_mxfp4_is_dot_general(flaxs: Linen, case: Case):
    """And its gradients."""

    def by_hand(params: Any, x: Any) -> jax.Array:
        dimensions = (case.contracting, case.batch)
        y = mx_jax.dot_general(x, params["kernel"], dimensions, recipe=MXFP4)
        return y + (params["bias"][:, None] if case.batch[0] else params["bias"])

    params, x = tame(flaxs, case), case.drawn()
    ours, expected = (
        value_and_grads(run, params, x) for run in (flaxs.run(flaxs.build(case, MXFP4)), by_hand)
    )
    assert_trees_equal(ours, expected)


@some_cases
@both
@cases
def test_an_mxarray_kernel_is_used_as_it_is(flaxs: Linen, case: Case):
    """Only x is cast to MXFP4; the kernel keeps its MXINT8 codes."""
    params, x = tame(flaxs, case), case.drawn()
    both = MXFP4.with_(fwd=MatmulSpec(lhs=MXFP4.fwd.lhs, rhs=operand("mxint8")))
    stored = params | {"kernel": case.stored(params["kernel"], "mxint8")}
    actual = quick(flaxs.run(flaxs.build(case, MXFP4)))(stored, x)
    assert_bitwise_equal(actual, quick(flaxs.run(flaxs.build(case, both)))(params, x))


@both
def test_an_mxarray_kernel_in_an_unmodified_layer(flaxs: Linen):
    """Through __jax_array__: the values of the codes, multiplied in high precision."""
    params, x, run = tame(flaxs, DENSE), DENSE.drawn(), flaxs.run(flaxs.build(DENSE))
    kernel = DENSE.stored(params["kernel"], "mxint8")
    actual, expected = (run(params | {"kernel": k}, x) for k in (kernel, kernel.dequantize()))
    assert_bitwise_equal(actual, expected)


@both
def test_gradient_past_an_mxarray_kernel(flaxs: Linen):
    """Biases and inputs of a frozen quantized layer train."""
    params, x, run = tame(flaxs, DENSE), DENSE.drawn(), flaxs.run(flaxs.build(DENSE, MXFP4))
    kernel = DENSE.stored(params["kernel"], "mxint8")

    def loss(bias: Any, x: Any) -> Any:
        return jnp.sum(run({"kernel": kernel, "bias": bias}, x) ** 2)

    by_bias, by_x = quick(jax.grad(loss, argnums=(0, 1)))(params["bias"], x)
    assert np.all(np.abs(by_bias) > 0) and np.all(np.any(np.abs(by_x) > 0, axis=-1))


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
def test_operations_of_the_users_own_are_respected(flaxs: Linen):
    calls = []

    def own(*args: Any, **options: Any) -> Any:
        calls.append(options)
        return lax.dot_general(*args, **options)

    def own_einsum(*args: Any, **options: Any) -> Any:
        calls.append(options)
        return jnp.einsum(*args, **options)

    chosen = [
        (DENSE, {"dot_general": own}),
        (CASES["general"], {"dot_general": own}),
        (CASES["general"], {"dot_general_cls": lambda: own}),
        (EINSUM, {"einsum_op": own_einsum})
        if isinstance(flaxs, Nnx)
        else (DENSE, {"dot_general_cls": lambda: own}),
    ]
    for case, options in chosen:
        params, x = tame(flaxs, case), case.drawn()
        actual = flaxs.run(flaxs.build(case, MXFP4, **options))(params, x)
        assert_bitwise_equal(actual, flaxs.run(flaxs.build(case))(params, x))
    assert len(calls) == 4


@both
@cases
def test_a_promote_dtype_of_the_users_own_is_respected(flaxs: Linen, case: Case):
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


@pytest.mark.parametrize("case", [DENSE, EINSUM], ids=["dense", "einsum"])
def test_linen_draws_from_the_quantize_stream(case: Case):
    layer, x = Linen().build(case, stochastic()), case.drawn()
    variables = {"params": tame(Linen(), case)}
    flax = jax.eval_shape(Linen().build(case).init, KEY, x)
    assert jax.eval_shape(layer.init, KEY, x) == flax
    apply = quick(lambda key: layer.apply(variables, x, rngs={"quantize": key}))
    first, again, other = (apply(jax.random.key(seed)) for seed in (0, 0, 1))
    assert_bitwise_equal(first, again)
    assert not np.array_equal(first, other)
    message = (
        f"{case.linen[0]}: recipe 'stochastic' draws random bits and needs the 'quantize' stream; "
        "call apply(..., rngs={'quantize': key})"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        layer.apply(variables, x)


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
    once, twice = call(first, x), call(first, x)
    assert not np.array_equal(once, twice)
    assert_bitwise_equal(call(second, x), once)


STREAMS = [{"default": 0}, {"params": 0, "quantize": 1}, {"default": 0, "params": 1}]


def key_of(layer: Any) -> bytes:
    return jax.random.key_data(layer.rngs.key[...]).tobytes()


@pytest.mark.parametrize("streams", STREAMS, ids=str)
def test_every_layer_has_a_stream_of_its_own(streams: dict[str, int]):
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
def test_layers_of_a_stack_have_streams_of_their_own(only: Any):
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
