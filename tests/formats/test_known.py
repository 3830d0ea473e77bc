"""Formats by their facts: a row under another name is that row; another fact makes a stranger."""

import dataclasses

import pytest

from mx_jax.formats import (
    BLOCK_FORMATS,
    E2M1,
    E4M3,
    E4M3_SCALE,
    E5M2,
    E8M0,
    ELEMENT_FORMATS,
    F32_DIVISOR,
    FLOAT8_TENSORWISE_E4M3,
    INT8,
    MXFP4,
    MXFP8_E5M2,
    NVFP4,
    SCALE_FORMATS,
    BlockFormat,
    ElementFormat,
    ScaleFormat,
)
from mx_jax.formats.block import known_block
from mx_jax.formats.element import known_element
from mx_jax.formats.scale import known_scale

STRANGER = dataclasses.replace(E2M1, bias=2)


@pytest.mark.parametrize(
    ("known", "rows"),
    [(known_element, ELEMENT_FORMATS), (known_scale, SCALE_FORMATS), (known_block, BLOCK_FORMATS)],
    ids=["element", "scale", "block"],
)
def test_rows_under_any_name(known, rows):
    for row in rows:
        assert known(row) is row
        assert known(dataclasses.replace(row, name="mine")) is row


def test_parts_under_any_name():
    mine = dataclasses.replace(E4M3_SCALE, element=dataclasses.replace(E4M3, name="mine"))
    assert known_scale(mine) is E4M3_SCALE
    element = dataclasses.replace(E2M1, name="mine")
    format = dataclasses.replace(NVFP4, element=element, scale=mine)
    assert known_block(format) is NVFP4 and format.is_known


def test_strangers():
    assert known_element(STRANGER) is None
    assert known_scale(dataclasses.replace(E4M3_SCALE, element=STRANGER)) is None
    assert known_scale(dataclasses.replace(E4M3_SCALE, element=E5M2)) is None
    assert known_scale(dataclasses.replace(E8M0, bits=7)) is None
    for facts in (
        {"element": STRANGER},
        {"scale": dataclasses.replace(E4M3_SCALE, bits=7)},
        {"block": (1, 17)},
        {"scale": E8M0, "tensor_scale": False, "block": (16, 1)},
    ):
        assert known_block(dataclasses.replace(NVFP4, **facts)) is None


def test_kernels_ask_element_and_scale_alone():
    assert MXFP4.with_block(7).is_known
    assert not dataclasses.replace(MXFP4, element=STRANGER).is_known
    assert not dataclasses.replace(MXFP4, scale=dataclasses.replace(E8M0, bits=7)).is_known


@pytest.mark.parametrize(
    ("format", "bits"),
    [(MXFP4, 2), (NVFP4, 2 + 4), (MXFP8_E5M2, 3), (FLOAT8_TENSORWISE_E4M3, None)],
    ids=lambda value: value.name if isinstance(value, BlockFormat) else None,
)
def test_significand_bits(format: BlockFormat, bits: int | None):
    assert format.significand_bits == bits


def test_significand_bits_of_elements():
    assert [e.significand_bits for e in (E4M3, E5M2, INT8)] == [4, 3, 7]


def fact(base: ElementFormat, **facts) -> ElementFormat | None:
    try:
        return dataclasses.replace(base, **facts)
    except ValueError:
        return None


def test_how_many_codes_may_be_reserved():
    """Of E2M1's eight, two stay; Inf needs a NaN beside it; the fnuz formats and INT8 have none."""
    ok = [number for number in range(-2, 9) if fact(E2M1, num_reserved_codes=number)]
    assert ok == list(range(7))
    ok = [number for number in range(-2, 9) if fact(E2M1, num_reserved_codes=number, has_inf=True)]
    assert ok == list(range(2, 7))
    for base, facts in ((E2M1, {"has_negative_zero": False}), (INT8, {})):
        assert fact(base, num_reserved_codes=0, **facts)
        assert not fact(base, num_reserved_codes=1, **facts)
        assert not fact(base, num_reserved_codes=-1, **facts)


def test_where_a_format_ends():
    """At most eight bits, values from 2^-22 to below 2^17."""
    for mantissa_bits, fits in ((-1, False), (0, True), (5, True), (6, False)):
        assert bool(fact(E2M1, mantissa_bits=mantissa_bits)) == fits
    for exponent_bits, fits in ((0, False), (1, True)):
        assert bool(fact(E2M1, exponent_bits=exponent_bits)) == fits
    assert not fact(INT8, exponent_bits=2, mantissa_bits=4)
    for bias, fits in ((22, True), (23, False), (-13, True), (-14, False)):
        assert bool(fact(E2M1, bias=bias)) == fits
    for scale in SCALE_FORMATS:
        assert scale.is_float32 == (scale.bits == 32)
    assert F32_DIVISOR.element is None


@pytest.mark.parametrize("kind", [ElementFormat, ScaleFormat, BlockFormat])
def test_formats_are_built_by_names(kind: type):
    """Their facts are numbers, whose order nobody remembers."""
    with pytest.raises(TypeError, match="positional"):
        kind("mine")


def test_what_facts_are_by_default():
    fp5 = ElementFormat(name="e2m2", exponent_bits=2, mantissa_bits=2, bias=1)
    assert (fp5.kind, fp5.num_reserved_codes, fp5.has_inf, fp5.dtype_name) == (
        "float",
        0,
        False,
        None,
    )
    assert (fp5.has_negative_zero, fp5.negative_extra) == (True, False)
    mine = BlockFormat(name="mine", element=fp5, scale=E8M0)
    assert (mine.block, mine.tensor_scale) == ((1, 32), False)
    for block in ((0, 32), (1, 0)):
        with pytest.raises(ValueError, match="BlockFormat mine: a block size must be a positive"):
            dataclasses.replace(mine, block=block)
