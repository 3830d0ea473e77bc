"""MXArray: bytes, native dtypes, repr, conversions, and what transformations make of it."""

import dataclasses
import re

import jax
import jax.monitoring
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import mx_jax
from mx_jax.formats import (
    FLOAT8_ROWWISE_E4M3,
    MXFP4,
    MXFP6_E2M3,
    MXFP6_E3M2,
    MXFP8_E4M3,
    MXFP8_E5M2,
    MXINT8,
    NVFP4,
    NVFP4_ONE_LEVEL,
    BlockFormat,
)
from mx_jax.testing.compare import assert_bitwise_equal

X = np.random.default_rng(0).normal(size=(3, 40)).astype(np.float32)

NATIVE = [
    (MXFP8_E4M3, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e8m0fnu),
    (MXFP8_E5M2, ml_dtypes.float8_e5m2, ml_dtypes.float8_e8m0fnu),
    (MXINT8, np.int8, ml_dtypes.float8_e8m0fnu),
    (MXFP4, ml_dtypes.float4_e2m1fn, ml_dtypes.float8_e8m0fnu),
    (NVFP4_ONE_LEVEL, ml_dtypes.float4_e2m1fn, ml_dtypes.float8_e4m3fn),
    (FLOAT8_ROWWISE_E4M3, ml_dtypes.float8_e4m3fn, np.float32),
]


@pytest.mark.slow(but="mxfp8_e4m3|mxfp4|float8_rowwise")
@pytest.mark.parametrize(
    ("format", "element", "scale"), NATIVE, ids=lambda v: getattr(v, "name", None)
)
def test_native_dtypes(format, element, scale):
    """The same numbers as native arrays, outside jit and inside."""
    cast = jax.jit(lambda x: ((q := mx_jax.quantize(x, format)), q.elements, q.scale_values))
    quantized, elements, scale_values = cast(X)
    assert (elements.dtype, scale_values.dtype) == (element, scale)
    assert (elements.shape, scale_values.shape) == (X.shape, quantized.scales.shape)
    # NumPy unpacks 4-bit arrays to one a byte.
    assert_bitwise_equal(np.asarray(elements).view(np.uint8), quantized.codes)
    assert_bitwise_equal(np.asarray(scale_values).view(quantized.scales.dtype), quantized.scales)
    assert_bitwise_equal(np.asarray(quantized.elements).view(np.uint8), quantized.codes)
    assert_bitwise_equal(quantized.scale_values, scale_values, any_nan=True)
    # Native arrays stand for the values that dequantizing gives.
    block = 40 if scale is np.float32 else format.block[1]
    spread = np.asarray(scale_values).astype(np.float64).repeat(block, 1)[:, :40]
    value = np.asarray(elements).astype(np.float64) / (64 if format is MXINT8 else 1)
    product = value / spread if scale is np.float32 else value * spread
    np.testing.assert_array_equal(quantized.dequantize(), product.astype(np.float32))


@pytest.mark.parametrize("format", [MXFP6_E2M3, MXFP6_E3M2], ids=lambda format: format.name)
def test_float6_has_no_native_array(format: BlockFormat):
    quantized = mx_jax.quantize(X, format)
    message = (
        f"MXArray.elements: XLA does not carry arrays of {format.element.dtype_name} (it aborts or "
        f"raises), got format={format.name}; use codes, or decode with dequantize()"
    )
    with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
        _ = quantized.elements
    assert quantized.scale_values.dtype == ml_dtypes.float8_e8m0fnu


def test_bytes():
    """120 elements; 2 blocks of 32 a row, 3 of 16, 1 of the whole row."""
    sizes = {
        q.format.name: (q.nbytes, q.packed_nbytes)
        for format in (MXFP8_E4M3, MXFP6_E3M2, MXFP4, NVFP4, FLOAT8_ROWWISE_E4M3)
        for q in [mx_jax.quantize(X, format)]
    }
    assert sizes == {
        "mxfp8_e4m3": (120 + 6, 120 + 6),
        "mxfp6_e3m2": (120 + 6, 90 + 6),
        "mxfp4": (120 + 6, 60 + 6),
        "nvfp4": (120 + 9 + 4, 60 + 9 + 4),
        "float8_rowwise_e4m3": (120 + 12, 120 + 12),
    }


def test_no_tensor_without_axes():
    bare = mx_jax.MXArray(
        codes=jnp.uint8(3), scales=jnp.uint8(127), format=MXFP4, blocks=(), dtype=np.dtype("f4")
    )
    with pytest.raises(TypeError, match=r"len\(\) of an MXArray without axes"):
        len(bare)
    assert float(bare.dequantize()) == 1.5


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_dequantize_gives_back_the_dtype(dtype):
    quantized = mx_jax.quantize(jnp.asarray(X, dtype), MXFP8_E4M3)
    assert quantized.dtype == dtype
    assert quantized.dequantize().dtype == mx_jax.dequantize(quantized).dtype == dtype
    assert jnp.asarray(quantized).dtype == np.asarray(quantized).dtype == dtype
    for other in (jnp.float32, jnp.bfloat16, jnp.float16):
        values = mx_jax.dequantize(quantized, other)
        assert values.dtype == other
        assert_bitwise_equal(values, quantized.dequantize(jnp.float32).astype(other))


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.uint8, jnp.bool_, jnp.complex64])
def test_dequantize_to_what_is_no_float(dtype):
    quantized = mx_jax.quantize(X, MXFP8_E4M3)
    with pytest.raises(TypeError, match=np.dtype(dtype).name):
        mx_jax.dequantize(quantized, dtype)


