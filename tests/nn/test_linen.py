"""linen layers with a recipe: Flax's parameters, Flax's numbers in high precision."""

import functools
import re
from typing import Any

import flax.linen as flax_nn
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import mx_jax
from mx_jax import recipes
from mx_jax.nn import linen
from mx_jax.recipes import MatmulSpec, Recipe, operand
from mx_jax.testing.compare import assert_bitwise_equal
from mx_jax.testing.draw import draw_few_octaves
from tests.nn import layers
from tests.nn.layers import HIGH, MXFP4, assert_trees_equal, stochastic, weighted_sum
from tests.quick import quick

KEY = jax.random.key(0)


class Case(layers.Case):
    def flax(self, **options: Any) -> flax_nn.Module:
        return getattr(flax_nn, self.layer)(*self.arguments, **dict(self.options), **options)

    def ours(self, recipe: Recipe = MXFP4, **options: Any) -> flax_nn.Module:
        options |= dict(self.options)
        return getattr(linen, self.layer)(*self.arguments, recipe=recipe, **options)

    def params(self) -> dict[str, Any]:
        """Parameters whose products with x need no rounding."""
        shapes = jax.eval_shape(self.flax().init, KEY, self.x())["params"]
        rng = np.random.default_rng(1)
        return {name: draw_few_octaves(rng, leaf.shape) for name, leaf in shapes.items()}


CASES = {
    "dense": Case(layer="Dense", arguments=(24,), input=(3, 5, 40), contracting=((2,), (0,))),
    "dense_general": Case(
        layer="DenseGeneral",
        arguments=((4, 6),),
        options=(("axis", (-2, -1)),),
        input=(5, 3, 40),
        contracting=((1, 2), (0, 1)),
    ),
    "dense_general_batch": Case(
        layer="DenseGeneral",
        arguments=(6,),
        options=(("batch_dims", (0,)),),
        input=(3, 5, 40),
        contracting=((2,), (1,)),
        batch=((0,), (0,)),
    ),
    "einsum": Case(
        layer="Einsum",
        arguments=((40, 4, 6), "btd,dhk->bthk"),
        input=(2, 5, 40),
        contracting=((2,), (0,)),
    ),
}
cases = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def value_and_grads(layer: Any, params: Any, x: Any) -> tuple[Any, Any]:
    """Output, and the gradients of a loss by parameters and input."""

    def loss(params, x):
        y = layer.apply({"params": params}, x)
        return weighted_sum(y), y

    gradients, y = jax.grad(loss, argnums=(0, 1), has_aux=True)(params, x)
    return y, gradients


@pytest.mark.by_default("dense$|True-einsum")
@cases
@pytest.mark.parametrize("use_bias", [True, False])
def test_parameters_are_flaxs(case: Case, use_bias: bool):
    """Names, shapes, dtypes and, from the same key, values."""
    options = {"use_bias": use_bias, "param_dtype": jnp.bfloat16}
    ours = quick(case.ours(HIGH, **options).init)(KEY, case.x())
    assert_trees_equal(ours, quick(case.flax(**options).init)(KEY, case.x()))
    assert set(ours["params"]) == ({"kernel", "bias"} if use_bias else {"kernel"})


@pytest.mark.by_default("dense$|einsum")
@cases
def test_high_precision_is_flax(case: Case):
    """Outputs and gradients, bit for bit, from each other's checkpoint."""
    saved = flax.serialization.to_bytes({"params": case.params()})
    target = jax.eval_shape(case.ours().init, KEY, case.x())
    loaded = flax.serialization.from_bytes(target, saved)
    x = np.random.default_rng(0).standard_normal(case.input, np.float32)
    actual, expected = (
        jax.jit(functools.partial(value_and_grads, layer))(loaded["params"], x)
        for layer in (case.ours(HIGH), case.flax())
    )
    assert_trees_equal(actual, expected)


def product_by_hand(case: Case, params: Any, x: Any) -> jax.Array:
    dimensions = (case.contracting, case.batch)
    y = mx_jax.dot_general(x, params["kernel"], dimensions, recipe=MXFP4)
    return y + (params["bias"][:, None] if case.batch[0] else params["bias"])


@pytest.mark.by_default("dense$|einsum")
@cases
def test_mxfp4_is_dot_general(case: Case):
    params, x = case.params(), case.x()
    actual = quick(case.ours().apply)({"params": params}, x)
    assert_bitwise_equal(actual, quick(functools.partial(product_by_hand, case))(params, x))


def test_gradients_are_those_of_dot_general():
    case = CASES["dense_general"]

    class ByHand:
        def apply(self, variables, x):
            return product_by_hand(case, variables["params"], x)

    actual, expected = (
        quick(functools.partial(value_and_grads, layer))(case.params(), case.x())
        for layer in (case.ours(), ByHand())
    )
    assert_trees_equal(actual, expected)


