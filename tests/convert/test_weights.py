"""Weights stored once: the numbers of the model that quantizes in every call, and its few bytes."""

import dataclasses
import warnings
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import mx_jax
from mx_jax import checkpoint, convert
from mx_jax.backends.cpu_ffi import products
from mx_jax.backends.select import only_backend
from mx_jax.convert import Rule
from mx_jax.mxarray import MXArray
from mx_jax.packed import PackedMXArray, Quantized
from mx_jax.recipes import Hadamard, mxfp4, weight_only
from mx_jax.testing.compare import assert_bitwise_equal
from tests.needs import needs_library

RULES = [
    Rule("tokens", weight_only("mxfp4"), types=nn.Embed),
    Rule("head", None),
    Rule("blocks/up", "mxfp8"),
    Rule(".*", weight_only("nvfp4")),
]
TOKENS = jnp.array([[3, 95, 0, 7]])


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        x = x + nn.MultiHeadAttention(num_heads=2, name="attention")(x)
        return x + nn.Dense(64, name="down")(nn.gelu(nn.Dense(96, name="up")(x))), None


class Model(nn.Module):
    """A stack of layers, kernels of three axes, a table that is looked up in and multiplied by."""

    @nn.compact
    def __call__(self, tokens):
        table = nn.Embed(96, 64, name="tokens")
        stack = nn.scan(Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=2)
        x, _ = stack(name="blocks")(table(tokens), None)
        return nn.Dense(96, name="head")(x) + table.attend(x)


@pytest.fixture(scope="module")
def variables() -> Any:
    shapes = jax.eval_shape(Model().init, jax.random.key(0), TOKENS)
    random = np.random.default_rng(0)
    return jax.tree.map(
        lambda x: jnp.asarray(random.standard_normal(x.shape, np.float32) / 8), shapes
    )


@pytest.fixture(scope="module")
def expected(variables: Any) -> jax.Array:
    """Of the model that quantizes in every call."""
    with only_backend("cpu_ffi"):
        return jax.jit(convert.linen(Model(), RULES).apply)(variables, TOKENS)


def kinds(tree: Any) -> dict[str, str]:
    """Class and format of the quantized leaves, by path."""
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: isinstance(x, Quantized))
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): (
            f"{type(leaf).__name__} {leaf.format.name}"
        )
        for path, leaf in leaves
        if isinstance(leaf, Quantized)
    }


def compiled(run: Any, *args: Any) -> tuple[Any, str]:
    program = jax.jit(run).lower(*args).compile()
    return program(*args), program.as_text() or ""


# flax.linen ---------------------------------------------------------------------------------------


def test_tables_below_vmap():
    """A stack of them is looked up in by its values."""
    axes = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}, "in_axes": None}
    model, ids = nn.vmap(nn.Embed, axis_size=2, **axes)(8, 32), jnp.arange(6).reshape(2, 3)
    rule = Rule(".*", weight_only("mxfp4"), types=nn.Embed)
    params = model.init(jax.random.key(0), ids)["params"]
    stored = convert.weights(params, rule, model=model, args=(ids,), pack=False)
    converted = convert.linen(model, rule)
    results = [converted.apply({"params": each}, ids) for each in (params, stored)]
    assert_bitwise_equal(*results)
    (row,) = convert.report(model, rule, ids).decisions
    assert row.layer.shape == (32, 8)


@pytest.mark.slow
@needs_library
@pytest.mark.parametrize("pack", [False, True], ids=["mxarrays", "packed"])
def test_a_linen_model_gives_the_numbers_of_its_conversion(
    variables: Any, expected: jax.Array, pack: bool
):
    with only_backend("cpu_ffi"):
        model = convert.linen(Model(), RULES)
        stored = convert.weights(variables, RULES, model=Model(), args=(TOKENS,), pack=pack)
        actual, text = compiled(model.apply, stored, TOKENS)
    assert_bitwise_equal(actual, expected, what="logits")
    form = "PackedMXArray" if pack else "MXArray"
    prefix = "params/blocks/attention/"
    assert kinds(stored) == {
        **{f"{prefix}{name}/kernel": f"{form} nvfp4" for name in ("key", "out", "query", "value")},
        "params/blocks/down/kernel": f"{form} nvfp4",
        "params/blocks/up/kernel": f"{form} mxfp8_e4m3",
        # Rows are looked up in it, which its packed layout gives one by one.
        "params/tokens/embedding": f"{form} mxfp4",
    }
    # Scanned, so that each of the six kernels has one call; `attend` has the seventh.
    assert text.count(f'custom_call_target="{products.PACKED_MATMUL}"') == 7 * pack
    # No kernel and no table is decoded whole: of the stack, one would be [64, 96].
    assert "f32[96,64]" not in text


