"""safetensors files written and read one tensor at a time.

The package of that name checks what is read. It writes only what lies in memory whole, so writing
is done here: the layout is a length, a header in JSON, and the tensors in a row. Source:
safetensors' format description.
"""

import contextlib
import dataclasses
import functools
import json
import math
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import safetensors

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

# Names of the format, by dtype.
_DTYPES = {
    "BOOL": np.bool_,
    "U8": np.uint8,
    "I8": np.int8,
    "U16": np.uint16,
    "I16": np.int16,
    "U32": np.uint32,
    "I32": np.int32,
    "U64": np.uint64,
    "I64": np.int64,
    "F16": np.float16,
    "F32": np.float32,
    "F64": np.float64,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
}
_NAMES = {np.dtype(dtype): name for name, dtype in _DTYPES.items()}
_METADATA = "__metadata__"
# Tensors start at multiples of it.
_ALIGNMENT = 8
# What the names of files end with that are not whole yet.
_PARTIAL = ".mx_jax-partial"


def check_name(name: str, where: str) -> None:
    """ValueError for a tensor's name that a terminal would take for a command, or a line's end."""
    if not name.isprintable():
        raise ValueError(f"{where}: a tensor is called {name!r}: no name, but control characters")


def named_dtype(name: str) -> np.dtype:
    """The dtype of one of the format's names."""
    return np.dtype(_DTYPES[name])


def dtype_name(dtype: np.dtype) -> str:
    """The format's name of a dtype that was read."""
    return _NAMES[dtype]


