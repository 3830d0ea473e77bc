"""DotGeneral and EinsumOp: recipes in Flax's own layers, with a stream of their own.

A stream is asked for where something is drawn: not in forward passes that round to nearest.
"""

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

import mx_jax
from mx_jax import convert, recipes
from mx_jax.nn import linen, nnx
from mx_jax.nn.linen import DotGeneral, EinsumOp, layer_key
from mx_jax.testing.compare import assert_bitwise_equal
from mx_jax.testing.draw import draw_few_octaves
from tests.nn.layers import MXFP4, assert_trees_equal, stochastic, weighted_sum
from tests.quick import quick

KEY = jax.random.key(0)
X = np.random.default_rng(0).standard_normal((2, 5, 32), np.float32)
KERNEL = flax_nn.initializers.constant(0.3)


@pytest.mark.parametrize("name", ["DotGeneral", "EinsumOp"])
def test_errors(name: str):
    in_linen, in_nnx = getattr(linen, name), getattr(nnx, name)
    for operation in (in_linen, in_nnx):
        with pytest.raises(TypeError, match=f"^{name}: recipe must be a Recipe .* got recipe=None"):
            operation(None)
    missing = f"^{name}: recipe 'stochastic' draws random bits and needs the 'quantize' stream"
    with pytest.raises(ValueError, match=missing):
        in_linen(stochastic()).apply({}, X, X)
    for rngs, result in ((None, "no rngs"), (flax_nnx.Rngs(0), "rngs with 'default'")):
        with pytest.raises(ValueError, match=f"{missing}, got {re.escape(result)}"):
            in_nnx(stochastic(), rngs=rngs)
    assert in_nnx("mxfp8").stream is None


# linen --------------------------------------------------------------------------------------------

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


@pytest.mark.slow(but="class")
@forms
def test_each_product_draws_other_bits(form: Any):
    model = Twins(form(stochastic()))
    draw = functools.partial(apply, model, init(model), X)
    first, second, again = draw(KEY)
    assert np.any(first != second) and np.any(first != again)
    for left, right in zip(draw(KEY), (first, second, again), strict=True):
        assert_bitwise_equal(left, right)
    assert np.any(draw(jax.random.key(1))[0] != first)


@pytest.mark.parametrize(
    "form",
    [*FORMS.values(), lambda recipe: lambda: recipes.from_name(recipe).dot_general],
    ids=[*FORMS, "recipe.dot_general"],
)
def test_the_product_is_the_recipes(form: Any):
    variables = quick(flax_nn.Dense(8).init)(KEY, X)
    layer = flax_nn.Dense(8, dot_general_cls=form("mxfp4"))
    expected = linen.Dense(8, recipe=MXFP4).apply(variables, X)
    assert_bitwise_equal(layer.apply(variables, X), expected)


@pytest.mark.slow(but="class")
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


# nnx ----------------------------------------------------------------------------------------------

EXACT = draw_few_octaves(np.random.default_rng(0), (2, 5, 32))
PLAIN = {
    "Linear": functools.partial(flax_nnx.Linear, 32, 8),
    "LinearGeneral": functools.partial(flax_nnx.LinearGeneral, 32, (2, 4)),
    "Einsum": functools.partial(flax_nnx.Einsum, "btd,dhk->bthk", (32, 2, 4), (2, 4)),
}


def make(kind: str, recipe: Any, **streams: int) -> Any:
    rngs = flax_nnx.Rngs(0, **streams)
    if kind == "Einsum":
        return PLAIN[kind](einsum_op=nnx.EinsumOp(recipe, rngs=rngs), rngs=rngs)
    return PLAIN[kind](dot_general=nnx.DotGeneral(recipe, rngs=rngs), rngs=rngs)


def product(layer: Any) -> Any:
    return layer.einsum_op if isinstance(layer, flax_nnx.Einsum) else layer.dot_general


def test_nnx_operations_draw_from_their_stream_alone():
    """Of two made one after the other each has a key; parameters are Flax's."""
    rngs = flax_nnx.Rngs(0, quantize=1)
    pair: Any = [nnx.DotGeneral(stochastic(), rngs=rngs) for _ in range(2)]
    assert pair[0].stream.key[...] != pair[1].stream.key[...]
    layer = flax_nnx.Linear(32, 8, dot_general=pair[0], rngs=rngs)
    plain = flax_nnx.Linear(32, 8, rngs=flax_nnx.Rngs(0))
    assert_bitwise_equal(layer.kernel[...], plain.kernel[...])


@pytest.mark.slow(but="Linear$")
@pytest.mark.parametrize("kind", PLAIN)
def test_nnx_products_are_the_recipes_with_the_streams_key(kind: str):
    layer = make(kind, stochastic(), quantize=1)
    graph, params, rest = flax_nnx.split(layer, flax_nnx.Param, ...)
    keys = flax_nnx.clone(product(layer).stream)
    axes = {"Linear": "btd,df->btf"}.get(kind, "btd,dhk->bthk")

    def hooked(params, x, rest):
        layer = flax_nnx.merge(graph, params, rest, copy=True)
        y = layer(x)
        return weighted_sum(y), (y, product(layer).stream.count[...])

    def by_hand(params, x, key):
        y = mx_jax.einsum(axes, x, params["kernel"][...], recipe=stochastic(), key=key)
        y = y + params["bias"][...]
        return weighted_sum(y), y

    gradients, (y, count) = quick(jax.grad(hooked, argnums=(0, 1), has_aux=True))(
        params, EXACT, rest
    )
    expected, z = quick(jax.grad(by_hand, argnums=(0, 1), has_aux=True))(params, EXACT, keys())
    assert_bitwise_equal(y, z)
    assert_trees_equal(gradients, expected)
    assert count == 1


