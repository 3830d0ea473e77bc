"""Checkpoints of others, read tensor by tensor."""

import dataclasses
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePath
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mx_jax.checkpoint.layouts import LAYOUTS, Facts, Layout, named
from mx_jax.checkpoint.matching import match
from mx_jax.checkpoint.safetensors_file import Reader, dtype_name
from mx_jax.checkpoint.wire import checked
from mx_jax.codecs import packing
from mx_jax.mxarray import MXArray

_INDEX = "model.safetensors.index.json"
# Layouts with a tensor scale are NVFP4: its largest element times its largest block scale.
_NVFP4_MAX = 6.0 * 448.0


@dataclasses.dataclass(frozen=True, eq=False)
class Weights(Mapping[str, "MXArray | jax.Array"]):
    """The tensors of a checkpoint by name, each read when it is asked for.

    A mapping: `weights["model.layers.0.mlp.up_proj.weight"]`, `dict(weights)`, `len(weights)`.
    Names and axes are the checkpoint's: weights `[out, in]`, blocks along `in`.

    Attributes:
      path: the file or folder.
      quantized: from a quantized weight's name to its tensors' base name and its layout.
      dtype: of quantized weights, when dequantized: the model's own.
    """

    path: Path
    quantized: Mapping[str, tuple[str, Layout]]
    dtype: np.dtype
    _readers: Mapping[str, Reader]
    _plain: tuple[str, ...]

    def __iter__(self) -> Iterator[str]:
        yield from self.quantized
        yield from self._plain

    def __len__(self) -> int:
        return len(self.quantized) + len(self._plain)

    def __getitem__(self, name: str) -> "MXArray | jax.Array":
        if name in self.quantized:
            return self._quantized(name)
        if name not in self._plain:
            raise KeyError(name)
        return jnp.asarray(self._readers[name].read(name))

    def __repr__(self) -> str:
        layouts = sorted({layout.name for _, layout in self.quantized.values()})
        return (
            f"Weights({str(self.path)!r}, {len(self)} tensors, {len(self.quantized)} of them "
            f"quantized: {', '.join(layouts) or 'none'})"
        )

    def _quantized(self, name: str) -> MXArray:
        base, layout = self.quantized[name]
        where = f"checkpoint.read: {self.path}: {name}"
        found = {p: self._readers[n].read(n) for p, n in layout.parts(base).items()}
        stored = found["codes"].view(np.uint8)
        shape = layout.shape(stored.shape)
        stored = stored.reshape(*shape[:-1], -1)
        scales = _scales(found["scales"], layout, where).reshape(layout.scales_shape(shape))
        tensor_scale = None
        if "tensor_scale" in found:
            value = _tensor_scale(found["tensor_scale"], layout, where)
            tensor_scale = jnp.full((1,) * len(shape), value, jnp.float32)
        codes = packing.unpack(stored, layout.format.element.bits, shape[-1])
        return checked(
            MXArray(
                codes=jnp.asarray(codes),
                scales=jnp.asarray(scales),
                tensor_scale=tensor_scale,
                format=layout.format,
                blocks=layout.blocks,
                dtype=self.dtype,
            ),
            where,
        )


def read(path: str | os.PathLike[str], *, layout: str | None = None) -> Weights:
    """Open a checkpoint in one of the layouts that are in use elsewhere.

    A folder with `config.json` says what it is; a bare file is read if its names, dtypes and shapes
    fit one layout. Tensors are read as they are asked for, so a model larger than memory can be
    gone through.

    Args:
      path: a safetensors file, or a folder of them, with or without an index.
      layout: the name of one, to read this and no other; `mx_jax.checkpoint.LAYOUTS` has them.

    Returns:
      A mapping from names to MXArrays `[..., out, in]` and plain arrays.

    Raises:
      FileNotFoundError: there is nothing, or a file that the index names is missing.
      ValueError: a weight that fits two layouts, scales that fit none or have another shape, scales
        that are NaN or negative, a tensor scale that is stored the other way around, damaged files.

    Example:
      >>> import os, tempfile, numpy as np, safetensors.numpy
      >>> from mx_jax import checkpoint
      >>> path = os.path.join(tempfile.mkdtemp(), "model.safetensors")
      >>> tensors = {
      ...     "up.weight_packed": np.full((8, 16), 0x22, np.uint8),
      ...     "up.weight_scale": np.full((8, 1), 128, np.uint8),
      ... }
      >>> safetensors.numpy.save_file(tensors, path)
      >>> weights = checkpoint.read(path)
      >>> weights["up.weight"].format.name, float(weights["up.weight"].dequantize()[0, 0])
      ('mxfp4', 2.0)
    """
    path = Path(path)
    where = f"checkpoint.read: {path}"
    readers = _readers(path, where)
    tensors: dict[str, Facts] = {
        name: (dtype_name(reader.tensors[name][0]), reader.tensors[name][1])
        for name, reader in readers.items()
    }
    config = _config(path)
    quantized = match(tensors, (named(layout),) if layout else _candidates(config, where), where)
    parts = {name for base, found in quantized.values() for name in found.parts(base).values()}
    plain = tuple(name for name in tensors if name not in parts)
    dtype = config.get("torch_dtype") or config.get("dtype") or "bfloat16"
    if dtype not in ("bfloat16", "float16", "float32"):
        raise ValueError(f"{where}: config.json names dtype={dtype!r}, no dtype of a model")
    return Weights(path, quantized, jnp.dtype(dtype), readers, plain)


