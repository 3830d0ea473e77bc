"""Block formats: what they hold, what they refuse."""

import dataclasses

import pytest

from mx_jax.formats import (
    BLOCK_FORMATS,
    E2M1,
    E4M3_SCALE,
    E8M0,
    F32_DIVISOR,
    FLOAT8_ROWWISE_E4M3,
    FLOAT8_TENSORWISE_E5M2,
    MXFP4,
    MXFP4_2D,
    MXFP8_E4M3,
    NVFP4,
    NVFP4_2D,
    NVFP4_ONE_LEVEL,
    WHOLE,
    BlockFormat,
    check_block_size,
)

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
}


def test_table():
    rows = {
        format.name: (format.element.name, format.scale.name, format.block, format.tensor_scale)
        for format in BLOCK_FORMATS
    }
    assert rows == TABLE
    assert len(BLOCK_FORMATS) == len(TABLE)


@pytest.mark.parametrize(
    ("format", "bits"),
    [
        (MXFP8_E4M3, 8.25),
        (MXFP4, 4.25),
        (NVFP4, 4.5),
        (NVFP4_ONE_LEVEL, 4.5),
        (FLOAT8_ROWWISE_E4M3, 8.0),
        (FLOAT8_TENSORWISE_E5M2, 8.0),
        (MXFP4.with_block(8), 5.0),
        (MXFP4_2D, 4 + 8 / 1024),
        (NVFP4_2D, 4 + 8 / 256),
    ],
    ids=lambda value: value.name if isinstance(value, BlockFormat) else None,
)
def test_bits_per_element(format: BlockFormat, bits: float):
    assert format.bits_per_element == bits


def test_with_block():
    assert MXFP4.with_block(32) is MXFP4
    assert MXFP4.with_block(64).block == (1, 64)
    assert MXFP4.with_block(WHOLE).block == (1, WHOLE)
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


@pytest.mark.parametrize("size", [1, 32, 10**9, WHOLE])
def test_good_block_sizes(size):
    check_block_size(size, "op")
    assert MXFP4.with_block(size).block[1] == size


def test_block_has_two_sizes():
    with pytest.raises(ValueError, match=r"must be \(kept, contracting\), got block=\(1, 2, 3\)"):
        dataclasses.replace(MXFP4, block=(1, 2, 3))  # pyright: ignore[reportArgumentType]


def test_a_tensor_scale_needs_an_element_scale():
    for scale in (E8M0, F32_DIVISOR):
        with pytest.raises(ValueError, match=f"got scale={scale.name}; set tensor_scale=False"):
            BlockFormat(name="wrong", element=E2M1, scale=scale, tensor_scale=True)
    right = BlockFormat(name="right", element=E2M1, scale=E4M3_SCALE, tensor_scale=True)
    assert right.tensor_scale


def test_repr():
    assert repr(MXFP4) == "BlockFormat(mxfp4, block=(1, 32))"
    assert repr(FLOAT8_ROWWISE_E4M3) == "BlockFormat(float8_rowwise_e4m3, block=(1, WHOLE))"
