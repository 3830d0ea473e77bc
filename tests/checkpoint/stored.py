"""Tiny checkpoints: MXArrays of every kind, made without compiling a cast, files and folders."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from mx_jax import checkpoint
from mx_jax.checkpoint.files import Entry, write
from mx_jax.codecs.blocks import scales_shape
from mx_jax.formats import BlockFormat
from mx_jax.mxarray import MXArray


def draw(
    format: BlockFormat, shape: tuple[int, ...], rng: np.random.Generator, *, axis: int = -1
) -> MXArray:
    """Random codes under random scales, blocks along `axis` and the one before it."""
    sizes = (axis - 1, format.block[0]), (axis, format.block[1])
    blocks = tuple((at, size) for at, size in sizes if size != 1)
    scale_shape = scales_shape(shape, blocks)
    scales: Any = rng.integers(100, 130, scale_shape).astype(np.uint8)
    if format.scale.element:  # no sign, no NaN
        scales &= 0x3F
    if format.scale.is_float32:
        scales = rng.random(scale_shape).astype(np.float32)
    tensor_scale = jnp.full((1,) * len(shape), 0.25, jnp.float32) if format.tensor_scale else None
    codes = rng.integers(0, 1 << format.element.bits, shape).astype(np.uint8)
    return MXArray(
        codes=jnp.asarray(codes),
        scales=jnp.asarray(scales),
        tensor_scale=tensor_scale,
        format=format,
        blocks=blocks,
        dtype=jnp.dtype("bfloat16"),
    )


def assert_same(result: Any, expected: MXArray) -> None:
    """Equal to the last bit and the last fact."""
    assert isinstance(result, MXArray)
    facts = ("format", "blocks", "dtype", "shape")
    assert [getattr(result, f) for f in facts] == [getattr(expected, f) for f in facts]
    for part in ("codes", "scales", "tensor_scale"):
        one, other = getattr(result, part), getattr(expected, part)
        assert (one is None) == (other is None)
        if one is not None:
            assert one.dtype == other.dtype
            np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


def assert_same_tensors(one: Path, other: Path) -> None:
    """Of two checkpoints: the same names, and each tensor to the bit."""
    a, b = (checkpoint.read(path).stored for path in (one, other))
    assert {*a} == {*b}
    for name, stored in a.items():
        x: Any = stored.look()
        y: Any = b[name].look()
        if isinstance(x, MXArray):
            assert_same(dataclasses.replace(y, dtype=x.dtype), x)
        else:
            assert np.asarray(x).tobytes() == np.asarray(y).tobytes() and x.dtype == y.dtype


def values(x: Any) -> np.ndarray:
    """What an MXArray stands for, in float32."""
    assert isinstance(x, MXArray)
    return np.asarray(x.dequantize(jnp.float32))


def put(
    path: Path, tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str] | None = None
) -> Path:
    """A safetensors file of arrays, whoever's it may be."""
    write(path, {n: Entry.of(x) for n, x in tensors.items()}, metadata or {}, lambda *_: None)
    return path


def put_model(folder: Path, weights: Mapping[str, Any], config: Any, layout: str | None = None):
    """A model's folder with its config.json: arrays as they are, or weights in a layout."""
    folder.mkdir(exist_ok=True)
    if layout is None:
        put(folder / "model.safetensors", weights)
    else:
        checkpoint.write(folder / "model.safetensors", weights, layout=layout)
    (folder / "config.json").write_text(json.dumps(config))