def test_parameters_alone_tell_less():
    params = {
        "heads": {"kernel": jnp.ones((64, 2, 4)), "bias": jnp.ones((2, 4))},
        "norm": {"scale": jnp.ones(64)},
        "odd": {"w": jnp.ones((64, 8))},
        "steps": {"kernel": jnp.ones((64, 8), jnp.int32)},
        "table": {"embedding": jnp.ones((96, 64))},
        "up": {"kernel": jnp.ones((64, 8))},
    }
    rules = [Rule("up", "mxfp8", types=nn.Dense), Rule(".*/kernel", weight_only("mxfp4"))]
    with pytest.warns(convert.UnusedRuleWarning, match="matched no layer: 0"):
        report = convert.weights_report(params, rules)
    unknown = "which of its axes a product contracts is not known"
    assert {d.layer.path: d.reason for d in report.decisions} == {
        "heads": unknown,
        "odd/w": unknown,
        "steps": "is int32; float32, bfloat16 and float16 can be quantized",
        "table": "no rule matches",
        "up": "",
    }
    with pytest.warns(convert.UnusedRuleWarning):
        report = convert.weights_report({"up": params["up"]}, rules[:1])
    unknown = "rule 0: parameters alone do not tell types: give the model"
    assert report.decisions[0].reason == unknown
    with pytest.warns(convert.UnusedRuleWarning):
        stored = convert.weights(params, rules, pack=False)
    assert kinds(stored) == {"up/kernel": "MXArray mxfp4"}
    assert stored["norm"]["scale"] is params["norm"]["scale"]
    with pytest.raises(ValueError, match="matched no layer: 0"):
        convert.weights(params, rules, strict=True)


@pytest.mark.parametrize("model", [False, True])
def test_rules_that_store_nothing(model: bool):
    """Whoever serves by a recipe that transforms weights would serve float32 without a word."""
    transform = Hadamard(size=16, signs=(1,) * 16)
    boxed = mxfp4().with_(
        output=dataclasses.replace(mxfp4().output, transform=transform), name="turned"
    )
    rules = [Rule("up", weight_only("mxfp4")), Rule(".*", boxed)]
    layers = {name: nnx.Linear(32, 8, rngs=nnx.Rngs(0)) for name in ("up", "down")}
    ones = jnp.ones((32, 8))
    params: Any = nnx.Dict(layers) if model else {name: {"kernel": ones} for name in layers}
    rngs: dict[str, Any] = {"rngs": nnx.Rngs(quantize=0)} if model else {}
    text = (
        r"weights: rule 1 \('\.\*'\) stores nothing: its recipe transforms weights in every "
        r"product, got recipe='turned'; its layers stay in high precision"
    )
    with pytest.warns(convert.UnusedRuleWarning, match=text):
        convert.weights(params, rules, **rngs)
    with pytest.raises(ValueError, match=text):
        convert.weights(params, rules, strict=True, **rngs)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        high = [rules[0], Rule(".*", "mxfp4_backward")]
        kept: Any = convert.weights(params, high, **rngs)["down"]
    kernel, before = (kept.kernel, layers["down"].kernel) if model else (*kept.values(), ones)
    assert kernel is before
    reasons = [decision.reason for decision in convert.weights_report(params, high).decisions]
    assert reasons == ["its recipe leaves weights in high precision", ""]


def test_stored_again_and_boxed():
    """What is quantized stays; metadata of sharding stay around what they are of."""
    boxed = nn.Partitioned(jnp.ones((64, 8)), names=("data", None))
    rule = Rule(".*", weight_only("mxfp4"))
    once = convert.weights({"up": {"kernel": boxed}}, rule, pack=False)
    assert once["up"]["kernel"].names == ("data", None)
    assert isinstance(once["up"]["kernel"].value, MXArray)
    with pytest.warns(convert.UnusedRuleWarning):
        report = convert.weights_report(once, rule)
    assert report.decisions[0].reason == "is mxfp4 already"


def test_what_is_no_tree():
    with pytest.raises(TypeError, match=r"needs a flax\.nnx model or state, .* got Dense"):
        convert.weights(nn.Dense(8), Rule(".*", "mxfp8"))
    with pytest.raises(TypeError, match=r"calibrate.Gptq\(moments\) does, got by='gptq'"):
        convert.weights({}, Rule(".*", "mxfp8"), by="gptq")  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="Linear is itself a model; model= and args="):
        model = nnx.Linear(32, 8, rngs=nnx.Rngs(0))
        convert.weights(model, Rule(".*", "mxfp8"), model=nn.Dense(8))


# flax.nnx -----------------------------------------------------------------------------------------