@dataclasses.dataclass(frozen=True, eq=False)
class Entry:
    """A tensor that is to be written: `save` and `write` ask for it when its turn comes.

    Attributes:
      shape: of the tensor.
      dtype: of it.
      fetch: makes it.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    fetch: Callable[[], Any]

    @classmethod
    def of(cls, array: Any) -> "Entry":
        """Of an array, on whatever device, or of what is one already."""
        if isinstance(array, Entry):
            return array
        return cls(tuple(array.shape), np.dtype(array.dtype), lambda: array)

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) * self.dtype.itemsize

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.fetch(), dtype=dtype)


# Below this an array is kept: a tensor scale is asked for before its codes are written.
_SMALL = 1 << 16


def deferred(make: Callable[[], Any], like: Any) -> Any:
    """What `make` gives, of which nothing is made before it is written.

    Args:
      make: gives an array, or an MXArray; called again only where its parts are asked for again.
      like: the same with anything that has a shape and a dtype for arrays.

    Examples:
      >>> import jax, jax.numpy as jnp, mx_jax
      >>> from mx_jax.checkpoint.safetensors_file import deferred
      >>> make = lambda: mx_jax.quantize(jnp.ones((2, 64)), "mxfp4")
      >>> later = deferred(make, jax.eval_shape(make))
      >>> later.format.name, later.shape, type(later.codes).__name__
      ('mxfp4', (2, 64), 'Entry')
    """
    leaves, structure = jax.tree.flatten(like)
    once = _Once(make)
    parts = [
        Entry(tuple(leaf.shape), np.dtype(leaf.dtype), functools.partial(once.part, index))
        for index, leaf in enumerate(leaves)
    ]
    return jax.tree.unflatten(structure, parts)


class _Once:
    """The arrays of one tensor, each handed out once; the small ones as often as asked for."""

    def __init__(self, make: Callable[[], Any]):
        self._make = make
        self._small: dict[int, np.ndarray] = {}
        self._held: dict[int, np.ndarray] = {}

    def part(self, index: int) -> np.ndarray:
        if index in self._small:
            return self._small[index]
        if index not in self._held:
            arrays = enumerate(map(np.asarray, jax.tree.leaves(self._make())))
            found = dict(arrays)
            self._small = {i: array for i, array in found.items() if array.nbytes <= _SMALL}
            if index in self._small:
                return self._small[index]
            self._held = {i: array for i, array in found.items() if i not in self._small}
        return self._held.pop(index)


def write(
    path: Path,
    entries: Mapping[str, Entry],
    metadata: Mapping[str, str],
    step: Callable[[str, int], None],
) -> None:
    """Write a file, or nothing: it appears under its name when it is whole.

    Args:
      path: of the file; its folder has to be there.
      entries: tensors by name; one at a time is in memory.
      metadata: of the header.
      step: called with each tensor's name and bytes once it is written.

    Raises:
      ValueError: a dtype that the format does not have, or a tensor other than announced.
    """
    text = header_of(entries, metadata)
    with replacing(path) as file:
        file.write(text)
        for name, entry in entries.items():
            tensor = np.asarray(entry)
            if tensor.shape != entry.shape or tensor.dtype != entry.dtype:
                raise ValueError(
                    f"checkpoint: {name} changed while it was written: announced "
                    f"{entry.dtype}{list(entry.shape)}, got {tensor.dtype}{list(tensor.shape)}"
                )
            file.write(np.ascontiguousarray(tensor).reshape(-1).view(np.uint8))
            step(name, entry.nbytes)


def header_of(entries: Mapping[str, Entry], metadata: Mapping[str, str]) -> bytes:
    """What a file of these tensors begins with; ValueError for a dtype that the format lacks."""
    header: dict[str, Any] = {_METADATA: dict(metadata)}
    end = 0
    for name, entry in entries.items():
        if entry.dtype not in _NAMES:
            raise ValueError(
                f"checkpoint: {name} has dtype={entry.dtype}, which safetensors cannot hold; "
                f"cast it, or keep it elsewhere; it holds {', '.join(map(str, _NAMES))}"
            )
        begin, end = end, end + entry.nbytes
        header[name] = {
            "dtype": _NAMES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _partial(path: Path) -> tuple[Any, str]:
    """A file beside `path`, locked until it is closed or the process ends, and its name."""
    while True:
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=_PARTIAL, dir=path.parent)
        if fcntl is not None:
            with contextlib.suppress(OSError):  # no locks on that disk
                fcntl.flock(handle, fcntl.LOCK_EX)
        if os.fstat(handle).st_nlink:
            return os.fdopen(handle, "wb"), name
        os.close(handle)  # Removed as if abandoned, before it was locked.


def _remove_abandoned(folder: Path) -> None:
    """Remove half-written files of processes that are no more: nobody has them locked."""
    if fcntl is None:
        return
    for path in folder.glob(f".*{_PARTIAL}"):
        with contextlib.suppress(OSError), path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Any]:
    """A file beside `path` that takes its place at the end, or is gone; errors name `path`.

    What a process that was killed left there goes when the next one writes to the folder.
    """
    _remove_abandoned(path.parent)
    made, name = _partial(path)
    try:
        with made as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        # As a file that `open` makes: mkstemp's is for its owner alone.
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(name, 0o666 & ~mask)
        os.replace(name, path)
    except BaseException as error:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
        if isinstance(error, OSError) and error.errno is not None and error.filename is None:
            # A full disk says so of a descriptor alone.
            error.filename = os.fspath(path)
        raise


def check_apart(out: Path, source: Path, where: str) -> None:
    """ValueError if files are to be replaced that are read, by whatever path or link.

    Args:
      out: a file, or a folder with the files in it.
      source: likewise.
      where: how the error begins.
    """
    if _identities(out) & _identities(source):
        raise ValueError(f"{where}{out} is what is read; write to another place")


def _identities(path: Path) -> set[tuple[int, int]]:
    """Of a path and, of a folder, the files in it: what is the same for all links."""
    files = [file for file in path.iterdir() if file.is_file()] if path.is_dir() else []
    facts = [one.stat() for one in (path, *files) if one.exists()]
    return {(one.st_dev, one.st_ino) for one in facts}


@dataclasses.dataclass(frozen=True)
class Reader:
    """A file whose header has been checked.

    Attributes:
      path: of the file.
      metadata: of the header.
      tensors: names, each with dtype, shape and first byte.
      content: the file, mapped.
    """

    path: Path
    metadata: Mapping[str, str]
    tensors: Mapping[str, tuple[np.dtype, tuple[int, ...], int]]
    content: np.ndarray

    @classmethod
    def open(cls, path: Path) -> "Reader":
        """Check a file; nothing of its tensors is read.

        Raises:
          FileNotFoundError: there is none.
          ValueError: it is damaged or cut short, no safetensors file, or has a dtype unknown here.
        """
        if not path.is_file():
            raise FileNotFoundError(f"checkpoint: no file at {path}")
        try:
            # Lengths, offsets and sizes: all of it is checked there before anything is believed.
            with safetensors.safe_open(str(path), framework="numpy") as checked:
                metadata = checked.metadata() or {}
        except (safetensors.SafetensorError, OSError, ValueError) as error:
            raise ValueError(f"checkpoint: {path} is no whole safetensors file: {error}") from error
        content = np.memmap(path, np.uint8, mode="r")
        start = 8 + int.from_bytes(content[:8].tobytes(), "little")
        header = json.loads(content[8:start].tobytes())
        header.pop(_METADATA, None)
        tensors = {}
        for name, facts in header.items():
            check_name(name, f"checkpoint: {path}")
            if facts["dtype"] not in _DTYPES:
                raise ValueError(
                    f"checkpoint: {path}: {name} has dtype={facts['dtype']}, which is not known; "
                    f"known: {', '.join(_DTYPES)}"
                )
            dtype, shape = np.dtype(_DTYPES[facts["dtype"]]), tuple(facts["shape"])
            if math.prod(max(size, 1) for size in shape) * dtype.itemsize > sys.maxsize:
                # Of no bytes, since an axis is empty, but of a shape that no array can have.
                raise ValueError(f"checkpoint: {path}: {name} has shape={shape}, which is damaged")
            tensors[name] = dtype, shape, start + facts["data_offsets"][0]
        return cls(path, metadata, tensors, content)

    def nbytes(self, name: str) -> int:
        """Bytes of one tensor."""
        dtype, shape, _ = self.facts(name)
        return math.prod(shape) * dtype.itemsize

    def facts(self, name: str) -> tuple[np.dtype, tuple[int, ...], int]:
        """Of one tensor, what `tensors` has; ValueError if it is not there."""
        if name not in self.tensors:
            raise ValueError(f"checkpoint: {self.path} has no tensor {name!r}")
        return self.tensors[name]

    def read(self, name: str) -> np.ndarray:
        """One tensor; a view of the file."""
        dtype, shape, first = self.facts(name)
        count = math.prod(shape) * dtype.itemsize
        return self.content[first : first + count].view(dtype).reshape(shape)
