"""Codes and values of elements, against ml_dtypes and against exact arithmetic by NumPy."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from mx_jax.codecs import element as element_codec
from mx_jax.codecs import scale as scale_codec
from mx_jax.codecs.element import decode, decode_bits, encode
from mx_jax.codecs.lowering import Lowering, lowering
from mx_jax.codecs.rounding import AWAY, NEAREST, TOWARD_ZERO, stochastic
from mx_jax.formats import E2M1, E4M3, E5M2, ELEMENT_FORMATS, INT8, INTEGER8, ElementFormat
from mx_jax.testing.compare import assert_bitwise_equal
from tests.codecs.by_numpy import by_numpy
from tests.quantize import oracle

MODES = (NEAREST, AWAY, TOWARD_ZERO)
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOAT16 = np.dtype(np.float16)


def all_values(dtype: np.dtype) -> np.ndarray:
    return np.arange(1 << 16, dtype=np.uint16).view(dtype)


def all_codes(element: ElementFormat) -> np.ndarray:
    return np.arange(1 << element.bits, dtype=np.uint8)


@jax.jit
def encode_to_all(x: jax.Array) -> dict[str, jax.Array]:
    return {element.name: encode(x, element) for element in ELEMENT_FORMATS}


@np.errstate(invalid="ignore")
def cast_by_numpy(x: np.ndarray, element: ElementFormat) -> np.ndarray:
    """ml_dtypes' cast of clipped values; of integers, rint of x in units, in float64."""
    if element.kind == "int":
        lowest = -128 if element.negative_extra else -127
        near = np.nan_to_num(x.astype(np.float64)).clip(-256, 256)
        units = np.rint(near / element.smallest_subnormal)
        return np.clip(units, lowest, 127).astype(np.int8).view(np.uint8)
    limit = np.array(element.max, x.dtype)
    clipped = np.where(np.abs(x) > limit, np.copysign(limit, x), x)
    return clipped.astype(element.dtype).view(np.uint8)


@np.errstate(invalid="ignore")
def check_cast(x: np.ndarray, codes: dict[str, jax.Array], what: str) -> None:
    """Compare with ml_dtypes; any NaN code will do, and 0 is written where there is none."""
    nan = np.isnan(x)
    for element in ELEMENT_FORMATS:
        actual, expected = np.asarray(codes[element.name]), cast_by_numpy(x, element)
        assert_bitwise_equal(actual[~nan], expected[~nan], what=f"{what} to {element.name}")
        written = actual[nan]
        if element.nan_code is None:
            assert not written.any(), f"NaN to {element.name}"
        else:
            assert np.isnan(written.view(element.dtype)).all(), f"NaN to {element.name}"


def test_every_code_decodes_to_its_value():
    @jax.jit
    def decode_all(codes):
        return {e.name: decode(codes[e.name], e) for e in ELEMENT_FORMATS}

    values = decode_all({e.name: all_codes(e) for e in ELEMENT_FORMATS})
    for element in ELEMENT_FORMATS:
        expected = np.array([element.value(int(code)) for code in all_codes(element)], np.float32)
        assert_bitwise_equal(values[element.name], expected, what=element.name, any_nan=True)


def test_bits_above_the_format_are_ignored():
    codes = jnp.uint8([0x07, 0x1F, 0xF7, 0x8F])
    assert_bitwise_equal(decode(codes, E2M1), decode(codes & 15, E2M1))


@pytest.mark.parametrize("saturate", [True, False])
def test_every_code_round_trips(saturate: bool):
    dtypes = (np.dtype(np.float32), BFLOAT16, FLOAT16)

    @jax.jit
    def round_trips(codes):
        return {
            (e.name, dtype.name): encode(decode(codes[e.name], e, dtype), e, saturate=saturate)
            for e in ELEMENT_FORMATS
            for dtype in dtypes
        }

    codes = round_trips({e.name: all_codes(e) for e in ELEMENT_FORMATS})
    for element, dtype in itertools.product(ELEMENT_FORMATS, dtypes):
        expected = all_codes(element)
        if element in (INT8, INTEGER8):
            expected[0x80] = 0x81  # the lowest is read, but never written.
        if element.inf_code is not None and saturate:
            for sign in (0, element.sign_code):
                expected[sign | element.inf_code] = sign | element.max_code
        # Any code of NaN is as good as another.
        actual, expected = (
            np.asarray(array).view(element.dtype)
            for array in (codes[element.name, dtype.name], expected)
        )
        assert_bitwise_equal(actual, expected, what=f"{element.name} {dtype}", any_nan=True)


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16], ids=str)
def test_every_16_bit_value(dtype: np.dtype):
    x = all_values(dtype)
    check_cast(x, encode_to_all(jnp.asarray(x)), str(dtype))


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16], ids=str)
def test_every_16_bit_value_without_saturation(dtype: np.dtype):
    """Then overflow is what ml_dtypes makes of it: Inf, NaN, or the largest value."""
    formats = [element for element in ELEMENT_FORMATS if element.kind == "float"]
    encode_all = jax.jit(lambda x: {e.name: encode(x, e, saturate=False) for e in formats})
    x = all_values(dtype)
    codes = encode_all(jnp.asarray(x))
    # float6 and float4 have no NaN: ml_dtypes writes -0 or 0 for one, this library 0.
    x = x.astype(np.float32)
    number = ~np.isnan(x)
    for element in formats:
        with np.errstate(invalid="ignore", over="ignore"):
            expected = x.astype(element.dtype)
        actual = np.asarray(codes[element.name]).view(element.dtype)
        kept = number if element.nan_code is None else np.ones_like(number)
        assert_bitwise_equal(actual[kept], expected[kept], what=element.name, any_nan=True)


