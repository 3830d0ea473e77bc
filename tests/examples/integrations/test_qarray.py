"""QArrays of Qwix: the same values both ways, and an error where there is no twin.

Without Qwix a class of the same four fields stands in for its 0.1.8; with it, `-m slow`.
"""

import dataclasses
import sys
import types
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import mx_jax
from examples.integrations.qwix_qarray import from_qarray, to_qarray
from mx_jax.checkpoint.scales import decoded
from mx_jax.formats import WHOLE

VALUES = np.random.default_rng(0).standard_normal((64, 96), np.float32)


@dataclasses.dataclass
class QArray:
    """Qwix 0.1.8's, as far as its values go."""

    qvalue: Any
    scale: Any
    zero_point: Any = None
    qtype: Any = None


def dequantize(array: Any) -> np.ndarray:
    """`(qvalue) * scale` in float64, each scale repeated over its tile."""
    values = np.asarray(array.qvalue).astype(np.float64)
    scale = np.asarray(array.scale).astype(np.float64)
    for axis, (length, count) in enumerate(zip(values.shape, scale.shape, strict=True)):
        scale = np.repeat(scale, length // count, axis)
    return values * scale


def values_of(x: Any) -> np.ndarray:
    return np.concatenate(list(decoded(x)))


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "qwix", types.SimpleNamespace(QArray=QArray))


def drawn(dtype: Any, scales: Any, *, qtype: Any = None) -> QArray:
    """Random codes of a dtype under given scales, 64 x 96 elements."""
    rng = np.random.default_rng(1)
    if jnp.dtype(dtype) == jnp.int8:
        qvalue = jnp.asarray(rng.integers(-128, 128, (64, 96)), jnp.int8)
    else:
        qvalue = jnp.asarray(4 * VALUES).astype(dtype)
    return QArray(qvalue, jnp.asarray(scales), None, qtype or qvalue.dtype)


def powers(*shape: int) -> np.ndarray:
    return np.exp2(np.random.default_rng(2).integers(-20, 20, shape)).astype(np.float32)


def any_scales(*shape: int) -> np.ndarray:
    return np.random.default_rng(2).random(shape, np.float32) + 0.1


FP8, FP4 = "float8_e4m3fn", "float4_e2m1fn"
THREE = np.tile(np.array([0.875, 24.0, 2**-8], np.float32), (64, 2))
# dtype, scales, Qwix's name, the format asked for, the format of the result and its blocks.
FROM: dict[str, tuple[Any, Any, Any, Any, str, Any]] = {
    "mxfp8": (FP8, powers(2, 96), "mxfp8", None, "mxfp8_e4m3", ((-2, 32),)),
    "mxfp4": (FP4, powers(64, 3), "mxfp4", None, "mxfp4", ((-1, 32),)),
    "nvfp4": (FP4, THREE, "nvfp4", None, "nvfp4_one_level", ((-1, 16),)),
    "asked": ("float8_e5m2", powers(2, 96), None, "mxfp8_e5m2", "mxfp8_e5m2", ((-2, 32),)),
    "int8": ("int8", powers(2, 96), None, "mxint8", "mxint8", ((-2, 32),)),
    "int8 channels": ("int8", any_scales(1, 96), None, None, "qwix_1xwhole_int8", ((-2, WHOLE),)),
    "tensor": (
        FP8,
        any_scales(1, 1),
        None,
        None,
        "qwix_wholexwhole_e4m3",
        ((-2, WHOLE), (-1, WHOLE)),
    ),
    "tiles": (FP4, any_scales(4, 3), None, None, "qwix_16x32_e2m1", None),
    "each": (FP8, any_scales(64, 96), None, None, "qwix_1x1_e4m3", ()),
    "bfloat16": (FP8, any_scales(2, 96).astype("bfloat16"), None, None, "qwix_1x32_e4m3", None),
}


@pytest.mark.parametrize("case", FROM.values(), ids=FROM)
def test_a_qarray_keeps_its_values(case: Any, stand_in: None):
    dtype, scales, qtype, format, name, blocks = case
    array = drawn(dtype, scales, qtype=qtype)
    x = from_qarray(array, format=format)
    assert x.format.name == name and (blocks is None or x.blocks == blocks)
    assert x.dtype == array.scale.dtype
    np.testing.assert_array_equal(values_of(x), dequantize(array))
    np.testing.assert_array_equal(np.asarray(x.dequantize()), values_of(x).astype(x.dtype))
    back = to_qarray(x)
    assert back.qvalue.dtype == array.qvalue.dtype and back.scale.dtype == array.scale.dtype
    np.testing.assert_array_equal(np.asarray(back.scale), np.asarray(array.scale))
    np.testing.assert_array_equal(*(np.asarray(a.qvalue).view(np.uint8) for a in (back, array)))
    assert back.qtype == (qtype or array.qvalue.dtype)


