"""MXArrays as torchao's tensor subclasses: their tensors, and the metadata that name them."""

import dataclasses
import json
from typing import Any

import numpy as np

from mx_jax.checkpoint import torchao
from mx_jax.checkpoint.safetensors_file import Entry
from mx_jax.checkpoint.scales import finite_scales
from mx_jax.codecs import packing
from mx_jax.formats import F32, NVFP4, Whole
from mx_jax.mxarray import MXArray


def torchao_parts(name: str, value: MXArray | Any) -> tuple[dict[str, Entry], dict[str, str]]:
    """The tensors that hold a weight, and what the file's metadata say of it.

    Args:
      name: of the weight.
      value: an MXArray `[..., out, in]`, whose dtype is that of the high-precision tensor, or a
        plain array.

    Raises:
      ValueError: an MXArray that is none of MXTensor, NVFP4Tensor and Float8Tensor.
    """
    if not isinstance(value, MXArray):
        return {name: Entry.of(value)}, {name: json.dumps({"_type": torchao.PLAIN})}
    kind, data = _said_of(name, value)
    parts = _parts(name, value)
    facts = {"_type": kind, "_data": data, "_tensor_data_names": list(parts)}
    entries = {torchao.base(name) + role: entry for role, entry in parts.items()}
    return entries, {name: json.dumps(facts)}


def torchao_metadata(names: list[str]) -> dict[str, str]:
    """What the metadata say of the weights together."""
    return {torchao.NAMES: json.dumps(names)}


def _said_of(name: str, x: MXArray) -> tuple[str, dict[str, Any]]:
    """The class of an MXArray and its attributes."""
    dtype = {"_type": "torch.dtype", "_data": x.dtype.name}
    in_rows = x.blocks == ((-1, x.format.block[1]),)
    if in_rows and _alike(x.format, NVFP4):
        said = {"block_size": 16, "orig_dtype": dtype, "use_triton_kernel": False}
        return torchao.NVFP4_TENSOR, said | {"is_swizzled_scales": False, "act_quant_kwargs": None}
    for element, row in torchao.ELEMENTS.items():
        if in_rows and _alike(x.format, row):
            return torchao.MX, _mx(element) | {"orig_dtype": dtype}
    is_float8 = x.format.scale == F32 and not x.format.tensor_scale
    if is_float8 and x.format.element in torchao.FLOAT8_ELEMENTS.values():
        return torchao.FLOAT8, _float8(x) | {"dtype": dtype}
    raise ValueError(
        f"checkpoint.write: torchao holds {', '.join(r.name for r in torchao.ELEMENTS.values())}, "
        "nvfp4 and float8 whose float32 scales multiply, blocks along the last axis, got "
        f"{name}: format={x.format.name}, blocks={x.blocks}; quantize it so, or transpose it"
    )


def _mx(element: str) -> dict[str, Any]:
    # FP6 is no dtype of torch's.
    typed = {"_type": "torch.dtype", "_data": element}
    return {
        "elem_dtype": element if element.startswith("fp6") else typed,
        "block_size": 32,
        "kernel_preference": {"_type": "KernelPreference", "_data": "EMULATED"},
        "act_quant_kwargs": None,
        "is_swizzled_scales": False,
    }


def _float8(x: MXArray) -> dict[str, Any]:
    sizes = dict(x.blocks)
    block = [sizes.get(axis - x.ndim, 1) for axis in range(x.ndim)]
    pairs = zip(block, x.shape, strict=True)
    return {
        "block_size": [length if isinstance(size, Whole) else size for size, length in pairs],
        "mm_config": None,
        "act_quant_kwargs": None,
        "kernel_preference": {"_type": "KernelPreference", "_data": "AUTO"},
    }


def _alike(one: Any, other: Any) -> bool:
    return dataclasses.replace(one, name=other.name) == other


def _parts(name: str, x: MXArray) -> dict[str, Entry]:
    bits, dtype = x.format.element.bits, x.format.scale.dtype
    if bits == 4 and x.shape[-1] % 2:
        raise ValueError(f"checkpoint.write: torchao needs FP4 rows of whole bytes, got {x.shape}")
    stored = x.format.element.dtype if bits == 8 else np.dtype(np.uint8)
    shape = (*x.shape[:-1], x.shape[-1] // 2) if bits == 4 else x.shape

    def codes() -> np.ndarray:
        given = np.asarray(x.codes)
        return packing.pack(given, 4) if bits == 4 else given.view(stored)

    parts = {
        torchao.QDATA: Entry(shape, stored, codes),
        torchao.SCALE: Entry(x.scales.shape, dtype, lambda: finite_scales(x, name).view(dtype)),
    }
    if x.tensor_scale is not None:
        # One number has no axes there, one an expert three.
        whole = np.asarray(x.tensor_scale)
        parts[torchao.TENSOR_SCALE] = Entry.of(whole.reshape(()) if whole.size == 1 else whole)
    return parts
