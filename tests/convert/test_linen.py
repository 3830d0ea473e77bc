"""convert.linen: models, what the converted module is, and what becomes of each kind of layer."""

import copy
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mx_jax
from mx_jax import convert
from mx_jax.convert import Rule
from mx_jax.nn.linen import RNG_STREAM
from tests.quick import quick

from .helpers import MXFP8, STOCHASTIC, products, recipe_names
from .linen_models import MODELS, WIDTH, Block, Compact, Repeated, example_input

ALL, KEPT = Rule(".*", MXFP8), Rule(".*", None)


def program(module: nn.Module, variables: Any, *args: Any, **options: Any) -> str:
    """What apply runs, as a jaxpr: equal programs give equal bits, and nothing is compiled."""
    return str(jax.make_jaxpr(functools.partial(module.apply, **options))(variables, *args))


def abstract_init(module: nn.Module, *args: Any) -> Any:
    return jax.eval_shape(module.init, jax.random.key(0), *args)


@pytest.mark.parametrize("name", MODELS)
def test_every_product_is_converted(name: str):
    """Whatever contains it; the numbers of each region are tested with functions."""
    make, num_layers = MODELS[name]
    model, x = make(), example_input()
    converted, variables = convert.linen(model, ALL), abstract_init(model, x)
    assert abstract_init(converted, x) == variables
    assert products(converted.apply, variables, x).keys() == {"mx_matmul"}
    assert convert.report(model, ALL, x).num_converted == num_layers
    kept = convert.linen(model, KEPT)
    assert program(kept, variables, x) == program(model, variables, x)


def test_the_numbers_are_those_of_a_model_by_hand(monkeypatch: pytest.MonkeyPatch):
    """One in which Flax's layers are the library's of the same name, with the recipe."""

    def loss_and_output(module: nn.Module, variables: Any, x: jax.Array) -> Any:
        y: Any = module.apply(variables, x)
        return jnp.sum(y * jnp.cos(jnp.arange(y.size, dtype=y.dtype).reshape(y.shape))), y

    run = jax.value_and_grad(loss_and_output, argnums=(1, 2), has_aux=True)
    x, shapes = example_input(), abstract_init(Compact(), example_input())
    rng = np.random.default_rng(0)
    variables = jax.tree.map(lambda leaf: rng.standard_normal(leaf.shape, np.float32) / 6, shapes)
    converted = convert.linen(Compact(), ALL)
    (_, output), gradients = quick(functools.partial(run, converted))(variables, x)
    attention = functools.partial(
        nn.MultiHeadDotProductAttention,
        qkv_dot_general=MXFP8.dot_general,
        out_dot_general=MXFP8.dot_general,
        qk_attn_weights_einsum_cls=lambda: functools.partial(mx_jax.einsum, recipe=MXFP8),
        attn_weights_value_einsum_cls=lambda: functools.partial(mx_jax.einsum, recipe=MXFP8),
    )
    monkeypatch.setattr(nn, "MultiHeadDotProductAttention", attention)
    for name in ("Dense", "DenseGeneral", "Einsum"):
        layer = functools.partial(getattr(mx_jax.nn.linen, name), recipe=MXFP8)
        monkeypatch.setattr(nn, name, layer)
    (_, expected), expected_gradients = quick(functools.partial(run, Compact()))(variables, x)
    np.testing.assert_array_equal(output, expected)
    # Sums of gradients are in another order.
    close = functools.partial(np.testing.assert_allclose, rtol=2e-6, atol=2e-5)
    jax.tree.map(close, gradients, expected_gradients)


def test_below_nn_jit():
    """Flax compiles equal modules once, wherever they are; rules go by path."""
    model, x = Repeated(), example_input()
    variables = abstract_init(model, x)
    first, second, both = (
        convert.linen(model, Rule(f"{name}/.*", MXFP8)) for name in ("first", "second", ".*")
    )
    for module in (first, second):
        made = products(module.apply, variables, x)
        assert made == {"dot_general": 1, "mx_matmul": 1}
    assert program(first, variables, x) != program(second, variables, x)
    assert products(both.apply, variables, x) == {"mx_matmul": 2}


def test_a_cell_that_joins_its_parameters():
    """As the plain cell, which has the same parameters."""
    x, rule = jnp.ones((2, 3, 32)), Rule(".*", "mxfp8")
    model, plain = nn.RNN(nn.OptimizedLSTMCell(32)), nn.RNN(nn.LSTMCell(32))
    assert convert.report(model, rule, x).summary == "2 of 2 layers converted"
    variables = quick(model.init)(jax.random.key(0), x)
    joined = quick(convert.linen(model, rule).apply)(variables, x)
    np.testing.assert_array_equal(joined, quick(convert.linen(plain, rule).apply)(variables, x))
    assert 0 < abs(joined - quick(model.apply)(variables, x)).max() < 0.1


def test_clone_and_deepcopy():
    converted = convert.linen(nn.Dense(3), KEPT)
    assert converted.features == 3
    assert converted.clone() == converted
    assert converted.copy(features=4) == convert.linen(nn.Dense(4), KEPT)
    model = convert.linen(Block(), ALL)
    assert copy.deepcopy(model) == model


