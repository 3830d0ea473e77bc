"""Flax's own attention, decoding with its cache in a block format by a rule."""

import functools
import pickle
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import flax.linen as nn
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mx_jax import convert
from mx_jax.nn import KVCache
from tests.quick import quick

BATCH, LENGTH, HEADS, FEATURES, WIDTH = 2, 4, 2, 32, 32
X = np.random.default_rng(0).standard_normal((BATCH, LENGTH, WIDTH)).astype(np.float32)
FIXED = convert.CacheFormat("nvfp4", tensor_scales=(0.002, 0.001))
FORMATS = [
    pytest.param("mxfp8_e4m3", 8.25, id="mxfp8"),
    pytest.param(FIXED, 4.5, id="nvfp4-fixed"),
]


class Decoder(nn.Module):
    """A user's model, which knows nothing of formats."""

    decode: bool = True
    attention_fn: Any = nn.dot_product_attention

    @nn.compact
    def __call__(self, x, mask=None, sow=False):
        attention = functools.partial(
            nn.MultiHeadAttention,
            num_heads=HEADS,
            qkv_features=HEADS * FEATURES,
            decode=self.decode,
            attention_fn=self.attention_fn,
        )
        for index in range(2):
            x = x + attention(name=f"attention_{index}")(x, mask=mask, sow_weights=sow)
        return x


class OwnAttention(nn.Module):
    """Attention with the library's cache written into it, its parameters those of Flax's."""

    format: convert.CacheFormat

    @nn.compact
    def __call__(self, x):
        shape = (BATCH, LENGTH, HEADS, FEATURES)
        form, scales = self.format.format, self.format.tensor_scales
        empty = functools.partial(KVCache.zeros, *shape, format=form, tensor_scales=scales)
        cache = self.variable("cache", "kv", empty)
        index = self.variable("cache", "index", lambda: jnp.array(0, jnp.int32))
        project = functools.partial(nn.DenseGeneral, (HEADS, FEATURES))
        query, keys, values = (project(name=name)(x) for name in ("query", "key", "value"))
        if not self.is_initializing():
            cache.value = cache.value.append(keys, values, index.value)
            query, index.value = cache.value.attend(query, index.value), index.value + x.shape[1]
        return nn.DenseGeneral(WIDTH, axis=(-2, -1), name="out")(query)


class OwnDecoder(nn.Module):
    """`Decoder` of such attention."""

    format: convert.CacheFormat

    @nn.compact
    def __call__(self, x):
        for index in range(2):
            x = x + OwnAttention(self.format, name=f"attention_{index}")(x)
        return x


def rule(format):
    return convert.Rule(".*", None, cache=format)


def format_of(given):
    return given if isinstance(given, convert.CacheFormat) else convert.CacheFormat(given)


@functools.cache
def original_variables():
    with jax.ensure_compile_time_eval():
        return quick(Decoder().init)(jax.random.key(1), X)


def params():
    return original_variables()["params"]


def started(model):
    """The cache as a user makes it: of zeros, by the shapes that init would give."""
    shapes = jax.eval_shape(model.init, jax.random.key(0), X)["cache"]
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)


def decoded(model, cache, x=X, **options):
    """Token by token in one scan, the cache donated."""

    def step(cache, token):
        variables = {"params": params(), "cache": cache}
        y, new = model.apply(variables, token[:, None], mutable=["cache"], **options)
        return new["cache"], y[:, 0]

    run = quick(lambda cache: jax.lax.scan(step, cache, x.swapaxes(0, 1)), donate_argnums=0)
    cache, y = run(cache)
    return y.swapaxes(0, 1), cache


def rows(cache):
    return [cache[f"attention_{i}"][name] for i in range(2) for name in KEPT]


KEPT = ("cached_key", "cached_value")


