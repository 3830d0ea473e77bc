"""The golden files are the ones that MANIFEST.json describes, and no array of them is left out."""

import collections
import hashlib

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from mx_jax import MXArray
from mx_jax.codecs.element import decode, encode
from mx_jax.codecs.rounding import NEAREST, stochastic
from mx_jax.codecs.scale import decode_scaled, encode_scaled, scale_to_float32
from mx_jax.formats import E4M3, E8M0, NVFP4_ONE_LEVEL, ElementFormat
from mx_jax.testing.compare import assert_bitwise_equal
from tests.conformance import golden
from tests.conformance.golden import FORMATS, arrays, from_bits

# Golden arrays that are tables: read by name, not parsed into cases.
ELEMENTS = tuple(FORMATS)
NOT_SATURATING = ("fp8_e4m3", "fp8_e5m2")
RANDOM_BITS = (8, 16)

DECODE = {element: f"decode_{element}_f32" for element in ELEMENTS}
CAST = {element: f"cast_bf16_{element}_rne_sat" for element in ELEMENTS}
CAST_NOT_SATURATING = {element: f"cast_bf16_{element}_rne_nosat" for element in NOT_SATURATING}
DEQUANTIZE = {
    (element, dtype): f"dequant_{element}_{dtype}"
    for element in ELEMENTS
    for dtype in ("f32", "bf16")
}
STOCHASTIC = {
    (element, bits): (f"in_{element}", f"rand{bits}_{element}", f"codes{bits}_{element}")
    for element in ELEMENTS
    for bits in RANDOM_BITS
}
SPECIAL = tuple(f"special_{part}_l1" for part in ("scale", "codes", "deq"))

ARRAYS = {
    ("tables.npz", "decode_e8m0_f32"),
    *(("tables.npz", name) for name in (*DECODE.values(), *CAST.values())),
    *(("tables.npz", name) for name in CAST_NOT_SATURATING.values()),
    *(("dequant.npz", name) for name in DEQUANTIZE.values()),
    *(("stochastic.npz", name) for names in STOCHASTIC.values() for name in names),
    *(("nvfp4.npz", name) for name in ("special_in_f32", *SPECIAL)),
}


@pytest.mark.parametrize("file", golden.FILES)
def test_file_is_the_published_one(file: str):
    facts = golden.MANIFEST["files"][file]
    contents = (golden.DATA / file).read_bytes()
    assert len(contents) == facts["bytes"]
    assert hashlib.sha256(contents).hexdigest() == facts["sha256"]


def test_no_file_is_missing_or_extra():
    files = {path.name for path in golden.DATA.iterdir()}
    assert files == {*golden.FILES, "MANIFEST.json"}


def test_every_array_is_visited_once():
    """Counts how often the tests of this folder compare or read each."""
    count: collections.Counter[tuple[str, str]] = collections.Counter(ARRAYS)
    for source, cases in golden.sources().items():
        count[source] += 1
        for case in cases:
            count.update((case.file, name) for name in case.outputs.values())
            if case.tensor_scale_name is not None:
                count[case.file, case.tensor_scale_name] += 1
    everything = {(file, name) for file in golden.FILES for name in golden.arrays(file)}
    assert everything - count.keys() == set(), "arrays that no test compares"
    assert count.keys() - everything == set(), "arrays that tests name but no file holds"
    assert set(count.values()) == {1}, "arrays compared twice: a name was parsed wrongly"


# The golden tables: every code decoded, every bf16 cast, every code under every scale byte.


ALL_BFLOAT16 = np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16)
IS_NAN = np.isnan(ALL_BFLOAT16.astype(np.float32))


def element(name: str) -> ElementFormat:
    return FORMATS[name].element


def test_decode():
    codes = {e: jnp.arange(1 << element(e).bits, dtype=jnp.uint8) for e in DECODE}
    values = jax.jit(lambda codes: {e: decode(codes[e], element(e)) for e in codes})(codes)
    for name, array in DECODE.items():
        expected = arrays("tables.npz")[array].view(np.float32)
        assert_bitwise_equal(values[name], expected, what=array, any_nan=True)


def test_decode_e8m0():
    # A float32 subnormal in and out of a program keeps its bits: nothing is computed.
    values = jax.jit(lambda b: scale_to_float32(b, E8M0))(jnp.arange(256, dtype=jnp.uint8))
    expected = arrays("tables.npz")["decode_e8m0_f32"].view(np.float32)
    assert_bitwise_equal(values, expected, what="decode_e8m0_f32", any_nan=True)


