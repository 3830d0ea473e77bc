"""Errors of `quantize`, and of MXArrays whose parts do not fit: rule, values, remedy."""

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import mx_jax
from mx_jax import MXArray, recipes
from mx_jax.formats import ELEMENT_FORMATS, MXFP4, NVFP4, ElementFormat
from tests.needs import CPU_BACKENDS, needs_library

X = np.ones((2, 32), np.float32)


def needs_floats(dtype: str, shape: tuple) -> str:
    return (
        f"quantize: needs float32, bfloat16 or float16 input, got dtype={dtype}, shape={shape}; "
        "convert it first, e.g. x.astype(jnp.float32)"
    )


STOCHASTIC, FLOAT8 = {"rounding": "stochastic"}, ml_dtypes.float8_e8m0fnu
KEY, KEYS = jax.random.key(0), jax.random.split(jax.random.key(0))
# Arguments in place of MXFP4's cast of X, the error and its message.
REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    *(
        ({"x": x}, TypeError, needs_floats(x.dtype.name, x.shape))
        for x in (
            # NumPy's 64-bit types included, which jnp.asarray would quietly narrow.
            *(np.ones((2, 32), dtype) for dtype in ("i4", "i8", "u1", "?", "c8", "f8", FLOAT8)),
            *(jnp.ones((2, 32), dtype) for dtype in ("int32", "complex64", "bool", FLOAT8)),
            np.float64(1),
        )
    ),
    ({"x": [1, 2]}, TypeError, needs_floats("int32", (2,))),
    ({"x": [1j]}, TypeError, needs_floats("complex64", (1,))),
    *(
        (
            {"axis": axis},
            ValueError,
            f"quantize: axis={axis} is out of range for shape=(2, 32); use -2..-1 or 0..",
        )
        for axis in (2, -3, 100)
    ),
    *(
        (
            {"axis": axis},
            TypeError,
            f"quantize: axis must be an int, got axis={axis!r}; count axes from 0, or from the "
            "end with -1",
        )
        for axis in (None, 1.0, "0", True, (0,), [1])
    ),
    (
        {"x": np.float32(1)},
        ValueError,
        "quantize: axis=-1 is out of range for shape=(); a scalar has no axis for blocks",
    ),
    (
        {"x": np.ones(64, np.float32), "format": "mxfp4_2d"},
        ValueError,
        "quantize: format=mxfp4_2d has two-dimensional blocks=(32, 32) and needs at least two "
        "axes, got shape=(64,)",
    ),
    *(
        (
            {"block_size": size},
            ValueError,
            f"quantize: a block size must be a positive int or WHOLE, got block_size={size!r}",
        )
        for size in (0, (1, 32))
    ),
    *(
        (
            {"rounding": rounding},
            ValueError,
            f"unknown rounding={rounding!r}; known: nearest, away, toward_zero, stochastic",
        )
        for rounding in ("up", "", None, 3)
    ),
    (
        STOCHASTIC,
        ValueError,
        "quantize: stochastic rounding needs a key, got key=None; pass key=jax.random.key(seed)",
    ),
    *(
        (
            {"rounding": rounding, "key": KEY},
            ValueError,
            f"quantize: a key is for stochastic rounding only, got rounding={rounding!r} and a key;"
            " drop the key or use rounding='stochastic'",
        )
        for rounding in ("nearest", "away", "toward_zero")
    ),
    *(
        (
            STOCHASTIC | {"key": key},
            TypeError,
            "quantize: key must be one PRNG key from jax.random.key or jax.random.PRNGKey, got "
            + described,
        )
        for key, described in (
            (3, "3"),
            ("key", "'key'"),
            (np.zeros(2, np.float32), "dtype=float32, shape=(2,)"),
            (np.zeros((2, 2), np.uint32), "dtype=uint32, shape=(2, 2)"),
            (np.uint32(3), "dtype=uint32, shape=()"),
            (KEYS, "dtype=key<fry>, shape=(2,)"),
        )
    ),
    *(
        (
            {"format": format, "tensor_scale": 1.0},
            ValueError,
            f"quantize: format={format} has no tensor scale, got tensor_scale; drop it",
        )
        for format in ("mxfp4", "nvfp4_one_level", "float8_rowwise_e4m3")
    ),
    (
        {"x": np.ones((3, 2, 32), "f4"), "format": NVFP4, "tensor_scale": np.ones((1, 2, 1))},
        ValueError,
        "quantize: a tensor scale belongs to the whole tensor, or to each position of its first "
        "axes, got tensor_scale.shape=(1, 2, 1)",
    ),
    *(
        (
            {"format": NVFP4, "tensor_scale": scale},
            ValueError,
            "quantize: tensor_scale must have an axis for each of codes, of length 1, or of the "
            f"same length where no blocks lie, got tensor_scale.shape={np.shape(scale)}, "
            "codes.shape=(2, 32), blocks=((-1, 16),); pass one number, or one for each matrix of a "
            "batch",
        )
        for scale in (np.ones(2, np.float32), np.ones((2, 32)), [1.0, 2.0])
    ),
]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [pytest.param(*row, id=f"{i}-{'-'.join(row[0])}") for i, row in enumerate(REFUSED)],
)
def test_refused(arguments: dict[str, Any], error: type[Exception], message: str):
    with pytest.raises(error, match=f"^{re.escape(message)}"):
        mx_jax.quantize(**{"x": X, "format": MXFP4} | arguments)


