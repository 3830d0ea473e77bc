"""The header of a GGUF file: what it says of the model, and where its tensors lie.

Nothing that it says is believed before it is checked: no length, count or offset may lie beyond the
file's end. Source: the GGUF description, versions 2 and 3, little-endian.
"""

import dataclasses
import itertools
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mx_jax.checkpoint.gguf_types import GGUF_TYPES, UNREAD, GgufType
from mx_jax.checkpoint.safetensors_file import check_name

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_ALIGNMENT = "general.alignment"
# As the struct module and NumPy call them.
_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9
# Arrays in arrays: nobody writes any, so a few are enough.
_DEEPEST = 4
_MOST_NESTED = 10_000
# ggml's own.
_MOST_AXES = 4
_TYPES = {row.number: row for row in GGUF_TYPES}


def is_gguf(path: Path) -> bool:
    """Whether there is a file that begins as these do."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(_MAGIC)) == _MAGIC


@dataclasses.dataclass(frozen=True)
class GgufTensor:
    """Where a tensor lies.

    Attributes:
      type: its row.
      shape: with the last axis contiguous: ggml's, reversed.
      first: its first byte in the file.
    """

    type: GgufType
    shape: tuple[int, ...]
    first: int

    @property
    def nbytes(self) -> int:
        """In the file."""
        return math.prod(self.shape) // self.type.block * self.type.nbytes


@dataclasses.dataclass(frozen=True)
class GgufFile:
    """A file whose header has been checked.

    Attributes:
      path: of the file.
      metadata: keys with numbers, bools, strings, tuples of them or of tuples, NumPy arrays.
      tensors: by name, as they lie in the file.
      content: the file, mapped.
    """

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]
    content: np.ndarray

    @classmethod
    def open(cls, path: Path) -> "GgufFile":
        """Check a file; nothing of its tensors is read.

        Raises:
          FileNotFoundError: there is none.
          ValueError: it is no GGUF file, damaged, cut short, or has types that are not read.
        """
        if not path.is_file():
            raise FileNotFoundError(f"checkpoint: no file at {path}")
        if not is_gguf(path):
            raise ValueError(f"checkpoint: {path} is no GGUF file: it does not begin with GGUF")
        # A plain view: slices of a memmap are slow.
        content = np.asarray(np.memmap(path, np.uint8, mode="r"))
        cursor = _Cursor(content.data, f"checkpoint: {path}", len(_MAGIC))
        version = cursor.number("I", "its version")
        if version not in _VERSIONS:
            raise ValueError(
                f"{cursor.where} has version={version}, this mx_jax reads {_VERSIONS}, "
                "little-endian"
            )
        count, pairs = (cursor.number("Q", "its counts") for _ in range(2))
        metadata = _metadata(cursor, pairs)
        infos = _tensors(cursor, count)
        tensors = _placed(infos, _alignment(metadata, cursor.where), cursor)
        return cls(path, metadata, tensors, content)

    def read(self, name: str) -> np.ndarray:
        """The bytes of one tensor, `[blocks, bytes of one]`; a view of the file."""
        tensor = self.tensors[name]
        stored = self.content[tensor.first : tensor.first + tensor.nbytes]
        return stored.reshape(-1, tensor.type.nbytes)


@dataclasses.dataclass
class _Cursor:
    """A place in a file, that reads forward and never beyond the end."""

    content: memoryview
    where: str
    at: int
    nested: int = 0

    def take(self, length: int, what: str) -> memoryview:
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
            return str(stored, encoding="utf-8", errors=errors)
        except UnicodeDecodeError as error:
            raise ValueError(f"{self.where}: {what} is no UTF-8: {error}") from error


def _metadata(cursor: _Cursor, count: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    # A count beyond the file's end runs into it, and takes no memory before.
    for index in range(count):
        key = cursor.text(f"key {index} of {count}")
        if key in found:
            raise ValueError(f"{cursor.where}: the key {key!r} is there twice")
        kind = cursor.number("I", f"the type of {key!r}")
        found[key] = _value(cursor, kind, f"the value of {key!r}", _DEEPEST)
    return found


def _value(cursor: _Cursor, kind: int, what: str, depth: int) -> Any:
    if kind in _SCALARS:
        return cursor.number(_SCALARS[kind], what)
    if kind == _STRING:
        # Tokens may be any bytes.
        return cursor.text(what, "backslashreplace")
    if kind != _ARRAY:
        raise ValueError(f"{cursor.where}: {what} has type={kind}, which GGUF does not have")
    if depth == 0:
        raise ValueError(f"{cursor.where}: {what} has arrays in arrays, {_DEEPEST} deep")
    inner = cursor.number("I", what)
    count = cursor.number("Q", what)
    if inner == _ARRAY:
        cursor.nested += count
        if cursor.nested > _MOST_NESTED:
            raise ValueError(
                f"{cursor.where}: {what} has arrays in arrays, {cursor.nested} of them so far, and "
                f"at most {_MOST_NESTED} are read"
            )
    if inner not in _SCALARS:
        return tuple(_value(cursor, inner, what, depth - 1) for _ in range(count))
    dtype = np.dtype(_SCALARS[inner])
    stored = np.frombuffer(cursor.take(count * dtype.itemsize, what), np.uint8)
    # A bool that is neither 0 nor 1 is no bool of NumPy's.
    return stored != 0 if dtype == np.bool_ else stored.view(dtype)


def _tensors(cursor: _Cursor, count: int) -> dict[str, tuple[GgufType, tuple[int, ...], int]]:
    """Of each tensor its type, shape and offset, as the file says."""
    found = {}
    for index in range(count):
        name = cursor.text(f"the name of tensor {index} of {count}")
        check_name(name, cursor.where)
        where = f"{cursor.where}: {name}"
        if name in found:
            raise ValueError(f"{where} is there twice")
        axes = cursor.number("I", f"the number of axes of {name}")
        if axes > _MOST_AXES:
            raise ValueError(f"{where} has {axes} axes, GGUF has up to {_MOST_AXES}")
        shape = tuple(cursor.number("Q", f"the shape of {name}") for _ in range(axes))[::-1]
        number = cursor.number("I", f"the type of {name}")
        offset = cursor.number("Q", f"the offset of {name}")
        if number not in _TYPES:
            raise ValueError(
                f"{where} has type={number} ({UNREAD.get(number, 'unknown')}), which mx_jax does "
                f"not read; it reads {', '.join(row.name for row in GGUF_TYPES)}"
            )
        row = _TYPES[number]
        if 0 in shape or (shape[-1] if shape else 1) % row.block:
            raise ValueError(
                f"{where} has shape={shape}, and {row.name} needs rows of whole blocks of "
                f"{row.block}"
            )
        found[name] = row, shape, offset
    return found


def _alignment(metadata: Mapping[str, Any], where: str) -> int:
    found = metadata.get(_ALIGNMENT, 32)
    if type(found) is not int or found <= 0 or found & (found - 1):
        raise ValueError(f"{where}: {_ALIGNMENT} must be a power of two, got {found!r}")
    return found


def _placed(
    infos: Mapping[str, tuple[GgufType, tuple[int, ...], int]], alignment: int, cursor: _Cursor
) -> dict[str, GgufTensor]:
    """Where the tensors lie, if they lie in the file, aligned and apart."""
    start = cursor.at + -cursor.at % alignment
    placed = {name: GgufTensor(t, shape, start + at) for name, (t, shape, at) in infos.items()}
    for name, (_, shape, offset) in infos.items():
        tensor = placed[name]
        if offset % alignment:
            raise ValueError(
                f"{cursor.where}: {name} lies at offset={offset}, no multiple of {alignment}"
            )
        if tensor.first + tensor.nbytes > len(cursor.content):
            raise ValueError(
                f"{cursor.where}: {name} of shape={shape} in {tensor.type.name} would end at byte "
                f"{tensor.first + tensor.nbytes}, and the file has {len(cursor.content)}; it is "
                "damaged or cut short"
            )
    ordered = sorted(placed.items(), key=lambda item: item[1].first)
    for (name, one), (other, next) in itertools.pairwise(ordered):
        if one.first + one.nbytes > next.first:
            raise ValueError(f"{cursor.where}: {name} and {other} overlap at byte {next.first}")
    return placed
