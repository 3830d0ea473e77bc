"""torchao's tensor subclasses in safetensors files: MXTensor, NVFP4Tensor, Float8Tensor.

The header's metadata name every tensor with its class and attributes; a weight `up.weight` is
`up._weight_qdata`, `up._weight_scale` and, of NVFP4, `up._weight_per_tensor_scale`. Scales may be
in the tiles of tensor cores. Source: torchao 0.18, prototype/safetensors.
"""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from mx_jax import formats
from mx_jax.checkpoint.files import Entry, Reader
from mx_jax.checkpoint.scales import float32_blocks, stored_parts
from mx_jax.checkpoint.weights import Described, Stored, stored_plain
from mx_jax.codecs import packing
from mx_jax.codecs.blocks import Blocks, scales_shape
from mx_jax.formats.element import same_facts
from mx_jax.mxarray import MXArray

# What users and messages call it.
TORCHAO = "torchao"
NAMES = "tensor_names"
QDATA, SCALE = "qdata", "scale"
_PARTS = {QDATA: "codes", SCALE: "scales", "per_tensor_scale": "tensor_scale"}
ROLES = tuple(_PARTS)
PLAIN, MX, NVFP4_TENSOR, FLOAT8 = "Tensor", "MXTensor", "NVFP4Tensor", "Float8Tensor"
# Of MXTensor, by what it calls its elements. FP4 is two in a byte, FP6 one.
ELEMENTS = {
    "float8_e4m3fn": formats.MXFP8_E4M3,
    "float8_e5m2": formats.MXFP8_E5M2,
    "float4_e2m1fn_x2": formats.MXFP4,
    "fp6_e2m3": formats.MXFP6_E2M3,
    "fp6_e3m2": formats.MXFP6_E3M2,
}
FLOAT8_ELEMENTS = {
    np.dtype(ml_dtypes.float8_e4m3fn): formats.E4M3,
    np.dtype(ml_dtypes.float8_e5m2): formats.E5M2,
}
_DTYPES = ("bfloat16", "float16", "float32")


def read_torchao(
    opened: Sequence[Reader], tensors: Mapping[str, Entry], where: str
) -> dict[str, Stored]:
    """The tensors of files that torchao wrote; ValueError for classes and metadata not known."""
    # Of each tensor the JSON that describes it.
    described: dict[str, str] = {}
    for reader in opened:
        try:
            listed = json.loads(reader.metadata.get(NAMES, "[]"))
            described |= {name: reader.metadata[name] for name in listed}
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise ValueError(
                f"{where}: {reader.path.name} has damaged metadata of torchao: {error!s}"
            ) from error
    stored: dict[str, Stored] = {}
    plain = dict(tensors)
    for name, text in described.items():
        at = f"{where}: {name}"
        try:
            facts = json.loads(text)
            if facts["_type"] == PLAIN:
                continue
            kind, data = facts["_type"], facts["_data"]
            names = {r: base(name) + r for r in facts["_tensor_data_names"] if r in ROLES}
            missing = [each for each in names.values() if each not in tensors]
            if missing or QDATA not in names or SCALE not in names:
                raise ValueError(f"it has tensors {[*names]}, and {missing} are missing")
            parts = {role: tensors[each] for role, each in names.items()}
            stored[name] = _stored(kind, data, parts, at)
        except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
            raise ValueError(f"{at}: what torchao says of it is not read: {error!s}") from error
        for each in names.values():
            plain.pop(each, None)
    return stored | {n: stored_plain(entry, f"{where}: {n}") for n, entry in plain.items()}


def _stored(kind: str, data: Mapping[str, Any], parts: Mapping[str, Entry], where: str) -> Stored:
    """Damaged metadata raise errors of many types, which the caller turns into a ValueError."""
    codes, scales = parts[QDATA], parts[SCALE]
    if kind == FLOAT8:
        format, blocks = _float8(codes.dtype, codes.shape, data["block_size"])
    elif kind in (MX, NVFP4_TENSOR):
        format = (
            formats.NVFP4 if kind == NVFP4_TENSOR else ELEMENTS[_plain_name(data["elem_dtype"])]
        )
        blocks = ((-1, format.block[1]),)
        if data["block_size"] != format.block[1]:
            raise ValueError(f"{format.name} with block_size={data['block_size']!r}")
    else:
        raise ValueError(f"its class is {kind}; read are {MX}, {NVFP4_TENSOR} and {FLOAT8}")
    if len(codes.shape) < 2 or codes.dtype.itemsize != 1:
        raise ValueError(f"its {QDATA} is {codes.dtype}{list(codes.shape)}")
    shape = (*codes.shape[:-1], codes.shape[-1] * (2 if format.element.bits == 4 else 1))
    dtype = _plain_name(data["dtype" if kind == FLOAT8 else "orig_dtype"])
    if dtype not in _DTYPES:
        raise ValueError(f"dtype={dtype!r}, known: {', '.join(_DTYPES)}")
    swizzled = data.get("is_swizzled_scales") is True
    expected = scales_shape(shape, blocks)
    fits = scales.shape == expected
    if swizzled:
        fits = math.prod(scales.shape) == math.prod(_tiles(expected))
    if not fits or scales.dtype != format.scale.dtype:
        raise ValueError(
            f"its scales are {scales.dtype}{list(scales.shape)}, swizzled={swizzled}, and "
            f"{format.name} of shape={shape} needs {format.scale.dtype}{list(expected)}"
        )

    # FP6 is one code in a byte there.
    described = Described(
        format=format, blocks=blocks, shape=shape, dtype=dtype, packed=format.element.bits == 4
    )

    def fetch() -> MXArray:
        arrays = {_PARTS[role]: np.asarray(entry) for role, entry in parts.items()}
        if swizzled:
            sizes = math.prod(expected[:-1]), expected[-1]
            tiles = arrays["scales"].reshape(_tiles(expected))
            arrays["scales"] = packing.from_blocked_scales(tiles, *sizes)
        return described.assembled(arrays, where, layout=TORCHAO)

    nbytes = sum(entry.nbytes for entry in parts.values())
    return Stored(shape=shape, nbytes=nbytes, fetch=fetch, layout=f"torchao-{kind}")


