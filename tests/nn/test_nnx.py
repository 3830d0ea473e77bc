"""nnx layers with a recipe: Flax's parameters, Flax's numbers in high precision."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

import mx_jax
from mx_jax import recipes
from mx_jax.nn import nnx as ours
from mx_jax.recipes import MatmulSpec, Recipe, operand
from mx_jax.testing.compare import assert_bitwise_equal
from mx_jax.testing.draw import draw_few_octaves
from tests.nn import layers
from tests.nn.layers import HIGH, MXFP4, assert_trees_equal, stochastic, weighted_sum
from tests.quick import quick


class Case(layers.Case):
    def flax(self, seed: int = 0, **options: Any) -> Any:
        options |= dict(self.options)
        return getattr(nnx, self.layer)(*self.arguments, rngs=nnx.Rngs(seed), **options)

    def ours(self, recipe: Recipe = MXFP4, seed: int = 0, **options: Any) -> Any:
        options |= dict(self.options)
        layer = getattr(ours, self.layer)
        return layer(*self.arguments, recipe=recipe, rngs=nnx.Rngs(seed), **options)


CASES = {
    "linear": Case(layer="Linear", arguments=(40, 24), input=(3, 5, 40), contracting=((2,), (0,))),
    "linear_general": Case(
        layer="LinearGeneral",
        arguments=((3, 40), (4, 6)),
        options=(("axis", (-2, -1)),),
        input=(5, 3, 40),
        contracting=((1, 2), (0, 1)),
    ),
    "linear_general_batch": Case(
        layer="LinearGeneral",
        arguments=(40, 6),
        options=(("batch_axis", {0: 3}),),
        input=(3, 5, 40),
        contracting=((2,), (1,)),
        batch=((0,), (0,)),
    ),
    "einsum": Case(
        layer="Einsum",
        arguments=("btd,dhk->bthk", (40, 4, 6), (4, 6)),
        input=(2, 5, 40),
        contracting=((2,), (0,)),
    ),
}
cases = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def value_and_grads(layer: Any, x: Any) -> tuple[Any, Any]:
    """Output, and the gradients of a loss by parameters and input."""
    graph, params, rest = nnx.split(layer, nnx.Param, ...)

    def run(params, x):
        def loss(params, x):
            y = nnx.merge(graph, params, rest)(x)
            return weighted_sum(y), y

        gradients, y = jax.grad(loss, argnums=(0, 1), has_aux=True)(params, x)
        return y, gradients

    y, (by_params, by_x) = quick(run)(params, x)
    return y, (nnx.to_pure_dict(by_params), by_x)


def state(layer: Any) -> dict[str, Any]:
    return nnx.to_pure_dict(nnx.state(layer))


def tame(layer: Any) -> Any:
    """The layer with parameters whose products with x need no rounding."""
    rng = np.random.default_rng(1)
    for name in ("kernel", "bias"):
        param = getattr(layer, name)
        param[...] = jnp.asarray(draw_few_octaves(rng, param.shape))
    return layer


@pytest.mark.by_default("linear$|batch")
@cases
def test_state_is_flaxs(case: Case):
    """Names, shapes, dtypes and, from the same seed, values."""
    options = {"param_dtype": jnp.bfloat16}
    actual, expected = state(case.ours(**options)), state(case.flax(**options))
    assert_trees_equal(actual, expected)
    assert set(actual) == {"kernel", "bias"}


@pytest.mark.by_default("linear$|einsum")
@cases
def test_high_precision_is_flax(case: Case):
    """Outputs and gradients, bit for bit, from each other's checkpoint."""
    plain, layer = case.flax(), case.ours(HIGH, seed=1)
    nnx.update(layer, nnx.state(plain))
    x = np.random.default_rng(0).standard_normal(case.input, np.float32)
    assert_trees_equal(value_and_grads(layer, x), value_and_grads(plain, x))
    other = case.flax(seed=2)
    nnx.update(other, nnx.state(layer))
    assert_trees_equal(state(other), state(plain))


@pytest.mark.by_default("linear$|batch")
@cases
def test_mxfp4_is_dot_general(case: Case):
    layer, x = tame(case.ours()), case.x()
    dimensions = (case.contracting, case.batch)

    @quick
    def by_hand(x, kernel, bias):
        y = mx_jax.dot_general(x, kernel, dimensions, recipe=MXFP4)
        return y + (bias[:, None] if case.batch[0] else bias)

    graph, params = nnx.split(layer)
    actual = quick(lambda params, x: nnx.merge(graph, params)(x))(params, x)
    assert_bitwise_equal(actual, by_hand(x, layer.kernel[...], layer.bias[...]))


