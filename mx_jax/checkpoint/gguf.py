"""GGUF files, as llama.cpp and its kin store them.

No length, count or offset of a header is believed before it is checked. Types of integers with many
scales are left to llama.cpp's package `gguf`, which gets bytes of the right number only.
Source: the GGUF description, versions 2 and 3, little-endian, and ggml's block structures.
"""

import dataclasses
import functools
import importlib
import importlib.util
import itertools
import math
import mmap
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from mx_jax.checkpoint.files import Entry, check_name
from mx_jax.checkpoint.weights import Described, Stored, Weights, plain, stored_plain
from mx_jax.formats import MXFP4, NVFP4, BlockFormat
from mx_jax.mxarray import MXArray

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_ALIGNMENT = "general.alignment"
# By their numbers in a file, as the struct module and NumPy call them.
_SCALARS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
# ggml's limit.
_MOST_AXES = 4

# Types ----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class GgufType:
    """One of ggml's types; blocks are along the last axis."""

    name: str
    nbytes: int  # of a block
    block: int = 1  # elements of a block
    # From blocks, uint8 `[rows, blocks, nbytes]`, to their values, or to codes and scales
    # as `format` has them; None: the package `gguf` gives the values.
    decode: Callable[[Any], Any] | None = None
    format: BlockFormat | None = None  # of the MXArrays that hold it; None if none does
    dtype: np.dtype | None = None  # of plain numbers


def _plain(name: str, dtype: type) -> GgufType:
    made = np.dtype(dtype)
    return GgufType(name, made.itemsize, decode=lambda blocks: blocks.view(made), dtype=made)


def _nibbles(packed: np.ndarray) -> np.ndarray:
    """Codes of groups in order: their low nibbles, then their high ones."""
    return np.concatenate([packed & 0xF, packed >> 4], axis=-1)


def _halves(blocks: jax.Array) -> jax.Array:
    """float16 numbers as float32, on a last axis of one."""
    return jax.lax.bitcast_convert_type(blocks, jnp.float16)[..., None].astype(jnp.float32)


