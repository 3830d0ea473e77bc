"""Scales of powers of two against their formula, wherever float32 has numbers."""

import jax.numpy as jnp
import numpy as np
import pytest

from mx_jax.formats import MXFP4, MXFP8_E4M3, MXFP8_E5M2, MXINT8, ElementFormat
from mx_jax.reference import scale_functions
from mx_jax.reference.scale_functions import BlockData, PowerOfTwo

PATTERNS = np.unique(
    np.concatenate(
        [
            np.arange(0, 64),
            [1 << bit for bit in range(31)],
            np.random.default_rng(0).integers(0, 0x7F800000, 4000),
            np.random.default_rng(1).integers(0, 1 << 24, 4000),
        ]
    )
).astype(np.int32)


def always(element: ElementFormat) -> int:
    return 0


def past_every_mantissa(element: ElementFormat) -> int:
    return 1 << 25


@pytest.mark.parametrize(
    "threshold",
    [
        always,
        past_every_mantissa,
        scale_functions.never,
        scale_functions.above_power_of_two,
        scale_functions.rounds_up,
        scale_functions.above_max,
    ],
)
def test_every_exponent(threshold):
    significand, exponent = np.frexp(PATTERNS.view(np.float32).astype(np.float64))
    mantissa = (significand * 2 - 1) * 2**23
    for format in (MXFP8_E4M3, MXFP8_E5M2, MXFP4, MXINT8):
        element = format.element
        data = BlockData(jnp.zeros(()), (), jnp.asarray(PATTERNS), format, None)
        found = np.asarray(PowerOfTwo(threshold)(data))
        wanted = exponent - 1 - element.emax + (mantissa >= threshold(element)) + 127
        wanted = np.where(PATTERNS == 0, 0, np.clip(wanted, 0, 254))
        np.testing.assert_array_equal(found, wanted, err_msg=format.name)
