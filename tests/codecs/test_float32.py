"""Bit patterns: widening and narrowing, exact down to the last subnormal, and sums in one order."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from mx_jax.codecs import float32
from mx_jax.testing.compare import assert_bitwise_equal

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOAT16 = np.dtype(np.float16)


def patterns(rng: np.random.Generator) -> np.ndarray:
    """int32: random ones, subnormals, ties of bfloat16 and float16, specials."""
    wild = rng.integers(0, 1 << 32, 100_000, dtype=np.uint64).astype(np.uint32)
    half = wild[:20_000]
    ties_of_bfloat16 = (half & np.uint32(0xFFFF0000)) | np.uint32(0x8000)
    near_float16 = rng.uniform(-70000, 70000, 20_000).astype(np.float32)
    small_float16 = (rng.normal(size=20_000) * 2.0**-20).astype(np.float32)
    # Midpoints of neighbours in float16, whose subnormals are included.
    steps = rng.integers(0, 0x7BFF, 20_000, dtype=np.uint16)
    neighbours = steps.view(FLOAT16), (steps + np.uint16(1)).view(FLOAT16)
    ties_of_float16 = sum(n.astype(np.float32) for n in neighbours) / np.float32(2)
    floats = np.concatenate([near_float16, small_float16, ties_of_float16, -ties_of_float16])
    specials = np.array(
        [0, 1 << 31, 1, 0x7FFFFF, 0x800000, 0x7F7FFFFF, 0x7F800000, 0x7FC00000], np.uint32
    )
    return np.concatenate(
        [
            wild,
            ties_of_bfloat16,
            ties_of_bfloat16 + np.uint32(1),
            ties_of_bfloat16 - np.uint32(1),
            floats.view(np.uint32),
            half & np.uint32(0x807FFFFF),
            specials,
            specials | np.uint32(1 << 31),
        ]
    ).view(np.int32)


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16], ids=str)
def test_every_16_bit_value_widens_exactly(dtype: np.dtype):
    x = np.arange(1 << 16, dtype=np.uint16).view(dtype)
    bits = np.asarray(jax.jit(float32.float32_bits)(x)).view(np.float32)
    assert_bitwise_equal(bits, x.astype(np.float32), what=str(dtype), any_nan=True)


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16], ids=str)
def test_one_rounding_to_16_bits(dtype: np.dtype, rng: np.random.Generator):
    bits = patterns(rng)
    narrow = jax.jit(lambda b: float32.from_bits(b, dtype))(bits)
    with np.errstate(over="ignore", invalid="ignore"):
        expected = bits.view(np.float32).astype(dtype)
    assert_bitwise_equal(narrow, expected, what=str(dtype), any_nan=True)


@pytest.mark.parametrize("shape", [(3, 16), (5, 7), (2, 1), (4, 0), (16, 16)])
def test_sums_in_order(shape: tuple[int, int], rng: np.random.Generator):
    """By halves of the next power of two, each sum rounded once: the same bits everywhere."""
    x = np.square(rng.normal(size=shape).astype(np.float32))
    expected = np.pad(x, ((0, 0), (0, 16 - shape[1])))
    while expected.shape[1] > 1:
        first, second = np.split(expected, 2, axis=1)
        expected = first + second
    result = jax.jit(lambda root: float32.sum_in_order(jnp.square(root), (1,)))(np.sqrt(x))
    again = jax.jit(lambda x: float32.sum_in_order(x, (1,)))(x)
    assert_bitwise_equal(again, expected)
    # A square is rounded before it is added: no FMA.
    squares = jax.jit(jnp.square)(np.sqrt(x))
    assert_bitwise_equal(result, jax.jit(lambda x: float32.sum_in_order(x, (1,)))(squares))
    both = jax.jit(lambda x: float32.sum_in_order(x, (0, 1)))(x)
    assert both.shape == (1, 1) and np.allclose(both, x.sum())
