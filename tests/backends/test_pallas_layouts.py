"""The layout of packed weights that GPU kernels read, without a GPU."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from mx_jax import formats
from mx_jax.backends.pallas_gpu.layouts import PackedWeights
from mx_jax.formats import MXFP4, MXFP6_E3M2, MXFP8_E4M3, MXFP8_E5M2
from mx_jax.mxarray import MXArray


def random_weights(
    rng: np.random.Generator, shape: tuple[int, int, int], format: formats.BlockFormat
) -> MXArray:
    """Any code under any scale byte."""
    batch, n, k = shape
    block = format.block[1]
    assert isinstance(block, int)
    return MXArray(
        codes=jnp.asarray(rng.integers(0, 1 << format.element.bits, shape).astype(np.uint8)),
        scales=jnp.asarray(rng.integers(0, 256, (batch, n, -(-k // block))).astype(np.uint8)),
        tensor_scale=jnp.full((1, 1, 1), 0.5) if format.tensor_scale else None,
        format=format,
        blocks=((-1, block),),
        dtype=jnp.dtype("bfloat16"),
    )


def test_size_of_packed_weights(rng: np.random.Generator):
    known = {MXFP4: 4.5, formats.NVFP4: 5, MXFP8_E4M3: 8.5, formats.MXINT8: 8.5}
    for format, bits in (known | {MXFP6_E3M2: 8.5}).items():
        packed = jax.eval_shape(PackedWeights.of, random_weights(rng, (1, 128, 256), format))
        assert 4 * (packed.codes.size + packed.scales.size) == 128 * 256 * bits / 8


def test_a_nan_among_the_codes_becomes_its_blocks_scale(rng: np.random.Generator):
    weights = random_weights(rng, (1, 2, 64), MXFP8_E5M2)
    weights = dataclasses.replace(weights, codes=jnp.full((1, 2, 64), 0x7C, jnp.uint8))
    one = jnp.full((1, 2, 2), 127, jnp.uint8)
    weights = dataclasses.replace(weights, codes=weights.codes.at[0, 1, 40].set(0xFD), scales=one)
    halves = np.asarray(jax.jit(lambda w: PackedWeights.of(w).scales)(weights)).view(jnp.bfloat16)
    first, second = halves.astype(np.float32).reshape(2, -1, 64, 2)[0, 0, :2]
    np.testing.assert_array_equal([first, second], [[1, 1], [1, np.nan]])
