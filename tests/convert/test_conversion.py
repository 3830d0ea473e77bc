"""What every way to convert must give, stated once and asked of each: linen, nnx, functions.

All convert one small model, `tanh(x up) down` without biases, whose products written by hand are
what they are compared with. What is a matter of one framework alone is in the files of their names.
"""

import functools
import pickle
import re
import warnings
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

import mx_jax
from mx_jax import convert, recipes
from mx_jax.convert import Report, Rule, UnusedRuleWarning
from tests.quick import quick

from .helpers import MXFP8, STOCHASTIC, WEIGHT_ONLY, as_function, recipe_names
from .linen_models import WIDTH, Compact

ALL = Rule(".*", MXFP8)
Kernels = dict[str, jax.Array]
_rng = np.random.default_rng(0)
X = jnp.asarray(_rng.standard_normal((6, 40), np.float32))
TABLE = jnp.asarray(_rng.standard_normal((9, 33), np.float32))
ATTENDED = jnp.asarray(_rng.standard_normal((2, 6, WIDTH), np.float32))
KERNEL = jnp.asarray(_rng.standard_normal((2, 40, 8), np.float32) / 6)
KERNELS: Kernels = {
    "up": jnp.asarray(_rng.standard_normal((40, 64), np.float32) / 6),
    "down": jnp.asarray(_rng.standard_normal((64, 8), np.float32) / 6),
}


def by_hand(up: Any, down: Any) -> Callable[[Kernels, jax.Array], jax.Array]:
    """The model with a recipe in each product."""

    def product(x: jax.Array, kernel: jax.Array, recipe: Any) -> jax.Array:
        return x @ kernel if recipe is None else mx_jax.matmul(x, kernel, recipe=recipe)

    def run(kernels: Kernels, x: jax.Array) -> jax.Array:
        return product(jnp.tanh(product(x, kernels["up"], up)), kernels["down"], down)

    return run


def by_name(kind: str, x: Any, w: Any, ragged: Any = lax.ragged_dot) -> Any:
    """What somebody's own layer may do with a kernel `[2, k, n]`."""
    if kind == "product":
        return x @ w[0]
    return ragged(x, w, jnp.array([4, 2])) if kind == "experts" else x + w[0, 0, 0]


class Custom(nn.Module):
    kind: str

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return by_name(self.kind, x, self.param("w", nn.initializers.ones, KERNEL.shape))


class NnxCustom(nnx.Module):
    def __init__(self, kind: str):
        self.w, self.kind = nnx.Param(KERNEL), kind

    def __call__(self, x: jax.Array) -> jax.Array:
        return by_name(self.kind, x, self.w[...])


class Way:
    """How one framework states the model, and how it is converted and run."""

    operation: Any
    # Somebody's own layer, which only a rule that names its type converts.
    foreign: type | None = None

    def model(self) -> Any:
        raise NotImplementedError

    def convert(self, rules: Any, **options: Any) -> Any:
        return self.operation(self.model(), rules, **options)

    def report(self, rules: Any, **options: Any) -> Report:
        return convert.report(self.model(), rules, X, **options)

    def identity(self, model: Any) -> Any:
        """What equal models have equal."""
        return model

    def names(self, model: Any, rules: Any, x: Any = None) -> dict[str, str]:
        x = np.ones((2, 3, WIDTH), np.float32) if x is None else x
        return recipe_names(model, rules, x)


def value_alone(query, key, value, mask=None, **options):
    return value


class NnxKinds(nnx.Module):
    def __init__(self, attention_fn: Any, rngs: nnx.Rngs):
        options = {"attention_fn": attention_fn} if attention_fn else {}
        self.attention = nnx.MultiHeadAttention(2, WIDTH, decode=False, rngs=rngs, **options)
        self.split = nnx.LinearGeneral(WIDTH, (2, 5), rngs=rngs)
        self.each_head = nnx.Einsum("bthk,hkf->bthf", (2, 5, 7), (2, 7), rngs=rngs)
        self.merge = nnx.LinearGeneral((2, 7), WIDTH, axis=(-2, -1), rngs=rngs)
        self.head = nnx.Linear(WIDTH, 11, rngs=rngs)
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        heads = self.split(x + self.norm(self.attention(x)))
        return self.head(self.merge(self.each_head(heads)))


