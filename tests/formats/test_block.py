"""Block formats: what they hold, what they refuse, and how they are found."""

import dataclasses
import re

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from mx_jax import recipes
from mx_jax.formats import (
    BLOCK_FORMATS,
    E2M1,
    E4M3_SCALE,
    E8M0,
    ELEMENT_FORMATS,
    F32,
    F32_DIVISOR,
    FLOAT8_ROWWISE_E4M3,
    FLOAT8_TENSORWISE_E5M2,
    MXFP4,
    MXFP4_2D,
    MXFP6_E2M3,
    MXFP6_E3M2,
    MXFP8_E4M3,
    MXFP8_E5M2,
    MXINT8,
    NVFP4,
    NVFP4_2D,
    NVFP4_ONE_LEVEL,
    SCALE_FORMATS,
    WHOLE,
    BlockFormat,
    ElementFormat,
    ScaleFormat,
    any_format,
    block_format,
    check_block_size,
)
from mx_jax.formats.block import FLOAT8_BLOCKWISE_2D_E8M0, FLOAT8_BLOCKWISE_E8M0
from mx_jax.formats.element import nearest

TABLE = {
    "mxfp8_e4m3": ("e4m3", "e8m0", (1, 32), False),
    "mxfp8_e5m2": ("e5m2", "e8m0", (1, 32), False),
    "mxfp6_e2m3": ("e2m3", "e8m0", (1, 32), False),
    "mxfp6_e3m2": ("e3m2", "e8m0", (1, 32), False),
    "mxfp4": ("e2m1", "e8m0", (1, 32), False),
    "mxint8": ("int8", "e8m0", (1, 32), False),
    "nvfp4": ("e2m1", "e4m3", (1, 16), True),
    "nvfp4_one_level": ("e2m1", "e4m3", (1, 16), False),
    "mxfp4_2d": ("e2m1", "e8m0", (32, 32), False),
    "nvfp4_2d": ("e2m1", "e4m3", (16, 16), True),
    "float8_rowwise_e4m3": ("e4m3", "f32_divisor", (1, WHOLE), False),
    "float8_rowwise_e5m2": ("e5m2", "f32_divisor", (1, WHOLE), False),
    "float8_tensorwise_e4m3": ("e4m3", "f32_divisor", (WHOLE, WHOLE), False),
    "float8_tensorwise_e5m2": ("e5m2", "f32_divisor", (WHOLE, WHOLE), False),
    "float8_blockwise_e4m3": ("e4m3", "f32", (1, 128), False),
    "float8_blockwise_2d_e4m3": ("e4m3", "f32", (128, 128), False),
    "int8_rowwise": ("integer8", "f32_divisor", (1, WHOLE), False),
}


def test_table():
    rows = {
        format.name: (format.element.name, format.scale.name, format.block, format.tensor_scale)
        for format in BLOCK_FORMATS
    }
    assert rows == TABLE
    assert len(BLOCK_FORMATS) == len(TABLE)


# Bits that an element takes with its share of the scales, and digits of a value.
FACTS = {
    MXFP8_E4M3: (8.25, 4),
    MXFP8_E5M2: (8.25, 3),
    MXINT8: (8.25, 7),
    MXFP4: (4.25, 2),
    NVFP4: (4.5, 2 + 4),
    NVFP4_ONE_LEVEL: (4.5, 2 + 4),
    FLOAT8_ROWWISE_E4M3: (8.0, None),
    FLOAT8_TENSORWISE_E5M2: (8.0, None),
    MXFP4.with_block(8): (5.0, 2),
    MXFP4_2D: (4 + 8 / 1024, 2),
    NVFP4_2D: (4 + 8 / 256, 2 + 4),
}


def test_bits_and_digits():
    assert {x: (x.bits_per_element, x.significand_bits) for x in FACTS} == FACTS


def test_with_block():
    assert MXFP4.with_block(32) is MXFP4
    for size in (1, 64, 10**9, WHOLE):
        check_block_size(size, "op")
        assert MXFP4.with_block(size).block == (1, size)
    assert MXFP4_2D.with_block(4).block == (32, 4)
    assert MXFP4.with_block(64) != MXFP4
    assert hash(MXFP4.with_block(64)) == hash(MXFP4.with_block(64))


@pytest.mark.parametrize("size", [0, -1, 1.5, 32.0, True, "32", None])
def test_a_block_size_is_a_positive_int_or_whole(size):
    message = rf"block size must be a positive int or WHOLE, got block_size={size!r}$"
    with pytest.raises(ValueError, match="op: a " + message):
        check_block_size(size, "op")
    with pytest.raises(ValueError, match="BlockFormat mxfp4: a " + message):
        MXFP4.with_block(size)


def test_block_has_two_sizes():
    for block, message in (
        ((1, 2, 3), r"must be \(kept, contracting\), got block=\(1, 2, 3\)"),
        ((0, 32), "a block size must be a positive int or WHOLE, got block_size=0"),
        ((1, 0), "a block size must be a positive int or WHOLE, got block_size=0"),
    ):
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(MXFP4, block=block)  # pyright: ignore[reportArgumentType]


