"""Formats whose scales are floats (NVFP4, float8) or cover two axes, against NumPy's float32.

Here every step is IEEE float32 arithmetic in a fixed order; NumPy does the same steps.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import mx_jax
from mx_jax.backends.reference import REFERENCE
from mx_jax.codecs.lowering import Lowering, lowering
from mx_jax.formats import (
    FLOAT8_BLOCKWISE_2D_E4M3,
    FLOAT8_BLOCKWISE_E4M3,
    INT8_ROWWISE,
    MXFP4,
    MXFP4_2D,
    NVFP4,
    NVFP4_2D,
    NVFP4_ONE_LEVEL,
    BlockFormat,
    block_format,
)
from mx_jax.testing.cases import QuantizeCase
from mx_jax.testing.compare import assert_bitwise_equal
from tests.extending.least_error import LEAST_ERROR

F = np.float32
ELEMENTS = ("e4m3", "e5m2")
E4M3 = ml_dtypes.float8_e4m3fn
E2M1 = ml_dtypes.float4_e2m1fn


def tile_amax(x: np.ndarray, rows: int, cols: int) -> np.ndarray:
    """Largest magnitude of each tile, spread over the tile: [m, n]."""
    out = np.empty_like(x)
    for i in range(0, x.shape[0], rows):
        for j in range(0, x.shape[1], cols):
            out[i : i + rows, j : j + cols] = np.abs(x[i : i + rows, j : j + cols]).max()
    return out


def nvfp4(x: np.ndarray, p: np.float32, rows: int = 1):
    """Codes, scale bytes (spread) and values of finite x, step by step."""
    s = np.clip(tile_amax(x, rows, 16) / F(6) / p, F(2.0**-6), F(448)).astype(E4M3)
    wide = s.astype(F)
    codes = np.clip(x * ((F(1) / p) / wide), F(-6), F(6)).astype(E2M1)
    return codes.view(np.uint8), s.view(np.uint8), codes.astype(F) * (p * wide)


def wide_normal(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Normal values whose rows and columns differ in size."""
    rows = 2.0 ** rng.uniform(-6, 6, (shape[0], 1))
    return (rng.normal(size=shape) * rows * 2.0 ** rng.uniform(-3, 3, shape)).astype(F)


def outputs(x: mx_jax.MXArray) -> tuple[jax.Array, jax.Array, jax.Array]:
    return x.codes, x.scales, x.dequantize(jnp.float32)


def test_nvfp4_in_square_blocks(rng: np.random.Generator):
    """Rows of blocks are golden data."""
    x = wide_normal(rng, (33, 56))
    x[3] = 0
    x[4] *= F(1e-6)  # Far below 2^-6 of the largest scale.
    x[5, :3] = [1e8, -0.0, 2.0**-140]
    p = np.abs(x).max() / F(448 * 6)
    run = jax.jit(lambda x: ((q := mx_jax.quantize(x, NVFP4_2D)).tensor_scale, *outputs(q)))
    codes, scales, values = nvfp4(x, p, 16)
    # One byte of every tile.
    expected = np.full((1, 1), p, F), codes, scales[::16, ::16], values
    jax.tree.map(assert_bitwise_equal, run(x), expected)


def test_nvfp4_for_each_row_of_a_vmap(rng: np.random.Generator):
    """One tensor scale a row; rows of one block make every scale a scalar to XLA."""
    x = wide_normal(rng, (50, 16))
    quantize = jax.jit(
        jax.vmap(lambda row: ((q := mx_jax.quantize(row, NVFP4)).tensor_scale, *outputs(q)))
    )
    p = np.abs(x).max(axis=1, keepdims=True) / F(2688)
    rows = [nvfp4(row[None], p_row[0]) for row, p_row in zip(x, p, strict=True)]
    codes, scales, values = (np.concatenate(parts) for parts in zip(*rows, strict=True))
    jax.tree.map(assert_bitwise_equal, quantize(x), (p, codes, scales[:, ::16], values))


