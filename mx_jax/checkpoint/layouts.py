"""How others store quantized weights: one row for each layout, and its `quantization_config`.

Sources: the published checkpoints and the code that writes them, listed in docs/checkpoint.md;
compressed-tensors' QuantizationConfig, ModelOpt's two forms, transformers' Mxfp4Config and
FineGrainedFP8Config.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mx_jax.checkpoint.files import PACKED_BITS, Entry, read_table
from mx_jax.codecs.blocks import Blocks, scales_shape
from mx_jax.formats import (
    E4M3,
    F32,
    FLOAT8_BLOCKWISE_2D_E4M3,
    FLOAT8_BLOCKWISE_2D_E8M0,
    MXFP4,
    MXFP6_E2M3,
    MXFP6_E3M2,
    MXFP8_E4M3,
    NVFP4,
    WHOLE,
    BlockFormat,
    Whole,
)
from mx_jax.formats.removed import whereabouts
from mx_jax.packed import Quantized


def transposed_blocks(blocks: Blocks) -> Blocks:
    """Of blocks along the last two axes, those of the transposed matrices."""
    return tuple(sorted((-3 - axis, size) for axis, size in blocks))


# What is said of a tensor that a weight lacks.
ABSENT = "which is not there"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """The tensors that a quantized weight is stored as.

    A weight called `<base><weight>` is the tensors `<base><codes>`, `<base><scales>` and, if there
    is one, `<base><tensor_scale>`. Blocks run along its last axis, the one that is contracted:
    these are weights `[out, in]`.

    Attributes:
      name: what users and messages call it.
      format: of the weight.
      codes: suffix of the codes' name; FP4 is two in a byte, the first in the low nibble, FP6
        four in three bytes.
      scales: suffix of the block scales' name.
      tensor_scale: of the tensor scale's name, or None.
      weight: of the weight's name.
      codes_dtype: safetensors' name of the codes' dtype; that of the element itself is read too.
      scales_dtypes: those that the scales may have, the first as they are written.
      divides: whether the tensor scale is stored as what it divides by.
      scale_shape: of the tensor scale as it is written; any of one number is read.
      split: whether the codes' last axis is cut into blocks `[..., in / 32, 16]`.
      transposed: regular expression for names of experts that the unquantized model has as
        `[experts, in, out]`; they are read and written so, with blocks along `in`.
      configs: what `quantization_config` says where the layout is used: pairs of key and value.

    Examples:
      >>> from mx_jax.checkpoint import LAYOUTS
      >>> layout = next(row for row in LAYOUTS if row.name == "nvfp4-pack-quantized")
      >>> layout.codes, layout.scales, layout.tensor_scale, layout.divides
      ('.weight_packed', '.weight_scale', '.weight_global_scale', True)
    """

    name: str
    format: BlockFormat
    codes: str
    scales: str
    tensor_scale: str | None = None
    weight: str = ".weight"
    codes_dtype: str = "U8"
    scales_dtypes: tuple[str, ...] = ("U8",)
    divides: bool = False
    scale_shape: tuple[int, ...] = (1,)
    split: bool = False
    transposed: str | None = None
    configs: tuple[tuple[tuple[str, str], ...], ...] = ()

    @property
    def blocks(self) -> Blocks:
        """Those of a weight, the last two axes being `[out, in]`."""
        sizes = zip((-2, -1), self.format.block, strict=True)
        return tuple((axis, size) for axis, size in sizes if size != 1)

    @property
    def orientations(self) -> tuple[Blocks, ...]:
        """Blocks that its weights may have."""
        others = () if self.transposed is None else (transposed_blocks(self.blocks),)
        return (self.blocks, *others)

    def transposes(self, name: str, ndim: int) -> bool:
        """Whether a weight of that name is `[experts, in, out]`, and stored transposed."""
        pattern = self.transposed
        return pattern is not None and ndim == 3 and bool(re.fullmatch(pattern, name))

    def blocks_of(self, name: str, ndim: int) -> Blocks:
        """Those of a weight of that name."""
        return transposed_blocks(self.blocks) if self.transposes(name, ndim) else self.blocks

    def parts(self, base: str) -> dict[str, str]:
        """Names of a weight's tensors."""
        names = {"codes": base + self.codes, "scales": base + self.scales}
        if self.tensor_scale is not None:
            names["tensor_scale"] = base + self.tensor_scale
        return names

    def shape(self, codes: Entry) -> tuple[int, ...]:
        """The weight's shape, from its stored codes."""
        shape, bits = codes.shape, self.format.element.bits
        if self.split:
            shape = (*shape[:-2], shape[-2] * shape[-1])
        return shape if codes.dtype in PACKED_BITS else (*shape[:-1], shape[-1] * 8 // bits)

    @property
    def least_axes(self) -> int:
        """Axes that stored codes have at least."""
        return 3 if self.split else 2

    @property
    def dtypes(self) -> dict[str, tuple[str, ...]]:
        """By part, the dtypes of codes and scales that are read."""
        # Codes and scales may say themselves what they are.
        element = _ELEMENTS.get(self.format.element.name)
        codes = (self.codes_dtype, element) if element else (self.codes_dtype,)
        typed = ("F8_E8M0",) if self.format.scale.kind == "exponent" else ()
        scales = dict.fromkeys((*self.scales_dtypes, *typed))
        return {"codes": tuple(dict.fromkeys(codes)), "scales": tuple(scales)}

    def lacks(self, base: str, tensors: Mapping[str, Entry]) -> list[str]:
        """What a weight of that name would need, in words: tensors, other dtypes, whole codes."""
        dtypes = self.dtypes
        wanted = {name: dtypes.get(part) for part, name in self.parts(base).items()}
        needs = []
        for name, kinds in wanted.items():
            if name not in tensors:
                needs.append(f"{name}, {ABSENT}")
            elif kinds is not None and tensors[name].kind not in kinds:
                needs.append(f"{name} of dtype {' or '.join(kinds)}, got {tensors[name].kind}")
        if not needs:
            codes, bits = tensors[base + self.codes], self.format.element.bits
            odd = codes.dtype not in PACKED_BITS and codes.shape[-1:] and codes.shape[-1] * 8 % bits
            if len(codes.shape) < self.least_axes or odd:
                needs.append("codes of whole bytes")
        return needs

    def misfit(self, base: str, tensors: Mapping[str, Entry]) -> str | None:
        """What is wrong with the shape of the scales; they may leave out a last axis of one."""
        parts = self.parts(base)
        shape, actual = self.shape(tensors[parts["codes"]]), tensors[parts["scales"]].shape
        expected = scales_shape(shape, self.blocks)
        if actual == expected or (*actual, 1) == expected:
            return None
        hint = "they may be swizzled for tensor cores, or of another block size"
        if all(size == 1 for size in actual):
            hint = (
                "it is one scale for the whole tensor, which mx_jax does not read; take a "
                "checkpoint with scales of rows or blocks, or the unquantized model"
            )
        if actual == (*expected[:-2], *reversed(expected[-2:])):
            hint = "they lie the other way around"
        return (
            f"of shape={shape} in {self.name} needs scales of shape={expected}, got "
            f"{parts['scales']} of shape={actual}; {hint}"
        )

    def used_by(self, config: Mapping[str, Any]) -> bool:
        """Whether a `quantization_config` names it."""
        return any(all(config.get(key) == value for key, value in pairs) for pairs in self.configs)


# safetensors' dtypes of elements of few bits, by the element's name.
_ELEMENTS = {"e2m1": "F4", "e2m3": "F6_E2M3", "e3m2": "F6_E3M2"}
# Entries of the `quantization_config` by which a layout is known.
_QUARK, _FP8 = {"quant_method": "quark"}, {"quant_method": "fp8"}


def _compressed(format: str) -> dict[str, str]:
    return {"quant_method": "compressed-tensors", "format": format}


def _modelopt(algorithm: str) -> dict[str, str]:
    return {"quant_method": "modelopt", "quant_algo": algorithm}


def _row(
    name: str, format: BlockFormat, codes: str, scales: str, *configs: dict[str, str], **more: Any
) -> Layout:
    stated = tuple(tuple(config.items()) for config in configs)
    return Layout(name=name, format=format, codes=codes, scales=scales, configs=stated, **more)


def _float8(
    name: str, format: BlockFormat, scales: str, dtypes: str, *configs: dict[str, str]
) -> Layout:
    """E4M3 codes that are called `.weight`."""
    more = {"codes_dtype": "F8_E4M3", "scales_dtypes": tuple(dtypes.split())}
    return _row(name, format, ".weight", scales, *configs, **more)


_FP8_ROWS = BlockFormat(name="float8_channelwise_e4m3", element=E4M3, scale=F32, block=(1, WHOLE))

LAYOUTS: tuple[Layout, ...] = (
    _row(
        "gpt-oss",
        MXFP4,
        "_blocks",
        "_scales",
        {"quant_method": "mxfp4"},
        weight="",
        split=True,
        transposed=r"(.*\.)?experts\.(gate_up_proj|down_proj)",
    ),
    _row("gpt-oss-original", MXFP4, ".blocks", ".scales", weight="", split=True),
    *(
        _row(name, format, ".weight_packed", ".weight_scale", _compressed(name))
        for name, format in (("mxfp4-pack-quantized", MXFP4), ("mxfp6-pack-quantized", MXFP6_E2M3))
    ),
    _row(
        "nvfp4-pack-quantized",
        NVFP4,
        ".weight_packed",
        ".weight_scale",
        _compressed("nvfp4-pack-quantized"),
        tensor_scale=".weight_global_scale",
        scales_dtypes=("F8_E4M3",),
        divides=True,
    ),
    _float8(
        "mxfp8-quantized",
        MXFP8_E4M3,
        ".weight_scale",
        "U8 F8_E8M0",
        _compressed("mxfp8-quantized"),
        _modelopt("MXFP8"),
    ),
    _float8(
        "float-quantized", _FP8_ROWS, ".weight_scale", "F32 BF16", _compressed("float-quantized")
    ),
    _row(
        "modelopt-nvfp4",
        NVFP4,
        ".weight",
        ".weight_scale",
        _modelopt("NVFP4"),
        _modelopt("W4A16_NVFP4"),
        tensor_scale=".weight_scale_2",
        scale_shape=(),
        scales_dtypes=("F8_E4M3",),
    ),
    _row(
        "modelopt-mxfp4",
        MXFP4,
        ".weight",
        ".weight_scale",
        _modelopt("MXFP4"),
        # As ModelOpt 0.47 spells it itself.
        _modelopt("mxfp4"),
        _modelopt("W4A8_MXFP4_FP8"),
        _QUARK,
    ),
    _row("quark-mxfp4", MXFP4, ".weight", ".weight_quantizer.scale", _QUARK),
    # The float8 layers that it leaves as DeepSeek has them, scales renamed.
    _float8("quark-float8", FLOAT8_BLOCKWISE_2D_E4M3, ".weight_scale", "F32", _QUARK),
    # DeepSeek's scales are float32, those of others bfloat16.
    _float8("deepseek-v3", FLOAT8_BLOCKWISE_2D_E4M3, ".weight_scale_inv", "F32 BF16", _FP8),
    _float8("deepseek-v3.1", FLOAT8_BLOCKWISE_2D_E8M0, ".weight_scale_inv", "F8_E8M0", _FP8),
    # V4 before its last training, with experts in float8 too.
    _float8("deepseek-v4-base", FLOAT8_BLOCKWISE_2D_E4M3, ".scale", "F32", _FP8),
    _float8("deepseek-v4", FLOAT8_BLOCKWISE_2D_E8M0, ".scale", "F8_E8M0", _FP8),
    # Its I8 is packed FP4, not INT8.
    _row(
        "deepseek-v4-experts",
        MXFP4,
        ".weight",
        ".scale",
        _FP8,
        codes_dtype="I8",
        scales_dtypes=("F8_E8M0",),
    ),
    # Of nobody's: codes whose dtype says the element, for which no program has names.
    *(
        _row(
            name,
            format,
            ".weight",
            ".weight_scale",
            codes_dtype=_ELEMENTS[format.element.name],
            scales_dtypes=("F8_E8M0",),
        )
        for name, format in (("mxfp6-e2m3", MXFP6_E2M3), ("mxfp6-e3m2", MXFP6_E3M2))
    ),
)


def named(name: str) -> Layout:
    """The row of `LAYOUTS` of that name; ValueError lists the names."""
    for layout in LAYOUTS:
        if layout.name == name:
            return layout
    raise ValueError(
        f"checkpoint: unknown layout={name!r}{whereabouts(name)}; known: "
        f"{', '.join(row.name for row in LAYOUTS)}"
    )


# config.json --------------------------------------------------------------------------------

# Modules are found by their class, and these are of another class than Linear.
_EMBEDDING = re.compile(r"(.*\.)?(\w*embed\w*|wte|wpe)")
_HEAD = "lm_head"
_MODELOPT_FILE = "hf_quant_config.json"


def config_of(path: Path) -> dict[str, Any]:
    """config.json; where it says nothing of quantization, with what hf_quant_config.json says."""
    folder = path if path.is_dir() else path.parent
    path_of_config, modelopt = folder / "config.json", folder / _MODELOPT_FILE
    config = read_table(path_of_config, "checkpoint.read") if path_of_config.is_file() else {}
    if "quantization_config" not in config and modelopt.is_file():
        stated = read_table(modelopt, "checkpoint.read").get("quantization") or {}
        if not isinstance(stated, dict):
            raise ValueError(
                f"checkpoint.read: {modelopt}: quantization is no table, got {stated!r}"
            )
        config["quantization_config"] = {"quant_method": "modelopt"} | stated
    return config


def stated_by(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The `quantization_config`; ValueError for what is none, and for methods that are not read."""
    stated = config.get("quantization_config") or config.get("compression_config") or {}
    if not isinstance(stated, dict):
        raise ValueError(f"{where}: quantization_config is no table, got {stated!r}")
    method = stated.get("quant_method")
    known = sorted({dict(pairs)["quant_method"] for row in LAYOUTS for pairs in row.configs})
    if method is not None and method not in known:
        raise ValueError(
            f"{where}: config.json says quant_method={method!r}, which mx_jax does not read; it "
            f"reads {', '.join(known)}. Take the unquantized model, or dequantize it by {method}"
        )
    return stated


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
    """ModelOpt's hf_quant_config.json, from the `quantization_config`."""
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


def _group(weights: Mapping[str, Any], row: Layout, **scheme: object) -> dict[str, Any]:
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


def _modelopt_entries(row: Layout, weights: Mapping[str, Any]) -> dict[str, Any]:
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
    "modelopt": _modelopt_entries,
    "mxfp4": lambda row, weights: {"modules_to_not_convert": _ignored(weights, row)},
    "fp8": _fp8,
}
