"""`quantize` equals an exact oracle for any input.

The configurations are few and fixed, since each compiles one program; hypothesis draws values.
"""

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mx_jax
from mx_jax.formats import (
    MXFP4,
    MXFP6_E2M3,
    MXFP6_E3M2,
    MXFP8_E4M3,
    MXFP8_E5M2,
    MXINT8,
    BlockFormat,
)
from mx_jax.testing.cases import QuantizeCase
from mx_jax.testing.compare import assert_bitwise_equal
from tests.quantize import oracle


def config(
    format: BlockFormat,
    rule: str,
    shape: tuple[int, ...],
    axis: int,
    block: int,
    rounding: str = "nearest",
    dtype: str = "float32",
) -> QuantizeCase:
    how = {"axis": axis, "block_size": block, "scale_rule": rule, "rounding": rounding}
    return QuantizeCase(format=format, shape=shape, dtype=dtype, **how)


# Ranks 1 to 4, first, middle and last axes, whole, partial and single blocks, blocks of one and
# blocks longer than the axis; every format, rule, deterministic rounding and dtype.
CONFIGS = (
    config(MXFP8_E4M3, "floor", (40,), -1, 32),
    config(MXFP8_E4M3, "rceil", (3, 40), 1, 32),
    config(MXFP8_E4M3, "even", (40, 3), 0, 16, "away"),
    config(MXFP8_E5M2, "floor", (2, 40, 3), 1, 32),
    config(MXFP8_E5M2, "rceil", (3, 40), -1, 8, "toward_zero"),
    config(MXFP8_E5M2, "ceil", (2, 2, 17), -1, 7, dtype="bfloat16"),
    config(MXFP6_E2M3, "even", (3, 40), -1, 32),
    config(MXFP6_E2M3, "ceil", (40, 3), -2, 40, "away"),
    config(MXFP6_E3M2, "floor", (2, 3, 2, 9), 3, 4),
    config(MXFP6_E3M2, "rceil", (3, 40), -1, 16, dtype="float16"),
    config(MXFP4, "floor", (3, 40), -1, 32, dtype="bfloat16"),
    config(MXFP4, "even", (2, 40, 3), -2, 16),
    config(MXFP4, "rceil", (40,), 0, 64, "toward_zero"),
    config(MXFP4, "ceil", (9, 2), 0, 1),
    config(MXINT8, "floor", (3, 40), -1, 32),
    config(MXINT8, "rceil", (2, 2, 3, 7), -3, 2, "away"),
    config(MXINT8, "even", (40, 3), 0, 32, dtype="float16"),
    config(MXINT8, "ceil", (3, 40), -1, 16, "toward_zero", dtype="bfloat16"),
)

SPECIALS = (
    *(np.nan, np.inf, -np.inf, 0.0, -0.0, 2.0**-149, -(2.0**-149), 2.0**-127, 2.0**-126),
    *(-(2.0**-130), 2.0**127, float(np.finfo(np.float32).max), -65504.0, 2.0**-24, 6.0, 7.0),
    *(448.0, -480.0, 1.9921875),
)


@st.composite
def tensors(draw: st.DrawFn, shape: tuple[int, ...], dtype: str):
    """Values around one power of two, wherever it is in float32's range, with a few specials."""
    size = int(np.prod(shape))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    center = draw(st.integers(-149, 126))
    octaves = draw(st.integers(0, 24))
    exponents = np.clip(center - rng.integers(0, octaves + 1, size), -149, 126)
    values = np.ldexp(rng.uniform(-2, 2, size), exponents)
    specials = st.sampled_from(SPECIALS)
    for index, special in draw(st.lists(st.tuples(st.integers(0, size - 1), specials), max_size=5)):
        values[index] = special
    narrow = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    with np.errstate(over="ignore"):
        return values.astype(np.float32).astype(narrow).reshape(shape)


@pytest.mark.slow(
    but="mxfp8_e4m3.*floor|mxfp8_e5m2.*ceil|mxfp6.*-(even|rceil)|mxfp4.*-(even|rceil)|mxint8.*ceil"
)
@pytest.mark.parametrize("case", CONFIGS, ids=str)
def test_equals_the_oracle(case: QuantizeCase):
    names = "axis", "block_size", "scale_rule", "rounding"
    options: dict[str, Any] = {name: getattr(case, name) for name in names}

    @jax.jit
    def run(x: jax.Array) -> tuple[jax.Array, ...]:
        quantized = mx_jax.quantize(x, case.format, **options)
        return quantized.codes, quantized.scales, quantized.dequantize(jnp.float32)

    @settings(max_examples=40)
    @given(tensors(case.shape, case.dtype))
    def check(x: np.ndarray):
        expected = oracle.quantize(x, case.format, **options)
        parts = expected.codes, expected.scales, expected.values
        for name, left, right in zip(("codes", "scales", "values"), run(x), parts, strict=True):
            assert_bitwise_equal(left, right, what=name, any_nan=True)

    check()