def test_one_scale_for_an_axis_is_one_for_each_position():
    """Qwix gives the axes that it was not told of one scale; MX has blocks of one along them."""
    array = drawn("float8_e4m3fn", powers(2, 1), qtype="mxfp8")
    x = from_qarray(array)
    assert x.blocks == ((-2, 32),) and x.scales.shape == (2, 96)
    np.testing.assert_array_equal(values_of(x), dequantize(array))


def zero_point() -> QArray:
    return dataclasses.replace(drawn("int8", powers(1, 96)), zero_point=jnp.zeros((1, 96)))


def of(dtype: str, *scales: int) -> QArray:
    """Of 4 x 6 x 10, or fewer axes, as many as the scales have."""
    shape = (4, 6, 10)[: len(scales)]
    return QArray(jnp.ones(shape, jnp.dtype(dtype)), jnp.ones(scales), None, dtype)


# What is made, the format asked for, and the complaint.
BAD: dict[str, tuple[Any, Any, str]] = {
    "zero point": (zero_point, None, "no zero point"),
    "nf4": (lambda: of("uint4", 1, 6), None, "elements must be of .* got uint4, qtype='uint4'"),
    "no power of two": (
        lambda: drawn(FP8, any_scales(2, 96), qtype="mxfp8"),
        None,
        "format=mxfp8_e4m3 has scales in e8m0, got scale=",
    ),
    "tiles of 16": (
        lambda: drawn(FP8, powers(4, 96), qtype="mxfp8"),
        None,
        r"format=mxfp8_e4m3 has blocks of \(1, 32\), got tiles={-2: \(16, 4\)}",
    ),
    "elements": (
        lambda: drawn(FP8, powers(2, 96)),
        "mxfp4",
        "format=mxfp4 has other elements, or a tensor scale; got e4m3",
    ),
    "negative": (lambda: drawn(FP8, -powers(2, 96)), None, "and not negative, got scale="),
    "three sizes": (lambda: of(FP8, 2, 2, 2), None, r"two sizes of tiles, got \[2, 3, 5\]"),
    "rank": (lambda: drawn("int8", powers(96)), None, r"of qvalue's rank, got float32\[96\]"),
    "partial": (lambda: drawn("int8", powers(5, 96)), None, "tiles must divide their axis"),
}


@pytest.mark.parametrize("case", BAD.values(), ids=BAD)
def test_a_qarray_without_a_twin_is_refused(case: Any):
    array, format, message = case
    with pytest.raises(ValueError, match=f"^from_qarray: no exact twin: .*{message}"):
        from_qarray(array(), format=format)


@pytest.mark.parametrize(
    ("factor", "format", "dtype", "message"),
    [
        (1, "mxfp6_e2m3", None, "no elements of e2m3"),
        (1, "float8_rowwise_e4m3", None, "only powers of two"),
        (1, "nvfp4", None, "normal numbers of dtype=float32"),
        (2.0**-30, "mxfp8_e4m3", "float16", "normal numbers of dtype=float16"),
    ],
)
def test_an_mxarray_without_a_twin_is_refused(
    factor: float, format: str, dtype: Any, message: str, stand_in: None
):
    x = mx_jax.quantize(VALUES * factor, format)
    with pytest.raises(ValueError, match=f"^to_qarray: no exact twin: .*{message}"):
        to_qarray(x, dtype=dtype)


def test_other_errors(monkeypatch: pytest.MonkeyPatch, stand_in: None):
    with pytest.raises(ValueError, match=r"^to_qarray: no exact twin: .*got shape=\(64, 40\)"):
        to_qarray(mx_jax.quantize(VALUES[:, :40], "mxfp4"))
    with pytest.raises(TypeError, match=r"^to_qarray: needs an MXArray, got ndarray"):
        to_qarray(VALUES)  # pyright: ignore[reportArgumentType]
    monkeypatch.setitem(sys.modules, "qwix", None)
    with pytest.raises(ImportError, match=r"^to_qarray: needs Qwix: pip install qwix"):
        to_qarray(mx_jax.quantize(VALUES, "mxfp4"))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("qtype", "options"),
    [
        ("mxfp8", {"tiled_axes": {0: 32}}),
        ("mxfp4", {"tiled_axes": {1: 32}}),
        ("nvfp4", {"tiled_axes": {0: 16}}),
        ("int8", {"channelwise_axes": (1,)}),
        ("int8", {"channelwise_axes": (1,), "tiled_axes": {0: 32}}),
        ("float8_e4m3fn", {}),
        ("float8_e5m2", {"channelwise_axes": (0,), "scale_dtype": jnp.bfloat16}),
    ],
)
def test_qarrays_of_qwix(qtype: str, options: dict[str, Any]):
    """What Qwix 0.1.8 quantizes, and what it says the values are."""
    qwix = pytest.importorskip("qwix")
    array = qwix.quantize(jnp.asarray(VALUES), qtype, **options)
    x = from_qarray(array)
    np.testing.assert_array_equal(np.asarray(x.dequantize()), np.asarray(qwix.dequantize(array)))
    back = to_qarray(x)
    assert isinstance(back, qwix.QArray)
    np.testing.assert_array_equal(*(np.asarray(qwix.dequantize(a)) for a in (back, array)))