def _candidates(config: Mapping[str, Any], where: str) -> tuple[Layout, ...]:
    stated = config.get("quantization_config") or {}
    if not isinstance(stated, dict):
        raise ValueError(f"{where}: quantization_config is no table, got {stated!r}")
    return tuple(row for row in LAYOUTS if row.used_by(stated)) or LAYOUTS


def _readers(path: Path, where: str) -> dict[str, Reader]:
    """The file of each tensor."""
    if not path.is_dir():
        reader = Reader.open(path)
        return dict.fromkeys(reader.tensors, reader)
    index = path / _INDEX
    if not index.is_file():
        files = sorted(path.glob("*.safetensors"))
        if not files:
            raise FileNotFoundError(f"{where}: no safetensors file in this folder")
        opened = [Reader.open(file) for file in files]
        return {name: reader for reader in opened for name in reader.tensors}
    named = _json(index).get("weight_map")
    if not isinstance(named, dict):
        raise ValueError(f"{where}: {_INDEX} has no weight_map")
    for file in named.values():
        if not isinstance(file, str) or PurePath(file).name != file:
            raise ValueError(f"{where}: {_INDEX} names {file!r}, which is no file of this folder")
    readers = {file: Reader.open(path / file) for file in sorted(set(named.values()))}
    for name, file in named.items():
        if name not in readers[file].tensors:
            raise ValueError(f"{where}: {_INDEX} says that {name} is in {file}, which has no such")
    return {name: readers[file] for name, file in named.items()}


def _config(path: Path) -> dict[str, Any]:
    """config.json, with ModelOpt's own file in its place for quantization."""
    folder = path if path.is_dir() else path.parent
    found: dict[str, Any] = {}
    if (folder / "config.json").is_file():
        found = _json(folder / "config.json")
    elif (folder / "hf_quant_config.json").is_file():
        stated = _json(folder / "hf_quant_config.json").get("quantization") or {}
        found = {"quantization_config": {"quant_method": "modelopt"} | stated}
    return found


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"checkpoint.read: {path} is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"checkpoint.read: {path} holds no table, got {type(found).__name__}")
    return found


def _scales(stored: np.ndarray, layout: Layout, where: str) -> np.ndarray:
    """Block scales as an MXArray has them; what is no scale is refused."""
    if layout.format.scale.is_float32:
        scales = stored.astype(np.float32)
        bad = ~np.isfinite(scales) | (scales < 0)
    else:
        scales = stored.view(np.uint8)
        # E8M0 has one NaN; E4M3 has a sign, which no scale bears, and a NaN for each.
        bad = scales == 0xFF if layout.format.scale.kind == "exponent" else scales >= 0x7F
    if bad.any():
        raise ValueError(
            f"{where}: {int(bad.sum())} of {bad.size} scales are NaN, infinite or negative; the "
            "file is damaged, or its scales are of another format"
        )
    return scales


def _tensor_scale(stored: np.ndarray, layout: Layout, where: str) -> float:
    """One number for the tensor, as what the codes are multiplied by."""
    values = stored.astype(np.float32).reshape(-1)
    if values.size != 1 or not (np.isfinite(values).all() and values[0] > 0):
        raise ValueError(
            f"{where}: the tensor scale must be one positive number, got {values[:4]} of "
            f"shape={stored.shape}"
        )
    value = np.float32(1) / values[0] if layout.divides else values[0]
    if value > 1:
        raise ValueError(
            f"{where}: {layout.name} stores what a tensor is "
            f"{'divided' if layout.divides else 'multiplied'} by, and {values[0]} makes weights of "
            f"up to {value * _NVFP4_MAX:g}: it is the other way around; is it another layout?"
        )
    return float(value)
