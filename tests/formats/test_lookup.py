"""Formats by object, name or dtype, and the messages where there is none."""

import re

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from mx_jax import recipes
from mx_jax.formats import (
    BLOCK_FORMATS,
    E8M0,
    ELEMENT_FORMATS,
    F32,
    MXFP4,
    MXFP6_E2M3,
    MXFP6_E3M2,
    MXFP8_E4M3,
    MXFP8_E5M2,
    MXINT8,
    SCALE_FORMATS,
    BlockFormat,
    any_format,
    block_format,
)
from mx_jax.formats.block import FLOAT8_BLOCKWISE_2D_E8M0, FLOAT8_BLOCKWISE_E8M0

ALL_BLOCK_NAMES = ", ".join(format.name for format in BLOCK_FORMATS)


@pytest.mark.parametrize("format", BLOCK_FORMATS, ids=lambda format: format.name)
def test_by_object_and_name(format: BlockFormat):
    assert block_format(format) is format
    assert block_format(format.name) is format
    assert block_format(f"  {format.name.upper().replace('_', '-')} ") is format


def test_an_own_format_needs_no_registration():
    own = MXFP4.with_block(8)
    assert block_format(own) is own


@pytest.mark.parametrize(
    ("dtype", "format"),
    [
        (ml_dtypes.float8_e4m3fn, MXFP8_E4M3),
        (jnp.float8_e4m3fn, MXFP8_E4M3),
        (np.dtype(ml_dtypes.float8_e5m2), MXFP8_E5M2),
        (ml_dtypes.float6_e2m3fn, MXFP6_E2M3),
        (ml_dtypes.float6_e3m2fn, MXFP6_E3M2),
        (np.int8, MXINT8),
        (jnp.int8, MXINT8),
        (np.dtype("int8"), MXINT8),
    ],
    ids=str,
)
def test_by_dtype(dtype, format: BlockFormat):
    assert block_format(dtype) is format


def test_an_ambiguous_dtype_lists_its_formats():
    message = "dtype=float4_e2m1fn is stored by several block formats; name one of: mxfp4, nvfp4"
    for dtype in (ml_dtypes.float4_e2m1fn, np.dtype(ml_dtypes.float4_e2m1fn)):
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            block_format(dtype)


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, ml_dtypes.float8_e8m0fnu, np.uint8])
def test_a_dtype_without_block_format_lists_all(dtype):
    message = (
        f"dtype={np.dtype(dtype).name} is stored by no block format; name one of: {ALL_BLOCK_NAMES}"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        block_format(dtype)


@pytest.mark.parametrize("name", ["mxfp5", "", "fp8", "float32"])
def test_an_unknown_name_lists_the_known(name: str):
    message = f"unknown block format name={name!r}; known: {ALL_BLOCK_NAMES}"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        block_format(name)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("float8_rowwise", "float8_rowwise_e4m3, float8_rowwise_e5m2"),
        ("E2M3", "mxfp6_e2m3"),
        ("float8_e5m2", "mxfp8_e5m2, float8_rowwise_e5m2, float8_tensorwise_e5m2"),
    ],
)
def test_a_name_in_part_lists_what_may_be_meant(name: str, meant: str):
    message = (
        f"unknown block format name={name!r}, perhaps one of {meant}; known: {ALL_BLOCK_NAMES}"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        block_format(name)


def test_names_of_recipes_for_all_operands_are_those_of_formats():
    """So one name is good wherever a format or a recipe is taken."""
    for name in ("mxfp8", "mxfp6", "mxfp6_e2m3", "mxfp4", "mxint8", "nvfp4"):
        fwd = recipes.from_name(name).fwd
        assert fwd.lhs.format == fwd.rhs.format == block_format(name) == any_format(name)
    assert block_format("MXFP8").name == "mxfp8_e4m3"


@pytest.mark.parametrize("format", [3, 3.5, [1], object, {"a": 1}], ids=repr)
def test_anything_else_is_a_type_error(format):
    with pytest.raises((TypeError, ValueError), match=re.escape(ALL_BLOCK_NAMES)):
        block_format(format)


def test_any_format_finds_blocks_before_elements_before_scales():
    # "e4m3" names an element format and a scale format: the element format comes first.
    shadowed = {"e4m3"}
    for format in (*BLOCK_FORMATS, *ELEMENT_FORMATS):
        assert any_format(format.name) is format
    for scale in SCALE_FORMATS:
        assert (any_format(scale.name) is scale) == (scale.name not in shadowed)
    assert any_format("E8M0") is E8M0
    assert any_format("F32") is F32


def test_any_format_lists_what_it_knows():
    names = [format.name for format in (*BLOCK_FORMATS, *ELEMENT_FORMATS, *SCALE_FORMATS)]
    message = f"unknown format name='e9m9'; known: {', '.join(names)}"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        any_format("e9m9")


def test_formats_of_recipes_alone_have_names():
    for format in (FLOAT8_BLOCKWISE_E8M0, FLOAT8_BLOCKWISE_2D_E8M0):
        assert block_format(format.name) is format
