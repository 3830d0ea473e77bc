"""The `quantization_config` of a model's config.json: read, and built for weights to be written.

Sources: compressed-tensors' QuantizationConfig, ModelOpt's two forms of its export's configuration,
transformers' Mxfp4Config and FineGrainedFP8Config.
"""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mx_jax.checkpoint.files import read_table
from mx_jax.checkpoint.layouts import Layout, named
from mx_jax.formats import BlockFormat, Whole
from mx_jax.packed import Quantized

# Modules are found by their class, and these are of another class than Linear.
_EMBEDDING = re.compile(r"(.*\.)?(\w*embed\w*|wte|wpe)")
_HEAD = "lm_head"
_MODELOPT_FILE = "hf_quant_config.json"


def config_of(path: Path) -> dict[str, Any]:
    """config.json, with ModelOpt's own file in its place for quantization."""
    folder = path if path.is_dir() else path.parent
    config, own = folder / "config.json", folder / _MODELOPT_FILE
    found = read_table(config, "checkpoint.read") if config.is_file() else {}
    if "quantization_config" not in found and own.is_file():
        stated = read_table(own, "checkpoint.read").get("quantization") or {}
        if not isinstance(stated, dict):
            raise ValueError(f"checkpoint.read: {own}: quantization is no table, got {stated!r}")
        found["quantization_config"] = {"quant_method": "modelopt"} | stated
    return found


def quantization_config(
    weights: Mapping[str, Any], *, layout: str, program: str | None = None
) -> dict[str, Any] | None:
    """The `quantization_config` by which other programs find the layout of weights.

    Weights are quantized, and what they multiply is not. Only shapes and formats are read.

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
        if method in _ENTRIES and program in (None, method):
            return said | _ENTRIES[method](row, weights)
    return None


def hf_quant_config(stated: Mapping[str, Any]) -> dict[str, Any]:
    """ModelOpt's own file, hf_quant_config.json, from the `quantization_config`."""
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


def _group(weights: Mapping[str, Any], row: Layout, **scheme: Any) -> dict[str, Any]:
    """The one group of layers that are quantized, and how their weights are."""
    embeddings = filter(_EMBEDDING.fullmatch, _modules(weights, row, quantized=True))
    bits, size = row.format.element.bits, _group_size(row.format)
    weight = {"num_bits": bits, "type": "float", "group_size": size, "dynamic": False} | scheme
    return {"targets": ["Linear", *embeddings], "weights": weight}


def _group_size(format: BlockFormat) -> int | None:
    size = format.block[1]
    return None if isinstance(size, Whole) else size


def _compressed_tensors(row: Layout, weights: Mapping[str, Any]) -> dict[str, Any]:
    kind, whole = row.format.scale.kind, _group_size(row.format) is None
    strategy = "channel" if whole else "tensor_group" if row.format.tensor_scale else "group"
    stored = {"exponent": "torch.uint8", "element": "torch.float8_e4m3fn"}.get(kind)
    dtypes = {} if stored is None else {"scale_dtype": stored, "zp_dtype": stored}
    group = _group(weights, row, symmetric=True, strategy=strategy, **dtypes)
    unquantized = dict.fromkeys(("input_activations", "output_activations"))
    return {
        "config_groups": {"group_0": group | unquantized | {"format": row.name}},
        "ignore": _ignored(weights, row),
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
        "global_compression_ratio": None,
    }


def _modelopt(row: Layout, weights: Mapping[str, Any]) -> dict[str, Any]:
    group = _group(weights, row)
    stated: dict[str, Any] = {
        "config_groups": {"group_0": group},
        "ignore": _ignored(weights, row),
        # By which readers recognize ModelOpt's configuration.
        "producer": {"name": "modelopt"},
    }
    algorithms = [dict(pairs).get("quant_algo", "") for pairs in row.configs]
    weight_only = [algorithm for algorithm in algorithms if algorithm.startswith("W4A16")]
    if weight_only and not any(name.endswith(".input_scale") for name in weights):
        return stated | {"quant_algo": weight_only[0]}
    # Inputs are quantized by the scales that are there for them, or as they come.
    group["input_activations"] = group["weights"]
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


# By `quant_method`: the entries beside those that name the layout.
_ENTRIES: dict[str, Callable[[Layout, Mapping[str, Any]], dict[str, Any]]] = {
    "compressed-tensors": _compressed_tensors,
    "modelopt": _modelopt,
    "mxfp4": _mxfp4,
    "fp8": _fp8,
}
