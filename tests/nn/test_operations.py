"""linen.DotGeneral and linen.EinsumOp: recipes in Flax's own layers, with a stream of their own."""

import functools
from typing import Any

import flax.linen as flax_nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import mx_jax
from mx_jax import convert, recipes
from mx_jax.nn import linen
from mx_jax.nn.linen import DotGeneral, EinsumOp
from mx_jax.testing.compare import assert_bitwise_equal
from tests.nn.layers import MXFP4, stochastic
from tests.quick import quick

KEY = jax.random.key(0)
X = np.random.default_rng(0).standard_normal((2, 5, 32), np.float32)
KERNEL = flax_nn.initializers.constant(0.3)
# The module itself, and the class with its recipe bound.
FORMS = {
    "module": lambda recipe: DotGeneral(recipe),
    "class": lambda recipe: functools.partial(DotGeneral, recipe=recipe),
}
forms = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)


@functools.partial(quick, static_argnums=0)
def init(model: flax_nn.Module) -> Any:
    return model.init(KEY, X)


@functools.partial(quick, static_argnums=0)
def apply(model: flax_nn.Module, variables: Any, x: Any, key: Any) -> Any:
    return model.apply(variables, x, rngs={"quantize": key})


class Twins(flax_nn.Module):
    """Two equal layers, which differ by their rounding alone, and the first once more."""

    dot_general: Any

    @flax_nn.compact
    def __call__(self, x):
        first, second = (
            flax_nn.Dense(8, kernel_init=KERNEL, dot_general_cls=self.dot_general) for _ in range(2)
        )
        return first(x), second(x), first(x)


@forms
def test_parameters_are_those_of_the_layer_without_it(form: Any):
    layer = flax_nn.DenseGeneral((2, 4), dot_general_cls=form(stochastic()))
    expected = jax.eval_shape(flax_nn.DenseGeneral((2, 4)).init, KEY, X)
    assert jax.eval_shape(layer.init, KEY, X) == expected


@pytest.mark.by_default("class")
@forms
def test_each_product_draws_its_own_bits(form: Any):
    model = Twins(form(stochastic()))
    draw = functools.partial(apply, model, init(model), X)
    first, second, again = draw(KEY)
    assert np.any(first != second) and np.any(first != again)
    for left, right in zip(draw(KEY), (first, second, again), strict=True):
        assert_bitwise_equal(left, right)
    assert np.any(draw(jax.random.key(1))[0] != first)


@forms
def test_the_product_is_the_recipes(form: Any):
    variables = quick(flax_nn.Dense(8).init)(KEY, X)
    layer = flax_nn.Dense(8, dot_general_cls=form("mxfp4"))
    expected = linen.Dense(8, recipe=MXFP4).apply(variables, X)
    assert_bitwise_equal(layer.apply(variables, X), expected)


def test_a_rebuilt_model_is_not_retraced():
    traces = []

    @functools.partial(jax.jit, static_argnums=0)
    def apply(model, variables):
        traces.append(model)
        return model.apply(variables, X, rngs={"quantize": KEY})

    variables = quick(Twins(DotGeneral(MXFP4)).init)(KEY, X)
    for recipe in ("mxfp4", recipes.mxfp4(), MXFP4):
        apply(Twins(DotGeneral(recipe)), variables)
    assert len(traces) == 1


@pytest.mark.slow
@forms
def test_attention_projections(form: Any):
    attention = flax_nn.MultiHeadDotProductAttention(
        num_heads=2, qkv_dot_general_cls=form(stochastic()), out_dot_general_cls=form(stochastic())
    )
    variables = init(attention)
    flaxs = init(flax_nn.MultiHeadDotProductAttention(num_heads=2))
    left, right = (tree["params"]["query"]["kernel"] for tree in (variables, flaxs))
    assert_bitwise_equal(left, right)
    one, other = (apply(attention, variables, X, key) for key in jax.random.split(KEY))
    assert np.any(one != other)


