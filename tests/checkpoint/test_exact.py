"""Values in float64, against those that every format's dequantize gives."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from mx_jax.checkpoint import exact
from mx_jax.formats import FLOAT8_ROWWISE_E4M3, MXFP4, MXFP4_2D, MXFP8_E4M3, MXINT8, NVFP4
from tests.checkpoint.stored import draw

FORMATS = (MXFP4, MXFP4_2D, MXFP8_E4M3, MXINT8, NVFP4, FLOAT8_ROWWISE_E4M3)


@pytest.mark.parametrize("format", FORMATS, ids=str)
@pytest.mark.parametrize(("shape", "axis"), [((5, 70), -1), ((70, 3), -2), ((2, 40, 33), -1)])
def test_decoded(format, shape: tuple[int, ...], axis: int, rng: np.random.Generator):
    """Partial blocks, and several pieces: all of them whole rows."""
    if axis == -2 and format.block[0] != 1:
        axis = -1
    x = draw(format, shape, rng, axis=axis)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exact, "_CHUNK", 2 * x.size // len(x))
        pieces = list(exact.decoded(x))
    assert [len(piece) for piece in pieces] == [2] * (len(x) // 2) + [1] * (len(x) % 2)
    assert {piece.dtype for piece in pieces} == {np.dtype(np.float64)}
    expected = np.asarray(x.dequantize(jnp.float32))
    np.testing.assert_array_equal(np.concatenate(pieces).astype(np.float32), expected)


def test_every_scale(rng: np.random.Generator):
    """The last of E8M0 is NaN; the smallest lies below what float32 has without subnormals."""
    x = draw(MXFP4, (256, 32), rng)
    x = dataclasses.replace(x, scales=jnp.arange(256, dtype=jnp.uint8)[:, None])
    scales = exact.effective_scales(x)[:, 0]
    np.testing.assert_array_equal(scales[:255], np.ldexp(1.0, np.arange(-127, 128)))
    assert np.isnan(scales[255])
    (values,) = exact.decoded(x)
    assert np.isnan(values[255]).all() and np.isfinite(values[:255]).all()
