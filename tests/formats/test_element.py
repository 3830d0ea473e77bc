"""Element and scale formats: their facts, every code, and the tables of MX v1.0 as literals."""

import dataclasses

import ml_dtypes
import numpy as np
import pytest

from mx_jax.formats import (
    E2M1,
    E4M3,
    E4M3_SCALE,
    E5M2,
    E8M0,
    ELEMENT_FORMATS,
    F32,
    F32_DIVISOR,
    INT8,
    INT8_FULL,
    SCALE_FORMATS,
    ElementFormat,
)

FLOATS = [element for element in ELEMENT_FORMATS if element.kind == "float"]


def name(format) -> str:
    return format.name


def values_of_codes(dtype: np.dtype, count: int) -> np.ndarray:
    return np.arange(count, dtype=np.uint8).view(dtype).astype(np.float64)


@pytest.mark.parametrize("element", FLOATS, ids=name)
def test_finfo(element: ElementFormat):
    info = ml_dtypes.finfo(element.dtype)
    assert (element.bits, element.exponent_bits, element.mantissa_bits) == (
        info.bits,
        info.nexp,
        info.nmant,
    )
    assert (element.emin, element.emax) == (info.minexp, info.maxexp - 1)
    assert element.max == float(info.max) == -float(info.min)
    assert element.smallest_normal == float(info.smallest_normal)
    assert element.smallest_subnormal == float(info.smallest_subnormal)
    assert 2.0**-element.mantissa_bits == float(info.eps)


@pytest.mark.parametrize("element", FLOATS, ids=name)
def test_every_code(element: ElementFormat):
    count = 1 << element.bits
    expected = values_of_codes(element.dtype, count)
    actual = np.array([element.value(code) for code in range(count)])
    np.testing.assert_array_equal(actual, expected)
    finite = ~np.isnan(expected)
    np.testing.assert_array_equal(np.signbit(actual[finite]), np.signbit(expected[finite]))


@pytest.mark.parametrize("element", [INT8, INT8_FULL], ids=name)
def test_every_code_of_int8(element: ElementFormat):
    assert element.dtype == np.int8
    expected = values_of_codes(np.dtype(np.int8), 256) / 64
    np.testing.assert_array_equal([element.value(code) for code in range(256)], expected)


def test_nan_inf_and_overflow_codes():
    facts = {
        element.name: (element.nan_code, element.inf_code, element.overflow_code)
        for element in ELEMENT_FORMATS
    }
    assert facts == {
        "e4m3": (0x7F, None, 0x7F),
        "e5m2": (0x7F, 0x7C, 0x7C),
        "e2m3": (None, None, 0x1F),
        "e3m2": (None, None, 0x1F),
        "e2m1": (None, None, 0x07),
        "int8": (None, None, 0x7F),
        "int8_full": (None, None, 0x7F),
        "integer8": (None, None, 0x7F),
        "e4m3fnuz": (0x80, None, 0x80),
        "e5m2fnuz": (0x80, None, 0x80),
    }


@pytest.mark.parametrize("code", [-1, 16, 255])
def test_a_code_outside_the_format_is_refused(code: int):
    with pytest.raises(ValueError, match=rf"e2m1\.value: the code must lie in 0\.\.15, .*={code}$"):
        E2M1.value(code)


@pytest.mark.parametrize("scale", [E8M0, E4M3_SCALE], ids=name)
def test_every_scale_byte(scale):
    expected = values_of_codes(scale.dtype, 256)
    actual = np.array([scale.value(code) for code in range(256)])
    np.testing.assert_array_equal(actual, expected)
    info = ml_dtypes.finfo(scale.dtype)
    assert scale.max == float(info.max)
    assert scale.smallest == float(info.smallest_subnormal)


def test_scale_facts():
    facts = {
        scale.name: (scale.kind, scale.bits, scale.bias, scale.storage_dtype.name)
        for scale in SCALE_FORMATS
    }
    assert facts == {
        "e8m0": ("exponent", 8, 127, "uint8"),
        "e4m3": ("element", 8, 7, "uint8"),
        "f32": ("multiplier", 32, None, "float32"),
        "f32_divisor": ("divisor", 32, None, "float32"),
    }
    assert [scale.is_float32 for scale in SCALE_FORMATS] == [False, False, True, True]
    assert E4M3_SCALE.element is E4M3
    assert (F32.max, F32.smallest) == (float(np.finfo(np.float32).max), 2.0**-149)


@pytest.mark.parametrize(("scale", "code"), [(F32, 0), (F32_DIVISOR, 1), (E8M0, 256), (E8M0, -1)])
def test_a_scale_code_that_means_nothing_is_refused(scale, code: int):
    message = rf"{scale.name}\.value: needs a byte scale and a code in 0\.\.255, .*code={code}$"
    with pytest.raises(ValueError, match=message):
        scale.value(code)


@pytest.mark.parametrize("formats", [ELEMENT_FORMATS, SCALE_FORMATS], ids=["element", "scale"])
def test_formats_are_frozen_hashable_and_named_once(formats):
    assert len({format.name for format in formats}) == len(set(formats)) == len(formats)
    for format in formats:
        assert hash(format) == hash(dataclasses.replace(format))
        with pytest.raises(dataclasses.FrozenInstanceError):
            format.bits_per_code = 3


def test_repr_is_short():
    assert repr(E5M2) == "ElementFormat(e5m2)"
    assert repr(E8M0) == "ScaleFormat(e8m0)"


def test_int8_never_writes_minus_two_by_default():
    # Section 5.3.4: the extra code may be left unused to keep the range symmetric.
    assert (INT8.max, INT8.emax, INT8.smallest_subnormal) == (1.984375, 0, 0.015625)
    assert (INT8.negative_extra, INT8_FULL.negative_extra) == (False, True)
    assert INT8.value(128) == INT8_FULL.value(128) == -2.0
