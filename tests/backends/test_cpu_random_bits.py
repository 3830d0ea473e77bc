"""Random bits by the compiled handler: bit for bit those of `jax.random.bits`."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import mx_jax
from mx_jax.codecs import rounding
from mx_jax.codecs.rounding import DerivedKey
from mx_jax.ops.arguments import draw_bits
from mx_jax.ops.product import transformed
from mx_jax.recipes import Hadamard
from mx_jax.testing.compare import assert_bitwise_equal
from tests.needs import needs_library
from tests.quick import handlers, quick

pytestmark = needs_library

P = PartitionSpec
KEY = jax.random.key(7)


@pytest.mark.parametrize(
    ("shape", "width"),
    [((5, 7), width) for width in (1, 7, 16, 17, 24, 31)]
    + [((1,), 16), ((3, 0), 16), ((2, 3, 16411), 16), ((2, 3, 16411), 24)],
    ids=str,
)
def test_the_bits_of_jax(shape: tuple[int, ...], width: int):
    draw = lambda key: draw_bits(key, shape, width)  # noqa: E731
    assert handlers(draw, KEY) == ["random_bits"]
    bits, expected = quick(draw)(KEY), rounding.draw_bits(KEY, shape, width)
    assert bits.dtype == expected.dtype == jnp.int32
    np.testing.assert_array_equal(bits, expected)
    np.testing.assert_array_equal(draw(KEY), expected)


@pytest.mark.parametrize(
    ("key", "partitionable"), [(jax.random.key(3, impl="rbg"), True), (KEY, False)]
)
def test_keys_of_another_kind_are_left_to_jax(key: jax.Array, partitionable: bool):
    draw = lambda key: draw_bits(key, (8, 32), 16)  # noqa: E731
    with jax.threefry_partitionable(partitionable):
        assert handlers(draw, key) == []
        np.testing.assert_array_equal(draw(key), rounding.draw_bits(key, (8, 32), 16))


def derived(key: jax.Array) -> tuple[DerivedKey, jax.Array]:
    """A key of three of what is folded in, as a call has it and as JAX does."""
    ours = DerivedKey.of(key).fold_in(11).split(3)[2]
    return ours, jax.random.split(jax.random.fold_in(key, 11), 3)[2]


@pytest.mark.parametrize("key", [KEY, jax.random.PRNGKey(5)], ids=["typed", "old"])
def test_the_keys_of_jax(key: jax.Array):
    """Derived in the call that draws, and at once where a number is traced."""
    draw = lambda key: draw_bits(derived(key)[0], (33,), 16)  # noqa: E731
    assert handlers(draw, key) == ["random_bits"]
    expected = rounding.draw_bits(derived(key)[1], (33,), 16)
    np.testing.assert_array_equal(quick(draw)(key), expected)
    np.testing.assert_array_equal(draw(key), expected)
    ours, other = derived(key)
    np.testing.assert_array_equal(data(ours.get()), data(other))
    folded = quick(lambda key, place: derived(key)[0].fold_in(place))(key, 4)
    np.testing.assert_array_equal(folded.data, data(jax.random.fold_in(other, 4)))
    keys = jax.random.split(key, 4)
    for one, bits in zip(keys, quick(jax.vmap(draw))(keys), strict=True):
        np.testing.assert_array_equal(bits, rounding.draw_bits(derived(one)[1], (33,), 16))


def data(keys: jax.Array) -> jax.Array:
    typed = jnp.issubdtype(keys.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(keys) if typed else keys


def test_signs_are_those_of_bernoulli():
    """Drawn by the transform."""
    x, random = jnp.ones((3, 64)), Hadamard(size=64, signs=None)
    turn = lambda x, key: transformed(x, random, key, 1)  # noqa: E731
    assert handlers(turn, x, KEY) == ["transform"]
    keys = jax.random.split(KEY, 8)
    for key, values in zip(keys, quick(jax.vmap(turn, (None, 0)))(x, keys), strict=True):
        drawn = np.where(jax.random.bernoulli(key, jnp.float32(0.5), (64,)), 1, -1)
        fixed = Hadamard(size=64, signs=tuple(drawn.tolist()))
        np.testing.assert_array_equal(values, transformed(x, fixed, None, 1))


def rounded(x: jax.Array, key: jax.Array) -> Any:
    """Along rows, along columns, and both by one handler."""
    along = [mx_jax.quantize(x, "mxfp4", axis=a, rounding="stochastic", key=key) for a in (-1, 0)]
    return along, mx_jax.quantize_both(x, "mxfp8_e5m2", rounding="stochastic", key=key)


def test_each_cast_draws_its_bits():
    """Whatever is mapped: as the reference does for one lane."""
    x, keys = jax.random.normal(jax.random.key(1), (2, 3, 64, 96)), jax.random.split(KEY, (2, 3))
    assert handlers(rounded, x[0, 0], KEY) == ["quantize"] * 2 + ["quantize_both"]
    ways: dict[str, tuple[Any, jax.Array, jax.Array]] = {
        "values": (jax.vmap(rounded, (0, None)), x[0], KEY),
        "keys": (jax.vmap(rounded, (None, 0)), x[0, 0], keys[0]),
        "both": (jax.vmap(jax.vmap(rounded)), x, keys),
        "last keys": (jax.vmap(jax.vmap(rounded), (0, None)), x, keys[0]),
    }
    alone = quick(rounded)
    for way, (run, values, drawn) in ways.items():
        together = jax.tree.map(np.asarray, quick(run)(values, drawn))
        lanes = np.broadcast_shapes(values.shape[:-2], drawn.shape)
        values = np.broadcast_to(values, (*lanes, 64, 96))
        for lane in np.ndindex(lanes):
            with mx_jax.only_backend("reference"):
                expected = alone(values[lane], jnp.broadcast_to(drawn, lanes)[lane])
            actual = jax.tree.map(lambda leaf: leaf[lane], together)  # noqa: B023
            jax.tree.map(functools.partial(assert_bitwise_equal, what=way), actual, expected)