def random_patterns(rng: np.random.Generator, count: int) -> np.ndarray:
    """Float32: half uniform bit patterns, half with exponents of -20 to 20, where rounding acts."""
    wild = rng.integers(0, 1 << 32, count // 2, dtype=np.uint64).astype(np.uint32)
    tame = rng.integers(0, 1 << 32, count - count // 2, dtype=np.uint64).astype(np.uint32)
    exponents = rng.integers(127 - 20, 127 + 21, len(tame), dtype=np.uint32)
    tame = (tame & np.uint32(0x807FFFFF)) | (exponents << np.uint32(23))
    return np.concatenate([wild, tame]).view(np.float32)


def test_a_million_of_float32(rng: np.random.Generator):
    x = random_patterns(rng, 1 << 20)
    check_cast(x, encode_to_all(jnp.asarray(x)), "float32")


def edges(element: ElementFormat) -> np.ndarray:
    """Every value, every midpoint, where overflow begins, each with its float32 neighbours."""
    table = np.array([element.value(code) for code in range(element.max_code + 1)])
    overflows = [table[-1] + (table[-1] - table[-2]) / 2, table[1] / 4, 2 * table[-1]]
    points = np.unique(np.concatenate([table, (table[1:] + table[:-1]) / 2, overflows]))
    exact = points.astype(np.float32)
    assert (exact == points).all()
    x = np.concatenate(
        [exact, np.nextafter(exact, np.float32(np.inf)), np.nextafter(exact, -exact)]
    )
    return np.concatenate([x, -x])


@jax.jit
def encode_all_ways(x: dict[str, jax.Array], exponent: jax.Array) -> dict[str, jax.Array]:
    return {
        f"{e.name} {mode.name}": encode(x[e.name], e, exponent=exponent, rounding=mode)
        for e in ELEMENT_FORMATS
        for mode in MODES
    }


# Over the smallest scale the points themselves are subnormal in float32.
@pytest.mark.parametrize("exponent", [0, 1, 100, -130])
def test_ties_and_their_neighbours(exponent: int):
    scale = np.float64(2.0**exponent)
    x = {e.name: (edges(e) * scale).astype(np.float32) for e in ELEMENT_FORMATS}
    codes = encode_all_ways(x, jnp.int32(exponent))
    for element in ELEMENT_FORMATS:
        for mode in MODES:
            expected = oracle.round_to_codes(x[element.name] / scale, element, mode.name)
            what = f"{element.name} {mode.name}"
            assert_bitwise_equal(codes[what], expected, what=what)


def test_random_bits_are_needed_for_stochastic_rounding():
    with pytest.raises(AssertionError, match="stochastic rounding without random bits"):
        encode(jnp.ones(3), E4M3, rounding=stochastic(8))


@pytest.mark.parametrize("element", [E4M3, E5M2], ids=str)
def test_subnormals_round_to_zero_without_being_normalized(element: ElementFormat):
    """Over a constant exponent: the same codes as over an array of it, by addition."""
    patterns = np.r_[:64, np.arange(0, 1 << 25, 1021), (1 << 31) + np.arange(0, 1 << 25, 4093)]
    x = patterns.astype(np.uint32).view(np.float32)
    codes = [jax.jit(lambda x, e=e: encode(x, element, exponent=e)) for e in (0, -130)]
    normalizes = r"stablehlo\.convert .*xi32>\) -> tensor<\d+xf32>"
    texts = [run.lower(x).as_text() for run in codes]
    assert [bool(re.search(normalizes, text)) for text in texts] == [False, True]
    result = codes[0](x)
    assert np.array_equal(result, encode(x, element, exponent=jnp.zeros(x.shape, jnp.int32)))
    assert not (np.asarray(result) & 127).any()


def patterns_under_scales(
    element: ElementFormat, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Under every scale: ties and their neighbours, the ends of float32, and any pattern."""
    scales = np.arange(-127, 128, dtype=np.int32)[:, None]
    ties = np.unique(np.abs(edges(element))).view(np.int32)
    with np.errstate(over="ignore"):
        # Moved by the scale; past an end of float32 it is any other pattern.
        moved = np.where(ties, ties + (scales << 23), 0)
    drawn = random_patterns(rng, 255 * 32).view(np.int32).reshape(255, 32)
    ends = np.array(
        [0, 1, 2, 3, 1 << 22, (1 << 23) - 1, 1 << 23, 0x7F7FFFFF, 0x7F800000, 0x7FC00000]
    )
    bits = np.concatenate([moved, drawn, np.tile(ends.astype(np.int32), (255, 1))], 1)
    return bits, np.broadcast_to(scales, bits.shape)


@pytest.mark.parametrize("saturate", [True, False])
@pytest.mark.parametrize("element", ELEMENT_FORMATS, ids=str)
def test_quotients_on_gpus(element: ElementFormat, saturate: bool, rng: np.random.Generator):
    bits, scales = patterns_under_scales(element, rng)
    # Inf and NaN make the scale NaN, which overwrites their codes.
    bits, scales = (
        x[bits & 0x7FFFFFFF < 0x7F800000] for x in (bits, np.broadcast_to(scales, bits.shape))
    )
    operands = bits.view(np.float32), scales

    def encoded(x: jax.Array, scales: jax.Array) -> jax.Array:
        return encode(x, element, exponent=scales, saturate=saturate)

    with lowering(Lowering("cuda")):
        on_gpus = by_numpy(encoded, *operands)
    assert_bitwise_equal(on_gpus, jax.jit(encoded)(*operands))


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("flushes", [True, False])
@pytest.mark.parametrize("element", ELEMENT_FORMATS, ids=str)
def test_products_on_tpus(
    element: ElementFormat, flushes: bool, count: int, rng: np.random.Generator
):
    """Of every bfloat16 too, whether subnormals count as zero or not; 2^127 needs two factors."""
    bits, scales = patterns_under_scales(element, rng)
    every = np.arange(1 << 16, dtype=np.uint32).view(np.int32) << 16
    of_every = np.array([-127, -126, -125, -120, -100, 0, 1, 100, 126, 127], np.int32)
    bits = np.concatenate([bits.ravel(), np.tile(every, len(of_every))])
    scales = np.concatenate([scales.ravel(), np.repeat(of_every, len(every))])
    # Inf makes the scale NaN.
    kept = (bits & 0x7FFFFFFF != 0x7F800000) & (scales < 126 + count)
    x, scales = bits[kept].view(np.float32), scales[kept]

    def encoded(x: jax.Array, scales: jax.Array) -> jax.Array:
        powers = scale_codec.powers_of_two(-scales, count, scales)
        return element_codec.encode_products(x, powers, element, has_nan=True)

    on_tpus = by_numpy(encoded, x, scales, flushes=flushes)
    on_cpus = jax.jit(lambda x, scales: encode(x, element, exponent=scales))(x, scales)
    assert_bitwise_equal(on_tpus, on_cpus)


@pytest.mark.parametrize("saturate", [True, False])
@pytest.mark.parametrize("element", ELEMENT_FORMATS, ids=str)
def test_every_bfloat16_on_tpus(element: ElementFormat, saturate: bool):
    """Without a scale, where NaN and Inf have codes."""
    x = all_values(BFLOAT16).astype(np.float32)
    how = {"element": element, "saturate": saturate}
    with lowering(Lowering("tpu")):
        on_tpus = by_numpy(functools.partial(encode, **how), x, flushes=True)
    assert_bitwise_equal(on_tpus, jax.jit(functools.partial(encode, **how))(x))


@pytest.mark.parametrize("element", [E4M3, E5M2], ids=str)
def test_conversion_on_tpus(element: ElementFormat, rng: np.random.Generator):
    """Where they have one; float32's ties too."""
    bits, _ = patterns_under_scales(element, rng)
    for x in (all_values(BFLOAT16).astype(np.float32), bits.view(np.float32)):
        with lowering(Lowering("tpu", converts_float8=True)):
            result = jax.jit(lambda x: encode(x, element))(x)
        assert_bitwise_equal(result, jax.jit(lambda x: encode(x, element))(x))


@pytest.mark.parametrize("element", ELEMENT_FORMATS, ids=str)
@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_decoding_on_accelerators(element: ElementFormat, platform: str):
    codes = np.arange(256, dtype=np.uint8)
    if element.bits < 8 and platform == "cuda":
        codes = codes[: 1 << element.bits]
    with lowering(Lowering(platform)):
        result = by_numpy(
            functools.partial(decode_bits, element=element), codes, flushes=platform == "tpu"
        )
    assert_bitwise_equal(result, jax.jit(lambda codes: decode_bits(codes, element))(codes))
