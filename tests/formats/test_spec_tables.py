"""The tables of OCP Microscaling Formats (MX) v1.0, as literals.

Every number below is written down from the specification; none is computed.
"""

import math

import pytest

from mx_jax.formats import (
    E2M1,
    E2M3,
    E3M2,
    E4M3,
    E5M2,
    E8M0,
    INT8,
    INT8_FULL,
    MX_FORMATS,
    BlockFormat,
    ElementFormat,
)

# Section 5.3, tables 2 to 5: exponent bits, mantissa bits, bias, emax, max, smallest normal,
# smallest subnormal.
PARAMETERS = {
    E4M3: (4, 3, 7, 8, 448.0, 2.0**-6, 2.0**-9),
    E5M2: (5, 2, 15, 15, 57344.0, 2.0**-14, 2.0**-16),
    E2M3: (2, 3, 1, 2, 7.5, 1.0, 0.125),
    E3M2: (3, 2, 3, 4, 28.0, 0.25, 0.0625),
    E2M1: (2, 1, 1, 2, 6.0, 1.0, 0.5),
}

# Rows of the same tables that spell a bit pattern: code, value.
ENCODINGS = {
    E4M3: [
        (0b0_0000_000, 0.0),
        (0b0_0000_001, 2.0**-9),
        (0b0_0000_111, 0.875 * 2.0**-6),
        (0b0_0001_000, 2.0**-6),
        (0b0_0111_000, 1.0),
        (0b0_1000_000, 2.0),
        (0b0_1111_110, 448.0),
        (0b1_1111_110, -448.0),
        (0b0_1111_111, math.nan),
        (0b1_1111_111, math.nan),
        (0b1_0000_000, -0.0),
    ],
    E5M2: [
        (0b0_00000_00, 0.0),
        (0b0_00000_01, 2.0**-16),
        (0b0_00000_11, 0.75 * 2.0**-14),
        (0b0_00001_00, 2.0**-14),
        (0b0_01111_00, 1.0),
        (0b0_11110_11, 57344.0),
        (0b1_11110_11, -57344.0),
        (0b0_11111_00, math.inf),
        (0b1_11111_00, -math.inf),
        (0b0_11111_01, math.nan),
        (0b0_11111_10, math.nan),
        (0b1_11111_11, math.nan),
        (0b1_00000_00, -0.0),
    ],
    E2M3: [
        (0b0_00_000, 0.0),
        (0b0_00_001, 0.125),
        (0b0_00_111, 0.875),
        (0b0_01_000, 1.0),
        (0b0_11_111, 7.5),
        (0b1_11_111, -7.5),
        (0b1_00_000, -0.0),
    ],
    E3M2: [
        (0b0_000_00, 0.0),
        (0b0_000_01, 0.0625),
        (0b0_000_11, 0.1875),
        (0b0_001_00, 0.25),
        (0b0_111_11, 28.0),
        (0b1_111_11, -28.0),
        (0b1_000_00, -0.0),
    ],
    # Section 5.3.4: two's complement with an implied scale of 2^-6.
    INT8: [
        (0b0000_0000, 0.0),
        (0b0000_0001, 2.0**-6),
        (0b0100_0000, 1.0),
        (0b0111_1111, 1 + 63 / 64),
        (0b1000_0001, -(1 + 63 / 64)),
        (0b1000_0000, -2.0),
        (0b1111_1111, -(2.0**-6)),
    ],
}

# Section 5.3.3, table 5: all there is.
E2M1_VALUES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]

# Section 5.2, table 1: name, element bits, block size, scale bits.
CONCRETE_FORMATS = [
    ("mxfp8_e5m2", E5M2, 8, 32, 8),
    ("mxfp8_e4m3", E4M3, 8, 32, 8),
    ("mxfp6_e3m2", E3M2, 6, 32, 8),
    ("mxfp6_e2m3", E2M3, 6, 32, 8),
    ("mxfp4", E2M1, 4, 32, 8),
    ("mxint8", INT8, 8, 32, 8),
]


def same(actual: float, expected: float) -> bool:
    """Equal, with NaN equal to itself and signs of zero told apart."""
    if math.isnan(expected):
        return math.isnan(actual)
    return actual == expected and math.copysign(1, actual) == math.copysign(1, expected)


@pytest.mark.parametrize("element", PARAMETERS, ids=lambda element: element.name)
def test_parameters(element: ElementFormat):
    facts = (
        element.exponent_bits,
        element.mantissa_bits,
        element.bias,
        element.emax,
        element.max,
        element.smallest_normal,
        element.smallest_subnormal,
    )
    assert facts == PARAMETERS[element]


@pytest.mark.parametrize("element", ENCODINGS, ids=lambda element: element.name)
def test_encodings(element: ElementFormat):
    wrong = [
        (bin(code), element.value(code), value)
        for code, value in ENCODINGS[element]
        if not same(element.value(code), value)
    ]
    assert wrong == []


def test_e2m1_is_its_whole_table():
    assert [E2M1.value(code) for code in range(8)] == E2M1_VALUES
    assert [E2M1.value(8 + code) for code in range(8)] == [-value for value in E2M1_VALUES]
    assert math.copysign(1, E2M1.value(8)) == -1


@pytest.mark.parametrize("element", [E2M3, E3M2, E2M1], ids=lambda element: element.name)
def test_six_and_four_bits_have_neither_nan_nor_inf(element: ElementFormat):
    # Sections 5.3.2 and 5.3.3.
    assert (element.nan_code, element.inf_code) == (None, None)
    assert all(math.isfinite(element.value(code)) for code in range(1 << element.bits))


def test_int8_never_writes_minus_two_by_default():
    # Section 5.3.4: the extra code may be left unused to keep the range symmetric.
    assert (INT8.max, INT8.emax, INT8.smallest_subnormal) == (1.984375, 0, 0.015625)
    assert (INT8.negative_extra, INT8_FULL.negative_extra) == (False, True)
    assert INT8.value(128) == INT8_FULL.value(128) == -2.0


def test_e8m0():
    # Section 5.4.1, table 6: bias 127, exponents -127 to 127, NaN, no infinities and no zero.
    assert [E8M0.value(byte) for byte in range(255)] == [2.0**e for e in range(-127, 128)]
    assert math.isnan(E8M0.value(255))
    assert (E8M0.bits, E8M0.bias, E8M0.max, E8M0.smallest) == (8, 127, 2.0**127, 2.0**-127)


def test_concrete_formats():
    rows = [
        (format.name, format.element, format.element.bits, format.block[1], format.scale.bits)
        for format in MX_FORMATS
    ]
    assert sorted(rows, key=repr) == sorted(CONCRETE_FORMATS, key=repr)
    assert all(format.scale is E8M0 and format.block[0] == 1 for format in MX_FORMATS)


@pytest.mark.parametrize("format", MX_FORMATS, ids=lambda format: format.name)
def test_bits_per_element(format: BlockFormat):
    # Section 5.1: a block takes w + k d bits, here over k = 32 elements.
    assert format.bits_per_element * 32 == 8 + 32 * format.element.bits