@pytest.mark.by_default("linear$|einsum")
@cases
def test_an_mxarray_kernel_is_used_as_it_is(case: Case):
    """Only x is cast to MXFP4; the kernel keeps its MXINT8 codes, also through split and jit."""
    both = MatmulSpec(lhs=MXFP4.fwd.lhs, rhs=operand("mxint8"))
    plain = tame(case.ours(MXFP4.with_(fwd=both)))
    layer, x = tame(case.ours()), case.x()
    kernel = mx_jax.quantize(layer.kernel[...], "mxint8", axis=case.contracting[1][-1])
    layer.kernel = nnx.Param(kernel)
    call = nnx.jit(lambda layer, x: layer(x))
    assert_bitwise_equal(call(layer, x), call(plain, x))


def test_an_mxarray_kernel_in_an_unmodified_layer():
    """Through __jax_array__: the values of the codes, multiplied in high precision."""
    case = CASES["linear"]
    plain, layer, x = tame(case.flax()), tame(case.flax()), case.x()
    kernel = mx_jax.quantize(layer.kernel[...], "mxint8", axis=0)
    layer.kernel = nnx.Param(kernel)
    plain.kernel = nnx.Param(kernel.dequantize())
    assert_bitwise_equal(layer(x), plain(x))


@cases
@pytest.mark.parametrize("quantized", [False, True])
def test_dtype_is_that_of_the_computation(case: Case, quantized: bool):
    layer = case.ours(dtype=jnp.bfloat16)
    if quantized:
        axis = case.contracting[1][-1]
        layer.kernel = nnx.Param(mx_jax.quantize(layer.kernel[...], "mxfp4", axis=axis))
    assert nnx.eval_shape(lambda layer, x: layer(x), layer, case.x()).dtype == jnp.bfloat16


def test_bfloat16_and_preferred_element_type_are_flaxs():
    case = CASES["linear"]
    options = {"dtype": jnp.bfloat16, "preferred_element_type": jnp.float32}
    actual = value_and_grads(tame(case.ours(HIGH, **options)), case.x())
    expected = value_and_grads(tame(case.flax(**options)), case.x())
    assert actual[0].dtype == jnp.float32
    assert_trees_equal(actual, expected)


def test_operations_of_the_users_own_are_respected():
    calls = []

    def own(*args, **options):
        calls.append(options)
        return lax.dot_general(*args, **options)

    def own_einsum(*args, **options):
        calls.append(options)
        return jnp.einsum(*args, **options)

    for name, options in (
        ("linear", {"dot_general": own}),
        ("linear_general", {"dot_general": own}),
        ("linear_general", {"dot_general_cls": lambda: own}),
        ("einsum", {"einsum_op": own_einsum}),
    ):
        case = CASES[name]
        assert_bitwise_equal(case.ours(**options)(case.x()), case.flax()(case.x()))
    assert len(calls) == 4


def test_a_promote_dtype_of_the_users_own_is_respected():
    def own(args, /, *, dtype=None, inexact=True):
        return tuple(None if arg is None else jnp.asarray(arg, jnp.float16) for arg in args)

    for case in CASES.values():
        layer = case.ours(promote_dtype=own)
        assert nnx.eval_shape(lambda layer, x: layer(x), layer, case.x()).dtype == jnp.float16


@pytest.mark.by_default("linear$|einsum")
@cases
def test_a_rebuilt_layer_is_not_retraced(case: Case):
    traces = []

    @nnx.jit
    def apply(layer, x):
        traces.append(layer)
        return layer(x)

    for seed in range(3):
        apply(case.ours(recipes.weight_only("mxfp8_e4m3"), seed=seed), case.x())
    assert len(traces) == 1
    apply(case.ours(HIGH), case.x())
    assert len(traces) == 2


@pytest.mark.slow
def test_vmap_scan_and_remat():
    """A stack of layers made by nnx.vmap and run by nnx.scan gives what the layers give in turn."""

    @nnx.split_rngs(splits=2)
    @nnx.vmap(in_axes=0, out_axes=0)
    def make(rngs: nnx.Rngs):
        return ours.Linear(40, 40, recipe=recipes.weight_only("mxfp4"), rngs=rngs)

    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    @nnx.remat
    def scanned(x, layer):
        return x + layer(x)

    def loss_of_scan(stack, x):
        return jnp.sum(scanned(x, stack) ** 2)

    def loss_in_turn(stack, x):
        graph, params = nnx.split(stack)
        for i in range(2):
            layer = nnx.merge(graph, jax.tree.map(lambda leaf: leaf[i], params))  # noqa: B023
            x = x + layer(x)
        return jnp.sum(x**2)

    stack, x = make(nnx.Rngs(0)), draw_few_octaves(np.random.default_rng(0), (3, 40))
    assert stack.kernel.shape == (2, 40, 40)
    actual, expected = (nnx.jit(nnx.grad(loss))(stack, x) for loss in (loss_of_scan, loss_in_turn))
    for left, right in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-4, atol=1e-3)


