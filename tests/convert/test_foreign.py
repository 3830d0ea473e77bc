"""Modules that are not Flax's and multiply by name: a trace of the model's call reaches them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import mx_jax
from mx_jax import convert, recipes
from mx_jax.convert import Rule
from tests.quick import quick

from .helpers import MXFP8, STOCHASTIC, as_function, products


class Llama(nnx.Module):
    """As tunix has it: an Einsum of its own, attention and a tied head that multiply by name."""

    def __init__(self, rngs: nnx.Rngs):
        self.embedder = Embedder(rngs)
        self.layers = nnx.List([DecoderLayer(rngs) for _ in range(2)])

    def __call__(self, tokens: jax.Array, cache: Any = None) -> tuple[jax.Array, Any]:
        x = self.embedder.encode(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.embedder.decode(x), cache


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


TOKENS = jnp.arange(6).reshape(2, 3)
ALL, OTHER = Rule(".*", MXFP8), recipes.mxfp4()


class TestLlama:
    def test_every_product_is_converted(self):
        model = Llama(nnx.Rngs(0))
        run, state = as_function(model)
        assert products(run, state, TOKENS) == {"dot_general": 15}
        converted = convert.nnx(model, ALL, strict=True)
        ours, _ = as_function(converted)
        assert products(ours, state, TOKENS) == {"mx_matmul": 15}
        report = convert.report(model, ALL, TOKENS)
        assert report.summary == "15 of 15 layers converted"
        paths = {own.layer.path: own.layer.type for own in report.decisions}
        attention = {
            "layers/1/attn/btnh,bsnh->bnts": Attention,
            "layers/1/attn/bnts,bsnh->btnh": Attention,
        }
        assert {
            "embedder": Embedder,
            "layers/0/up": nnx.Linear,
            "layers/1/attn/q_proj": Einsum,
            **attention,
        }.items() <= paths.items()

    def test_it_is_the_function_converted(self):
        """To the bit, with its gradients; what a call changes is changed."""
        model = Llama(nnx.Rngs(0))
        run, _ = as_function(model)
        ours, _ = as_function(convert.nnx(model, ALL))
        theirs = convert.function(run, ALL, weights=0)
        params, others = nnx.state(model, nnx.Param, ...)

        def of_params(run: Any) -> Any:
            def loss(params: Any, others: Any) -> Any:
                # New Variables: these may change below the gradient.
                others = jax.tree.map(jnp.asarray, others)
                return jnp.var(run(nnx.merge_state(params, others), TOKENS)[0])

            return quick(jax.value_and_grad(loss))(params, others)

        jax.tree.map(np.testing.assert_array_equal, of_params(ours), of_params(theirs))
        converted = convert.nnx(model, ALL)
        first, second = converted(TOKENS)[0], converted(TOKENS)[0]
        assert np.any(first != second), "dropout drew anew"
        assert model.layers[1].attn.calls[...] == 2

    def test_rules_by_path_type_and_product(self):
        model = Llama(nnx.Rngs(0))
        rules = [
            Rule("embedder", None),
            Rule(".*/attn/.*->.*", OTHER, types=Attention),
            Rule("layers/0/.*", MXFP8, types=Einsum),
            Rule("layers/1/.*", MXFP8, types=convert.DotGeneral),
        ]
        report = convert.report(model, rules, TOKENS)
        assert [own.rule for own in report.decisions] == [
            *[None] * 4,
            *[2, 2, 1, 1, 2],
            *[3, 3, 1, 1, 3],
            0,
        ]
        converted = convert.nnx(model, rules, strict=True)
        run, state = as_function(converted)
        assert products(run, state, TOKENS) == {"dot_general": 5, "mx_matmul": 10}

    def test_what_is_told_when(self):
        """Without a call the products are not known; with one, rules that matched none are."""
        model = Llama(nnx.Rngs(0))
        report = convert.report(model, ALL)
        reasons = {own.layer.path: own.reason for own in report.decisions if own.recipe is None}
        assert len(reasons) == 7 and reasons["embedder"] == reasons["layers/0/attn/q_proj"] == (
            "its products show in a call: give the report example arguments"
        )
        typo = [Rule("layers/0/atn/.*", MXFP8), ALL]
        converted = convert.nnx(model, typo)
        with pytest.warns(convert.UnusedRuleWarning, match=r"matched no layer: 0 .*'layers/0/up'"):
            converted(TOKENS)
        with pytest.raises(ValueError, match=r"convert.nnx: rules that matched no layer: 0"):
            convert.nnx(model, typo, strict=True)(TOKENS)

    def test_its_parts_when_called_alone(self):
        """And in the closure of a jit, where nothing may change."""
        converted = convert.nnx(Llama(nnx.Rngs(0)), ALL)
        layer, x = converted.layers[0].attn.q_proj, jnp.ones((2, 3, 64))
        expected = mx_jax.einsum(layer.subscripts, x, layer.w[...], recipe=MXFP8)
        np.testing.assert_array_equal(jax.jit(lambda x: layer(x))(x), expected)

    def test_random_bits(self):
        """Of the model's stream, new ones in each call; without one it is named."""
        model = Llama(nnx.Rngs(0))
        model.eval()
        converted = convert.nnx(model, Rule(".*attn.*", STOCHASTIC), rngs=nnx.Rngs(quantize=1))
        assert np.any(converted(TOKENS)[0] != converted(TOKENS)[0])
        without = convert.nnx(model, Rule(".*attn.*", STOCHASTIC))
        with pytest.raises(ValueError, match="draws random bits and needs the 'quantize' stream"):
            without(TOKENS)

    def test_a_call_that_is_compiled(self):
        class Compiled(nnx.Module):
            def __init__(self):
                self.w = nnx.Param(jnp.ones((32, 4)))

            @nnx.jit
            def __call__(self, x: jax.Array) -> jax.Array:  # pyright: ignore
                return x @ self.w[...]

        run, state = as_function(convert.nnx(Compiled(), ALL, strict=True))
        assert products(run, state, jnp.ones((2, 32))) == {"mx_matmul": 1}

    def test_a_call_that_adds_variables(self):
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

    @pytest.mark.slow
    def test_below_a_scan_of_layers(self):
        """A stack made by nnx.vmap, which the model runs."""

        @nnx.split_rngs(splits=2)
        @nnx.vmap
        def stack(rngs: nnx.Rngs) -> Einsum:
            return Einsum("bd,df->bf", (64, 64), rngs)

        class Stack(nnx.Module):
            def __init__(self, rngs: nnx.Rngs):
                self.layers = stack(rngs)

            def __call__(self, x: jax.Array) -> jax.Array:
                scan = nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
                return scan(lambda x, layer: layer(x))(x, self.layers)

        model, x = Stack(nnx.Rngs(0)), jnp.ones((3, 64))
        expected = x
        for w in model.layers.w[...]:
            expected = mx_jax.einsum("bd,df->bf", expected, w, recipe=MXFP8)
        converted = convert.nnx(model, Rule("layers", MXFP8), strict=True)
        np.testing.assert_allclose(nnx.jit(converted)(x), expected, rtol=1e-5)