def test_methods_by_name_function_and_lambda():
    class Model(nn.Module):
        def setup(self):
            self.encoder = nn.Dense(5)

        def encode(self, x):
            return self.encoder(x)

        def __call__(self, x):
            return self.encode(x)

    model, x = Model(), jnp.ones((2, WIDTH))
    converted = convert.linen(model, Rule("encoder", MXFP8))
    variables = abstract_init(model, x)
    expected = program(converted, variables, x)
    assert expected != program(model, variables, x)
    assert program(converted, variables, x, method="encode") == expected
    assert program(converted, variables, x, method=Model.encode) == expected
    by_lambda = program(converted, variables, x, method=lambda model, x: model.encoder(x))
    assert by_lambda == expected


def test_nothing_stays_behind_after_an_error():
    class Fails(nn.Module):
        @nn.compact
        def __call__(self, x):
            nn.Dense(4)(x)
            raise RuntimeError

    dense, x = nn.Dense(4), jnp.ones((2, WIDTH))
    before = program(dense, abstract_init(dense, x), x)
    with pytest.raises(RuntimeError):
        convert.linen(Fails(), ALL).init(jax.random.key(0), x)
    assert program(dense, abstract_init(dense, x), x) == before


def test_applied_with_parameters_that_it_makes():
    class Tied(nn.Module):
        def setup(self):
            self.embed = nn.Embed(7, WIDTH)
            self.decoder = nn.Dense(7, use_bias=False)

        def __call__(self, tokens):
            x = self.embed(tokens)
            kernel = self.embed.variables["params"]["embedding"].T
            return self.decoder.apply({"params": {"kernel": kernel}}, x)

    tokens = jnp.ones((2, 3), jnp.int32)
    assert recipe_names(Tied(), Rule("decoder", MXFP8), tokens)["decoder"] == "mxfp8"


def test_errors():
    bound = nn.Dense(3).bind({"params": {}})
    with pytest.raises(ValueError, match=r"needs an unbound module, got Dense bound at ''"):
        convert.linen(bound, KEPT)
    with pytest.raises(ValueError, match=r"Dense.bind would leave layers .* method=lambda"):
        convert.linen(nn.Dense(3), KEPT).bind({"params": {}})
    # As a part of another it would know neither its scope nor its parameters.
    part = nn.Sequential([convert.linen(nn.Dense(3), KEPT), nn.relu])
    with pytest.raises(ValueError, match=r"Dense is called by init and apply, not as a part of an"):
        abstract_init(part, jnp.ones((2, WIDTH)))


# Stochastic recipes draw from the stream "quantize".
RANDOM = Rule(".*", STOCHASTIC)


class Layers(nn.Module):
    """Layers of equal kernels, one after the other: what differs is the rounding."""

    @nn.compact
    def __call__(self, x):
        options = {"kernel_init": nn.initializers.constant(0.3), "use_bias": False}
        first, second = (nn.Dense(WIDTH, **options, name=name) for name in "ab")
        return jnp.stack([first(x), second(x), first(x)])


@pytest.mark.parametrize("stream", [RNG_STREAM, "params"])
def test_every_layer_use_and_step_draws_anew(stream: str):
    """From the stream of Flax's that stands in for others too."""
    module, x = Layers(), example_input()
    variables = quick(module.init)(jax.random.key(0), x)
    apply = functools.partial(convert.linen(module, RANDOM).apply, variables, x)
    run = quick(lambda key: apply(rngs={stream: key}))
    first, again, other = (run(jax.random.key(seed)) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert np.any(first != other)
    assert len({np.asarray(values).tobytes() for values in first}) == len(first)


def test_init_needs_no_stream_and_draws_nothing_from_the_others():
    module, x = Block(), example_input()
    converted = convert.linen(module, RANDOM)
    plain, ours = (quick(m.init)(jax.random.key(0), x) for m in (module, converted))
    jax.tree.map(np.testing.assert_array_equal, plain, ours)


# Rules that match nothing: a module learns of them when its layers first appear.
KEY, X = jax.random.key(0), np.ones((2, 32), np.float32)


class Model(nn.Module):
    """Two layers, one of them below nn.jit, and one that only `decode` has."""

    def setup(self):
        self.encoder = nn.jit(nn.Dense)(32)
        self.head = nn.Dense(4)
        self.decoder = nn.Dense(32)

    def __call__(self, x):
        return self.head(self.encoder(x))

    def decode(self, x):
        return self.decoder(x)

    def both(self, x):
        return self(self.decode(x))


def test_a_rule_that_matched_before_is_not_warned_about():
    """`init` meets what `apply` does not, and nn.jit runs a layer once for all calls."""
    model = convert.linen(Model(), [Rule("decoder", MXFP8), ALL], strict=True)
    variables = jax.eval_shape(functools.partial(model.init, method=Model.both), KEY, X)
    for _ in range(3):
        jax.eval_shape(model.apply, variables, X)


@pytest.mark.filterwarnings("error")
def test_rules_that_keep_a_cells_products_match_them():
    """By an `apply` that follows no `init`, as after training."""
    model, x = nn.RNN(nn.SimpleCell(32)), np.ones((2, 3, 32), np.float32)
    variables = quick(model.init)(KEY, x)
    kept = convert.linen(model, Rule(".*", "high_precision"), strict=True)
    assert program(kept, variables, x) == program(model, variables, x)
    missing = convert.linen(model, Rule("nothing", None), strict=True)
    with pytest.raises(ValueError, match=r"rules that matched no layer: 0 \('nothing'\)"):
        program(missing, variables, x)