class NnxModel(nnx.Module):
    """Flax's layers and one of ours, of which two hold one kernel."""

    def __init__(self, rngs: nnx.Rngs):
        self.tokens = nnx.Embed(96, 64, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, 64, decode=False, rngs=rngs)
        self.up = nnx.Linear(64, 64, rngs=rngs)
        self.tied = nnx.Linear(64, 64, rngs=rngs)
        self.tied.kernel = self.up.kernel
        self.ours = mx_jax.nn.nnx.Linear(64, 64, recipe="mxfp8", rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.attention(self.tokens(tokens))
        return self.ours(self.tied(nnx.relu(self.up(x))))


NNX_RULES = [
    Rule("tokens", "mxfp8", types=nnx.Embed),
    Rule("ours", "mxfp8"),
    Rule("attention/(qk|av)", None),
    Rule(".*", weight_only("mxfp4")),
]


def run(model: Any, x: jax.Array) -> jax.Array:
    return model(x)


@needs_library
def test_an_nnx_model_gives_the_numbers_of_its_conversion():
    model = NnxModel(nnx.Rngs(0))
    with only_backend("cpu_ffi"):
        # Attention's own products have no kernel.
        with pytest.warns(convert.UnusedRuleWarning, match=r"layer: 2 "):
            served = convert.weights(model, NNX_RULES)
        with pytest.warns(convert.UnusedRuleWarning, match=r"layer: 1 \('ours'\);"):
            expected = nnx.jit(run)(convert.nnx(model, NNX_RULES), TOKENS)
        graph, state = nnx.split(served)
        actual, text = compiled(lambda s, x: nnx.merge(graph, s)(x), state, TOKENS)
    assert_bitwise_equal(actual, expected, what="output")
    assert text.count(f'custom_call_target="{products.PACKED_MATMUL}"') == 7
    # The model is as it was, and shares what stayed.
    assert isinstance(model.up.kernel[...], jax.Array)
    assert served.up.bias is model.up.bias
    assert isinstance(model.tokens.embedding[...], jax.Array) and type(model.tokens) is nnx.Embed
    assert isinstance(served.tokens.embedding[...], Quantized)
    # No table is decoded whole.
    assert "f32[96,64]" not in text
    assert served.up.kernel is served.tied.kernel
    assert isinstance(served.up.kernel[...], PackedMXArray)
    assert type(served.up.kernel) is nnx.Param


@needs_library
@pytest.mark.parametrize("pack", [False, True], ids=["mxarrays", "packed"])
def test_an_nnx_embedding_is_looked_up_and_attended_to_in_codes(pack: bool):
    """As its conversion has it, from 4.25 bits a value; the head reads the codes that rows do."""
    embed = nnx.Embed(96, 64, rngs=nnx.Rngs(0))
    rule = Rule(".*", weight_only("mxfp4"), types=nnx.Embed)
    served = convert.weights(embed, rule, pack=pack)
    table = served.embedding[...]
    assert isinstance(table, PackedMXArray if pack else MXArray)
    graph, state = nnx.split(served)
    query = jax.random.normal(jax.random.key(0), (2, 64))

    def run(state: Any, tokens: jax.Array, query: jax.Array) -> Any:
        model = nnx.merge(graph, state)
        return model(tokens), model.attend(query)

    with only_backend("cpu_ffi"):
        (rows, logits), text = compiled(run, state, TOKENS, query)
    converted = convert.nnx(embed, rule)
    assert_bitwise_equal(rows, converted(TOKENS), what="rows")
    np.testing.assert_allclose(logits, converted.attend(query), rtol=1e-5, atol=1e-6)
    assert ("f32[96,64]" not in text) and text.count(products.PACKED_MATMUL) == pack
    half = nnx.Embed(96, 64, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    assert convert.weights(half, rule, pack=pack)(TOKENS[:1]).dtype == jnp.bfloat16


def test_a_state_goes_back_into_its_model():
    model = convert.nnx(nnx.Linear(64, 8, rngs=nnx.Rngs(0)), Rule(".*", weight_only("mxfp4")))
    x = jnp.ones((2, 64))
    expected = nnx.jit(run)(model, x)
    state = convert.weights(nnx.state(model), Rule("", weight_only("mxfp4")), pack=False)
    nnx.update(model, state)
    assert isinstance(model.kernel[...], MXArray)
    assert_bitwise_equal(nnx.jit(run)(model, x), expected, what="output")


# Bytes --------------------------------------------------------------------------------------------


@needs_library
@pytest.mark.parametrize("format, bits", [("mxfp4", 4.25), ("nvfp4", 4.5), ("mxfp6_e2m3", 6.25)])
def test_bits_of_a_parameter(format: str, bits: float, tmp_path: Any):
    params = {"up": {"kernel": np.ones((1024, 256), np.float32)}}
    with only_backend("cpu_ffi"):
        stored = convert.weights(params, Rule(".*", weight_only(format)))
        assert stored["up"]["kernel"].nbytes * 8 / 1024 / 256 == pytest.approx(bits, rel=0.01)
        checkpoint.save(tmp_path / "model.safetensors", stored)
    size = (tmp_path / "model.safetensors").stat().st_size
    assert size * 8 / 1024 / 256 == pytest.approx(bits, rel=0.01)
