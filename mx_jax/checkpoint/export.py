"""Weights written as others store them, and what config.json says of them.

Sources: compressed-tensors' QuantizationConfig, ModelOpt's two forms of its export's configuration,
transformers' Mxfp4Config and FineGrainedFP8Config.
"""

import dataclasses
import functools
import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mx_jax.checkpoint.folder import Resume, check_sizes, write_files
from mx_jax.checkpoint.layouts import Layout, named
from mx_jax.checkpoint.safetensors_file import Entry, named_dtype
from mx_jax.checkpoint.scales import finite_scales
from mx_jax.checkpoint.torchao import NAMES, TORCHAO, torchao_parts
from mx_jax.codecs import packing
from mx_jax.formats import BlockFormat, Whole
from mx_jax.mxarray import MXArray
from mx_jax.packed import Quantized, unpacked

# Modules are found by their class, and these are of another class than Linear.
_EMBEDDING = re.compile(r"(.*\.)?(\w*embed\w*|wte|wpe)")
_HEAD = "lm_head"


def quantization_config(
    weights: Mapping[str, Any], *, layout: str, program: str | None = None
) -> dict[str, Any] | None:
    """What `quantization_config` in a model's config.json has to say of weights in a layout.

    Weights are quantized, and what they multiply is not. Nothing is read but shapes and formats.

    Args:
      weights: from names to MXArrays and plain arrays, as `write` takes them.
      layout: the name of one of `mx_jax.checkpoint.LAYOUTS`.
      program: `quant_method` of the program that is to read them, where several use a layout;
        default: the first that does.

    Returns:
      A table for JSON; None where no program finds the layout by its configuration, or no such
      configuration is known here.

    Raises:
      ValueError: an unknown layout.

    Examples:
      >>> import jax.numpy as jnp, mx_jax
      >>> from mx_jax import checkpoint
      >>> weights = {"up.weight": mx_jax.quantize(jnp.ones((8, 32)), "mxfp4")}
      >>> stated = checkpoint.quantization_config(weights, layout="mxfp4-pack-quantized")
      >>> stated["quant_method"], stated["format"], stated["ignore"]
      ('compressed-tensors', 'mxfp4-pack-quantized', ['lm_head'])
    """
    row = named(layout)
    for pairs in row.configs:
        said = dict(pairs)
        method = said["quant_method"]
        if method in _STATED and program in (None, method):
            return said | _STATED[method](row, weights)
    return None


def hf_quant_config(stated: Mapping[str, Any]) -> dict[str, Any]:
    """ModelOpt's own file, hf_quant_config.json, from what config.json says."""
    weights = stated["config_groups"]["group_0"]["weights"]
    return {
        "producer": stated["producer"],
        "quantization": {
            "quant_algo": stated["quant_algo"],
            "kv_cache_quant_algo": None,
            "group_size": weights["group_size"],
            "exclude_modules": stated["ignore"],
        },
    }


def _modules(weights: Mapping[str, Any], row: Layout, *, quantized: bool) -> list[str]:
    """Modules whose matrix is quantized, or those whose is not; biases and norms have none."""
    suffix = row.weight or ".weight"
    return [
        name.removesuffix(suffix)
        for name, x in weights.items()
        if isinstance(x, Quantized) == quantized and name.endswith(suffix) and len(x.shape) > 1
    ]


def _ignored(weights: Mapping[str, Any], row: Layout) -> list[str]:
    """Modules that stay; a head that is tied to the embedding has no tensor, but is a module."""
    tied = not any(re.split(r"[./]", name)[-2:-1] == [_HEAD] for name in weights)
    return [*_modules(weights, row, quantized=False), *([_HEAD] if tied else [])]


def _targets(weights: Mapping[str, Any], row: Layout) -> list[str]:
    embeddings = filter(_EMBEDDING.fullmatch, _modules(weights, row, quantized=True))
    return ["Linear", *embeddings]


def _group_size(format: BlockFormat) -> int | None:
    size = format.block[1]
    return None if isinstance(size, Whole) else size