@pytest.mark.by_default("dense$|einsum")
@cases
def test_an_mxarray_kernel_is_used_as_it_is(case: Case):
    """Only x is cast to MXFP4; the kernel keeps its MXINT8 codes."""
    params, x = case.params(), case.x()
    kernel = mx_jax.quantize(params["kernel"], "mxint8", axis=case.contracting[1][-1])
    both = MatmulSpec(lhs=MXFP4.fwd.lhs, rhs=operand("mxint8"))
    recipe = MXFP4.with_(fwd=both)
    variables = {"params": params | {"kernel": kernel}}
    actual = quick(case.ours().apply)(variables, x)
    assert_bitwise_equal(actual, quick(case.ours(recipe).apply)({"params": params}, x))


def test_an_mxarray_kernel_in_an_unmodified_layer():
    """Through __jax_array__: the values of the codes, multiplied in high precision."""
    case = CASES["dense"]
    params, x = case.params(), case.x()
    kernel = mx_jax.quantize(params["kernel"], "mxint8", axis=0)
    actual = flax_nn.Dense(24).apply({"params": params | {"kernel": kernel}}, x)
    values = {"params": params | {"kernel": kernel.dequantize()}}
    assert_bitwise_equal(actual, flax_nn.Dense(24).apply(values, x))


def test_gradient_past_an_mxarray_kernel():
    """Biases and inputs of a frozen quantized layer train."""
    case = CASES["dense"]
    params, x = case.params(), case.x()
    kernel = mx_jax.quantize(params["kernel"], "mxint8", axis=0)

    def loss(bias, x):
        return jnp.sum(case.ours().apply({"params": {"kernel": kernel, "bias": bias}}, x) ** 2)

    by_bias, by_x = quick(jax.grad(loss, argnums=(0, 1)))(params["bias"], x)
    assert np.all(np.abs(by_bias) > 0) and np.all(np.any(np.abs(by_x) > 0, axis=-1))


@pytest.mark.by_default("True")
@cases
@pytest.mark.parametrize("quantized", [False, True])
def test_dtype_is_that_of_the_computation(case: Case, quantized: bool):
    params = case.params()
    if quantized:
        axis = case.contracting[1][-1]
        params["kernel"] = mx_jax.quantize(params["kernel"], "mxfp4", axis=axis)
    apply = functools.partial(case.ours(dtype=jnp.bfloat16).apply, {"params": params})
    assert jax.eval_shape(apply, case.x()).dtype == jnp.bfloat16


def test_bfloat16_is_flaxs_in_high_precision():
    case = CASES["dense"]
    actual, expected = (
        quick(functools.partial(value_and_grads, layer))(case.params(), case.x())
        for layer in (case.ours(HIGH, dtype=jnp.bfloat16), case.flax(dtype=jnp.bfloat16))
    )
    assert actual[0].dtype == jnp.bfloat16
    assert_trees_equal(actual, expected)


def test_a_dot_general_of_the_users_own_is_respected():
    calls = []

    def own(*args, **options):
        calls.append(options)
        return lax.dot_general(*args, **options)

    x = np.ones((2, 40), np.float32)
    variables = quick(flax_nn.Dense(3).init)(KEY, x)
    for options in ({"dot_general": own}, {"dot_general_cls": lambda: own}):
        for layer in (
            linen.Dense(3, recipe=MXFP4, **options),
            linen.DenseGeneral(3, recipe=MXFP4, **options),
        ):
            actual = layer.apply(variables, x)
            assert_bitwise_equal(actual, flax_nn.Dense(3).apply(variables, x))
    assert len(calls) == 4


def test_a_promote_dtype_of_the_users_own_is_respected():
    def own(*args, dtype=None, inexact=True):
        return [None if arg is None else jnp.asarray(arg, jnp.float16) for arg in args]

    x = np.ones((2, 40), np.float32)
    for layer in (
        linen.Dense(3, recipe=MXFP4, promote_dtype=own),
        linen.DenseGeneral(3, recipe=MXFP4, promote_dtype=own),
        linen.Einsum((40, 3), "bd,de->be", recipe=MXFP4, promote_dtype=own),
    ):
        assert jax.eval_shape(layer.init_with_output, KEY, x)[0].dtype == jnp.float16


@pytest.mark.parametrize("layer", ["Dense", "DenseGeneral"])
def test_a_clone_with_another_recipe_has_it(layer: str):
    original = getattr(linen, layer)(3, recipe=MXFP4)
    clone = original.clone(recipe=recipes.mxint8())
    assert clone.dot_general.recipe == recipes.mxint8()
    assert original.dot_general.recipe == MXFP4


class Block(flax_nn.Module):
    """A residual layer, as flax.linen.scan wants it."""

    layer: Any

    @flax_nn.compact
    def __call__(self, x, _):
        return x + self.layer(x.shape[-1])(x), None


class Stack(flax_nn.Module):
    """Layers under remat and scan."""

    layer: Any

    @flax_nn.compact
    def __call__(self, x):
        scanned = flax_nn.scan(
            flax_nn.remat(Block), variable_axes={"params": 0}, split_rngs={"params": True}, length=2
        )
        return scanned(layer=self.layer)(x, None)[0]