def test_conversions():
    quantized = mx_jax.quantize(X, MXFP8_E4M3)
    values = np.asarray(quantized.dequantize())
    assert_bitwise_equal(jnp.asarray(quantized), values)
    assert_bitwise_equal(np.asarray(quantized), values)
    assert_bitwise_equal(np.array(quantized, dtype=np.float64), values.astype(np.float64))
    # jnp functions take it as the array it stands for, and so does arithmetic with an array.
    assert_bitwise_equal(jnp.negative(quantized), -values)
    assert_bitwise_equal(jax.jit(lambda q: jnp.asarray(q))(quantized), values)


def test_an_mxarray_is_quantized_again_from_its_values():
    quantized = mx_jax.quantize(X, MXFP8_E4M3)
    again = mx_jax.quantize(quantized, MXFP4, axis=0)
    expected = mx_jax.quantize(quantized.dequantize(), MXFP4, axis=0)
    jax.tree.map(assert_bitwise_equal, again, expected)


def test_dequantize_takes_an_mxarray_only():
    with pytest.raises(TypeError, match=r"^dequantize: needs an MXArray, got x of type ndarray$"):
        mx_jax.dequantize(np.ones(32))


def test_repr_shows_values():
    quantized = mx_jax.quantize(jnp.float32([[1, 2.6], [-0.3, 6]]), MXFP4)
    assert repr(quantized) == (
        "MXArray(mxfp4, shape=(2, 2), dtype=float32, blocks={-1: 32}, nbytes=6,\n"
        "[[ 1. ,  3. ],\n[-0.5,  6. ]])"
    )
    large = repr(mx_jax.quantize(jnp.ones((64, 64), jnp.bfloat16), NVFP4))
    assert "nvfp4, shape=(64, 64), dtype=bfloat16, blocks={-1: 16}, nbytes=4356" in large
    assert "..." in large and len(large) < 400
    whole = mx_jax.quantize(jnp.ones((2, 3)), FLOAT8_ROWWISE_E4M3)
    assert "blocks={-1: WHOLE}" in repr(whole)


def test_repr_without_values():
    """Under a tracer, with abstract leaves, with leaves that are no arrays at all."""
    seen = []

    @jax.jit
    def look(x):
        quantized = mx_jax.quantize(x, MXFP4)
        seen.append(repr(quantized))
        return quantized

    abstract = jax.eval_shape(look, jnp.ones((2, 32)))
    text = "MXArray(mxfp4, shape=(2, 32), dtype=float32, blocks={-1: 32})"
    assert seen == [text]
    assert repr(abstract) == text
    leafless = jax.tree.map(lambda _: None, abstract)
    assert repr(leafless) == "MXArray(mxfp4, shape=(), dtype=float32, blocks={-1: 32})"
    assert "mxfp4" in repr(jax.tree.map(lambda _: object(), abstract))


def test_eval_shape():
    """Shapes without running anything: as large as one likes."""
    shape = (1 << 20, 1 << 20)
    abstract = jax.eval_shape(
        lambda x: mx_jax.quantize(x, MXFP4), jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    )
    assert (abstract.shape, abstract.codes.dtype) == (shape, np.uint8)
    assert abstract.scales.shape == (1 << 20, 1 << 15)
    assert abstract.nbytes == (1 << 40) + (1 << 35)
    assert abstract.packed_nbytes == (1 << 39) + (1 << 35)
    values = jax.eval_shape(lambda q: q.dequantize(), abstract)
    assert (values.shape, values.dtype) == (shape, jnp.bfloat16)


@pytest.mark.parametrize("packs", [False, True], ids=["MXArray", "packed"])
def test_equality_is_that_of_values(packs: bool):
    """Elementwise, as of arrays: two of other codes may be equal, and none is hashable."""
    one, other = (mx_jax.quantize(X, format) for format in (MXFP8_E4M3, MXFP4))
    if packs:
        one, other = map(mx_jax.pack_weights, (one, other))
    values = [np.asarray(q.dequantize()) for q in (one, other)]
    same = values[0] == values[1]
    assert same.any() and not same.all()
    for right in (other, other.dequantize(), values[1]):
        np.testing.assert_array_equal(one == right, same)
        np.testing.assert_array_equal(one != right, ~same)
    np.testing.assert_array_equal(other.dequantize() == one.dequantize(), same)
    twin = jax.tree.map(jnp.copy, one)
    assert (one == twin).all() and not (one != twin).any()
    assert (jax.jit(lambda a, b: a == b)(one, twin)).all()
    with pytest.raises(ValueError, match="truth value of an array"):
        assert one == twin
    with pytest.raises(TypeError, match="unhashable"):
        hash(one)
    assert one != "text" and (one == None) is False  # noqa: E711
    # Trees that are no arrays, as `jax.eval_shape` gives them, compare by identity.
    shapes = jax.eval_shape(lambda: one)
    assert shapes == shapes and shapes != jax.tree.map(lambda leaf: leaf, shapes)


def test_trees_of_equal_facts_are_equal():
    """So nothing is traced again for another array of the same kind."""
    names = {MXFP4: [".codes", ".scales"], NVFP4: [".codes", ".scales", ".tensor_scale"]}
    for format, paths in names.items():
        q = mx_jax.quantize(X, format)
        leaves = jax.tree_util.tree_leaves_with_path(q)
        assert [jax.tree_util.keystr(path) for path, _ in leaves] == paths
        tree = jax.tree.structure(q)
        again = jax.tree.structure(mx_jax.quantize(X + 1, dataclasses.replace(format)))
        assert tree == again and hash(tree) == hash(again)
        assert tree != jax.tree.structure(mx_jax.quantize(X, format, axis=0))
