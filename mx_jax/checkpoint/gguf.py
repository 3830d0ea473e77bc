"""Tensors of GGUF files, as llama.cpp and its kin store them."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from mx_jax.checkpoint.gguf_file import GgufFile, is_gguf
from mx_jax.checkpoint.scales import block_scales, tensor_scale
from mx_jax.checkpoint.weights import Stored, Weights, on_device, plain
from mx_jax.checkpoint.wire import checked
from mx_jax.mxarray import MXArray


def gguf_in(path: Path) -> Path | None:
    """The GGUF file that is meant by a path: itself, or the only one in a folder of no others."""
    if path.is_dir():
        files = sorted(path.glob("*.gguf"))
        return files[0] if len(files) == 1 and not any(path.glob("*.safetensors*")) else None
    return path if path.suffix == ".gguf" or is_gguf(path) else None


def read_gguf(path: Path, where: str) -> Weights:
    """Open a GGUF file.

    MXFP4 and NVFP4 become MXArrays, Q8_0, Q4_0 and Q4_1 float32 values: no MXArray holds blocks of
    integers with a float16 scale. A tensor scale beside NVFP4 is taken with it. What such an
    MXArray gives when dequantized is float32, as in ggml.

    Args:
      path: of the file.
      where: how errors begin.

    Raises:
      FileNotFoundError: there is none.
      ValueError: damaged, or with types that are not read.
    """
    file = GgufFile.open(path)
    scales = {
        name: found
        for name, tensor in file.tensors.items()
        if tensor.type.format is not None and tensor.type.format.tensor_scale
        for found in (f"{name.removesuffix('.weight')}.scale", f"{name}.scale")
        if found in file.tensors
    }
    taken = set(scales.values())
    stored = {
        name: _stored(file, name, scales.get(name), f"{where}: {name}")
        for name in file.tensors
        if name not in taken
    }
    return Weights(path, stored, file.metadata)


def _stored(file: GgufFile, name: str, scale: str | None, where: str) -> Stored:
    tensor = file.tensors[name]
    quantized = tensor.type.quantized
    beside = 0 if scale is None else file.tensors[scale].nbytes
    return Stored(
        shape=tensor.shape,
        nbytes=tensor.nbytes + beside,
        fetch=functools.partial(_fetch, file, name, scale, where),
        layout=f"gguf-{tensor.type.name.lower()}" if quantized else None,
        dequantized=quantized and tensor.type.format is None,
    )


def _fetch(file: GgufFile, name: str, scale: str | None, where: str) -> MXArray | jax.Array:
    tensor = file.tensors[name]
    row = tensor.type
    if row.format is None:
        (values,) = row.decode(file.read(name))
        return plain(values.reshape(tensor.shape), where)
    codes, scales = row.decode(file.read(name))
    size = row.block // scales.shape[-1]
    scales = scales.reshape(*tensor.shape[:-1], tensor.shape[-1] // size)
    whole = None
    if row.format.tensor_scale:
        # Beside NVFP4 lies one number, or one an expert, or none, which means one.
        found = np.ones(1, np.float32) if scale is None else _numbers(file, scale, where)
        whole = tensor_scale(found, tensor.shape, divides=False, layout="GGUF", where=where)
    return checked(
        MXArray(
            codes=on_device(codes.reshape(tensor.shape)),
            scales=on_device(block_scales(scales, row.format, where)),
            tensor_scale=None if whole is None else jnp.asarray(whole),
            format=row.format,
            blocks=((-1, size),),
            dtype=jnp.dtype("float32"),
        ),
        where,
    )


def _numbers(file: GgufFile, name: str, where: str) -> np.ndarray:
    row = file.tensors[name].type
    if row.quantized:
        raise ValueError(f"{where}: its tensor scale {name} must be plain numbers, got {row.name}")
    return row.decode(file.read(name))[0]