NARROW = [element for element in ELEMENT_FORMATS if element.kind == "float"]


@pytest.mark.parametrize("element", NARROW, ids=lambda element: element.name)
def test_float8_and_narrower_floats_are_their_values(element: ElementFormat):
    """bfloat16 holds every one; NumPy's float6, which XLA does not carry, included."""
    codes = np.arange(1 << element.bits, dtype=np.uint8)
    narrow = np.tile(codes.view(element.dtype), (4, 64))
    narrow = np.nan_to_num(narrow.astype(np.float32), posinf=1, neginf=1).astype(element.dtype)
    wide = narrow.astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(wide.astype(np.float32), narrow.astype(np.float32))
    actual, expected = mx_jax.quantize(narrow, MXFP4), mx_jax.quantize(wide, MXFP4)
    assert actual.dtype == expected.dtype == jnp.bfloat16
    jax.tree.map(np.testing.assert_array_equal, actual, expected)
    x = wide.T[:, :2]
    product = mx_jax.matmul(narrow, x, recipe="mxfp8")
    assert product.dtype == jnp.bfloat16
    np.testing.assert_array_equal(product, mx_jax.matmul(wide, x, recipe="mxfp8"))


def test_the_gradient_of_a_float8_operand_is_float8():
    x = jnp.full((2, 32), 0.5, jnp.float8_e4m3fn)
    w = jnp.ones((32, 4), jnp.bfloat16)
    dx = jax.grad(lambda x: mx_jax.matmul(x, w, recipe="mxfp8").sum().astype(jnp.float32))(x)
    assert dx.dtype == x.dtype
    np.testing.assert_array_equal(dx.astype(np.float32), 4)


def test_python_floats_are_float32_to_jax():
    assert mx_jax.quantize([1.0, 2.0], MXFP4).dtype == np.float32


@pytest.mark.parametrize("x", ["abc", None, object(), np.array(["a"]), {"a": 1.0}], ids=type)
def test_what_is_no_array(x):
    with pytest.raises((TypeError, ValueError)):
        mx_jax.quantize(x, MXFP4)


def test_integers_of_numpy():
    blocks = mx_jax.quantize(X, MXFP4, axis=np.int32(0), block_size=np.int64(16)).blocks
    assert blocks == ((-2, 16),)