def test_nvfp4_of_zeros_and_of_what_is_not_finite(rng: np.random.Generator):
    """Zeros stay zeros; a block with NaN or Inf is NaN and no other block sees it."""
    x = rng.normal(size=(4, 32)).astype(F)
    broken = x.copy()
    broken[0, 3], broken[1, 20], broken[2, 17] = np.nan, np.inf, -np.inf
    both = jax.jit(
        lambda x: {f.name: outputs(mx_jax.quantize(x, f)) for f in (NVFP4, NVFP4_ONE_LEVEL)}
    )
    nan = np.zeros((4, 2), bool)
    nan[0, 0] = nan[1, 1] = nan[2, 1] = True
    for name, (codes, scales, values) in both(broken).items():
        np.testing.assert_array_equal(np.isnan(values), nan.repeat(16, axis=1), err_msg=name)
        np.testing.assert_array_equal(np.asarray(scales) == 0x7F, nan, err_msg=name)
        assert not np.asarray(codes)[nan.repeat(16, axis=1)].any()
    # Infinity and NaN are left out of the tensor scale, as zeros are.
    finite = np.where(nan.repeat(16, axis=1), F(0), broken)
    kept = ~nan.repeat(16, axis=1)
    for left, right in zip(both(broken)["nvfp4"], both(finite)["nvfp4"], strict=True):
        mask = kept if left.shape == kept.shape else ~nan
        assert_bitwise_equal(np.asarray(left)[mask], np.asarray(right)[mask])
    for zeros in (np.zeros((4, 32), F), np.full((4, 32), -0.0, F)):
        for _, scales, values in both(zeros).values():
            assert_bitwise_equal(values, zeros)
            assert (np.asarray(scales) == 0x08).all()  # 2^-6, the smallest scale
    assert jax.jit(lambda x: mx_jax.quantize(x, NVFP4).tensor_scale)(zeros) == 1


@pytest.mark.parametrize("rule", ["float8", "float8_power_of_two"])
def test_float8_is_torchaos(rule: str, rng: np.random.Generator):
    """scale = max / max(amax, 1e-12) as if in float64, rounded once; values are multiplied,
    clamped and cast, and divided by the scale to come back."""
    x = wide_normal(rng, (6, 40))
    x[1], x[2, :] = 0, F(1e-13)
    x[3, 5] = F(1e-12)
    names = (f"float8_{axes}wise_{element}" for axes in ("row", "tensor") for element in ELEMENTS)
    formats = [block_format(name) for name in names]
    quantize = jax.jit(
        lambda x: {f.name: outputs(mx_jax.quantize(x, f, scale_rule=rule)) for f in formats}
    )
    results = quantize(x)
    for format in formats:
        element, rowwise = format.element, format.block[0] == 1
        amax = np.abs(x).max(axis=1 if rowwise else None, keepdims=True).astype(np.float64)
        scale = (element.max / np.maximum(amax, 1e-12)).astype(F)
        if rule == "float8_power_of_two":
            scale = np.ldexp(F(1), np.frexp(scale)[1] - 1).astype(F)
        codes = np.clip(x * scale, F(-element.max), F(element.max)).astype(element.dtype)
        values = codes.astype(F) / scale
        actual = results[format.name]
        assert_bitwise_equal(actual[1], scale, what=f"{format.name} scales")
        assert_bitwise_equal(actual[0], codes.view(np.uint8), what=f"{format.name} codes")
        assert_bitwise_equal(actual[2], values, what=f"{format.name} values")


@pytest.mark.parametrize(("axis", "dtype"), [(0, "bfloat16"), (1, "float32")])
def test_int8_rows(axis: int, dtype: str, rng: np.random.Generator):
    """round(x * s), s = 127 / max(amax, 2^-100): on CPUs, in plain JAX, for TPUs."""
    x = wide_normal(rng, (24, 40))
    x[:, 3:6] = x[2:5] = 0
    x[3, 4], x[4, 5], x[2, 3] = 2.0**-140, 1e-30, -3e38
    # Ties: halves of a unit under a scale of 1; what becomes one where the product is rounded.
    x[5, 6:], x[6:, 6] = np.arange(34) - 20.5, np.arange(18) - 9.5
    x[5, 7] = x[7, 6] = 127
    ties, scale = np.arange(0.5, 127).astype(F), F(127) / F(3)
    near = (ties / scale).astype(np.float64) * scale
    near = (ties / scale)[(near.astype(F) == ties) & (near != ties)][:12]
    x[7], x[:, 9], x[7, 19] = 0, 0, 3
    x[7, 20:32], x[8:20, 9], x[7, 9] = near, near, 3
    broken = x.astype(dtype).astype(F)
    broken[20, 20], broken[21, 21], broken[22, 22] = np.nan, np.inf, -np.inf
    amax = np.abs(broken).max(axis, keepdims=True)
    with np.errstate(invalid="ignore"):
        scales = np.where(np.isfinite(amax), F(127) / np.maximum(amax, F(2.0**-100)), np.nan)
        codes = np.rint(np.nan_to_num(broken * scales) * (amax < np.inf)).astype(np.int8)
    rule: dict[str, Any] = {"format": INT8_ROWWISE, "axis": axis, "scale_rule": "amax_divisor"}
    call = QuantizeCase(shape=x.shape, dtype=dtype, **rule).call
    results = [mx_jax.quantize(jnp.asarray(broken, dtype), **rule)]
    for platform in ("cpu", "tpu"):
        # As TPUs compute it, op by op: a CPU has an instruction that multiplies and adds.
        with lowering(Lowering(platform)), jax.disable_jit(platform == "tpu"):
            run = jax.jit(lambda x: REFERENCE.run(call, x, None, None))
            results.append(run(jnp.asarray(broken, dtype)))
    for quantized in results:
        assert_bitwise_equal(quantized.scales, scales.astype(F), what="scales")
        np.testing.assert_array_equal(quantized.elements, codes)


