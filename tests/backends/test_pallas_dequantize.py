"""Packed weights decoded to bfloat16 by a kernel of their own: in the interpreter, as by XLA."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mx_jax import formats
from mx_jax.backends.matrices import without_tensor_scale
from mx_jax.backends.pallas_gpu import products
from mx_jax.backends.pallas_gpu.architecture import SM80, SM90, Architecture
from mx_jax.backends.pallas_gpu.layouts import PackedWeights
from mx_jax.formats import MXFP4, BlockFormat
from tests.backends.mosaic import interpreter, mostly_slow, needs_mosaic
from tests.backends.test_pallas_gpu import PACKED, random_weights

pytestmark = needs_mosaic


@pytest.mark.parametrize("architecture", [SM80, SM90], ids=str)
@pytest.mark.parametrize("format", mostly_slow(PACKED, MXFP4, formats.MXFP6_E3M2), ids=str)
def test_decodes_as_xla_does(
    format: BlockFormat, architecture: Architecture, rng: np.random.Generator
):
    weights = random_weights(rng, (2, 130, 700), format)
    # A NaN among the codes is one of its whole block, which other tests hold.
    codes = jnp.where(jnp.isnan(weights.dequantize(jnp.float32)), 0, weights.codes)
    # XLA on CPU loses bfloat16's subnormals, where a GPU keeps them.
    scales = np.clip(np.asarray(weights.scales), 40, 120)
    if format.scale.element is None:
        scales[0, 3], scales[1, 5, 1] = 250, 255
    weights = dataclasses.replace(weights, codes=codes, scales=jnp.asarray(scales))
    packed = PackedWeights.of(weights)
    expected = without_tensor_scale(packed.unpack()).dequantize(jnp.bfloat16)
    values = products.decode(packed, architecture, interpreter())
    assert values.shape == (2, packed.padded_n, packed.padded_k)
    # Not bit by bit: a zero of E5M2 loses its sign, which no product shows.
    actual = np.asarray(values[:, :130, :700], np.float32)
    np.testing.assert_array_equal(actual, np.asarray(expected, np.float32))
    outside = values.at[:, :130, :700].set(0)
    assert not np.asarray(jnp.any(outside != 0))


def test_lowers_for_cuda(rng: np.random.Generator):
    packed = PackedWeights.of(random_weights(rng, (1, 128, 1024), MXFP4))
    run = jax.jit(lambda packed: products.decode(packed, SM90, None))
    text = run.trace(packed).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 1