@pytest.mark.by_default("class")
@pytest.mark.parametrize("as_class", [False, True], ids=["module", "class"])
def test_attention_products(as_class: bool):
    def attention(**products: Any) -> flax_nn.Module:
        return flax_nn.MultiHeadDotProductAttention(num_heads=2, **products)

    def einsum(recipe: Any) -> Any:
        return functools.partial(EinsumOp, recipe=recipe) if as_class else EinsumOp(recipe)

    variables = init(attention())
    plain = apply(attention(), variables, X, KEY)
    for recipe in ("mxfp8", stochastic()):
        model = attention(
            qk_attn_weights_einsum_cls=einsum(recipe), attn_weights_value_einsum_cls=einsum(recipe)
        )
        assert jax.eval_shape(model.init, KEY, X) == jax.eval_shape(attention().init, KEY, X)
        one, other = (apply(model, variables, X, key) for key in jax.random.split(KEY))
        assert 3 < mx_jax.inspect.sqnr_db(plain, one) < 60
        assert np.any(one != other) == (recipe != "mxfp8")


@pytest.mark.by_default("class")
@forms
def test_through_the_bridge_to_nnx(form: Any):
    rngs = nnx.Rngs(0, quantize=1)
    model = nnx.bridge.ToNNX(flax_nn.Dense(8, dot_general_cls=form(stochastic())), rngs=rngs)
    model.lazy_init(X)
    first, second = model(X), model(X)
    assert first.shape == (2, 5, 8)
    assert np.any(first != second), "both calls rounded alike"


@pytest.mark.slow
def test_below_scan_each_layer_draws_its_own_bits():
    class Layer(flax_nn.Module):
        @flax_nn.compact
        def __call__(self, x, _):
            y = flax_nn.Dense(
                32, kernel_init=KERNEL, dot_general_cls=DotGeneral(stochastic()), use_bias=False
            )(x)
            return x, y

    class Model(flax_nn.Module):
        @flax_nn.compact
        def __call__(self, x):
            stack = flax_nn.scan(
                flax_nn.remat(Layer),
                variable_axes={"params": 0},
                split_rngs={"params": True, "quantize": True},
                length=2,
            )
            return stack(name="layers")(x, None)[1]

    variables = init(Model())

    def loss(variables, x, key):
        y: Any = Model().apply(variables, x, rngs={"quantize": key})
        return jnp.sum(y**2), y

    gradients, y = quick(jax.grad(loss, has_aux=True))(variables, X, KEY)
    assert np.any(y[0] != y[1])
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(gradients))


@pytest.mark.parametrize("operation", [DotGeneral, EinsumOp])
def test_errors(operation: Any):
    name = operation.__name__
    with pytest.raises(TypeError, match=f"^{name}: recipe must be a Recipe .* got recipe=None"):
        operation(None)
    with pytest.raises(
        ValueError, match=f"{name}: recipe 'stochastic' draws .* the 'quantize' str"
    ):
        operation(stochastic()).apply({}, X, X)


def test_another_stream_can_be_named():
    """A stack that hands its modules no stream of our name may have one of its own."""
    layer = flax_nn.Dense(8, dot_general_cls=DotGeneral(stochastic(), stream="noise"))
    variables = quick(flax_nn.Dense(8).init)(KEY, X)
    one, other = (
        layer.apply(variables, X, rngs={"noise": key, "quantize": KEY})
        for key in jax.random.split(KEY)
    )
    assert np.any(one != other)
    with pytest.raises(
        ValueError, match=r"the 'noise' stream; call apply\(..., rngs={'noise': key}"
    ):
        layer.apply(variables, X, rngs={"quantize": KEY})


def test_conversion_leaves_it_alone():
    layer = flax_nn.Dense(8, dot_general_cls=DotGeneral(MXFP4))
    with pytest.warns(convert.UnusedRuleWarning):
        report = convert.report(layer, convert.Rule(".*", recipes.mxfp8()), X)
    reasons = {decision.layer.path: decision.reason for decision in report.decisions}
    assert reasons == {"": "has its own dot_general_cls"}