def _compressed_tensors(row: Layout, weights: Mapping[str, Any]) -> dict[str, Any]:
    format, size = row.format, _group_size(row.format)
    strategy = "channel" if size is None else "tensor_group" if format.tensor_scale else "group"
    stored = {"exponent": "torch.uint8", "element": "torch.float8_e4m3fn"}
    scheme: dict[str, Any] = {
        "num_bits": format.element.bits,
        "type": "float",
        "symmetric": True,
        "group_size": size,
        "strategy": strategy,
        "dynamic": False,
    }
    if format.scale.kind in stored:
        scheme["scale_dtype"] = scheme["zp_dtype"] = stored[format.scale.kind]
    group = {
        "targets": _targets(weights, row),
        "weights": scheme,
        "input_activations": None,
        "output_activations": None,
        "format": row.name,
    }
    return {
        "config_groups": {"group_0": group},
        "ignore": _ignored(weights, row),
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
        "global_compression_ratio": None,
    }


def _modelopt(row: Layout, weights: Mapping[str, Any]) -> dict[str, Any]:
    scheme = {
        "dynamic": False,
        "num_bits": row.format.element.bits,
        "type": "float",
        "group_size": _group_size(row.format),
    }
    group: dict[str, Any] = {"weights": scheme, "targets": _targets(weights, row)}
    stated: dict[str, Any] = {
        "config_groups": {"group_0": group},
        "ignore": _ignored(weights, row),
        # What others look for to know that the rest is ModelOpt's.
        "producer": {"name": "modelopt"},
    }
    algorithms = [dict(pairs).get("quant_algo", "") for pairs in row.configs]
    weight_only = [algorithm for algorithm in algorithms if algorithm.startswith("W4A16")]
    if weight_only and not any(name.endswith(".input_scale") for name in weights):
        return stated | {"quant_algo": weight_only[0]}
    # Inputs are quantized by the scales that are there for them, or as they come.
    group["input_activations"] = scheme
    return stated


def _mxfp4(row: Layout, weights: Mapping[str, Any]) -> dict[str, Any]:
    return {"modules_to_not_convert": _ignored(weights, row)}


def _fp8(row: Layout, weights: Mapping[str, Any]) -> dict[str, Any]:
    stated: dict[str, Any] = {
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": _ignored(weights, row),
    }
    if row.format.scale.kind == "exponent":
        stated["scale_fmt"] = "ue8m0"
    if row.format.element.bits == 4:
        stated["expert_dtype"] = "fp4"
    return stated


# By `quant_method`: what it says beside what the layout is known by.
_STATED: dict[str, Callable[[Layout, Mapping[str, Any]], dict[str, Any]]] = {
    "compressed-tensors": _compressed_tensors,
    "modelopt": _modelopt,
    "mxfp4": _mxfp4,
    "fp8": _fp8,
}


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
    row = None if layout == TORCHAO else named(layout)
    if row is not None and row.rotation is not None:
        raise ValueError(
            f"checkpoint.write: {row.name} holds weights that were rotated before they were "
            "quantized, and is read only; choose another layout"
        )
    entries, metadata = _entries(weights, row)
    metadata = {"format": "pt"} | metadata
    if row is None:
        metadata[NAMES] = json.dumps(list(weights))
    sizes: Any = {"largest": max_shard_size, "resume": resume, "progress": progress}
    write_files(Path(path), entries, lambda _: metadata, **sizes)


def _entries(weights: Mapping[str, Any], row: Layout | None) -> Parts:
    """All tensors, none of them held: each is fetched anew when its turn comes."""
    held: dict[str, Any] = {}

    def weight(name: str) -> Any:
        # The tensors of one weight come one after the other.
        if name not in held:
            held.clear()
            value = weights[name]
            held[name] = unpacked(value) if isinstance(value, Quantized) else value
        return held[name]

    def parts_of(name: str) -> Parts:
        x = weight(name)
        if row is None:
            return torchao_parts(name, x)
        return (_stored(name, x, row) if isinstance(x, MXArray) else {name: Entry.of(x)}), {}

    def fetch(name: str, key: str) -> Any:
        return parts_of(name)[0][key].fetch()

    entries: dict[str, Entry] = {}
    metadata: dict[str, str] = {}
    for name in weights:
        parts, said = parts_of(name)
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
