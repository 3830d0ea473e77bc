"""Checkpoints of others, read tensor by tensor."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from mx_jax.checkpoint.file import own_weights
from mx_jax.checkpoint.folder import config_of, readers_of
from mx_jax.checkpoint.gguf import gguf_in, read_gguf
from mx_jax.checkpoint.layout import Layout
from mx_jax.checkpoint.layout_reader import read_layouts
from mx_jax.checkpoint.layouts import LAYOUTS, named
from mx_jax.checkpoint.torchao import TORCHAO, is_torchao, read_torchao
from mx_jax.checkpoint.weights import Weights


def read(
    path: str | os.PathLike[str], *, layout: str | None = None, rotated: bool = False
) -> Weights:
    """Open a checkpoint, one that `save` wrote or in a layout that is in use elsewhere.

    A folder with `config.json` says what it is; a bare file is read if its names, dtypes and shapes
    fit one layout. GGUF says itself what it holds. Tensors are read as they are asked for, so a
    model larger than memory can be gone through.

    Args:
      path: a GGUF file, a safetensors file, or a folder of these, with or without an index.
      layout: the name of one, to read this and no other; `mx_jax.checkpoint.LAYOUTS` has them.
      rotated: whether to read weights whose inputs have to be rotated (FP-Quant) as they are;
        `Weights.stored` names the matrix of each, and rotating is up to the caller.

    Returns:
      A mapping from names to MXArrays `[..., out, in]` and plain arrays.

    Raises:
      FileNotFoundError: there is nothing, or a file that the index names is missing.
      ValueError: a weight that fits two layouts, scales that fit none or have another shape, scales
        that are NaN or negative, a tensor scale that is stored the other way around, weights for
        rotated inputs without `rotated`, damaged files.

    Examples:
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
    gguf = gguf_in(path)
    if gguf is not None:
        if layout is not None:
            raise ValueError(f"{where}: GGUF says what it is; leave out layout={layout!r}")
        return read_gguf(gguf, where)
    return _read_safetensors(path, layout, rotated, where)


def _read_safetensors(path: Path, layout: str | None, rotated: bool, where: str) -> Weights:
    files, readers = readers_of(path, where)
    if (own := own_weights(path, files)) is not None:
        if layout not in (None, "mx_jax"):
            raise ValueError(
                f"{where}: mx_jax wrote it, and it says what it is; leave out layout={layout!r}"
            )
        return own
    metadata = {key: value for reader in files for key, value in reader.metadata.items()}
    if layout in (None, TORCHAO) and is_torchao(readers):
        return Weights(path, read_torchao(readers, where), metadata)
    config = config_of(path)
    dtype = config.get("torch_dtype") or config.get("dtype") or "bfloat16"
    if dtype not in ("bfloat16", "float16", "float32"):
        raise ValueError(f"{where}: config.json names dtype={dtype!r}, no dtype of a model")
    candidates = (named(layout),) if layout else _candidates(config, where)
    stored = read_layouts(readers, candidates, dtype=jnp.dtype(dtype), rotated=rotated, where=where)
    return Weights(path, stored, metadata)


def _candidates(config: Mapping[str, Any], where: str) -> tuple[Layout, ...]:
    stated = config.get("quantization_config") or {}
    if not isinstance(stated, dict):
        raise ValueError(f"{where}: quantization_config is no table, got {stated!r}")
    return tuple(row for row in LAYOUTS if row.used_by(stated)) or LAYOUTS
