"""A malformed MXArray is refused wherever one enters, by what its parts are, never by a number."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mx_jax
from mx_jax import MXArray, recipes
from tests.needs import needs_library

X = np.linspace(-3.0, 3.0, 4 * 64).astype(np.float32).reshape(64, 4)
MX, NV = "mxfp8_e4m3", "nvfp4"
ACTIVATIONS = np.ones((2, 64), np.float32)
RECIPE = recipes.weight_only("mxfp8_e4m3")


@functools.cache
def quantized(format: str) -> MXArray:
    return mx_jax.quantize(X, format, axis=0)


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
    "saturated_fraction": lambda w: mx_jax.inspect.saturated_fraction(X, w),
    "index": lambda w: w[:, :1],
    "reshape": lambda w: w.reshape(64, 2, 2),
    "at": lambda w: w.at[:, :1].set(w),
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


def test_refused_under_jit():
    malformed = dataclasses.replace(quantized(MX), scales=scales_of((1, 4)))
    with pytest.raises(ValueError, match="matmul: rhs: a malformed MXArray"):
        jax.jit(ENTRIES["matmul"])(malformed)


def test_trees_may_hold_anything():
    assert "MXArray" in repr(dataclasses.replace(quantized(MX), scales=scales_of((1, 4))))
    for leaf in (None, object(), 1, jax.ShapeDtypeStruct((3,), "float32")):
        assert "MXArray" in repr(jax.tree.map(lambda _, leaf=leaf: leaf, quantized(MX)))
    batched = jax.vmap(lambda x: mx_jax.quantize(x, "nvfp4"))(jnp.ones((3, 4, 32)))
    assert jax.vmap(lambda q: q.dequantize())(batched).shape == (3, 4, 32)
    assert mx_jax.dequantize(batched).shape == (3, 4, 32)


@needs_library
def test_a_mapped_packed_array_shows_itself():
    weights = mx_jax.quantize(np.ones((256, 16), np.float32), "mxfp4", axis=0)
    with mx_jax.only_backend("cpu_ffi"):
        packed = mx_jax.pack_weights(weights)
    assert not isinstance(packed, MXArray)
    for leaf in (None, 1, object()):
        assert "mxfp4" in repr(jax.tree.map(lambda _, leaf=leaf: leaf, packed))
