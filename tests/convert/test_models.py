"""Models that multiply by name, of linen and of nnx: a trace of the model's call reaches them.

Stand-ins for `FlaxGPT2Module` of transformers 4.55, which has layers of its own kind
(`FlaxConv1D`: `lax.dot_general` in a method), and for tunix's Llama, with an Einsum of its own,
attention and a tied head; test_peers.py runs the real ones.
"""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

import mx_jax
from mx_jax import convert
from mx_jax.convert import Rule
from tests.quick import quick

from .helpers import MXFP8, STOCHASTIC, WEIGHT_ONLY, as_function, products

TOKENS = jnp.arange(6).reshape(2, 3)
ALL = Rule(".*", MXFP8)


class Conv1D(nn.Module):
    """`[..., in]` by a kernel stored `[out, in]`, as GPT-2's checkpoints have it."""

    features: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        kernel = self.param("kernel", nn.initializers.normal(0.2), (self.features, x.shape[-1]))
        return lax.dot_general(x, kernel.transpose(), (((x.ndim - 1,), (0,)), ((), ())))


class Block(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        q, k, v = jnp.split(Conv1D(96, name="c_attn")(nn.LayerNorm()(x)), 3, -1)
        weights = nn.softmax(jnp.einsum("bqd,bkd->bqk", q, k))
        x = x + Conv1D(32, name="c_proj")(jnp.einsum("bqk,bkd->bqd", weights, v))
        return x + Conv1D(32, name="c_fc")(nn.gelu(x))


class Gpt2(nn.Module):
    @nn.compact
    def __call__(self, tokens: jax.Array, deterministic: bool = True) -> jax.Array:
        embed = nn.Embed(16, 32, name="wte")
        x = embed(tokens)
        for i in range(2):
            x = Block(name=f"h_{i}")(x)
        return embed.attend(nn.Dropout(0.5)(x, deterministic))


class Embedder(nnx.Module):
    """No call, and two methods, only one of which multiplies."""

    def __init__(self, rngs: nnx.Rngs):
        self.table = nnx.Param(jax.random.normal(rngs.params(), (7, 64)))

    def encode(self, tokens: jax.Array) -> jax.Array:
        return self.table[...][tokens]

    def decode(self, x: jax.Array) -> jax.Array:
        return jnp.dot(x, self.table[...].T)


class Einsum(nnx.Module):
    def __init__(self, subscripts: str, shape: tuple[int, ...], rngs: nnx.Rngs):
        self.subscripts, self.shape = subscripts, shape
        self.w = nnx.Param(jax.random.normal(rngs.params(), shape) / 8)

    @jax.named_scope("einsum")
    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.einsum(self.subscripts, x, self.w[...])


class Attention(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.q_proj = Einsum("btd,ndh->btnh", (2, 64, 32), rngs)
        self.kv_proj = Einsum("bsd,cndh->cbsnh", (2, 2, 64, 32), rngs)
        self.o_proj = Einsum("btnh,nhd->btd", (2, 32, 64), rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

    def block(self, x: jax.Array) -> jax.Array:
        q, (k, v) = self.q_proj(x), self.kv_proj(x)
        weights = self.dropout(nnx.softmax(jnp.einsum("btnh,bsnh->bnts", q, k)))
        self.calls[...] += 1
        return self.o_proj(jnp.einsum("bnts,bsnh->btnh", weights, v))

    def __call__(self, x: jax.Array) -> jax.Array:
        return nnx.remat(self.block.__func__)(self, x)  # pyright: ignore


class DecoderLayer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.attn = Attention(rngs)
        self.up, self.down = nnx.Linear(64, 64, rngs=rngs), nnx.Linear(64, 64, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attn(x)
        return x + self.down(nnx.silu(self.up(x)))


class Llama(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.embedder = Embedder(rngs)
        self.layers = nnx.List([DecoderLayer(rngs) for _ in range(2)])

    def __call__(self, tokens: jax.Array, cache: Any = None) -> tuple[jax.Array, Any]:
        x = self.embedder.encode(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.embedder.decode(x), cache


ATTENTION = "q_proj kv_proj btnh,bsnh->bnts bnts,bsnh->btnh o_proj".split()
BLOCK = "c_attn bqd,bkd->bqk bqk,bkd->bqd c_proj c_fc".split()
GPT2 = [f"h_{i}/{name}" for i in range(2) for name in BLOCK]
LLAMA = [
    f"layers/{i}/{name}"
    for i in range(2)
    for name in ("up", "down", *(f"attn/{name}" for name in ATTENTION))
]


@functools.cache
def variables() -> Any:
    with jax.ensure_compile_time_eval():
        return quick(Gpt2().init)(jax.random.key(0), TOKENS)


class Linen:
    """A model as a function of its parameters and tokens, and those parameters."""

    num_products, paths = 11, ("wte", *GPT2)

    def __init__(self):
        self.model, self.params = Gpt2(), variables()

    def run(self, *rules: Rule, strict: bool = True) -> Any:
        return convert.linen(self.model, rules, strict=strict).apply if rules else self.model.apply


class Nnx:
    num_products, paths = 15, (*LLAMA, "embedder")

    def __init__(self):
        self.model = Llama(nnx.Rngs(0))
        self.params, self.rest = nnx.state(self.model, nnx.Param, ...)

    def run(self, *rules: Rule, strict: bool = True) -> Any:
        model = convert.nnx(self.model, rules, strict=strict) if rules else self.model
        graph = nnx.graphdef(model)

        def run(params: Any, tokens: jax.Array) -> jax.Array:
            # New Variables: these may change below the gradient.
            rest = jax.tree.map(jnp.asarray, self.rest)
            return nnx.merge(graph, params, rest)(tokens)[0]

        return run


@pytest.mark.parametrize("case", [Linen, Nnx])
def test_every_product_is_converted(case: Any):
    framework = case()
    made = {"dot_general": 1, "mx_matmul": 10} if case is Linen else {"mx_matmul": 15}
    assert products(framework.run(), framework.params, TOKENS) == {"dot_general": case.num_products}
    assert products(framework.run(ALL), framework.params, TOKENS) == made
    report = convert.report(framework.model, ALL, TOKENS)
    assert report.num_converted == made["mx_matmul"]
    assert sorted(decision.layer.path for decision in report.decisions) == sorted(case.paths)


class TestGpt2:
    def test_rules_by_path_type_and_product(self):
        framework = Linen()

        def made(*rules: Rule) -> dict[str, int]:
            return products(framework.run(*rules), framework.params, TOKENS)

        assert made(ALL, Rule(".*", MXFP8, types=nn.Embed)) == {"mx_matmul": 11}
        assert made(Rule("h_1", MXFP8, types=Block)) == {"dot_general": 9, "mx_matmul": 2}
        assert made(Rule(".*/c_fc", MXFP8, types=Conv1D)) == {"dot_general": 9, "mx_matmul": 2}
        by_product = Rule("h_0/.*", MXFP8, types=convert.DotGeneral)
        assert made(by_product) == {"dot_general": 6, "mx_matmul": 5}
        # A recipe of weights alone says nothing of products without.
        assert made(Rule(".*", WEIGHT_ONLY)) == {"dot_general": 5, "mx_matmul": 6}

    def test_what_a_part_keeps_sows_and_draws_is_as_before(self):

        class Part(nn.Module):
            @nn.compact
            def __call__(self, x: jax.Array, *, scale: float) -> jax.Array:
                calls = self.variable("calls", "count", lambda: jnp.zeros((), jnp.int32))
                calls.value += 1
                self.sow("intermediates", "input", x)
                return nn.Dropout(0.5, deterministic=False)(Conv1D(32)(x)) * scale

        class Outer(nn.Module):
            part: nn.Module

            @nn.compact
            def __call__(self, x: jax.Array) -> jax.Array:
                return nn.Dense(8)(self.part(self.part(x, scale=2.0), scale=1.0))

        x, rngs = jnp.ones((2, 4, 32)), {"params": jax.random.key(0), "dropout": jax.random.key(1)}
        plain, rule = Outer(Part()), Rule("part(/.*)?", MXFP8)
        ours = convert.linen(plain, rule, strict=True)
        variables = quick(plain.init)(rngs, x)
        jax.tree.map(np.testing.assert_array_equal, quick(ours.init)(rngs, x), variables)

        def run(module: Any) -> Any:
            return functools.partial(module.apply, rngs=rngs, mutable=["calls", "intermediates"])

        assert products(run(plain), variables, x) == {"dot_general": 3}
        assert products(run(ours), variables, x) == {"dot_general": 1, "mx_matmul": 2}
        (before, kept), (after, ours_kept) = (
            quick(run(module))(variables, x) for module in (plain, ours)
        )
        assert ours_kept["calls"]["part"]["count"] == kept["calls"]["part"]["count"] == 4
        assert jax.tree.structure(ours_kept) == jax.tree.structure(kept)
        # The same is dropped.
        assert 0 < np.linalg.norm(after - before) < 0.2 * np.linalg.norm(before)

    @pytest.mark.slow
    @pytest.mark.parametrize("way", ["function", "linen"])
    def test_streams_of_the_model_reach_it(self, way: str):
        """flax.linen's apply takes rngs itself; conversion reads its own stream there."""
        framework, rule = Linen(), Rule(".*/c_fc", STOCHASTIC)
        converted: Any = framework.run(rule)
        if way == "function":
            converted = convert.function(framework.model.apply, rule, weights=0)

        @quick
        def apply(rngs: Any) -> Any:
            return converted(framework.params, TOKENS, deterministic=False, rngs=rngs)

        def run(quantize: int, dropout: int) -> np.ndarray:
            keys = {"quantize": jax.random.key(quantize), "dropout": jax.random.key(dropout)}
            return np.asarray(apply(keys))

        np.testing.assert_array_equal(run(0, 0), run(0, 0))
        assert np.any(run(0, 0) != run(1, 0)) and np.mean(run(0, 0) == run(0, 1)) < 0.1

    @pytest.mark.parametrize("way", ["to_linen", "ToNNX"])
    def test_a_layer_of_the_other_kind(self, way: str):
        x = jnp.ones((2, 64))
        if way == "ToNNX":
            model: Any = nnx.bridge.ToNNX(nn.Dense(8), rngs=nnx.Rngs(0)).lazy_init(x)
            before, after = model(x), convert.nnx(model, ALL)(x)
        else:
            model = nnx.bridge.to_linen(nnx.Linear, 64, 8)
            variables = model.init(jax.random.key(0), x)
            before, after = (m.apply(variables, x) for m in (model, convert.linen(model, ALL)))
        assert (before != after).any()
        (row,) = convert.report(model, ALL, x).decisions
        assert row.layer.kernel == (64, 8) and row.recipe is not None

    def test_a_model_that_holds_a_module(self):
        """As transformers' do: the error says what to convert, and how to put it back."""

        class PreTrained:
            _module = Gpt2()
            module = property(lambda self: self._module)

        text = r"convert.{}: PreTrained is no flax.linen module, but holds one as model.module: con"
        operations: list[Any] = [convert.linen, convert.report]
        for operation in operations:
            with pytest.raises(TypeError, match=text.format(operation.__name__)) as error:
                operation(PreTrained(), ALL)
            back = "put it back: model._module = convert.linen(model.module, rules)"
            assert back in str(error.value)


def call_once(model: Any) -> jax.Array:
    return model(TOKENS)[0]


class TestLlama:
    def test_what_a_call_says_of_rules_that_match_nothing(self):
        model = Llama(nnx.Rngs(0))
        typo = [Rule("layers/0/atn/.*", MXFP8), ALL]
        with pytest.warns(convert.UnusedRuleWarning, match=r"matched no layer: 0 .*'layers/0/up'"):
            nnx.eval_shape(call_once, convert.nnx(model, typo))
        with pytest.raises(ValueError, match=r"convert.nnx: rules that matched no layer: 0"):
            nnx.eval_shape(call_once, convert.nnx(model, typo, strict=True))

    def test_its_parts_and_what_calls_change(self):
        """A part is called alone in the closure of a jit, where nothing may change."""
        model = Llama(nnx.Rngs(0))
        converted = convert.nnx(model, ALL)
        layer, x = converted.layers[0].attn.q_proj, jnp.ones((2, 3, 64))
        expected = mx_jax.einsum(layer.subscripts, x, layer.w[...], recipe=MXFP8)
        np.testing.assert_array_equal(jax.jit(lambda x: layer(x))(x), expected)
        call = nnx.jit(call_once)
        assert np.any(call(converted) != call(converted)), "dropout drew anew"
        assert model.layers[1].attn.calls[...] == 2

    def test_random_bits(self):
        """Of the model's stream, new ones in each call; without one it is named."""
        model = Llama(nnx.Rngs(0))
        model.eval()
        converted = convert.nnx(model, Rule(".*attn.*", STOCHASTIC), rngs=nnx.Rngs(quantize=1))
        call = nnx.jit(call_once)
        assert np.any(call(converted) != call(converted))
        without = convert.nnx(model, Rule(".*attn.*", STOCHASTIC))
        remedy = r"needs the 'quantize' stream; convert the model with rngs=nnx.Rngs\(quantize=seed"
        with pytest.raises(ValueError, match=remedy):
            nnx.eval_shape(call_once, without)


class TestCallsOfNnx:
    """What else a module's call may do."""

    def test_one_that_is_compiled(self):
        class Compiled(nnx.Module):
            def __init__(self):
                self.w = nnx.Param(jnp.ones((32, 4)))

            @nnx.jit
            def __call__(self, x: jax.Array) -> jax.Array:  # pyright: ignore
                return x @ self.w[...]

        run, state = as_function(convert.nnx(Compiled(), ALL, strict=True))
        assert products(run, state, jnp.ones((2, 32))) == {"mx_matmul": 1}

    def test_one_that_adds_variables(self):
        class Sows(nnx.Module):
            def __init__(self):
                self.w, self.seen = nnx.Param(jnp.ones((32, 4))), 0

            def __call__(self, x: jax.Array, *, name: str) -> dict[str, Any]:
                self.last, self.seen = nnx.Intermediate(x), self.seen + 1
                return {"name": name, "y": x @ self.w[...], "none": None}

        converted, x = convert.nnx(Sows(), ALL), jnp.ones((2, 32))
        result = converted(x, name="head")
        assert result["name"] == "head" and result["y"].shape == (2, 4)
        assert converted.seen == 1
        np.testing.assert_array_equal(converted.last[...], x)

    def test_adapters_need_rules_that_name_them(self):
        """They are trained beside what rules quantize."""
        model, x = nnx.LoRALinear(64, 8, lora_rank=4, rngs=nnx.Rngs(0)), jnp.ones((2, 64))
        (_, first, second) = convert.report(model, ALL, x).decisions
        assert first.reason == second.reason == "rule 0: only a rule with types=LoRA converts it"
        run, state = as_function(convert.nnx(model, ALL))
        assert products(run, state, x) == {"dot_general": 2, "mx_matmul": 1}
        run, _ = as_function(convert.nnx(model, [ALL, Rule(".*", MXFP8, types=nnx.LoRA)]))
        assert products(run, state, x) == {"mx_matmul": 3}
