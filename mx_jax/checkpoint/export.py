"""Weights written as others store them."""

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mx_jax.checkpoint.layout import Layout
from mx_jax.checkpoint.layouts import named
from mx_jax.checkpoint.progress import progress_bar
from mx_jax.checkpoint.safetensors_file import Entry, named_dtype
from mx_jax.checkpoint.scales import finite_scales
from mx_jax.checkpoint.shards import Resume, check_sizes, write_files
from mx_jax.checkpoint.torchao import TORCHAO
from mx_jax.checkpoint.torchao_export import torchao_metadata, torchao_parts
from mx_jax.codecs import packing
from mx_jax.mxarray import MXArray
from mx_jax.packed import Quantized, unpacked

# The tensors that hold a weight, and what the file's metadata say of it.
Parts = tuple[dict[str, Entry], dict[str, str]]


def write(
    path: str | os.PathLike[str],
    weights: Mapping[str, Any],
    *,
    layout: str,
    max_shard_size: int | None = None,
    resume: Resume = False,
    progress: bool = False,
) -> None:
    """Write weights as others store them, in one safetensors file or several.

    What `read` gives goes back as it was. Each weight is fetched twice, to describe it and to write
    it, and one at a time is in memory: of `Weights` that are read from files, so a model larger
    than memory goes through. What is there stays until all is written, as with `save`.
    `quantization_config` gives what a model's config.json has to say of it.

    Args:
      path: of the file; of a folder, where there are to be several.
      weights: from names to MXArrays `[..., out, in]`, blocks along `in`, and plain arrays.
      layout: the name of one of `mx_jax.checkpoint.LAYOUTS`, or `"torchao"`.
      max_shard_size: bytes of tensors in a file, for files `model-00001-of-...` with an index.
      resume: whether to keep whole files that an earlier call left behind, if they hold the same
        values. Each is fetched and compared; with `"vouched"` only the first of a file, which is
        for a caller who knows that the earlier call was for the same, and whose values take long.
      progress: whether to show a bar on stderr.

    Raises:
      ValueError: an MXArray of another format or other blocks than the layout's, whose name does
        not end as its weights do, or whose rows fill no whole bytes; two tensors of one name;
        blocks whose scales are NaN, infinite or negative.

    Examples:
      >>> import os, tempfile, jax.numpy as jnp, mx_jax
      >>> from mx_jax import checkpoint
      >>> path = os.path.join(tempfile.mkdtemp(), "model.safetensors")
      >>> weights = {"up.weight": mx_jax.quantize(jnp.ones((8, 32)), "mxfp4")}
      >>> checkpoint.write(path, weights, layout="mxfp4-pack-quantized")
      >>> checkpoint.read(path)["up.weight"].shape
      (8, 32)
    """
    check_sizes(max_shard_size, resume, "checkpoint.write")
    exporter = _EXPORTERS.get(layout) or _by_row(layout)
    entries, metadata = _entries(weights, exporter)
    metadata = {"format": "pt"} | metadata | exporter.together(list(weights))
    with progress_bar("write", sum(e.nbytes for e in entries.values()), progress) as step:
        write_files(
            Path(path),
            entries,
            lambda _: metadata,
            largest=max_shard_size,
            resume=resume,
            step=step,
        )


@dataclasses.dataclass(frozen=True)
class _Exporter:
    """How weights become tensors.

    Attributes:
      parts: of a weight by its name.
      together: what the metadata say of all, by their names.
    """

    parts: Callable[[str, Any], Parts]
    together: Callable[[list[str]], dict[str, str]] = lambda names: {}


def _by_row(layout: str) -> _Exporter:
    """By one of `LAYOUTS`."""
    row = named(layout)
    if row.rotation is not None:
        raise ValueError(
            f"checkpoint.write: {row.name} holds weights that were rotated before they were "
            "quantized, and is read only; choose another layout"
        )

    def parts(name: str, x: Any) -> Parts:
        return (_stored(name, x, row) if isinstance(x, MXArray) else {name: Entry.of(x)}), {}

    return _Exporter(parts)


# Those that are no row of `LAYOUTS`, by their names.
_EXPORTERS = {TORCHAO: _Exporter(torchao_parts, torchao_metadata)}


def _entries(weights: Mapping[str, Any], exporter: _Exporter) -> Parts:
    """All tensors, none of them held: each is fetched anew when its turn comes."""
    held: dict[str, Any] = {}

    def weight(name: str) -> Any:
        # The tensors of one weight come one after the other.
        if name not in held:
            held.clear()
            value = weights[name]
            held[name] = unpacked(value) if isinstance(value, Quantized) else value
        return held[name]

    def fetch(name: str, key: str) -> np.ndarray:
        return exporter.parts(name, weight(name))[0][key].fetch()

    entries: dict[str, Entry] = {}
    metadata: dict[str, str] = {}
    for name in weights:
        parts, said = exporter.parts(name, weight(name))
        for key, entry in parts.items():
            if key in entries:
                raise ValueError(f"checkpoint.write: two tensors would be named {key!r}")
            entries[key] = dataclasses.replace(entry, fetch=functools.partial(fetch, name, key))
        metadata |= said
    held.clear()
    return entries, metadata


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
            x.scales.shape, scale_dtype, lambda: finite_scales(x, name).view(scale_dtype)
        ),
    }
    if row.tensor_scale is not None:
        value = np.asarray(x.tensor_scale).reshape(-1)
        if value.size != 1:
            raise ValueError(f"checkpoint.write: needs one tensor scale, got {value.size}: {facts}")
        value = (1 / value if row.divides else value).reshape(row.scale_shape)
        found[parts["tensor_scale"]] = Entry.of(value)
    return found