def _mxfp4(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """E8M0, then 16 bytes. ggml's table has doubled values under a halved scale: E2M1's."""
    return _nibbles(blocks[..., 1:]), blocks[..., :1]


def _nvfp4(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Four E4M3 scales, then 8 bytes for each of their 16 elements; doubled and halved likewise."""
    return _nibbles(blocks[..., 4:].reshape(-1, 4, 8)), blocks[..., :4]


# By XLA, in one pass where NumPy makes four. Products of a float16 number and a code are exact, so
# it is the same whether a sum of them is rounded with the product or after it.
def _q4_0(blocks: jax.Array) -> jax.Array:
    """A float16 scale, and codes from -8 to 7 that are stored from 0 on."""
    codes = jnp.concatenate([blocks[..., 2:] & 0xF, blocks[..., 2:] >> 4], axis=-1)
    return _halves(blocks[..., :2]) * (codes.astype(jnp.float32) - 8)


def _q4_1(blocks: jax.Array) -> jax.Array:
    """A float16 scale, a float16 minimum, and codes from 0 to 15."""
    codes = jnp.concatenate([blocks[..., 4:] & 0xF, blocks[..., 4:] >> 4], axis=-1)
    return _halves(blocks[..., :2]) * codes + _halves(blocks[..., 2:4])


def _q8_0(blocks: jax.Array) -> jax.Array:
    """A float16 scale and signed bytes."""
    return _halves(blocks[..., :2]) * jax.lax.bitcast_convert_type(blocks[..., 2:], jnp.int8)


# Number, name, bytes and elements of a block: types whose values the package `gguf` gives.
_OF_THE_PACKAGE = """
6 Q5_0 22 32,      7 Q5_1 24 32,      10 Q2_K 84 256,    11 Q3_K 110 256,    12 Q4_K 144 256
13 Q5_K 176 256,   14 Q6_K 210 256,   16 IQ2_XXS 66 256, 17 IQ2_XS 74 256,   18 IQ3_XXS 98 256
19 IQ1_S 50 256,   20 IQ4_NL 18 32,   21 IQ3_S 110 256,  22 IQ2_S 82 256,    23 IQ4_XS 136 256
29 IQ1_M 56 256,   34 TQ1_0 54 256,   35 TQ2_0 66 256
"""
# By their numbers in a file.
GGUF_TYPES: dict[int, GgufType] = {
    0: _plain("F32", np.float32),
    1: _plain("F16", np.float16),
    2: GgufType("Q4_0", 18, 32, _q4_0),
    3: GgufType("Q4_1", 20, 32, _q4_1),
    8: GgufType("Q8_0", 34, 32, _q8_0),
    24: _plain("I8", np.int8),
    25: _plain("I16", np.int16),
    26: _plain("I32", np.int32),
    27: _plain("I64", np.int64),
    28: _plain("F64", np.float64),
    30: _plain("BF16", ml_dtypes.bfloat16),
    39: GgufType("MXFP4", 17, 32, _mxfp4, MXFP4),
    40: GgufType("NVFP4", 36, 64, _nvfp4, NVFP4),
}
_ROWS = (row.split() for row in _OF_THE_PACKAGE.strip().replace("\n", ",").split(","))
GGUF_TYPES |= {int(number): GgufType(name, int(n), int(size)) for number, name, n, size in _ROWS}
# What others know by these numbers, for messages: nobody stores weights in them.
_UNREAD = {9: "Q8_1", 15: "Q8_K", 41: "Q1_0"}

# Headers --------------------------------------------------------------------------------------


def is_gguf(path: Path) -> bool:
    """Whether there is a file that begins as these do."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(_MAGIC)) == _MAGIC


@dataclasses.dataclass(frozen=True)
class GgufTensor:
    """A tensor of a file whose header has been checked."""

    type: GgufType
    # With the last axis contiguous: ggml's, reversed.
    shape: tuple[int, ...]
    # Its first byte in the file, which is mapped.
    first: int
    content: np.ndarray = dataclasses.field(repr=False)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) // self.type.block * self.type.nbytes

    @property
    def end(self) -> int:
        return self.first + self.nbytes

    def blocks(self) -> np.ndarray:
        """Its bytes, uint8 `[*rows, blocks, nbytes]`."""
        *rows, last = self.shape or (1,)
        stored = self.content[self.first : self.end]
        return stored.reshape(*rows, last // self.type.block, self.type.nbytes)

    def read(self) -> Any:
        """What its type decodes its bytes to."""
        row, stored = self.type, self.blocks()
        # NaN and Inf in scales are reported where values are checked, not as warnings here.
        with np.errstate(all="ignore"):
            if row.decode is not None:
                by_xla = row.block > 1 and row.format is None
                return _values(stored, row.decode) if by_xla else row.decode(stored)
            quants: Any = importlib.import_module("gguf.quants")
            kind = quants.GGMLQuantizationType[row.name]
            return quants.dequantize(stored.reshape(math.prod(self.shape[:-1]), -1), kind)


@functools.partial(jax.jit, static_argnums=1)
def _values(blocks: jax.Array, decode: Callable[[Any], jax.Array]) -> jax.Array:
    return decode(blocks)


def _open(path: Path) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
    """Metadata and tensors of a file whose header has been checked; no tensor is read."""
    if not path.is_file():
        raise FileNotFoundError(f"checkpoint: no file at {path}")
    if not is_gguf(path):
        raise ValueError(f"checkpoint: {path} is no GGUF file: it does not begin with GGUF")
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    cursor = _Cursor(mapped, f"checkpoint: {path}", len(_MAGIC))
    version = cursor.number("I", "its version")
    if version not in _VERSIONS:
        raise ValueError(
            f"{cursor.where} has version={version}, this mx_jax reads {_VERSIONS}, little-endian"
        )
    count, pairs = (cursor.number("Q", "its counts") for _ in range(2))
    metadata: dict[str, Any] = {}
    # A count beyond the file's end runs into it, and takes no memory before.
    for index in range(pairs):
        key = cursor.text(f"key {index} of {pairs}")
        if key in metadata:
            raise ValueError(f"{cursor.where}: the key {key!r} is there twice")
        kind = cursor.number("I", f"the type of {key!r}")
        metadata[key] = _value(cursor, kind, f"the value of {key!r}")
    alignment = metadata.get(_ALIGNMENT, 32)
    if type(alignment) is not int or alignment <= 0 or alignment & (alignment - 1):
        raise ValueError(f"{cursor.where}: {_ALIGNMENT} must be a power of two, got {alignment!r}")
    tensors = _tensors(cursor, count, alignment)
    left = [name for name, tensor in tensors.items() if tensor.type.decode is None]
    if left and importlib.util.find_spec("gguf") is None:
        raise ValueError(
            f"{cursor.where}: {left[0]} has type={tensors[left[0]].type.name}, one of {len(left)} "
            "tensors that llama.cpp's package reads: pip install 'mx_jax[gguf]'"
        )
    return metadata, tensors


@dataclasses.dataclass
class _Cursor:
    """A place in a file, that reads forward and never beyond the end."""

    content: mmap.mmap
    where: str
    at: int

    def take(self, length: int, what: str) -> bytes:
        left = len(self.content) - self.at
        if length > left:
            raise ValueError(
                f"{self.where}: {what} at byte {self.at} would take {length} bytes, and the file "
                f"has {left} more; it is damaged or cut short"
            )
        self.at += length
        return self.content[self.at - length : self.at]

    def number(self, letter: str, what: str) -> Any:
        return struct.unpack(f"<{letter}", self.take(struct.calcsize(f"<{letter}"), what))[0]

    def text(self, what: str, errors: str = "strict") -> str:
        stored = self.take(self.number("Q", f"the length of {what}"), what)
        try:
            return stored.decode(errors=errors)
        except UnicodeDecodeError as error:
            raise ValueError(f"{self.where}: {what} is no UTF-8: {error}") from error

    def texts(self, count: int, what: str) -> tuple[str, ...]:
        """Strings that may be any bytes, a vocabulary's for one: no message is made for each."""
        length, texts = struct.Struct("<Q").unpack_from, list[str]()
        for _ in range(count):
            start = self.at + 8
            # `take` says what is missing of a file that is cut short.
            end = start + length(self.content, self.at)[0] if start <= len(self.content) else start
            if end > len(self.content):
                self.take(length(self.take(8, f"the length of {what}"))[0], what)
            texts.append(self.content[start:end].decode(errors="backslashreplace"))
            self.at = end
        return tuple(texts)


def _value(cursor: _Cursor, kind: int, what: str) -> Any:
    if kind in _SCALARS:
        return cursor.number(_SCALARS[kind], what)
    if kind == _STRING:
        # Tokens may be any bytes.
        return cursor.text(what, "backslashreplace")
    if kind != _ARRAY:
        raise ValueError(f"{cursor.where}: {what} has type={kind}, which GGUF does not have")
    inner, count = cursor.number("I", what), cursor.number("Q", what)
    if inner == _STRING:
        return cursor.texts(count, what)
    if inner not in _SCALARS:
        # Nobody writes arrays in arrays, and llama.cpp reads none either.
        raise ValueError(f"{cursor.where}: {what} is an array of type={inner}, which is not read")
    dtype = np.dtype(_SCALARS[inner])
    stored = np.frombuffer(cursor.take(count * dtype.itemsize, what), np.uint8)
    # A bool that is neither 0 nor 1 is no bool of NumPy's.
    return stored != 0 if dtype == np.bool_ else stored.view(dtype)


def _tensors(cursor: _Cursor, count: int, alignment: int) -> dict[str, GgufTensor]:
    content, tensors = np.frombuffer(cursor.content, np.uint8), dict[str, GgufTensor]()
    for index in range(count):
        name = cursor.text(f"the name of tensor {index} of {count}")
        check_name(name, cursor.where)
        where = f"{cursor.where}: {name}"
        if name in tensors:
            raise ValueError(f"{where} is there twice")
        axes = cursor.number("I", f"the number of axes of {name}")
        if axes > _MOST_AXES:
            raise ValueError(f"{where} has {axes} axes, GGUF has up to {_MOST_AXES}")
        shape = tuple(cursor.number("Q", f"the shape of {name}") for _ in range(axes))[::-1]
        number = cursor.number("I", f"the type of {name}")
        offset = cursor.number("Q", f"the offset of {name}")
        row = GGUF_TYPES.get(number)
        if row is None:
            raise ValueError(
                f"{where} has type={number} ({_UNREAD.get(number, 'unknown')}), which mx_jax does "
                f"not read; it reads {', '.join(each.name for each in GGUF_TYPES.values())}"
            )
        if 0 in shape or (shape[-1] if shape else 1) % row.block:
            raise ValueError(
                f"{where} has shape={shape}, and {row.name} needs rows of whole blocks of "
                f"{row.block}"
            )
        if offset % alignment:
            raise ValueError(f"{where} lies at offset={offset}, no multiple of {alignment}")
        tensors[name] = GgufTensor(row, shape, offset, content)
    # Offsets count from where the header has ended.
    start = cursor.at + -cursor.at % alignment
    tensors = {n: dataclasses.replace(x, first=start + x.first) for n, x in tensors.items()}
    for name, each in tensors.items():
        if each.end > len(content):
            raise ValueError(
                f"{cursor.where}: {name} of shape={each.shape} in {each.type.name} would end at "
                f"byte {each.end}, and the file has {len(content)}; it is damaged or cut short"
            )
    ordered = sorted(tensors.items(), key=lambda item: item[1].first)
    for (name, one), (other, next) in itertools.pairwise(ordered):
        if one.end > next.first:
            raise ValueError(f"{cursor.where}: {name} and {other} overlap at byte {next.first}")
    return tensors


# Weights --------------------------------------------------------------------------------------


def gguf_in(path: Path) -> Path | None:
    """The GGUF file that is meant by a path: itself, or the only one in a folder of no others."""
    if path.is_dir():
        files = sorted(path.glob("*.gguf"))
        return files[0] if len(files) == 1 and not any(path.glob("*.safetensors*")) else None
    return path if path.suffix == ".gguf" or is_gguf(path) else None


def read_gguf(path: Path, where: str) -> Weights:
    """Open a GGUF file: MXFP4 and NVFP4 become MXArrays, other quantized types float32 values."""
    # No MXArray holds blocks of integers with a float16 scale. Values are float32, as in ggml.
    metadata, tensors = _open(path)
    scales = {
        name: candidate
        for name, tensor in tensors.items()
        if tensor.type.format is not None and tensor.type.format.tensor_scale
        for candidate in (f"{name.removesuffix('.weight')}.scale", f"{name}.scale")
        if candidate in tensors
    }
    tensor_scales = set(scales.values())
    stored: dict[str, Stored] = {}
    for name, tensor in tensors.items():
        if name in tensor_scales:
            continue
        row, scale = tensor.type, scales.get(name)
        if row.dtype is not None:
            fetch = lambda each=tensor: each.read().reshape(each.shape)  # noqa: E731
            entry = Entry(tensor.shape, row.dtype, fetch)
            stored[name] = stored_plain(entry, f"{where}: {name}")
            continue
        stored[name] = Stored(
            shape=tensor.shape,
            nbytes=tensor.nbytes + (0 if scale is None else tensors[scale].nbytes),
            fetch=functools.partial(_fetch, tensors, name, scale, f"{where}: {name}"),
            layout=f"gguf-{row.name.lower()}",
            dequantized=row.format is None,
        )
    return Weights(path, stored, metadata)


def _fetch(
    tensors: Mapping[str, GgufTensor], name: str, scale: str | None, where: str
) -> MXArray | jax.Array:
    tensor, whole = tensors[name], None
    format = tensor.type.format
    if format is None:
        return plain(tensor.read().reshape(tensor.shape), where)
    if scale is not None:
        kind = tensors[scale].type
        if kind.block > 1:
            raise ValueError(
                f"{where}: its tensor scale {scale} must be plain numbers, got {kind.name}"
            )
        whole = tensors[scale].read()
    # Beside NVFP4 is one number, or one an expert, or none, which means one.
    codes, scales = tensor.read()
    blocks = ((-1, tensor.type.block // scales.shape[-1]),)
    described = Described(
        format=format, blocks=blocks, shape=tensor.shape, dtype="float32", packed=False
    )
    arrays = {"codes": codes, "scales": scales, "tensor_scale": whole}
    return described.assembled(arrays, where, layout="GGUF")