@pytest.mark.parametrize("format", [FLOAT8_BLOCKWISE_E4M3, FLOAT8_BLOCKWISE_2D_E4M3], ids=str)
def test_multipliers(format: BlockFormat, rng: np.random.Generator):
    """DeepSeek-V3's scales, amax / 448: codes are E4M3(x / scale), values code * scale."""
    x = wide_normal(rng, (130, 200))
    x[0, :128] = 0 if format.block[0] == 1 else x[0, :128]
    rows, cols = format.block
    codes, scales, values = jax.jit(lambda x: outputs(mx_jax.quantize(x, format)))(x)
    scale = tile_amax(x, int(rows), int(cols)) / F(448)
    scale = np.where(scale == 0, F(1), scale)
    expected = np.clip(x / scale, F(-448), F(448)).astype(E4M3)
    assert_bitwise_equal(scales, scale[::rows, ::cols], what="scales")
    assert_bitwise_equal(codes, expected.view(np.uint8), what="codes")
    assert_bitwise_equal(values, expected.astype(F) * scale, what="values")


def test_square_blocks_are_the_same_from_both_sides(rng: np.random.Generator):
    """The purpose of two-dimensional blocks: a transposed tensor has the transposed codes."""
    x = wide_normal(rng, (40, 70))
    for format in (MXFP4_2D, NVFP4_2D, FLOAT8_BLOCKWISE_2D_E4M3, "mxfp8_2d"):
        cast = jax.jit(functools.partial(mx_jax.quantize, format=format), static_argnames="axis")
        jax.tree.map(assert_bitwise_equal, cast(x, axis=0), cast(x))
        jax.tree.map(assert_bitwise_equal, cast(x.T).T, cast(x))


def test_square_blocks_share_one_scale(rng: np.random.Generator):
    """A 32 x 32 block is quantized as if it were one long block."""
    x = wide_normal(rng, (32, 64))
    quantize = jax.jit(lambda x, flat: (mx_jax.quantize(x, MXFP4_2D), mx_jax.quantize(
        flat, MXFP4, block_size=1024)))  # fmt: skip
    flat = x.reshape(32, 2, 32).transpose(1, 0, 2).reshape(2, 1024)
    square, long = quantize(x, flat)
    assert square.scales.shape == (1, 2)
    assert_bitwise_equal(np.asarray(square.scales)[0], np.asarray(long.scales)[:, 0])
    back = np.asarray(long.codes).reshape(2, 32, 32).transpose(1, 0, 2).reshape(32, 64)
    assert_bitwise_equal(square.codes, back)


def test_a_tensor_scale_may_have_any_shape_of_one():
    for scale in (0.5, np.float32(0.5), jnp.float32(0.5), np.full((1, 1), 0.5)):
        quantized = mx_jax.quantize(jnp.ones((2, 16)), NVFP4, tensor_scale=scale)
        assert quantized.tensor_scale.shape == (1, 1) and quantized.tensor_scale == 0.5


@pytest.mark.parametrize(
    ("format", "rule"), [("mxfp8_e4m3", LEAST_ERROR), ("nvfp4", None), ("nvfp4", "four_over_six")]
)
def test_a_block_longer_than_its_axis_gives_the_same_bits(format: str, rule: Any, rng):
    """As many zeros by hand as the block has room for; rules that read values see them."""
    x = rng.normal(size=(4, 40)).astype(F)
    with mx_jax.only_backend("reference"):
        short, full = (
            mx_jax.quantize(x, format, block_size=64, scale_rule=rule)
            for x in (x, np.pad(x, ((0, 0), (0, 24))))
        )
    for left, right in zip(outputs(short), outputs(full), strict=True):
        assert_bitwise_equal(left, np.asarray(right)[:, : left.shape[1]])