@flax_nnx.split_rngs(splits=2)
@functools.partial(flax_nnx.vmap, in_axes=0)
def stack(rngs: flax_nnx.Rngs) -> flax_nnx.Linear:
    return flax_nnx.Linear(32, 32, dot_general=nnx.DotGeneral(stochastic(), rngs=rngs), rngs=rngs)


@pytest.mark.slow
def test_layers_of_a_stack_draw_different_bits():
    layers = stack(flax_nnx.Rngs(0, quantize=1))
    layers.kernel[...] = layers.kernel[...].at[1].set(layers.kernel[0])

    @flax_nnx.jit
    @flax_nnx.vmap(in_axes=(0, None))
    def run(layer, x):
        return layer(x)

    first, second = run(layers, EXACT + 0.01)
    assert np.any(first != second)
    with pytest.raises(ValueError, match=r"^DotGeneral: a layer of a stack .* shape=\(2,\)"):
        product(layers)(EXACT, layers.kernel[0], (((2,), (0,)), ((), ())))


# Keys where something is drawn ------------------------------------------------------------------

ROWS = np.random.default_rng(0).standard_normal((32, 32), np.float32)
# The forward product rounds to nearest, gradients draw.
RECIPE = recipes.mxfp4_stochastic()
RULE = convert.Rule(".*", RECIPE)
VARIABLES = quick(flax_nn.Dense(32).init)(jax.random.key(0), ROWS)
EINSUM = {"params": {"kernel": VARIABLES["params"]["kernel"]}}

LINEN: dict[str, tuple[Any, Any]] = {
    "Dense": (linen.Dense(32, recipe=RECIPE), VARIABLES),
    "Einsum": (linen.Einsum((32, 32), "bk,kn->bn", use_bias=False, recipe=RECIPE), EINSUM),
    "DotGeneral": (flax_nn.Dense(32, dot_general_cls=linen.DotGeneral(RECIPE)), VARIABLES),
    "converted": (convert.linen(flax_nn.Dense(32), RULE), VARIABLES),
}


def rngs(**streams: int) -> flax_nnx.Rngs:
    return flax_nnx.Rngs(params=0, **streams)


NNX: dict[str, Callable[..., Any]] = {
    "Linear": lambda **streams: nnx.Linear(32, 32, recipe=RECIPE, rngs=rngs(**streams)),
    "Einsum": lambda **streams: nnx.Einsum(
        "bk,kn->bn", (32, 32), recipe=RECIPE, rngs=rngs(**streams)
    ),
    "converted": lambda **streams: convert.nnx(
        flax_nnx.Linear(32, 32, rngs=rngs()),
        RULE,
        rngs=flax_nnx.Rngs(**streams) if streams else None,
    ),
}
MISSING = re.escape("recipe 'mxfp4_stochastic' rounds stochastically in grad_") + ".*quantize"


@pytest.mark.parametrize("name", LINEN)
def test_a_linen_layer_asks_for_a_key_where_it_draws(name: str):
    layer, variables = LINEN[name]

    def loss(variables: Any, **options: Any) -> Any:
        return jnp.sum(jnp.square(jnp.asarray(layer.apply(variables, ROWS, **options))))

    keyed = {"quantize": jax.random.key(1)}
    assert_bitwise_equal(layer.apply(variables, ROWS), layer.apply(variables, ROWS, rngs=keyed))
    jax.eval_shape(lambda v: jax.grad(loss)(v, rngs=keyed), variables)
    with pytest.raises(ValueError, match=MISSING):
        jax.eval_shape(jax.grad(loss), variables)


@pytest.mark.parametrize("name", NNX)
def test_an_nnx_layer_asks_for_a_key_where_it_draws(name: str):
    layer, keyed = NNX[name](), NNX[name](quantize=1)
    assert not jax.tree.leaves(flax_nnx.state(layer, flax_nnx.RngState))
    assert_bitwise_equal(layer(ROWS), keyed(ROWS))

    def loss(layer: Any) -> jax.Array:
        return jnp.sum(layer(ROWS) ** 2)

    flax_nnx.eval_shape(flax_nnx.grad(loss), keyed)
    with pytest.raises(ValueError, match=MISSING):
        flax_nnx.eval_shape(flax_nnx.grad(loss), layer)


class Draws(flax_nn.Module):
    """Two keys of a stream, by Flax or by this library."""

    is_ours: bool

    @flax_nn.compact
    def __call__(self, stream: str) -> list[jax.Array]:
        def key() -> jax.Array:
            if not self.is_ours:
                return self.make_rng(stream)
            ours = layer_key(self, RECIPE, stream)
            assert ours is not None
            return ours.get()

        return [jax.random.bits(key()) for _ in range(2)]


class Nested(flax_nn.Module):
    is_ours: bool

    @flax_nn.compact
    def __call__(self, stream: str) -> list[list[jax.Array]]:
        return [Draws(self.is_ours, name=name)(stream) for name in ("first", "second")]


@pytest.mark.parametrize("streams", [("quantize",), ("params", "quantize"), ("params",)], ids=str)
@pytest.mark.parametrize("make", [jax.random.key, jax.random.PRNGKey], ids=["typed", "raw"])
def test_a_layers_keys_are_those_of_make_rng(make: Any, streams: tuple[str, ...]):
    rngs = {name: make(number) for number, name in enumerate(streams)}
    for run in (lambda apply: apply, jax.jit):
        result, expected = (
            run(lambda ours=ours: Nested(ours).apply({}, "quantize", rngs=rngs))()
            for ours in (True, False)
        )
        assert result == expected and len(set(map(int, jax.tree.leaves(result)))) == 4