def test_cast():
    x = jnp.asarray(ALL_BFLOAT16)
    codes = jax.jit(lambda x: {e: encode(x, element(e)) for e in CAST})(x)
    for name, array in CAST.items():
        check_cast(codes[name], array, element(name))


def test_cast_without_saturation():
    x = jnp.asarray(ALL_BFLOAT16)
    codes = jax.jit(
        lambda x: {e: encode(x, element(e), saturate=False) for e in CAST_NOT_SATURATING}
    )(x)
    for name, array in CAST_NOT_SATURATING.items():
        check_cast(codes[name], array, element(name))


def check_cast(codes: jax.Array, array: str, element: ElementFormat) -> None:
    """Bit-equal for every number; a NaN becomes a NaN where the format has one, else 0."""
    expected = arrays("tables.npz")[array]
    actual = np.asarray(codes)
    assert_bitwise_equal(actual[~IS_NAN], expected[~IS_NAN], what=array)
    if element.nan_code is None:
        # DO NOT CARE in the specification; both this library and the table write 0.
        assert_bitwise_equal(actual[IS_NAN], expected[IS_NAN], what=f"{array} of NaN")
    else:
        assert_bitwise_equal(
            actual[IS_NAN].view(element.dtype),
            expected[IS_NAN].view(element.dtype),
            what=f"{array} of NaN",
            any_nan=True,
        )


def test_dequantize_every_code_under_every_scale():
    def every(name: str) -> MXArray:
        count = 1 << element(name).bits
        return MXArray(
            codes=jnp.tile(jnp.arange(count, dtype=jnp.uint8), (256, 1)),
            scales=jnp.arange(256, dtype=jnp.uint8)[:, None],
            format=FORMATS[name].with_block(count),
            blocks=((-1, count),),
            dtype=np.dtype(np.float32),
        )

    inputs = {name: every(name) for name in ELEMENTS}
    dtypes = {"f32": jnp.float32, "bf16": jnp.bfloat16}
    values = jax.jit(
        lambda inputs: {
            (name, dtype): inputs[name].dequantize(dtypes[dtype]) for name, dtype in DEQUANTIZE
        }
    )(inputs)
    for key, array in DEQUANTIZE.items():
        expected = from_bits(arrays("dequant.npz")[array])
        assert_bitwise_equal(values[key], expected, what=array, any_nan=True)


def test_stochastic_rounding_by_stored_bits():
    stored = arrays("stochastic.npz")
    inputs = {
        key: (from_bits(stored[x]), stored[random].astype(np.int32))
        for key, (x, random, _) in STOCHASTIC.items()
    }
    codes = jax.jit(
        lambda inputs: {
            (name, bits): encode(
                inputs[name, bits][0],
                element(name),
                rounding=stochastic(bits),
                random_bits=inputs[name, bits][1],
            )
            for name, bits in inputs
        }
    )(jax.tree.map(jnp.asarray, inputs))
    for key, (_, _, array) in STOCHASTIC.items():
        assert_bitwise_equal(codes[key], stored[array], what=array)


def test_nvfp4_special_blocks_of_a_peer():
    """torchao's NVFP4 of NaN and Inf: what its steps give is reproduced step by step.

    `quantize` deviates on purpose: a block with Inf becomes NaN there (NUMERICS.md, NVFP4), where
    torchao makes 2688 of it. That is tested in tests/quantize/test_float_scales.py.
    """
    peer = arrays("nvfp4.npz")
    scales, codes, values = (peer[name] for name in SPECIAL)

    def steps(x: jax.Array):
        amax = jnp.max(jnp.abs(x), axis=-1, keepdims=True)
        stored = encode(jnp.clip(amax / 6, 2.0**-6, E4M3.max), E4M3)
        how = {"rounding": NEAREST, "random_bits": None}
        written = encode_scaled(x, stored, NVFP4_ONE_LEVEL, tensor_scale=None, **how)
        decoded = decode_scaled(written, stored, NVFP4_ONE_LEVEL, None)
        return stored, written, decoded

    x = jnp.asarray(from_bits(peer["special_in_f32"]))
    stored, written, decoded = jax.jit(steps)(x)
    assert_bitwise_equal(stored, scales, what="special_scale_l1")
    # Row 0 holds a NaN: its scale is NaN, and codes under such a scale are DO NOT CARE.
    assert scales[0] == 0x7F
    assert_bitwise_equal(written[1:], codes[1:], what="special_codes_l1")
    assert_bitwise_equal(
        np.asarray(decoded).view(np.float32),
        values.view(np.float32),
        what="special_deq_l1",
        any_nan=True,
    )
