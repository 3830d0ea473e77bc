"""Flax's own attention, decoding with its cache in a block format, in linen and in nnx."""

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
_rng = np.random.default_rng(0)
X = _rng.standard_normal((BATCH, LENGTH, WIDTH)).astype(np.float32)
FIXED = convert.CacheFormat("nvfp4", tensor_scales=(0.002, 0.001))
PROJECTIONS = ("query", "key", "value")


def rule(format: Any) -> convert.Rule:
    return convert.Rule(".*", None, cache=format)


def kernels(num_heads: int) -> dict[str, jax.Array]:
    """Of one attention, whose query may have more heads than keys and values."""
    rng, heads = np.random.default_rng(1), (num_heads, HEADS, HEADS)
    shapes = {name: (WIDTH, size, FEATURES) for name, size in zip(PROJECTIONS, heads, strict=True)}
    shapes |= {"out": (num_heads, FEATURES, WIDTH)}
    return {
        name: jnp.asarray(rng.standard_normal(shape, np.float32) / 6)
        for name, shape in shapes.items()
    }


class Linen:
    """An attention that decodes, whose cache is a collection of variables."""

    num_heads = HEADS

    def __init__(self, rules: Any = None, **options: Any):
        sizes = {"qkv_features": HEADS * FEATURES, "use_bias": False}
        layer = nn.MultiHeadAttention(HEADS, **{"decode": True} | sizes | options)
        self.model: Any = layer if rules is None else convert.linen(layer, rules)
        # As a user makes it: of zeros, by the shapes that init would give.
        shapes = jax.eval_shape(self.model.init, jax.random.key(0), X).get("cache", {})
        self.cache = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
        params = kernels(HEADS).items()
        self.params = {name: {"kernel": kernel} for name, kernel in params}

    def report(self, rules: Any) -> convert.Report:
        return convert.report(self.model, rules, X)

    def converted(self, rules: Any) -> "Linen":
        """Converted, it goes on with the same variables."""
        new = Linen(rules)
        new.cache = self.cache
        return new

    def __call__(self, *x: Any, **options: Any) -> Any:
        variables = {"params": self.params, "cache": self.cache}
        apply = functools.partial(self.model.apply, mutable=["cache", "intermediates"], **options)
        y, new = quick(apply)(variables, *x)
        self.cache, self.sown = new["cache"], new.get("intermediates")
        return y

    def decode(self, x: Any) -> Any:
        """Token by token in one scan, the cache donated."""

        def step(cache: Any, token: jax.Array) -> Any:
            variables = {"params": self.params, "cache": cache}
            y, new = self.model.apply(variables, token[:, None], mutable=["cache"])
            return new["cache"], y[:, 0]

        run = quick(lambda cache, x: jax.lax.scan(step, cache, x), donate_argnums=0)
        self.cache, y = run(self.cache, x.swapaxes(0, 1))
        return y.swapaxes(0, 1)

    def kept(self) -> tuple[Any, ...]:
        return tuple(self.cache[name] for name in ("cached_key", "cached_value", "cache_index"))

    def weights(self) -> Any:
        assert self.sown is not None
        return self.sown["attention_weights"][0]


class Nnx:
    """The same, with Variables, and two heads of a query for each of keys and values."""

    num_heads = 2 * HEADS

    def __init__(self, rules: Any = None, kind: Any = nnx.MultiHeadAttention, **options: Any):
        heads = {"num_kv_heads": HEADS, "qkv_features": self.num_heads * FEATURES}
        arguments = {"decode": True, "use_bias": False, "rngs": nnx.Rngs(0)} | heads | options
        layer = kind(self.num_heads, WIDTH, **arguments)
        for name, kernel in kernels(self.num_heads).items():
            getattr(layer, name).kernel.set_value(kernel)
        self.model: Any = layer if rules is None else convert.nnx(layer, rules)
        self.model.init_cache(X.shape)

    def report(self, rules: Any) -> convert.Report:
        return convert.report(self.model, rules)

    def converted(self, rules: Any) -> "Nnx":
        new = Nnx()
        new.model = convert.nnx(self.model, rules)
        return new

    def __call__(self, *x: Any, **options: Any) -> Any:
        return nnx.jit(lambda model, *x: model(*x, **options))(self.model, *x)

    def decode(self, x: Any) -> Any:
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))
        def run(model: Any, token: jax.Array) -> Any:
            return model, model(token[:, None])[:, 0]

        return nnx.jit(run)(self.model, x.swapaxes(0, 1))[1].swapaxes(0, 1)

    def kept(self) -> tuple[Any, ...]:
        variables = (self.model.cached_key, self.model.cached_value, self.model.cache_index)
        return tuple(variable.get_value() for variable in variables)

    def weights(self) -> Any:
        return self.model.attention_weights.get_value()[0]


each = pytest.mark.parametrize("way", [Linen, Nnx])