def test_adapters_follow_rules_that_name_them():
    """They are trained beside what rules quantize."""
    model, x = nnx.LoRALinear(64, 8, lora_rank=4, rngs=nnx.Rngs(0)), jnp.ones((2, 64))
    (_, first, second) = convert.report(model, ALL, x).decisions
    assert first.reason == second.reason == "rule 0: only a rule with types=LoRA converts it"
    run, state = as_function(convert.nnx(model, ALL))
    assert products(run, state, x) == {"dot_general": 2, "mx_matmul": 1}
    named = [ALL, Rule(".*", MXFP8, types=nnx.LoRA)]
    run, _ = as_function(convert.nnx(model, named))
    assert products(run, state, x) == {"mx_matmul": 3}


def test_a_tied_head_of_flaxs_embedding():
    """It follows rules that name the type, and its attribute alone: no trace adds to it."""

    class Tied(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.embed, self.w = nnx.Embed(7, 64, rngs=rngs), nnx.Param(jnp.ones((64, 64)))

        def __call__(self, tokens: jax.Array) -> jax.Array:
            return self.embed.attend(self.embed(tokens) @ self.w[...])

    model = Tied(nnx.Rngs(0))
    for rules in (ALL, [Rule(".*", MXFP8, types=nnx.Embed), ALL]):
        run, state = as_function(convert.nnx(model, rules, strict=True))
        assert products(run, state, TOKENS) == {"dot_general": 1, "mx_matmul": 1}