def test_a_tensor_scale_needs_an_element_scale():
    for scale in (E8M0, F32_DIVISOR):
        with pytest.raises(ValueError, match=f"got scale={scale.name}; set tensor_scale=False"):
            BlockFormat(name="wrong", element=E2M1, scale=scale, tensor_scale=True)
    right = BlockFormat(name="right", element=E2M1, scale=E4M3_SCALE, tensor_scale=True)
    assert right.tensor_scale


def test_repr():
    assert repr(MXFP4) == "BlockFormat(mxfp4, block=(1, 32))"
    assert repr(FLOAT8_ROWWISE_E4M3) == "BlockFormat(float8_rowwise_e4m3, block=(1, WHOLE))"


@pytest.mark.parametrize("kind", [ElementFormat, ScaleFormat, BlockFormat])
def test_formats_are_built_by_names(kind: type):
    """Their facts are numbers, whose order nobody remembers."""
    with pytest.raises(TypeError, match="positional"):
        kind("mine")


ALL_BLOCK_NAMES = ", ".join(format.name for format in BLOCK_FORMATS)


@pytest.mark.parametrize(
    "format",
    [*BLOCK_FORMATS, FLOAT8_BLOCKWISE_E8M0, FLOAT8_BLOCKWISE_2D_E8M0],
    ids=lambda format: format.name,
)
def test_by_object_and_name(format: BlockFormat):
    assert block_format(format) is format
    assert block_format(format.name) is format
    assert block_format(f"  {format.name.upper().replace('_', '-')} ") is format
    rows, size = format.block
    if rows != 1 or size is WHOLE:
        with pytest.raises(ValueError, match="unknown block format name"):
            block_format(f"{format.name}_2d")
    else:
        square = dataclasses.replace(format, name=f"{format.name}_2d", block=(size, size))
        assert block_format(f"{format.name}_2d") == square


@pytest.mark.parametrize(
    ("dtype", "format"),
    [
        (ml_dtypes.float8_e4m3fn, MXFP8_E4M3),
        (jnp.float8_e4m3fn, MXFP8_E4M3),
        (np.dtype(ml_dtypes.float8_e5m2), MXFP8_E5M2),
        (ml_dtypes.float6_e2m3fn, MXFP6_E2M3),
        (ml_dtypes.float6_e3m2fn, MXFP6_E3M2),
        (np.int8, MXINT8),
    ],
    ids=str,
)
def test_by_dtype(dtype, format: BlockFormat):
    assert block_format(dtype) is format


KNOWN = f"known: {ALL_BLOCK_NAMES}"
UNKNOWN = [
    (
        ml_dtypes.float4_e2m1fn,
        "dtype=float4_e2m1fn is stored by several block formats; name one of: mxfp4, nvfp4",
    ),
    *(
        (dtype, f"dtype={name} is stored by no block format; name one of: {ALL_BLOCK_NAMES}")
        for dtype, name in ((jnp.bfloat16, "bfloat16"), (np.uint8, "uint8"))
    ),
    ("MXPF8", f"unknown block format name='MXPF8' (did you mean 'mxfp8'?); {KNOWN}"),
    *((name, f"unknown block format name={name!r}; {KNOWN}") for name in ("", "float32")),
    *(
        (name, f"unknown block format name={name!r}, perhaps one of {meant}; {KNOWN}")
        for name, meant in (
            ("float8_rowwise", "float8_rowwise_e4m3, float8_rowwise_e5m2"),
            ("E2M3", "mxfp6_e2m3"),
            ("float8_e5m2", "mxfp8_e5m2, float8_rowwise_e5m2, float8_tensorwise_e5m2"),
        )
    ),
]


@pytest.mark.parametrize(("format", "message"), UNKNOWN, ids=str)
def test_unknown_formats_list_what_may_be_meant(format, message: str):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        block_format(format)


def test_one_slip_suggests_a_name_one_slip_away():
    """All names with neighbours exchanged, a letter dropped or another in its place."""
    for known in (list(recipes.names()), [*ALL_BLOCK_NAMES.split(", "), "mxfp8", "mxfp6"]):
        slips = {name: set() for name in known}
        for name, neighbours in slips.items():
            for i, letter in enumerate(name):
                before, after = name[:i], name[i + 1 :]
                neighbours |= {before + after, f"{before}0{after}", f"{before}x{after}"}
                neighbours.add(before + after[:1] + letter + after[1:])
        for slip in set().union(*slips.values()) - set(known):
            assert slip in slips[re.findall("'(.*)'", nearest(slip, known))[0]], slip


def test_names_of_recipes_for_all_operands_are_those_of_formats():
    """So one name is good wherever a format or a recipe is taken."""
    for name in ("mxfp8", "mxfp6", "mxfp6_e2m3", "mxfp4", "mxint8", "nvfp4"):
        output = recipes.from_name(name).output
        assert output.lhs.format == output.rhs.format == block_format(name) == any_format(name)
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