def by_hand(num_heads: int, format: Any, x: Any) -> Any:
    """Attention with the library's cache written into it."""
    params = kernels(num_heads)
    form = format if isinstance(format, convert.CacheFormat) else convert.CacheFormat(format)

    def step(state: Any, token: jax.Array) -> Any:
        cache, at = state
        query, *new = (jnp.einsum("btd,dhf->bthf", token[:, None], params[n]) for n in PROJECTIONS)
        cache = cache.append(*new, at)
        y = jnp.einsum("bthf,hfd->btd", cache.attend(query, at), params["out"])
        return (cache, at + 1), y[:, 0]

    sizes, scales = (BATCH, LENGTH, HEADS, FEATURES), form.tensor_scales
    empty = KVCache.zeros(*sizes, format=form.format, tensor_scales=scales)
    (cache, _), y = quick(functools.partial(jax.lax.scan, step))((empty, 0), x.swapaxes(0, 1))
    return y.swapaxes(0, 1), cache


@pytest.mark.slow(but="mxfp8-Linen|nvfp4-fixed-Nnx")
@each
@pytest.mark.parametrize("format", ["mxfp8_e4m3", FIXED], ids=["mxfp8", "nvfp4-fixed"])
def test_it_decodes_as_the_librarys_cache(way: Any, format: Any):
    model = way(rule(format))
    y = model.decode(X)
    expected, cache = by_hand(way.num_heads, format, X)
    np.testing.assert_array_equal(y, expected)
    kept = (cache.keys, cache.values, LENGTH)
    jax.tree.map(np.testing.assert_array_equal, model.kept(), kept)


@each
def test_several_tokens_at_once_are_a_prompt(way: Any):
    prompt, single = way(rule("mxfp8_e4m3")), way(rule("mxfp8_e4m3"))
    np.testing.assert_allclose(prompt(X), single.decode(X), atol=1e-5)
    jax.tree.map(np.testing.assert_array_equal, prompt.kept(), single.kept())


@pytest.mark.filterwarnings("ignore:.*sow:DeprecationWarning")
@each
def test_a_mask_and_sown_weights_are_flaxs_over_the_decoded_rows(way: Any):
    model = way(rule("mxfp8_e4m3"))
    model(X[:, :3])
    mask = jnp.array([True, False, True, True])[None, None, None]
    model(X[:, 3:], mask=mask, sow_weights=True)
    query = jnp.einsum("btd,dhf->bthf", X[:, 3:], kernels(way.num_heads)["query"])
    keys = model.kept()[0].read().swapaxes(1, 2).repeat(way.num_heads // HEADS, axis=2)
    expected = nn.attention.dot_product_attention_weights(query, keys, mask=mask)
    results = np.asarray(model.weights())
    np.testing.assert_allclose(results, expected, atol=1e-5)
    assert (results[..., 1] == 0).all() and (results[..., 2:] > 0).all()


@each
def test_a_cache_that_an_unconverted_model_began_is_cast(way: Any):
    plain = way()
    plain.decode(X[:, :3])
    keys, values, _ = plain.kept()
    model = plain.converted(rule("mxfp8_e4m3"))
    y = model(X[:, 3:])
    rows, _, index = model.kept()
    expected = convert.CacheFormat("mxfp8_e4m3").holding(keys, values).keys
    np.testing.assert_array_equal(rows.codes[:, :, :3], expected.codes[:, :, :3])
    assert (rows.codes[:, :, 3] != 0).any() and index == LENGTH
    # The model itself goes on with its own.
    assert plain.kept()[2] == 3
    error = np.linalg.norm(y - plain(X[:, 3:])) / np.linalg.norm(y)
    assert 1e-4 < error < 0.1


@each
def test_a_product_that_a_rule_quantizes_is_quantized_over_the_cache(way: Any):
    rules = [convert.Rule("(qk|av|cache)", "mxfp8", cache="mxfp8_e4m3")]
    y, alone = way(rules)(X), way(rule("mxfp8_e4m3"))(X)
    assert 1e-4 < np.linalg.norm(y - alone) / np.linalg.norm(alone) < 0.1


def without_mask(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    return query


class OtherCall(nnx.MultiHeadAttention):
    def __call__(self, inputs_q: jax.Array, *args: Any, **options: Any) -> jax.Array:
        return inputs_q


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (lambda: Linen(decode=False), "decode=False"),
        (lambda: Linen(attention_fn=without_mask), "its attention_fn takes no mask"),
        (lambda: Nnx(attention_fn=without_mask), "its attention_fn takes no mask"),
        (lambda: Nnx(kind=OtherCall), "has a call of its own"),
    ],
    ids=["linen-decode", "linen-mask", "nnx-mask", "nnx-call"],
)
def test_reasons_of_what_stays(model: Any, reason: str):
    report = model().report(rule("mxfp4"))
    assert {decision.layer.path: decision.reason for decision in report.decisions}[
        "cache"
    ] == reason
    assert report.num_converted == 0


def test_rules_for_caches_that_met_none():
    with pytest.warns(convert.UnusedRuleWarning, match="no layer that keeps one: 0"):
        convert.report(nn.Dense(8), rule("mxfp4"), X)
    with pytest.raises(ValueError, match="no layer that keeps one: 0"):
        convert.nnx(nnx.Linear(8, 8, rngs=nnx.Rngs(0)), rule("mxfp4"), strict=True)