@pytest.mark.slow(but="nvfp4-fixed")
@pytest.mark.parametrize(("format", "bits"), FORMATS)
def test_linen_decodes_as_the_librarys_own_cache(format, bits):
    model = convert.linen(Decoder(), rule(format))
    y, cache = decoded(model, started(model))
    own = OwnDecoder(format_of(format))
    expected, own_cache = decoded(own, quick(own.init)(jax.random.key(0), X)["cache"])
    np.testing.assert_array_equal(y, expected)
    for name, layer in own_cache.items():
        for kept, kv in zip(KEPT, (layer["kv"].keys, layer["kv"].values), strict=True):
            jax.tree.map(np.testing.assert_array_equal, cache[name][kept], kv)
    values = 4 * BATCH * LENGTH * HEADS * FEATURES
    found = sum(leaf.nbytes for leaf in jax.tree.leaves(rows(cache)))
    assert found == values * bits / 8 + (16 if format is FIXED else 0)
    assert int(cache["attention_1"]["cache_index"]) == LENGTH


def values_of(rows):
    return rows.read().swapaxes(1, 2)


def test_a_mask_and_sown_weights_are_flaxs_over_the_decoded_rows():
    model = convert.linen(Decoder(), rule("mxfp8_e4m3"))
    _, cache = decoded(model, started(model), X[:, :3])
    mask = jnp.array([True, False, True, True])[None, None, None]
    variables = {"params": params(), "cache": cache}
    step = functools.partial(model.apply, variables, X[:, 3:], mutable=["cache", "intermediates"])
    _, new = step(mask=mask, sow=True)
    kept = new["cache"]["attention_0"]
    layer = functools.partial(nn.DenseGeneral, (HEADS, FEATURES))
    query = layer().apply({"params": params()["attention_0"]["query"]}, X[:, 3:])
    expected = nn.attention.dot_product_attention_weights(
        query, values_of(kept["cached_key"]), mask=mask
    )
    found = np.asarray(new["intermediates"]["attention_0"]["attention_weights"][0])
    np.testing.assert_allclose(found, expected, atol=1e-6)
    assert (found[..., 1] == 0).all() and (found[..., 2:] > 0).all()


def test_a_cache_that_an_unconverted_model_began_is_cast():
    plain, model = Decoder(), convert.linen(Decoder(), rule("mxfp8_e4m3"))
    _, floats = decoded(plain, original_variables()["cache"], X[:, :3])
    variables = {"params": params(), "cache": floats}
    _, new = quick(functools.partial(model.apply, mutable=["cache"]))(variables, X[:, 3:])
    kept = rows(new["cache"])[0]
    expected = convert.CacheFormat("mxfp8_e4m3").holding(*[floats["attention_0"][k] for k in KEPT])
    np.testing.assert_array_equal(kept.codes[:, :, :3], expected.keys.codes[:, :, :3])
    assert (kept.codes[:, :, 3] != 0).any()
    assert int(new["cache"]["attention_0"]["cache_index"]) == LENGTH


def test_several_tokens_at_once_are_a_prompt():
    model = convert.linen(Decoder(), rule("mxfp8_e4m3"))
    y, cache = decoded(model, started(model))
    variables = {"params": params(), "cache": started(model)}
    prompt, new = quick(functools.partial(model.apply, mutable=["cache"]))(variables, X)
    np.testing.assert_allclose(prompt, y, atol=1e-5)
    assert int(new["cache"]["attention_0"]["cache_index"]) == LENGTH
    np.testing.assert_array_equal(rows(new["cache"])[0].codes, rows(cache)[0].codes)


def without_mask(query, key, value):
    return query


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"decode": False}, "(decode=False)"),
        ({"attention_fn": without_mask}, "(its attention_fn takes no mask)"),
    ],
)
def test_what_stays_is_told(options, reason):
    report = convert.report(Decoder(**options), rule("mxfp4"), X)
    lines = [line for line in str(report).splitlines() if line.startswith("attention_0/cache")]
    assert len(lines) == 1 and lines[0].endswith(reason)
    assert report.num_converted == 0


