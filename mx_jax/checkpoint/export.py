"""Weights written as others store them."""

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mx_jax.checkpoint.layout import Layout
from mx_jax.checkpoint.layouts import named
from mx_jax.checkpoint.progress import progress_bar
from mx_jax.checkpoint.safetensors_file import Entry, named_dtype
from mx_jax.checkpoint.safetensors_file import write as write_file
from mx_jax.checkpoint.torchao import TORCHAO
from mx_jax.checkpoint.torchao_export import torchao_entries
from mx_jax.codecs import packing
from mx_jax.mxarray import MXArray
from mx_jax.packed import Quantized, unpacked

# Tensors of a file, and metadata of its header.
Export = tuple[dict[str, Entry], dict[str, str]]


def write(
    path: str | os.PathLike[str],
    weights: Mapping[str, Any],
    *,
    layout: str,
    progress: bool = False,
) -> None:
    """Write weights as others store them, in one safetensors file.

    What `read` gives goes back as it was. One tensor at a time is fetched; the file appears when it
    is whole. What `config.json` has to say beside it is the model's own matter.

    Args:
      path: of the file.
      weights: from names to MXArrays `[..., out, in]`, blocks along `in`, and plain arrays.
      layout: the name of one of `mx_jax.checkpoint.LAYOUTS`, or `"torchao"`.
      progress: whether to show a bar on stderr.

    Raises:
      ValueError: an MXArray of another format or other blocks than the layout's, whose name does
        not end as its weights do, or whose rows fill no whole bytes.

    Example:
      >>> import os, tempfile, jax.numpy as jnp, mx_jax
      >>> from mx_jax import checkpoint
      >>> path = os.path.join(tempfile.mkdtemp(), "model.safetensors")
      >>> weights = {"up.weight": mx_jax.quantize(jnp.ones((8, 32)), "mxfp4")}
      >>> checkpoint.write(path, weights, layout="mxfp4-pack-quantized")
      >>> checkpoint.read(path)["up.weight"].shape
      (8, 32)
    """
    given = {name: unpacked(x) if isinstance(x, Quantized) else x for name, x in weights.items()}
    entries, metadata = _EXPORTS.get(layout, _by_row)(given, layout)
    with progress_bar("write", sum(e.nbytes for e in entries.values()), progress) as step:
        write_file(Path(path), entries, {"format": "pt"} | metadata, step)


def _by_row(weights: Mapping[str, Any], layout: str) -> Export:
    """By one of `LAYOUTS`."""
    row, entries = named(layout), {}
    if row.rotation is not None:
        raise ValueError(
            f"checkpoint.write: {row.name} holds weights that were rotated before they were "
            "quantized, and is read only; choose another layout"
        )
    for name, x in weights.items():
        entries |= _stored(name, x, row) if isinstance(x, MXArray) else {name: Entry.of(x)}
    return entries, {}


def _torchao(weights: Mapping[str, Any], layout: str) -> Export:
    del layout
    return torchao_entries(weights)


# Those that are no row of `LAYOUTS`, by their names.
_EXPORTS = {TORCHAO: _torchao}


def _stored(name: str, x: MXArray, row: Layout) -> dict[str, Entry]:
    """The tensors of a quantized weight."""
    base = name.removesuffix(row.weight)
    blocks = row.blocks
    bits, width = x.format.element.bits, x.shape[-1] if x.ndim else 0
    facts = f"{name}: format={x.format.name}, shape={x.shape}, blocks={x.blocks}"
    if dataclasses.replace(x.format, name=row.format.name) != row.format or x.blocks != blocks:
        raise ValueError(
            f"checkpoint.write: {row.name} holds {row.format.name} with blocks={blocks}, got "
            f"{facts}; quantize it so, or transpose it"
        )
    if base + row.weight != name or width * bits % 8 or (row.split and width % 32):
        raise ValueError(
            f"checkpoint.write: {row.name} needs names that end in {row.weight!r} and rows of "
            f"whole {'blocks' if row.split else 'bytes'}, got {facts}"
        )
    parts, shape = row.parts(base), (*x.shape[:-1], width * bits // 8)
    if row.split:
        shape = (*x.shape[:-1], width // 32, 16)
    scale_dtype = named_dtype(row.scales_dtypes[0])

    def codes() -> np.ndarray:
        packed = packing.pack(np.asarray(x.codes), bits)
        return packed.reshape(shape).view(named_dtype(row.codes_dtype))

    found = {
        parts["codes"]: Entry(shape, named_dtype(row.codes_dtype), codes),
        parts["scales"]: Entry(
            x.scales.shape, scale_dtype, lambda: np.asarray(x.scales).view(scale_dtype)
        ),
    }
    if row.tensor_scale is not None:
        value = np.asarray(x.tensor_scale).reshape(-1)
        if value.size != 1:
            raise ValueError(f"checkpoint.write: needs one tensor scale, got {value.size}: {facts}")
        found[parts["tensor_scale"]] = Entry.of(1 / value if row.divides else value)
    return found