@pytest.mark.parametrize("scale", [0.0, -1.0, np.inf, np.nan, -np.inf, -1e-45], ids=repr)
@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_tensor_scale_that_scales_nothing(backend: str, scale: float):
    """Known, it is refused; traced, every value is NaN."""
    message = (
        f"quantize: tensor_scale must be finite and positive, got tensor_scale={scale}; leave it "
        "out, and it is computed"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        mx_jax.quantize(X, NVFP4, tensor_scale=scale)
    with mx_jax.only_backend(backend):
        cast = jax.jit(lambda x, p: mx_jax.cast(x, NVFP4, tensor_scale=p))
        assert np.isnan(cast(X, jnp.float32(scale))).all()


def test_errors_come_at_trace_time():
    """Also under jit and before anything runs."""
    with pytest.raises(ValueError, match=r"axis=5 is out of range for shape=\(2, 32\)"):
        jax.eval_shape(lambda x: mx_jax.quantize(x, MXFP4, axis=5), X)
    with pytest.raises(TypeError, match="got dtype=int32"):
        jax.jit(lambda x: mx_jax.quantize(x, MXFP4))(np.ones(3, np.int32))


MX, NV = "mxfp8_e4m3", "nvfp4"
WEIGHTS = np.linspace(-3.0, 3.0, 4 * 64).astype(np.float32).reshape(64, 4)
ACTIVATIONS = np.ones((2, 64), np.float32)
RECIPE = recipes.weight_only("mxfp8_e4m3")


@functools.cache
def quantized(format: str) -> MXArray:
    return mx_jax.quantize(WEIGHTS, format, axis=0)


def scales_of(shape: tuple[int, ...]) -> np.ndarray:
    return np.zeros(shape, np.uint8)


MALFORMED: dict[str, tuple[str, dict[str, Any], str]] = {
    "scales of another shape": (
        MX,
        {"scales": scales_of((1, 4))},
        r"scales.shape=\(2, 4\), got scales.shape=\(1, 4\), codes.shape=\(64, 4\)",
    ),
    "scales of another rank": (MX, {"scales": scales_of((2, 4, 1))}, r"scales.shape=\(2, 4, 1\)"),
    "scales of another dtype": (
        MX,
        {"scales": np.zeros((2, 4), np.float32)},
        "scales must be uint8, got scales.dtype=float32",
    ),
    "codes of another dtype": (
        MX,
        {"codes": np.zeros((64, 4), np.int32)},
        "codes must be uint8, got codes.dtype=int32",
    ),
    "no codes": (MX, {"codes": None}, "codes must be uint8, got codes.dtype=NoneType"),
    "blocks twice": (MX, {"blocks": ((-2, 32), (-2, 32))}, r"once, got blocks=\(\(-2, 32\)"),
    "blocks of another size": (MX, {"blocks": ((-2, 16),)}, r"block=\(1, 32\), got blocks="),
    "blocks beyond the axes": (MX, {"blocks": ((-3, 32),)}, r"from the end, got blocks=\(\(-3"),
    "blocks from the front": (MX, {"blocks": ((0, 32),)}, r"from the end, got blocks=\(\(0"),
    "a tensor scale too many": (
        MX,
        {"tensor_scale": np.ones((1, 1), np.float32)},
        r"has no tensor scale, got tensor_scale.shape=\(1, 1\)",
    ),
    "no tensor scale": (NV, {"tensor_scale": None}, "missing, got tensor_scale=None"),
    "a tensor scale of another dtype": (
        NV,
        {"tensor_scale": np.ones((1, 1), jnp.bfloat16)},
        "tensor_scale must be float32, got tensor_scale.dtype=bfloat16",
    ),
    "a tensor scale of another rank": (
        NV,
        {"tensor_scale": np.ones((), np.float32)},
        r"scale.shape=\(\)",
    ),
    "a tensor scale along blocks": (
        NV,
        {"tensor_scale": np.ones((64, 1), np.float32)},
        r"where no blocks lie, got tensor_scale.shape=\(64, 1\)",
    ),
}
ENTRIES: dict[str, Callable[[MXArray], Any]] = {
    "dequantize": mx_jax.dequantize,
    "MXArray.dequantize": lambda w: w.dequantize(),
    "asarray": lambda w: jnp.asarray(w),
    "matmul": lambda w: mx_jax.matmul(ACTIVATIONS, w, recipe=RECIPE),
    "high precision": lambda w: mx_jax.matmul(ACTIVATIONS, w, recipe=recipes.high_precision()),
    "left": lambda w: mx_jax.matmul(w, ACTIVATIONS, recipe=RECIPE),
    "dot_general": lambda w: mx_jax.dot_general(
        ACTIVATIONS, w, (((1,), (0,)), ((), ())), recipe=RECIPE
    ),
    "einsum": lambda w: mx_jax.einsum("mk,kn->mn", ACTIVATIONS, w, recipe=RECIPE),
    "ragged_dot": lambda w: mx_jax.ragged_dot(ACTIVATIONS, w, jnp.array([2]), recipe=RECIPE),
    "pack_weights": mx_jax.pack_weights,
    "index": lambda w: w[:, :1],
    "reshape": lambda w: w.reshape(64, 2, 2),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed(name: str):
    format, parts, match = MALFORMED[name]
    with pytest.raises(ValueError, match=f"dequantize: a malformed MXArray, format=.*{match}"):
        mx_jax.dequantize(dataclasses.replace(quantized(format), **parts))


@pytest.mark.parametrize("entry", ENTRIES)
def test_refused_wherever_it_enters(entry: str):
    malformed = dataclasses.replace(quantized(MX), scales=scales_of((1, 4)))
    with pytest.raises(ValueError, match=r"a malformed MXArray.* make it with mx_jax.quantize"):
        ENTRIES[entry](malformed)


@needs_library
def test_a_mapped_packed_array_shows_itself():
    weights = mx_jax.quantize(np.ones((256, 16), np.float32), "mxfp4", axis=0)
    with mx_jax.only_backend("cpu_ffi"):
        packed = mx_jax.pack_weights(weights)
    assert not isinstance(packed, MXArray)
    for leaf in (None, 1, object()):
        assert "mxfp4" in repr(jax.tree.map(lambda _, leaf=leaf: leaf, packed))