def test_a_product_that_a_rule_quantizes_is_quantized_over_the_cache():
    rules = [convert.Rule(".*/(qk|av|cache)", "mxfp8", cache="mxfp8_e4m3")]
    model = convert.linen(Decoder(), rules)
    y, _ = decoded(model, started(model))
    alone, _ = decoded(convert.linen(Decoder(), rule("mxfp8_e4m3")), started(model))
    error = np.linalg.norm(y - alone) / np.linalg.norm(alone)
    assert 1e-4 < error < 0.1


def test_rules_for_caches_that_met_none():
    with pytest.warns(convert.UnusedRuleWarning, match="no layer that keeps one: 0"):
        convert.report(nn.Dense(8), rule("mxfp4"), X)
    with pytest.raises(ValueError, match="no layer that keeps one: 0"):
        convert.nnx(nnx.Linear(8, 8, rngs=nnx.Rngs(0)), rule("mxfp4"), strict=True)


def test_errors():
    with pytest.raises(ValueError, match="blocks must lie along the features"):
        rule("float8_tensorwise_e4m3")
    with pytest.raises(ValueError, match="tensor_scales are for formats with a tensor scale"):
        convert.CacheFormat("mxfp4", tensor_scales=(1.0, 1.0))
    model = convert.linen(Decoder(), rule("mxfp8_e4m3"))
    variables = {"params": params(), "cache": started(model)}
    with pytest.raises(ValueError, match=r"got batch=1, .* the cache has 2, 4, 2 and 32"):
        model.apply(variables, X[:1, :1], mutable=["cache"])
    other = convert.linen(Decoder(), rule("mxfp4"))
    with pytest.raises(ValueError, match="format=mxfp8_e4m3, and its rule asks for format=mxfp4"):
        other.apply(variables, X[:, :1], mutable=["cache"])


# flax.nnx.


def attention(**options) -> Any:
    sizes = {"num_heads": 4, "in_features": WIDTH, "qkv_features": 4 * FEATURES}
    return nnx.MultiHeadAttention(
        **sizes, num_kv_heads=HEADS, decode=True, rngs=nnx.Rngs(0), **options
    )


def nnx_decoded(model, x=X):
    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))
    def run(model, token):
        return model, model(token[:, None])[:, 0]

    return nnx.jit(run)(model, x.swapaxes(0, 1))[1].swapaxes(0, 1)


@pytest.mark.slow(but="mxfp8")
@pytest.mark.parametrize(("format", "bits"), FORMATS)
def test_nnx_decodes_as_the_librarys_own_cache(format, bits):
    model = convert.nnx(attention(), rule(format))
    model.init_cache(X.shape)
    y = nnx_decoded(model)
    form, scales = format_of(format).format, format_of(format).tensor_scales

    @nnx.jit
    def own(model, x):
        cache = KVCache.zeros(BATCH, LENGTH, HEADS, FEATURES, format=form, tensor_scales=scales)
        outs = []
        for at in range(LENGTH):
            token = x[:, at : at + 1]
            query, keys, values = model.query(token), model.key(token), model.value(token)
            cache = cache.append(keys, values, at)
            outs.append(model.out(cache.attend(query, at))[:, 0])
        return jnp.stack(outs, 1), cache

    expected, cache = own(attention(), X)
    np.testing.assert_array_equal(y, expected)
    np.testing.assert_array_equal(model.cached_key.get_value().codes, cache.keys.codes)
    found = sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(model, nnx.Cache)))
    values = 2 * BATCH * LENGTH * HEADS * FEATURES
    assert found == values * bits / 8 + (8 if format is FIXED else 0) + 4
    assert int(model.cache_index[...]) == LENGTH