@pytest.mark.by_default("linear")
@pytest.mark.parametrize("case", [CASES["linear"], CASES["einsum"]], ids=["linear", "einsum"])
def test_stochastic_recipes_draw_anew_at_every_call(case: Case):
    first, second = case.ours(stochastic()), case.ours(stochastic())
    call = nnx.jit(lambda layer, x: layer(x))
    once, twice = call(first, case.x()), call(first, case.x())
    assert not np.array_equal(once, twice)
    assert_bitwise_equal(call(second, case.x()), once)


@pytest.mark.parametrize("streams", [{"default": 0}, {"params": 0, "quantize": 1}], ids=str)
def test_a_stochastic_recipe_leaves_the_parameters_flaxs(streams: dict[str, int]):
    """Also those of the layers that are built after it."""
    rngs, plain = nnx.Rngs(**streams), nnx.Rngs(**streams)
    layers = [ours.Linear(8, 4, recipe=stochastic(), rngs=rngs) for _ in range(2)]
    expected = [nnx.Linear(8, 4, rngs=plain) for _ in range(2)]
    for left, right in zip(layers, expected, strict=True):
        assert_bitwise_equal(left.kernel[...], right.kernel[...])


STREAMS = [{"default": 0}, {"params": 0, "quantize": 1}, {"default": 0, "params": 1}]


@pytest.mark.parametrize("streams", STREAMS, ids=str)
def test_every_layer_has_a_stream_of_its_own(streams: dict[str, int]):
    """Rounding errors of two layers must not be those of one; a rebuilt model has the same."""

    def keys() -> list[bytes]:
        rngs = nnx.Rngs(**streams)
        layers = [
            ours.Linear(8, 4, recipe=stochastic(), rngs=rngs),
            ours.Linear(8, 4, recipe=stochastic(), use_bias=False, rngs=rngs),
            ours.LinearGeneral(8, 4, recipe=stochastic(), rngs=rngs),
            ours.Einsum("bk,kn->bn", (8, 4), recipe=stochastic(), rngs=rngs),
        ]
        return [jax.random.key_data(layer.rngs.key[...]).tobytes() for layer in layers]

    assert len(set(keys())) == 4
    assert keys() == keys()


@pytest.mark.slow
def test_errors_of_two_layers_do_not_correlate():
    """Equal kernels and inputs: only the drawn bits tell the layers' errors apart."""
    rngs = nnx.Rngs(params=0, quantize=1)
    ones = nnx.initializers.constant(0.3)
    x = np.random.default_rng(0).standard_normal((16, 64), np.float32)

    def error() -> np.ndarray:
        layer = ours.Linear(64, 64, recipe=stochastic(), kernel_init=ones, rngs=rngs)
        return np.asarray(layer(x) - x @ np.full((64, 64), 0.3, np.float32)).ravel()

    assert abs(np.corrcoef(error(), error())[0, 1]) < 0.5


@pytest.mark.by_default("params")
@pytest.mark.parametrize("only", [..., "params"], ids=["all", "params"])
def test_layers_of_a_stack_have_streams_of_their_own(only: Any):
    """Made by nnx.vmap: also where only the parameters' stream is split."""

    @nnx.split_rngs(splits=3, only=only)
    @nnx.vmap(in_axes=(nnx.StateAxes({"params": 0, ...: 0 if only is ... else None}),), out_axes=0)
    def make(rngs: nnx.Rngs):
        first = ours.Linear(8, 4, recipe=stochastic(), rngs=rngs)
        return first, ours.Linear(8, 4, recipe=stochastic(), rngs=rngs)

    rngs = nnx.Rngs(params=0, quantize=1)
    keys = [jax.random.key_data(layer.rngs.key[...]) for layer in (*make(rngs), *make(rngs))]
    assert len(np.unique(np.concatenate(keys), axis=0)) == 12


def test_a_layer_made_below_jit_has_the_stream_of_one_made_outside():
    def make(rngs: nnx.Rngs):
        return [ours.Linear(8, 4, recipe=stochastic(), rngs=rngs) for _ in range(2)]

    layers = (*nnx.jit(make)(nnx.Rngs(0, quantize=1)), *make(nnx.Rngs(0, quantize=1)))
    keys = [jax.random.key_data(layer.rngs.key[...]).tobytes() for layer in layers]
    assert keys[:2] == keys[2:] and keys[0] != keys[1]


@pytest.mark.parametrize("case", [CASES["linear"], CASES["einsum"]], ids=["linear", "einsum"])
def test_a_missing_stream_is_named(case: Case):
    message = (
        f"{case.layer}: recipe 'stochastic' draws random bits and needs the 'quantize' stream, "
        "got rngs with 'params', 'dropout'; pass nnx.Rngs(..., quantize=seed)"
    )
    layer = getattr(ours, case.layer)
    with pytest.raises(ValueError, match=re.escape(message)):
        layer(*case.arguments, recipe=stochastic(), rngs=nnx.Rngs(params=0, dropout=1))


@cases
def test_the_recipe_is_required(case: Case):
    with pytest.raises(TypeError, match="recipe"):
        getattr(ours, case.layer)(*case.arguments, rngs=nnx.Rngs(0))