def base(name: str) -> str:
    """How the names of a weight's tensors begin."""
    module, _, leaf = name.rpartition(".")
    return f"{module}._{leaf}_" if module else f"_{leaf}_"


def _plain_name(named: str | dict[str, str]) -> str:
    return named if isinstance(named, str) else named["_data"]


def _float8(
    dtype: np.dtype, shape: tuple[int, ...], sizes: Sequence[Any]
) -> tuple[formats.BlockFormat, Blocks]:
    """The format of float8 codes under float32 scales, from the extent of a block."""
    if len(sizes) != len(shape) or any(size != 1 for size in sizes[:-2]):
        raise ValueError(f"block_size={sizes} for shape={shape}, not along the last two axes")
    block: list[formats.BlockSize] = [1, 1]
    for axis in (-2, -1)[-len(shape) :]:
        size, length = sizes[axis], shape[axis]
        if not isinstance(size, int) or size < 1:
            raise ValueError(f"block_size={sizes}")
        # A size that spans the axis is the whole of it, however long.
        block[axis] = size if size in (1, 128) else formats.WHOLE if size == length else size
    element = FLOAT8_ELEMENTS[dtype]
    blocks = tuple((axis, size) for axis, size in zip((-2, -1), block, strict=True) if size != 1)
    return float32_blocks("float8", element, (block[0], block[1])), blocks


def _tiles(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of scales in tiles of 128 x 4, as tensor cores have them."""
    return -(-math.prod(shape[:-1]) // 128), -(-shape[-1] // 4), 32, 4, 4


def torchao_parts(name: str, value: MXArray | Any) -> tuple[dict[str, Entry], dict[str, str]]:
    """The tensors that a weight is stored as, and its entry in the file's metadata."""
    if not isinstance(value, MXArray):
        return {name: Entry.of(value)}, {name: json.dumps({"_type": PLAIN})}
    kind, data = _class_and_attributes(name, value)
    # FP6 is one code in a byte there.
    element, codes = value.format.element, np.dtype(np.uint8)
    bits = 4 if element.bits == 4 else 8
    if bits == 4 and value.shape[-1] % 2:
        raise ValueError(
            "checkpoint.write: torchao needs FP4 rows of whole bytes, got "
            f"{name}: shape={value.shape}"
        )
    if element.bits == 8:
        codes = element.dtype
    shape = (*value.shape[:-1], value.shape[-1] * bits // 8)
    # One number has no axes there, one an expert three.
    whole = () if value.tensor_scale is None else value.tensor_scale.shape
    whole = () if math.prod(whole) == 1 else whole
    dtypes = (codes, value.format.scale.dtype)
    parts = stored_parts(value, name, shape, dtypes, scale_shape=whole)
    roles = ROLES[: len(parts)]
    facts = {"_type": kind, "_data": data, "_tensor_data_names": roles}
    entries = {base(name) + role: entry for role, entry in zip(roles, parts, strict=True)}
    return entries, {name: json.dumps(facts)}


def _class_and_attributes(name: str, x: MXArray) -> tuple[str, dict[str, Any]]:
    dtype = {"_type": "torch.dtype", "_data": x.dtype.name}
    unset = {"act_quant_kwargs": None}
    rows = unset | {"is_swizzled_scales": False, "orig_dtype": dtype, "block_size": 32}
    if x.blocks == ((-1, x.format.block[1]),):
        row = same_facts(x.format, (formats.NVFP4, *ELEMENTS.values()))
        if row is formats.NVFP4:
            return NVFP4_TENSOR, rows | {"block_size": 16, "use_triton_kernel": False}
        if row is not None:
            element = next(name for name, format in ELEMENTS.items() if format is row)
            # FP6 is no dtype of torch's.
            typed = {"_type": "torch.dtype", "_data": element}
            named = {"elem_dtype": element if element.startswith("fp6") else typed}
            return MX, rows | named | _kernels("EMULATED")
    is_float8 = x.format.scale == formats.F32 and not x.format.tensor_scale
    if is_float8 and x.format.element in FLOAT8_ELEMENTS.values():
        sizes = dict(x.blocks)
        blocks = [sizes.get(axis - x.ndim, 1) for axis in range(x.ndim)]
        pairs = zip(blocks, x.shape, strict=True)
        block = [length if isinstance(size, formats.Whole) else size for size, length in pairs]
        said = {"block_size": block, "mm_config": None, "dtype": dtype}
        return FLOAT8, unset | said | _kernels("AUTO")
    raise ValueError(
        f"checkpoint.write: torchao holds {', '.join(r.name for r in ELEMENTS.values())}, "
        "nvfp4 and float8 whose float32 scales multiply, blocks along the last axis, got "
        f"{name}: format={x.format.name}, blocks={x.blocks}; quantize it so, or transpose it"
    )


def _kernels(preference: str) -> dict[str, Any]:
    return {"kernel_preference": {"_type": "KernelPreference", "_data": preference}}