def test_nnx_goes_on_from_a_cache_and_back():
    floats = attention()
    floats.init_cache(X.shape)
    nnx_decoded(floats, X[:, :2])
    model = convert.nnx(floats, rule("mxfp8_e4m3"))
    y = nnx_decoded(model, X[:, 2:])
    # The model itself goes on with its own cache.
    assert int(floats.cache_index[...]) == 2 and int(model.cache_index[...]) == LENGTH
    expected = nnx_decoded(floats, X[:, 2:])
    assert 1e-4 < np.linalg.norm(y - expected) / np.linalg.norm(expected) < 0.1
    back: Any = convert.original(model)
    assert back.__class__ is nnx.MultiHeadAttention
    assert back.cached_key[...].shape == (BATCH, LENGTH, HEADS, FEATURES)
    np.testing.assert_allclose(back.cached_key[...], floats.cached_key[...], rtol=0.07, atol=0.02)
    assert int(back.cache_index[...]) == LENGTH
    assert back.cache_index is not model.cache_index


def test_nnx_without_decoding_is_flaxs_own():
    plain = attention()
    model = convert.nnx(plain, rule("mxfp4"))
    np.testing.assert_array_equal(model(X, decode=False), plain(X, decode=False))
    with pytest.raises(ValueError, match="init_cache"):
        model(X[:, :1])


def test_nnx_masks_and_functions_of_ones_own():
    calls = []

    def recording(query, keys, values, mask=None, **options):
        calls.append((keys.shape, np.asarray(mask)))
        return nnx.dot_product_attention(query, keys, values, mask=mask)

    model = convert.nnx(attention(attention_fn=recording), rule("mxfp8_e4m3"))
    model.init_cache(X.shape)
    mask = jnp.array([False, True, True, True])[None, None, None]
    model(X[:, :1])
    model(X[:, 1:2], mask=jnp.broadcast_to(mask, (BATCH, 1, 1, LENGTH)))
    assert [shape for shape, _ in calls] == [(BATCH, LENGTH, HEADS, FEATURES)] * 2
    np.testing.assert_array_equal(calls[0][1][0, 0, 0], [True, False, False, False])
    np.testing.assert_array_equal(calls[1][1][0, 0, 0], [False, True, False, False])


class OwnCall(nnx.MultiHeadAttention):
    def __call__(self, inputs_q, *args, **options):
        return inputs_q


def test_nnx_tells_what_stays():
    model = OwnCall(4, WIDTH, decode=True, rngs=nnx.Rngs(0))
    report = convert.report(model, rule("mxfp4"))
    assert str(report.decisions[-1].reason) == "has a call of its own"


# Calls that it refuses, and what its threads and files give.

RULE = rule("mxfp4")
LONG = np.random.default_rng(0).standard_normal((2, 8, 64)).astype(np.float32)


def in_linen() -> tuple[Any, Any]:
    model = convert.linen(nn.MultiHeadAttention(2, decode=True), RULE)
    return model, model.init(jax.random.key(0), LONG)


def in_nnx(kind: Any = nnx.MultiHeadAttention, **options: Any) -> Any:
    layer = convert.nnx(kind(2, 64, decode=True, rngs=nnx.Rngs(0), **options), RULE)
    layer.init_cache(LONG.shape)
    return layer


def test_calls_that_flax_refuses_too():
    """Queries of other tokens or sequences would see rows that nobody wrote, or those of others."""
    model, variables = in_linen()
    for query, keys in ((LONG[:, :2], LONG[:, :1]), (LONG[:, :1], LONG[:1, :1])):
        with pytest.raises(ValueError, match="must be of the same sequences and tokens, got query"):
            model.apply(variables, query, keys, mutable=["cache"])
    for mask in (jnp.ones((2, 8), bool), nn.make_causal_mask(jnp.ones((2, 3)), dtype=bool)):
        with pytest.raises(ValueError, match=r"heads or 1, tokens, 8\], got mask.shape="):
            model.apply(variables, LONG[:, :3], mask=mask, mutable=["cache"])
    tables = flax.serialization.to_state_dict(variables["cache"])
    with pytest.raises(ValueError, match="restored without a target"):
        model.apply({**variables, "cache": tables}, LONG[:, :1], mutable=["cache"])