def test_scan_and_remat():
    ours = Stack(layer=functools.partial(linen.Dense, recipe=HIGH))
    plain = Stack(layer=flax_nn.Dense)
    x = np.random.default_rng(0).standard_normal((3, 40), np.float32)
    params = quick(plain.init)(KEY, x)
    assert_trees_equal(quick(ours.init)(KEY, x), params)
    actual, expected = (
        quick(functools.partial(value_and_grads, model))(params["params"], x)
        for model in (ours, plain)
    )
    assert_trees_equal(actual, expected)


def test_scan_over_layers_is_the_layers_one_by_one():
    model = Stack(layer=functools.partial(linen.Dense, recipe=MXFP4))
    x = draw_few_octaves(np.random.default_rng(0), (3, 40))
    variables = quick(Stack(layer=flax_nn.Dense).init)(KEY, x)
    (stacked,) = jax.tree.leaves(variables, is_leaf=lambda leaf: "kernel" in leaf)

    @quick
    def one_by_one(stacked, y):
        for i in range(2):
            params = {name: leaf[i] for name, leaf in stacked.items()}
            y = y + linen.Dense(40, recipe=MXFP4).apply({"params": params}, y)
        return y

    expected = one_by_one(stacked, x)
    np.testing.assert_allclose(quick(model.apply)(variables, x), expected, rtol=1e-5, atol=1e-5)


class Model(flax_nn.Module):
    """Every kind of layer once."""

    recipe: Recipe

    @flax_nn.compact
    def __call__(self, x):
        x = linen.Dense(8, recipe=self.recipe)(x)
        x = linen.DenseGeneral((2, 4), recipe=self.recipe)(x)
        return linen.Einsum((2, 4, 3), "bhk,hkd->bd", recipe=self.recipe)(x)


def test_a_rebuilt_model_is_not_retraced():
    traces = []

    @functools.partial(jax.jit, static_argnums=0)
    def apply(model, variables, x):
        traces.append(model)
        return model.apply(variables, x)

    x = np.ones((2, 40), np.float32)
    variables = quick(Model(recipe=HIGH).init)(KEY, x)
    for _ in range(3):
        apply(Model(recipe=recipes.weight_only("mxfp8_e4m3")), variables, x)
    assert len(traces) == 1
    apply(Model(recipe=HIGH), variables, x)
    assert len(traces) == 2


@pytest.mark.parametrize("layer", ["Dense", "DenseGeneral"])
def test_a_rebuilt_layer_is_not_retraced(layer: str):
    """The layer itself is the static argument: it compares and hashes by its recipe."""
    traces = []

    @functools.partial(jax.jit, static_argnums=0)
    def apply(model, variables, x):
        traces.append(model)
        return model.apply(variables, x)

    def build(recipe: Recipe) -> flax_nn.Module:
        return getattr(linen, layer)(3, recipe=recipe)

    x = np.ones((2, 40), np.float32)
    variables = quick(flax_nn.Dense(3).init)(KEY, x)
    for _ in range(3):
        apply(build(recipes.weight_only("mxfp8_e4m3")), variables, x)
    assert len(traces) == 1
    assert build(recipes.mxfp8()) == build(recipes.mxfp8())
    assert build(recipes.mxfp8()) != build(MXFP4)


def test_the_recipe_is_required():
    with pytest.raises(TypeError, match="recipe"):
        linen.Dense(3)  # pyright: ignore[reportCallIssue]


@pytest.mark.parametrize("case", [CASES["dense"], CASES["einsum"]], ids=["dense", "einsum"])
def test_stochastic_recipes_draw_from_the_quantize_stream(case: Case):
    layer, x = case.ours(stochastic()), case.x()
    variables = {"params": case.params()}
    init = jax.eval_shape(layer.init, KEY, x)
    assert init == jax.eval_shape(case.flax().init, KEY, x)
    apply = quick(lambda key: layer.apply(variables, x, rngs={"quantize": key}))
    first, again, other = (apply(jax.random.key(seed)) for seed in (0, 0, 1))
    assert_bitwise_equal(first, again)
    assert not np.array_equal(first, other)
    message = (
        f"{case.layer}: recipe 'stochastic' draws random bits and needs the 'quantize' stream; "
        "call apply(..., rngs={'quantize': key})"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        layer.apply(variables, x)


@pytest.mark.parametrize(
    ("subscripts", "message"),
    [
        ("bd,de", "Einsum: needs explicit subscripts with '->', got 'bd,de'"),
        ("bd->b", "Einsum: needs exactly two operands, got 'bd->b'"),
    ],
)
def test_einsum_errors(subscripts: str, message: str):
    with pytest.raises(ValueError, match=re.escape(message)):
        linen.Einsum((40, 3), subscripts, recipe=MXFP4).init(KEY, np.ones((2, 40)))


def test_einsum_takes_its_subscripts_at_the_call():
    x = np.ones((2, 40), np.float32)
    layer, plain = linen.Einsum((40, 3), recipe=HIGH), flax_nn.Einsum((40, 3))
    variables = plain.init(KEY, x, "bd,de->be")
    assert_bitwise_equal(
        layer.apply(variables, x, " bd , de -> be "), plain.apply(variables, x, "bd,de->be")
    )