class LinenModel(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        dense = functools.partial(nn.Dense, use_bias=False)
        return dense(8, name="down")(jnp.tanh(dense(64, name="up")(x)))


class Linen(Way):
    operation, foreign = staticmethod(convert.linen), Custom

    def model(self, kernels: Kernels = KERNELS) -> Any:
        return LinenModel()

    def run(self, model: Any, kernels: Kernels, x: jax.Array, key: Any = None) -> jax.Array:
        params = {name: {"kernel": kernel} for name, kernel in kernels.items()}
        return model.apply({"params": params}, x, rngs=None if key is None else {"quantize": key})

    def foreign_layer(self, kind: str) -> Any:
        return Custom(kind)

    def run_custom(self, layer: Any, w: jax.Array, x: jax.Array, key: Any = None) -> jax.Array:
        return layer.apply({"params": {"w": w}}, x, rngs=None if key is None else {"quantize": key})

    def kinds(self, attention_fn: Any = None) -> Any:
        return Compact(attention_fn) if attention_fn else Compact()

    def chosen(self, what: str) -> Any:
        einsum = "btk,kn->btn"
        return {
            "dot_general": nn.Dense(4, dot_general=recipes.mxfp4().dot_general),
            "dot_general_cls": nn.Dense(4, dot_general_cls=lambda: jax.lax.dot_general),
            "recipe": mx_jax.nn.linen.Einsum((WIDTH, 4), einsum, recipe="mxfp4"),
            "nothing": nn.Einsum((WIDTH,), "btk,k->btk", kernel_init=nn.initializers.ones),
        }[what]

    def attention(self, *rules: Rule, **options: Any) -> Any:
        layer = nn.MultiHeadAttention(2, **options)
        shapes = jax.eval_shape(layer.init, jax.random.key(0), ATTENDED)
        rng = np.random.default_rng(1)
        variables = jax.tree.map(lambda x: rng.standard_normal(x.shape, np.float32) / 7, shapes)
        if rules:
            layer = convert.linen(layer, rules)

        def run(**options: Any) -> Any:
            rngs = {"dropout": jax.random.key(1)}
            apply = functools.partial(layer.apply, rngs=rngs, mutable=["intermediates"], **options)
            y, sown = quick(apply)(variables, ATTENDED)
            return y, sown["intermediates"]["attention_weights"][0]

        return run

    def embed(self, table: Any = TABLE) -> tuple[jax.Array, Any]:
        converted = convert.linen(nn.Embed(9, 33), Rule(".*", WEIGHT_ONLY, types=nn.Embed))
        variables = {"params": {"embedding": table}}
        return table, lambda method, x: converted.apply(variables, x, method=method)


class NnxModel(nnx.Module):
    up: Any
    down: Any

    def __init__(self, kernels: Kernels):
        for name, kernel in kernels.items():
            layer = nnx.Linear(*kernel.shape, use_bias=False, rngs=nnx.Rngs(0))
            layer.kernel = nnx.Param(kernel)
            setattr(self, name, layer)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(jnp.tanh(self.up(x)))


def with_key(state: Any, key: Any) -> Any:
    """The state of streams as of a model that was converted with this key."""

    def replaced(leaf: Any) -> Any:
        return key if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf

    return state if key is None else jax.tree.map(replaced, state)


class Nnx(Way):
    operation, foreign = staticmethod(convert.nnx), NnxCustom

    def model(self, kernels: Kernels = KERNELS) -> Any:
        return NnxModel(kernels)

    def convert(self, rules: Any, **options: Any) -> Any:
        # Keys are a matter of the model; the one of a call is made its seed.
        return super().convert(rules, **options, rngs=nnx.Rngs(quantize=0))

    def run(self, model: Any, kernels: Kernels, x: jax.Array, key: Any = None) -> jax.Array:
        graph, params, rest = nnx.split(model, nnx.Param, ...)
        for name, kernel in kernels.items():
            params[name]["kernel"] = nnx.Param(kernel)
        return nnx.merge(graph, params, with_key(rest, key))(x)

    def identity(self, model: Any) -> Any:
        return nnx.graphdef(model)

    def foreign_layer(self, kind: str) -> Any:
        return NnxCustom(kind)

    def run_custom(self, layer: Any, w: jax.Array, x: jax.Array, key: Any = None) -> jax.Array:
        graph, _, rest = nnx.split(layer, nnx.Param, ...)
        return nnx.merge(graph, nnx.State({"w": nnx.Param(w)}), with_key(rest, key))(x)

    def kinds(self, attention_fn: Any = None) -> Any:
        return nnx.eval_shape(lambda: NnxKinds(attention_fn, nnx.Rngs(0)))

    def chosen(self, what: str) -> Any:
        rngs, ones = nnx.Rngs(0), nnx.initializers.ones
        linear = functools.partial(nnx.LinearGeneral, WIDTH, 3, rngs=rngs)
        return {
            "dot_general": lambda: linear(dot_general=WEIGHT_ONLY.dot_general),
            "dot_general_cls": lambda: linear(dot_general_cls=lambda: jax.lax.dot_general),
            "recipe": lambda: mx_jax.nn.nnx.Linear(WIDTH, 3, recipe=STOCHASTIC, rngs=rngs),
            "nothing": lambda: nnx.Einsum("btk,k->btk", (WIDTH,), kernel_init=ones, rngs=rngs),
        }[what]()

    def attention(self, *rules: Rule, **options: Any) -> Any:
        heads = {"num_heads": 4, "num_kv_heads": 2, "in_features": WIDTH, "decode": False}
        layer = nnx.MultiHeadAttention(**heads, rngs=nnx.Rngs(0), **options)
        if rules:
            layer = convert.nnx(layer, rules)

        def run(**options: Any) -> Any:
            @nnx.jit
            def attend(layer: Any) -> jax.Array:
                return layer(ATTENDED, rngs=nnx.Rngs(dropout=1), is_causal=True, **options)

            y = attend(layer)
            return y, layer.attention_weights.get_value()[0]  # pyright: ignore

        return run

    def embed(self, table: Any = TABLE) -> tuple[jax.Array, Any]:
        embed = nnx.Embed(9, 33, rngs=nnx.Rngs(0))
        embed.embedding = nnx.Param(table)
        converted = convert.nnx(embed, Rule(".*", WEIGHT_ONLY, types=nnx.Embed))
        return table, lambda method, x: getattr(converted, method)(x)


def function_model(kernels: Kernels, x: jax.Array) -> jax.Array:
    with jax.named_scope("up"):
        x = jnp.tanh(x @ kernels["up"])
    with jax.named_scope("down"):
        return x @ kernels["down"]


class Function(Way):
    def operation(self, model: Any, rules: Any, **options: Any) -> Any:
        return convert.function(model, rules, weights=0, **options)

    def model(self, kernels: Kernels = KERNELS) -> Any:
        return function_model

    def run(self, model: Any, kernels: Kernels, x: jax.Array, key: Any = None) -> jax.Array:
        options = {} if key is None else {"rngs": {"quantize": key}}
        return model(kernels, x, **options)

    def report(self, rules: Any, **options: Any) -> Report:
        return convert.report(function_model, rules, KERNELS, X, weights=0, **options)


WAYS = {"linen": Linen(), "nnx": Nnx(), "function": Function()}


@pytest.fixture
def way(request: pytest.FixtureRequest) -> Way:
    return WAYS[request.param]


every_way = pytest.mark.parametrize("way", WAYS, indirect=True)
of_flax = pytest.mark.parametrize("way", ["linen", "nnx"], indirect=True)


def assert_equal(left: Any, right: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, left, right)


@every_way
class TestConversion:
    """A model of layers that conversion knows."""

    @pytest.mark.parametrize("rules", [[ALL], [Rule("down", None), Rule(".*", MXFP8)]], ids=len)
    def test_products_and_gradients_are_those_by_hand(self, way: Any, rules: list[Rule]):
        def values(run: Any) -> Any:
            loss = lambda *args: jnp.sum(run(*args) ** 2)  # noqa: E731
            return quick(jax.value_and_grad(loss, (0, 1)))(KERNELS, X)

        ours = values(functools.partial(way.run, way.convert(rules)))
        assert_equal(ours, values(by_hand(MXFP8, MXFP8 if len(rules) == 1 else None)))

    def test_the_report_says_what_each_layer_gets(self, way: Any):
        report = way.report([Rule("down", None), Rule(".*", WEIGHT_ONLY)])
        decisions = {decision.layer.path: decision for decision in report.decisions}
        up, down = decisions.pop("up"), decisions.pop("down")
        assert (up.rule, up.recipe, up.reason) == (1, WEIGHT_ONLY, "")
        assert (down.rule, down.recipe, down.reason) == (0, None, "kept by its rule")
        assert not decisions
        assert report.summary == "1 of 2 layers converted"
        assert (up.layer.shape, down.layer.shape) == ((40, 64), (64, 8)), "contracting, kept"

    def test_high_precision_is_the_original(self, way: Any):
        plain = quick(functools.partial(way.run, way.model()))(KERNELS, X)
        for recipe in (None, recipes.high_precision()):
            kept = way.convert(Rule(".*", recipe))
            assert_equal(quick(functools.partial(way.run, kept))(KERNELS, X), plain)

    def test_the_way_back_and_on(self, way: Any):
        """The original is the model; new rules replace old ones; what is equal jit finds again."""
        model, same = way.model(), way.identity
        once = way.convert(ALL)
        again = way.convert(Rule(".*", recipes.mxfp8()))
        assert same(once) == same(again) and hash(same(once)) == hash(same(again))
        assert same(once) != same(model)
        assert same(convert.original(once)) == same(convert.original(model)) == same(model)
        assert same(way.operation(once, Rule("up", WEIGHT_ONLY))) == same(
            way.convert(Rule("up", WEIGHT_ONLY))
        )
        assert same(pickle.loads(pickle.dumps(once))) == same(once)

    def test_random_bits(self, way: Any):
        run = quick(functools.partial(way.run, way.convert(Rule(".*", STOCHASTIC))))
        first, again, other = (run(KERNELS, X, jax.random.key(seed)) for seed in (1, 1, 2))
        assert_equal(first, again)
        assert np.any(first != other)

    def test_random_bits_without_a_key(self, way: Any):
        message = "recipe 'stochastic weight'.* draws random bits"
        with pytest.raises(ValueError, match=message):
            if isinstance(way, Nnx):
                convert.nnx(way.model(), Rule(".*", STOCHASTIC))
            way.run(way.convert(Rule(".*", STOCHASTIC)), KERNELS, X)

    def test_rules_that_match_nothing(self, way: Any):
        """Told of, where layers are first met; an error if strict; once by a report."""
        name = f"convert.{next(name for name, candidate in WAYS.items() if candidate is way)}"
        text = (
            r": rules that matched no layer: 0 \('typo'\); no layer is converted; the model has "
            "'(up', 'down|down', 'up)'; patterns match whole paths, and the first rule that "
            r"matches decides(?:$|\n)"
        )

        def run(rules: Any, strict: bool = False) -> None:
            way.run(way.convert(rules, strict=strict), KERNELS, X)

        typo = Rule("typo", MXFP8)
        with pytest.warns(UnusedRuleWarning, match=f"^{name}{text}"):
            run(typo)
        with pytest.raises(ValueError, match=f"^{name}{text}"):
            run(typo, strict=True)
        with pytest.raises(ValueError, match=r"rules that matched no layer: 1 \('typo'\); the m"):
            run([ALL, typo], strict=True)
        with pytest.warns(UnusedRuleWarning, match=f"^{name}: there are no rules; no layer is c"):
            run([])
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            way.report(typo)
        assert len(caught) == 1 and re.match(f"convert.report{text}", str(caught[0].message))
        with pytest.raises(ValueError, match=f"^convert.report{text}"):
            way.report(typo, strict=True)
        # Nothing was to be converted.
        run(Rule(".*", None), strict=True)

    def test_what_is_no_model_and_what_is_no_rule(self, way: Any):
        with pytest.raises(TypeError, match=r"convert\.\w+: needs a .*, got int; use convert\.\w+"):
            way.operation(3, ALL)
        with pytest.raises(TypeError, match=r"convert.*: rules must be Rule objects, got 'mxfp8'"):
            way.convert(["mxfp8"])


@of_flax
class TestCustomLayers:
    """A layer that conversion does not know and that multiplies by name."""

    def test_which_rules_convert_it(self, way: Any):
        (decision,) = convert.report(way.foreign_layer("product"), ALL, X).decisions
        layer = decision.layer
        assert (layer.path, layer.type, layer.product) == ("", way.foreign, convert.DotGeneral)
        assert layer.kernel == layer.shape == KERNEL.shape[1:] and decision.recipe == MXFP8

    def test_its_products_are_those_by_hand(self, way: Any):
        """Other regions are tested with functions, whose jaxprs are rewritten alike."""
        layer = way.operation(
            way.foreign_layer("experts"), Rule(".*", WEIGHT_ONLY, types=way.foreign)
        )
        ragged = functools.partial(mx_jax.ragged_dot, recipe=WEIGHT_ONLY)

        def values(run: Any) -> Any:
            loss = lambda w, x: jnp.sum(run(w, x) ** 2)  # noqa: E731
            return quick(jax.value_and_grad(loss, (0, 1)))(KERNEL, X)

        assert_equal(
            values(functools.partial(way.run_custom, layer)),
            values(lambda w, x: by_name("experts", x, w, ragged)),
        )

    def test_it_multiplies_by_what_is_stored(self, way: Any):
        """By the codes, which a cast by the recipe would change."""
        stored = mx_jax.quantize(KERNEL, "mxfp8_e4m3", axis=1)
        layer = way.operation(
            way.foreign_layer("product"), Rule(".*", WEIGHT_ONLY, types=way.foreign)
        )
        product = functools.partial(way.run_custom, layer)
        expected = mx_jax.matmul(X, stored[0], recipe=WEIGHT_ONLY)
        assert_equal(product(stored, X), expected)
        assert np.any(product(stored.dequantize(), X) != expected)

    def test_one_without_a_product(self, way: Any):
        layer = way.operation(way.foreign_layer("none"), Rule(".*", WEIGHT_ONLY, types=way.foreign))
        with pytest.warns(UnusedRuleWarning, match="the model has no layer that a rule reac"):
            way.run_custom(layer, KERNEL, X)


@of_flax
class TestKinds:
    """Every kind of Flax's layers."""

    def test_shapes_that_filters_see(self, way: Any):
        seen = {}

        def see(path: str, shape: Any, recipe: Any) -> bool:
            seen[path] = shape
            return True

        way.names(way.kinds(), Rule(".*", MXFP8, filter=see))
        assert seen == {
            "attention/query": (WIDTH, WIDTH),
            "attention/key": (WIDTH, WIDTH),
            "attention/value": (WIDTH, WIDTH),
            "attention/qk": None,
            "attention/av": None,
            "attention/out": (2, WIDTH // 2, WIDTH),
            "split": (WIDTH, 10),
            "each_head": (5, 7),
            "merge": (2, 7, WIDTH),
            "head": (WIDTH, 11),
        }

    def test_another_attention_fn(self, way: Any):
        """What it multiplies shows in a call, if it does."""
        names = way.names(way.kinds(value_alone), Rule(".*", MXFP8))
        assert "attention/qk" not in names and names["attention/query"] == "mxfp8"

    @pytest.mark.filterwarnings("ignore:.*sow:DeprecationWarning")
    def test_an_attention(self, way: Any):
        """Each product by itself; what is masked, dropped and sown is as before."""
        dropout = {"dropout_rate": 0.5, "deterministic": False}
        options = {"mask": nn.make_causal_mask(ATTENDED[..., 0]), "sow_weights": True}
        before, weights = way.attention(**dropout)(**options)
        results = {
            pattern: way.attention(Rule(pattern, MXFP8), **dropout)(**options)
            for pattern in ("qk", "av")
        }
        for after, weights_after in results.values():
            assert 18 < mx_jax.inspect.sqnr_db(before, after) < 60
            np.testing.assert_array_equal(weights_after == 0, weights == 0)
        assert np.any(results["qk"][0] != results["av"][0])
        np.testing.assert_allclose(results["av"][1], weights, rtol=2e-5)

    @pytest.mark.parametrize("what", ["dot_general", "dot_general_cls", "recipe", "nothing"])
    def test_what_a_user_chose_stays(self, way: Any, what: str):
        layer = way.chosen(what)
        reason = "contracts no axis" if what == "nothing" else f"has its own {what}"
        with pytest.warns(UnusedRuleWarning):
            assert way.names(layer, ALL) == {"": reason}
        x = jnp.ones((2, 3, WIDTH))
        if isinstance(layer, nn.Module):
            variables = jax.eval_shape(layer.init, jax.random.key(0), x)
            before, after = layer.apply, convert.linen(layer, ALL).apply
        else:
            before, variables = as_function(layer)
            after, _ = as_function(convert.nnx(layer, ALL))
        with pytest.warns(UnusedRuleWarning):
            ours = jax.make_jaxpr(after)(variables, x)
        assert str(ours) == str(jax.make_jaxpr(before)(variables, x))

    def test_an_embedding(self, way: Any):
        """Looked up in, and multiplied by, the quantized table; its gradient is the identity."""
        table, call = way.embed()
        quantized = mx_jax.cast(table, "mxfp4", scale_rule="even")
        np.testing.assert_array_equal(call("__call__", jnp.arange(4)), quantized[:4])
        gradient = jax.grad(lambda table: way.embed(table)[1]("__call__", jnp.arange(4)).sum())
        np.testing.assert_array_equal(gradient(table)[:4], 1.0)
        query = X[:2, :33]
        expected = jnp.dot(query, quantized.T)
        np.testing.assert_allclose(call("attend", query), expected, rtol=1e-5, atol=1e-5)
        embed: Any = (
            nn.Embed(9, 33) if isinstance(way, Linen) else nnx.Embed(9, 33, rngs=nnx.Rngs(0))
        )
        with pytest.warns(UnusedRuleWarning):
            names = way.names(embed, ALL, jnp.arange(4))
        assert names == {"": "rule 0: only a rule with types=Embed converts it"}