def test_codes_pass_no_gradient():
    model, variables = in_linen()

    def loss(params: Any) -> jax.Array:
        y, _ = model.apply({**variables, "params": params}, LONG[:, :1], mutable=["cache"])
        return jnp.sum(y)

    with pytest.raises(ValueError, match=r"kept as codes pass no gradient.*stop_gradient"):
        jax.grad(loss)(variables["params"])
    keys, query = jnp.ones((1, 1, 1, 32)), jnp.ones((1, 1, 1, 32))
    cache = KVCache.zeros(1, 4, 1, 32, format="mxfp4").append(keys, keys, 0)
    assert jax.grad(lambda q: cache.attend(q, 0).sum())(query).shape == query.shape


@pytest.mark.parametrize("format", [None, "mxfp4", "nvfp4"])
def test_flax_serialization(format: str | None):
    keys = jax.random.normal(jax.random.key(0), (2, 1, 2, 64))
    empty = KVCache.zeros(2, 8, 2, 64, format=format)
    cache = empty.append(keys, keys, 0)
    restored: Any = flax.serialization.from_bytes(empty, flax.serialization.to_bytes(cache))
    jax.tree.map(np.testing.assert_array_equal, cache, restored)
    assert restored.keys.format == cache.keys.format
    other = KVCache.zeros(2, 8, 2, 64, format="mxfp4" if format is None else None)
    with pytest.raises(ValueError, match="take a target of the same format"):
        flax.serialization.from_bytes(other, flax.serialization.to_bytes(cache))


def test_a_layer_with_its_cache_is_pickled():
    layer = in_nnx()
    layer(LONG[:, :3])
    again = pickle.loads(pickle.dumps(layer))
    assert again.cache_index[...] == 3 and again.cached_key.get_value().format.name == "mxfp4"
    np.testing.assert_array_equal(again(LONG[:, 3:4]), layer(LONG[:, 3:4]))


def test_threads_share_a_layer():
    layer = in_nnx()
    expected = layer(LONG, decode=False)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(3) as threads:
            for _ in range(8):
                threads.submit(layer, LONG[:, :1])
            whole = [threads.submit(layer, LONG, decode=False) for _ in range(8)]
    finally:
        sys.setswitchinterval(before)
    for own in whole:
        np.testing.assert_array_equal(own.result(), expected)
    assert layer.attention_fn is nnx.dot_product_attention
    assert layer.cache_index[...] <= 8, "calls that do not decode count nothing"


class Counting(nnx.MultiHeadAttention):
    def init_cache(self, *args: Any, **options: Any) -> None:
        super().init_cache(*args, **options)
        self.calls = nnx.Cache(jnp.int32(0))


def test_an_init_cache_of_ones_own_is_called():
    layer = in_nnx(Counting)
    assert layer.calls[...] == 0 and layer.cached_key.get_value().codes.shape == (2, 2, 8, 16)


def test_a_function_that_takes_any_option():
    def own(query: Any, keys: Any, values: Any, **options: Any) -> jax.Array:
        return nnx.dot_product_attention(query, keys, values, mask=options["mask"])

    layer, plain = in_nnx(attention_fn=own), in_nnx()
    np.testing.assert_allclose(layer(LONG[:, :1]), plain(LONG[:, :1]), atol=1e-5)


def test_a_stack_that_is_converted_anew():
    make = nnx.vmap(lambda rngs: nnx.MultiHeadAttention(2, 64, decode=True, rngs=rngs))
    stack = convert.nnx(make(nnx.Rngs(0).split(2)), RULE)
    nnx.vmap(lambda layer: layer.init_cache(LONG.shape))(stack)
    with pytest.warns(UserWarning, match="the cache of a stack is dropped .* call init_cache"):
        convert.nnx(stack, RULE)


@pytest.mark.filterwarnings("ignore:.*sow:DeprecationWarning")
def test_weights_are_sown_into_the_layer():
    """Not into what stands for it while it decodes."""
    layer = in_nnx()
    layer(LONG[:, :1], sow_weights=True)
    (weights,) = layer.attention_weights.get_value()
    np.testing.assert_array_equal(weights, np.eye(8)[:1] * np.ones((2, 2, 1, 1)))
