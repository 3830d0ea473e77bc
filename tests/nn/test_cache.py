"""The key-value cache: what it holds, what attention over it gives."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import mx_jax
from mx_jax.nn import KVCache
from mx_jax.nn.cache import read_rows
from tests.quick import quick
from tests.sharding.collectives import collectives

BATCH, LENGTH, HEADS, FEATURES = 2, 6, 2, 32
CAST = functools.partial(mx_jax.cast, format="nvfp4")
FORMATS = ["mxfp8_e4m3", "nvfp4"]


def drawn(tokens, heads=HEADS, seed=0, features=FEATURES):
    shape = (BATCH, tokens, heads, features)
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def empty(**options):
    return KVCache.zeros(BATCH, LENGTH, HEADS, FEATURES, **options)


@pytest.mark.parametrize(
    ("options", "bits"),
    [
        ({"format": "mxfp8_e4m3"}, 8.25),
        ({"format": "mxfp6_e2m3"}, 6.25),
        ({"format": "mxfp4"}, 4.25),
        ({"format": "nvfp4"}, 5.5),
        ({"format": "nvfp4", "tensor_scales": (1.0, 1.0)}, 4.5),
        ({"dtype": jnp.bfloat16}, 16),
        ({}, 32),
    ],
    ids=["mxfp8", "mxfp6", "mxfp4", "nvfp4", "nvfp4-fixed", "bfloat16", "float32"],
)
def test_bytes_are_the_formats(options, bits):
    values = 2 * BATCH * LENGTH * HEADS * FEATURES
    fixed = 8 if "tensor_scales" in options else 0
    assert empty(**options).nbytes == values * bits / 8 + fixed


@pytest.mark.slow(but="nvfp4")
@pytest.mark.parametrize("format", FORMATS)
def test_rows_are_those_of_quantize(format):
    keys, values = drawn(3), drawn(3, seed=1) * 1e-3
    scales = {"tensor_scales": (0.002, 0.0005)} if format == "nvfp4" else {}
    cache = quick(KVCache.append)(empty(format=format, **scales), keys, values, 2)
    for rows, arguments, index in ((cache.keys, keys, 0), (cache.values, values, 1)):
        scale = {"tensor_scale": scales["tensor_scales"][index]} if scales else {}
        rule = mx_jax.recipes.weight_only(format).output.rhs.scale_rule
        expected = mx_jax.cast(arguments, format, scale_rule=rule, **scale).swapaxes(1, 2)
        np.testing.assert_array_equal(read_rows(rows)[:, :, 2:5], expected)


def test_a_tensor_scale_for_each_token_and_head():
    # Rows whose sizes lie far apart: one tensor scale could not hold them.
    size = np.array([1e-20, 1.0, 1e20], np.float32)[None, :, None, None]
    keys = drawn(3) * size * np.array([1, 1e-3], np.float32)[:, None]
    keys[0, 1, 0] = 0
    cache = quick(KVCache.append)(empty(format="nvfp4"), keys, keys, 0)
    result = np.asarray(read_rows(cache.keys)[:, :, :3]).reshape(-1, FEATURES)
    alone = quick(jax.lax.map, static_argnums=0)(CAST, keys.swapaxes(1, 2).reshape(-1, FEATURES))
    np.testing.assert_array_equal(result, alone)
    assert np.abs(result).max(-1).min() == 0 and (result != 0).any(-1).sum() == len(result) - 1


@pytest.mark.parametrize("format", [None, "mxfp4"])
def test_donated_it_is_written_in_place(format):
    def step(cache, query, keys, values):
        cache = cache.append(keys, values, 3)
        return cache.attend(query, 3), cache

    cache, arguments = empty(format=format), [drawn(1)] * 3
    step = jax.jit(step, donate_argnums=0)
    program = step.lower(cache, *arguments).compile().as_text() or ""
    shape = re.escape(",".join(map(str, jax.tree.leaves(cache.keys)[0].shape)))
    assert re.search(rf"\[{shape}\]", program) and not re.search(rf"\[{shape}\].* copy\(", program)
    pointers = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(cache)]
    _, later = step(cache, *arguments)
    assert [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(later)] == pointers


def plain_attention(query, keys, values, position):
    """By NumPy, head by head and token by token."""
    out = np.zeros_like(query)
    shared = query.shape[2] // keys.shape[2]
    for batch, token, head in np.ndindex(query.shape[:3]):
        seen = position + token + 1
        scores = keys[batch, :seen, head // shared] @ query[batch, token, head]
        weights = np.exp(scores / np.sqrt(FEATURES))
        out[batch, token, head] = weights @ values[batch, :seen, head // shared] / weights.sum()
    return out


@pytest.mark.parametrize("format", [None, "mxfp4"])
def test_attention_over_what_it_holds(format):
    keys, values, query = drawn(5), drawn(5, seed=1), drawn(2, heads=3 * HEADS, seed=2)
    cache = quick(KVCache.append)(empty(format=format), keys, values, 0)
    with jax.numpy_rank_promotion("raise"):
        result = quick(KVCache.attend)(cache, query, 3)
    held = [np.asarray(read_rows(rows).swapaxes(1, 2)) for rows in (cache.keys, cache.values)]
    np.testing.assert_allclose(result, plain_attention(query, *held, 3), atol=1e-5)


def test_dtypes():
    cache = empty(format="mxfp4", dtype=jnp.bfloat16)
    assert cache.length == LENGTH and read_rows(cache.keys).dtype == jnp.bfloat16
    query = drawn(1).astype(jnp.bfloat16)
    assert jax.eval_shape(cache.attend, query, 0).dtype == jnp.bfloat16


def test_what_cannot_be_cached():
    for axis in range(4):
        sizes = [size * (axis != i) for i, size in enumerate((BATCH, LENGTH, HEADS, FEATURES))]
        with pytest.raises(ValueError, match="at least one sequence, token, head and feature"):
            KVCache.zeros(*sizes)
    for options, message in [
        ({"format": "mxfp4_2d"}, r"format=mxfp4_2d with block=\(32, 32\)"),
        ({"format": "float8_rowwise_e4m3"}, "format=float8_rowwise_e4m3"),
        ({"format": "mxfp4", "tensor_scales": (1.0, 1.0)}, "format=mxfp4; leave them out"),
        ({"format": "nvfp4", "tensor_scales": (1.0, 0.0)}, r"got tensor_scales=\(1.0, 0.0\)"),
    ]:
        with pytest.raises(ValueError, match=message):
            empty(**options)
    with pytest.raises(ValueError, match=r"query.shape=\(2, 1, 3, 32\)"):
        empty().attend(drawn(1, heads=3), 0)


@pytest.mark.parametrize("size", [1e4, 1e-5])
@pytest.mark.parametrize("batch", [1, 2])
def test_one_row_has_one_scale(batch, size):
    """The shape of its tensor scale is that of a fixed one."""
    cache = KVCache.zeros(batch, 1, 1, FEATURES, format="nvfp4")
    keys = size * drawn(1, heads=1)[:batch]
    cache = quick(KVCache.append)(cache, keys, keys, 0)
    np.testing.assert_allclose(read_rows(cache.keys)[:, 0], keys[:, 0], atol=0.4 * size)
    result = quick(KVCache.attend)(cache, drawn(1, heads=1)[:batch], 0)
    np.testing.assert_array_equal(result[:, 0, 0], read_rows(cache.values)[:, 0, 0])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"format": "mxfp4"},
        {"format": "nvfp4"},
        {"format": "nvfp4", "tensor_scales": (1e-3,) * 2},
    ],
    ids=str,
)
@pytest.mark.parametrize("tokens", [1, 2])
def test_a_position_for_each_sequence(options, tokens):
    before, new = (drawn(5), drawn(5, seed=1)), (drawn(tokens, seed=2), drawn(tokens, seed=3))
    query, positions = drawn(tokens, heads=3 * HEADS, seed=4), jnp.array([1, 4])
    run = quick(lambda cache, at: (c := cache.append(*new, at), c.attend(query, at)))
    cache, result = run(empty(**options).append(*before, 0), positions)
    for sequence, position in enumerate((1, 4)):
        each, expected = run(empty(**options).append(*before, 0), position)
        np.testing.assert_allclose(result[sequence], expected[sequence], atol=1e-6)
        np.testing.assert_array_equal(
            read_rows(cache.keys)[sequence], read_rows(each.keys)[sequence]
        )


@pytest.mark.parametrize(
    ("position", "message"),
    [
        (-1, "positions count from 0, got position=-1"),
        (3.0, r"dtype=float32, shape=\(\), batch=2"),
        (np.arange(3), r"dtype=int\d+, shape=\(3,\), batch=2"),
        (np.array([0, -2]), r"got position=\[ 0 -2\]"),
    ],
)
def test_no_positions(position, message):
    new = drawn(3)
    for call in (lambda: empty().append(new, new, position), lambda: empty().attend(new, position)):
        with pytest.raises(ValueError, match=message):
            call()


def test_a_known_position_within_a_program():
    """Not an argument of it: it is checked as it is outside."""
    cache, rows, position = empty(), drawn(1), jnp.array([1, 3])

    def run(rows):
        return cache.append(rows, rows, position).attend(rows, position)

    np.testing.assert_allclose(jax.jit(run)(rows), run(rows), rtol=1e-5)
    with pytest.raises(ValueError, match=r"got position=\[ 1 -2\]"):
        jax.jit(lambda rows: cache.attend(rows, np.array([1, -2])))(rows)


def test_no_tokens_no_sequences_and_a_list_of_positions():
    cache, none = empty(format="mxfp4").append(drawn(2), drawn(2), [1, 3]), drawn(0)
    assert cache.attend(none, 0).shape == none.shape
    rows = np.abs(np.asarray(read_rows(cache.keys))).sum((1, 3))
    np.testing.assert_array_equal(rows != 0, [[0, 1, 1, 0, 0, 0], [0, 0, 0, 1, 1, 0]])
    with pytest.raises(ValueError, match=r"got query.shape=\(0, 1, 2, 32\)"):
        cache.attend(drawn(1)[:0], 0)


def test_keys_of_another_shape_are_refused():
    """Smaller ones would fill a part of a row, and leave the rest as it was."""
    cache = KVCache.zeros(2, 4, 2, 64, format="mxfp4")
    for shape in ((1, 1, 2, 64), (2, 1, 1, 64), (2, 1, 2, 32), (2, 5, 2, 64)):
        keys, (batch, tokens, heads, features) = jnp.ones(shape), shape
        text = (
            rf"got batch={batch}, tokens={tokens}, heads={heads}, features={features}; the cache "
            "has 2, 4, 2 and 64"
        )
        with pytest.raises(ValueError, match=text):
            cache.append(keys, keys, 0)


def test_queries_that_cannot_be_answered():
    cache, query = KVCache.zeros(2, 4, 2, 64, format="mxfp4"), jnp.ones((2, 1, 4, 64))
    for arguments, text in (
        (query[..., :32], r"query.shape=\(2, 1, 4, 32\).*keys.shape=\(2, 2, 4, 64\)"),
        (query.astype(jnp.int32), "query.dtype=int32"),
        (query[0], r"as \[batch, tokens, heads, features\], got query.shape=\(1, 4, 64\)"),
    ):
        with pytest.raises(ValueError, match=text):
            cache.attend(arguments, 2)
    with pytest.raises(ValueError, match=r"got keys.shape=\(2, 64\)"):
        cache.append(query[:, 0, 0], query, 0)


def two_steps(cache, keys, values, query):
    """Three tokens at once, then one: the cache, and what both attend to."""
    cache = cache.append(keys[:, :3], values[:, :3], 0)
    first = cache.attend(query[:, :3], 0)
    cache = cache.append(keys[:, 3:], values[:, 3:], 3)
    return cache, jnp.concatenate([first, cache.attend(query[:, 3:], 3)], axis=1)


@pytest.mark.parametrize(
    ("format", "held_along", "heads_along"),
    [("mxfp4", P("data"), "model"), ("nvfp4", P("data", "model"), None)],
)
def test_explicit_axes(format: str, held_along: P, heads_along: str | None):
    """The cache stays where it is, queries where they are; its bits are those of one device."""
    rng, heads = np.random.default_rng(0), (2, 2, 4)
    arguments = [rng.standard_normal((4, 4, each, 64)).astype(np.float32) for each in heads]
    cache = KVCache.zeros(4, 8, 2, 64, format=format)
    alone, expected = jax.jit(two_steps)(cache, *arguments)
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        along = NamedSharding(mesh, P("data", None, heads_along, None))
        rows = NamedSharding(mesh, P(*held_along, *[None] * (4 - len(held_along))))
        placed = [jax.device_put(x, along) for x in arguments]
        held, result = jax.jit(two_steps)(jax.device_put(cache, rows), *placed)
        assert jax.typeof(result).sharding.spec == along.spec
        assert jax.typeof(held.keys.codes).sharding.spec == rows.spec
    jax.tree.map(np.testing.assert_array_equal, held, alone)
    np.testing.assert_allclose(result, expected, atol=1e-5)


@pytest.mark.parametrize(
    ("format", "each"), [(None, False), ("mxfp4", True), ("nvfp4", False), ("nvfp4", True)]
)
def test_devices_that_share_sequences_and_heads_exchange_nothing(format: str | None, each: bool):
    """On automatic axes, with a position for all sequences or for each."""
    rng, specs = np.random.default_rng(0), (P("data", None, "model"),) * 3
    arguments = [rng.standard_normal((4, 1, heads, 64)).astype(np.float32) for heads in (2, 2, 4)]
    position = np.array([3, 0, 5, 7]) if each else 3
    step = jax.jit(lambda cache, k, v, q, at: (c := cache.append(k, v, at), c.attend(q, at)))
    cache = KVCache.zeros(4, 8, 2, 64, format=format)
    expected = step(cache, *arguments, position)
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    held = jax.device_put(cache, NamedSharding(mesh, P("data", "model")))
    placed = [
        jax.device_put(x, NamedSharding(mesh, spec))
        for x, spec in zip(arguments, specs, strict=True)
    ]
    program = step.lower(held, *placed, position).compile()
    assert not collectives(program.as_text())
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5),
        program(held, *placed, position),
        expected,
    )


def test_codes_pass_no_gradient():
    cache, rows = empty(format="mxfp4"), jnp.asarray(drawn(1))
    with pytest.raises(ValueError, match=r"kept as codes pass no gradient.*stop_gradient"):
        jax.eval_shape(jax.grad(lambda k: cache.append(k, k, 0).attend(rows, 0).sum()), rows)
    assert jax.eval_shape(jax.grad(lambda q: cache.attend(q, 0).sum()), rows).shape == rows.shape