def test_formats_that_no_cache_has():
    with pytest.raises(ValueError, match="blocks must lie along the features"):
        rule("float8_tensorwise_e4m3")
    with pytest.raises(ValueError, match="tensor_scales are for formats with a tensor scale"):
        convert.CacheFormat("mxfp4", tensor_scales=(1.0, 1.0))


def test_calls_that_are_refused():
    """Queries of other tokens or sequences would see rows that nobody wrote, or those of others."""
    model = Linen(rule("mxfp8_e4m3"))
    with pytest.raises(ValueError, match=r"got batch=1, .* the cache has 2, 4, 2 and 32"):
        model(X[:1, :1])
    for query, keys in ((X[:, :2], X[:, :1]), (X[:, :1], X[:1, :1])):
        with pytest.raises(ValueError, match="must be of the same sequences and tokens, got query"):
            model(query, keys)
    for mask in (jnp.ones((2, 4), bool), nn.make_causal_mask(jnp.ones((2, 3)), dtype=bool)):
        with pytest.raises(ValueError, match=r"heads or 1, tokens, 4\], got mask.shape="):
            model(X[:, :3], mask=mask)
    with pytest.raises(ValueError, match="format=mxfp8_e4m3, and its rule asks for format=mxfp4"):
        model.converted(rule("mxfp4"))(X[:, :1])
    model.cache = flax.serialization.to_state_dict(model.cache)
    with pytest.raises(ValueError, match="restored without a target"):
        model(X[:, :1])


def test_codes_pass_no_gradient():
    model = Linen(rule("mxfp4"))

    def loss(params: Any, cache: Any) -> jax.Array:
        variables = {"params": params, "cache": cache}
        return jnp.sum(model.model.apply(variables, X[:, :1], mutable=["cache"])[0])

    with pytest.raises(ValueError, match=r"kept as codes pass no gradient.*stop_gradient"):
        jax.eval_shape(jax.grad(loss), model.params, model.cache)
    cache, query = KVCache.zeros(1, 4, 1, 32, format="mxfp4"), jnp.ones((1, 1, 1, 32))
    assert quick(jax.grad(lambda q: cache.attend(q, 0).sum()))(query).shape == query.shape


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


# flax.nnx alone -----------------------------------------------------------------------------------


def in_nnx(**options: Any) -> Any:
    return Nnx(rule("mxfp4"), **options).model


def test_the_way_back():
    """What the cache holds is decoded into new Variables."""
    model = Nnx(rule("mxfp8_e4m3")).model
    model(X)
    back: Any = convert.original(model)
    assert back.__class__ is nnx.MultiHeadAttention
    expected = model.cached_key.get_value().read().swapaxes(1, 2)
    np.testing.assert_array_equal(back.cached_key[...], expected)
    assert back.cache_index[...] == LENGTH and back.cache_index is not model.cache_index


def test_without_decoding_it_is_flaxs():
    model = in_nnx()
    np.testing.assert_array_equal(model(X, decode=False), Nnx().model(X, decode=False))
    model.cached_key = None
    with pytest.raises(ValueError, match="init_cache"):
        model(X[:, :1])


def test_a_layer_with_its_cache_is_pickled():
    layer, step = in_nnx(), nnx.jit(lambda layer, x: layer(x))
    step(layer, X[:, :3])
    again = pickle.loads(pickle.dumps(layer))
    assert again.cache_index[...] == 3 and again.cached_key.get_value().format.name == "mxfp4"
    np.testing.assert_array_equal(step(again, X[:, 3:]), step(layer, X[:, 3:]))


def test_threads_share_a_layer():
    layer = in_nnx()
    expected = layer(X, decode=False)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(3) as threads:
            for _ in range(8):
                threads.submit(layer, X[:, :1])
            whole = [threads.submit(layer, X, decode=False) for _ in range(8)]
    finally:
        sys.setswitchinterval(before)
    for output in whole:
        np.testing.assert_array_equal(output.result(), expected)
    assert layer.attention_fn is nnx.dot_product_attention
    assert layer.cache_index[...] <= 8, "calls that do not decode count nothing"


def test_an_overridden_init_cache_is_called():
    class Counting(nnx.MultiHeadAttention):
        def init_cache(self, *args: Any, **options: Any) -> None:
            super().init_cache(*args, **options)
            self.calls = nnx.Cache(jnp.int32(0))

    layer = in_nnx(kind=Counting)
    assert layer.calls[...] == 0 and layer.cached_key.get_value().codes.shape == (2, 2, 4, 16)


def test_a_stack_that_is_converted_anew():
    make = nnx.vmap(lambda rngs: nnx.MultiHeadAttention(2, WIDTH, decode=True, rngs=rngs))
    stack = convert.nnx(make(nnx.Rngs(0).split(2)), rule("mxfp4"))
    nnx.vmap(lambda layer: layer.init_cache(X.shape))(stack)
    with pytest.warns(UserWarning, match="the cache of a stack is dropped .* call init_cache"):
        convert.nnx(stack, rule("mxfp4"))
