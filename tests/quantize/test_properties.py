"""What holds of `quantize` for any input: equality with an exact oracle, and laws."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

import mx_jax
from mx_jax.codecs.blocks import scales_shape
from mx_jax.formats import FLOAT8_TENSORWISE_E4M3, MXFP4, NVFP4
from mx_jax.testing.compare import assert_bitwise_equal
from tests.quantize import oracle
from tests.quantize.inputs import CONFIGS, Config, compiled, tensors

EXAMPLES = settings(max_examples=40)
FEW_EXAMPLES = settings(max_examples=20)
ALL = pytest.mark.parametrize("config", CONFIGS, ids=str)
FLOAT32 = [config for config in CONFIGS if config.dtype == "float32"]
# The programs that test_equals_the_oracle runs on every Python.
NEAREST = [config for config in CONFIGS if config.rounding == "nearest"]


def assert_same(actual, expected, what: str = "") -> None:
    for name, left, right in zip(("codes", "scales", "values"), actual, expected, strict=True):
        assert_bitwise_equal(left, right, what=f"{name} {what}", any_nan=True)


@pytest.mark.slow(
    but="mxfp8_e4m3-floor|mxfp8_e5m2-ceil|mxfp6_e2m3-even|mxfp6_e3m2-rceil|mxfp4-[er]|mxint8-[rc]"
)
@ALL
def test_equals_the_oracle(config: Config):
    @EXAMPLES
    @given(tensors(config.shape, config.dtype))
    def check(x: np.ndarray):
        expected = oracle.quantize(x, config.format, **config.options)
        assert_same(compiled(config)(x), (expected.codes, expected.scales, expected.values))

    check()


@pytest.mark.parametrize("config", NEAREST, ids=str)
def test_quantizing_twice_changes_nothing(config: Config):
    """FLOOR and EVEN give the same codes and scales again. RCEIL and CEIL may halve a scale whose
    largest element became a power of two; the values stay."""

    @FEW_EXAMPLES
    @given(tensors(config.shape, config.dtype, finite=True))
    def check(x: np.ndarray):
        once = compiled(config)(x)
        if np.isinf(once[2]).any():
            return  # amax was rounded up to 2^128, which float32 does not have.
        # Values that bfloat16 or float16 hold would do as well, but not all are.
        again = compiled(dataclasses.replace(config, dtype="float32"))(once[2])
        if config.scale_rule in ("floor", "even"):
            assert_same(again, once)
        else:
            assert_bitwise_equal(again[2], once[2], any_nan=True)

    check()


@pytest.mark.slow
def test_arrays_without_elements():
    shapes = [(0,), (0, 64), (3, 0), (2, 0, 3)]
    cases = [
        (format, shape, axis)
        for format in (MXFP4, NVFP4, FLOAT8_TENSORWISE_E4M3)
        for shape in shapes
        for axis in range(len(shape))
    ]

    @jax.jit
    def all_of_them():
        zeros = ((format, jnp.zeros(shape, jnp.bfloat16), axis) for format, shape, axis in cases)
        quantized = [mx_jax.quantize(x, format, axis=axis) for format, x, axis in zeros]
        return quantized, [x.dequantize() for x in quantized]

    for case, x, values in zip(cases, *all_of_them(), strict=True):
        format, shape, axis = case
        assert x.shape == x.codes.shape == shape, case
        assert x.scales.shape == scales_shape(shape, x.blocks), case
        assert dict(x.blocks)[axis - len(shape)] == format.block[1], case
        assert x.size == 0, case
        assert (values.shape, values.dtype) == (shape, jnp.bfloat16), case
    # Outside jit too.
    assert mx_jax.quantize(jnp.zeros((0, 64)), MXFP4).dequantize().shape == (0, 64)
