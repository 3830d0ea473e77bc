"""safetensors files, one or several with an index, written and read one tensor at a time.

The package of that name checks what is read. It writes only what is in memory whole, so writing is
done here. Several files get names that no other checkpoint had: it changes at the moment at which
the new index takes its place.
"""

import contextlib
import dataclasses
import functools
import glob
import itertools
import json
import math
import numbers
import os
import re
import secrets
import shutil
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path, PurePath
from typing import Any

import jax
import ml_dtypes
import numpy as np
import safetensors
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from mx_jax.codecs import packing

# The format's dtypes, by its names for them.
DTYPES = {
    "BOOL": np.dtype(np.bool_),
    **{
        f"{kind}{bits}": np.dtype(f"{kind.lower()}{bits // 8}")
        for bits in (8, 16, 32, 64)
        for kind in "UI"
    },
    **{f"F{bits}": np.dtype(f"f{bits // 8}") for bits in (16, 32, 64)},
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "F8_E4M3FNUZ": np.dtype(ml_dtypes.float8_e4m3fnuz),
    "F8_E5M2FNUZ": np.dtype(ml_dtypes.float8_e5m2fnuz),
    "F4": np.dtype(ml_dtypes.float4_e2m1fn),
    "F6_E2M3": np.dtype(ml_dtypes.float6_e2m3fn),
    "F6_E3M2": np.dtype(ml_dtypes.float6_e3m2fn),
    "C64": np.dtype(np.complex64),
}
# Bits of those that a file packs, little-endian; in memory each code has a byte.
PACKED_BITS = {DTYPES[name]: int(name[1]) for name in ("F4", "F6_E2M3", "F6_E3M2")}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_METADATA = "__metadata__"
# Tensors start at multiples of it.
_ALIGNMENT = 8

INDEX = "model.safetensors.index.json"
WHOLE = "model.safetensors"
# With what makes a later checkpoint's names its own before the numbers, where others that go by
# names expect it; behind them it was before.
NUMBERED = re.compile(r"model-([0-9a-f]{8}-)?(\d{5})-of-(\d{5})(?:-\d+)?\.safetensors")
# Suffix of what is not complete yet.
_PARTIAL = ".mx_jax-partial"
# Called with a tensor's name and its bytes once they are done.
Step = Callable[[str, int], None]


def check_name(name: str, where: str) -> None:
    """ValueError for a tensor's name that a terminal would take for a command, or a line's end."""
    if not name.isprintable():
        raise ValueError(f"{where}: a tensor is called {name!r}: no name, but control characters")


# Files that appear whole ----------------------------------------------------------------------


def partial(path: Path) -> Path:
    """Where a file or folder is made before it takes its place: beside it, under a new name."""
    remove_partial(path.parent, f".{glob.escape(path.name)}")
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}{_PARTIAL}")


def remove_partial(folder: Path, start: str) -> None:
    """Remove what processes left that were killed; one that still writes it ends with an error."""
    for left in folder.glob(f"{start}.{'[0-9a-f]' * 8}{_PARTIAL}"):
        with contextlib.suppress(OSError):
            shutil.rmtree(left) if left.is_dir() else left.unlink()


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Any]:
    """A file beside `path` that takes its place at the end, or is gone; errors name `path`."""
    path = Path(os.path.realpath(path))  # A link stays, as with `open`.
    made = partial(path)
    try:
        with made.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(made, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            made.unlink()
        named = (None, os.fspath(made))  # None where the disk is full
        if isinstance(error, OSError) and error.errno is not None and error.filename in named:
            error.filename = os.fspath(path)
        raise


# One file --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class Entry:
    """A tensor of a file, read or to be written: `fetch` makes it when its turn comes."""

    shape: tuple[int, ...]
    dtype: np.dtype
    fetch: Callable[[], Any]

    @classmethod
    def of(cls, array: "np.ndarray | jax.Array | Entry") -> "Entry":
        """Of an array, on whatever device, or of what is one already."""
        if isinstance(array, Entry):
            return array
        return cls(tuple(array.shape), np.dtype(array.dtype), lambda: array)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * _bits(self.dtype) // 8

    @property
    def kind(self) -> str:
        """The format's name of its dtype."""
        return DTYPE_NAMES[self.dtype]

    def __array__(self, dtype: np.dtype | None = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.fetch(), dtype=dtype)

    def __str__(self) -> str:
        return f"{self.kind}{list(self.shape)}"


def _bits(dtype: np.dtype) -> int:
    """Of an element in a file."""
    return PACKED_BITS.get(dtype, 8 * dtype.itemsize)


def deferred(make: Callable[[], Any], like: object) -> Any:
    """`like` with an Entry for each array: `make` gives them when the first one is written."""
    # Each array is handed out once; the second time it is made again.
    held: dict[int, np.ndarray] = {}

    def part(index: int) -> np.ndarray:
        if index not in held:
            held.update(enumerate(map(np.asarray, jax.tree.leaves(make()))))
        return held.pop(index)

    leaves, structure = jax.tree.flatten(like)
    entries = [
        Entry(tuple(leaf.shape), np.dtype(leaf.dtype), lambda index=index: part(index))
        for index, leaf in enumerate(leaves)
    ]
    return jax.tree.unflatten(structure, entries)


def write(
    path: Path, entries: Mapping[str, Entry], metadata: Mapping[str, str], step: Step
) -> None:
    """Write a file atomically: it appears under its name when it is complete."""
    text = _header(entries, metadata)
    with replacing(path) as file:
        file.write(text)
        for name, entry in entries.items():
            tensor = np.asarray(entry)
            if tensor.shape != entry.shape or tensor.dtype != entry.dtype:
                raise ValueError(
                    f"checkpoint: {name} changed while it was written: announced "
                    f"{entry.dtype}{list(entry.shape)}, got {tensor.dtype}{list(tensor.shape)}"
                )
            stored = np.ascontiguousarray(tensor).reshape(-1).view(np.uint8)
            bits = PACKED_BITS.get(tensor.dtype)
            file.write(stored if bits is None else packing.pack(stored, bits))
            step(name, entry.nbytes)


def _header(entries: Mapping[str, Entry], metadata: Mapping[str, str]) -> bytes:
    header: dict[str, Any] = {_METADATA: dict(metadata)}
    end = 0
    for name, entry in entries.items():
        check_name(name, "checkpoint")
        if name == _METADATA:
            raise ValueError(f"checkpoint: a tensor is called {name!r}, as metadata are; rename it")
        if entry.dtype not in DTYPE_NAMES:
            raise ValueError(
                f"checkpoint: {name} has dtype={entry.dtype}, which safetensors cannot hold; "
                f"cast it, or keep it elsewhere; it holds {', '.join(map(str, DTYPE_NAMES))}"
            )
        if math.prod(entry.shape) * _bits(entry.dtype) % 8:
            raise ValueError(
                f"checkpoint: {name} of dtype={entry.dtype}, shape={entry.shape} fills no whole "
                "bytes, which safetensors needs; cast it, or pad it"
            )
        begin, end = end, end + entry.nbytes
        header[name] = {
            "dtype": DTYPE_NAMES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


@dataclasses.dataclass(frozen=True)
class Reader:
    """A file whose header has been checked; its tensors are views of the file, which is mapped."""

    path: Path
    metadata: Mapping[str, str]
    tensors: Mapping[str, Entry]

    @classmethod
    def open(cls, path: Path) -> "Reader":
        """Check a file; nothing of its tensors is read."""
        if not path.is_file():
            raise FileNotFoundError(f"checkpoint: no file at {path}")
        path.open("rb").close()  # For safetensors there is no file where one may not be read.
        try:
            # Lengths, offsets and sizes: all of it is checked there before anything is believed.
            with safetensors.safe_open(str(path), framework="numpy"):
                pass
        except (safetensors.SafetensorError, OSError, ValueError) as error:
            raise ValueError(f"checkpoint: {path} is no whole safetensors file: {error}") from error
        # A plain view: slices of a memmap are slow.
        content = np.asarray(np.memmap(path, np.uint8, mode="r"))
        start = 8 + int.from_bytes(content[:8].tobytes(), "little")
        header = json.loads(content[8:start].tobytes())
        # Of the same file as what follows: the checked one may be replaced by now.
        metadata = header.pop(_METADATA, None) or {}
        tensors = {}
        for name, facts in header.items():
            check_name(name, f"checkpoint: {path}")
            if facts["dtype"] not in DTYPES:
                raise ValueError(
                    f"checkpoint: {path}: {name} has dtype={facts['dtype']}, which is not known; "
                    f"known: {', '.join(DTYPES)}"
                )
            dtype, shape = DTYPES[facts["dtype"]], tuple(facts["shape"])
            elements = math.prod(max(size, 1) for size in shape)  # an axis may be empty
            if elements * dtype.itemsize > sys.maxsize or len(shape) > 64:  # NumPy's limits
                raise ValueError(f"checkpoint: {path}: {name} has shape={shape}, which is damaged")
            stored = content[start:][slice(*facts["data_offsets"])]
            tensors[name] = Entry(shape, dtype, functools.partial(_array, stored, dtype, shape))
        return cls(path, metadata, tensors)

    def __getitem__(self, name: str) -> Entry:
        if name not in self.tensors:
            raise ValueError(f"checkpoint: {self.path} has no tensor {name!r}")
        return self.tensors[name]


def _array(stored: np.ndarray, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    """The tensor of a file's bytes: a view, but of codes that are packed."""
    if (bits := PACKED_BITS.get(dtype)) is not None:
        stored = np.asarray(packing.unpack(stored, bits, math.prod(shape)))
    return stored.view(dtype).reshape(shape)


# Several files ---------------------------------------------------------------------------------


def check_size(largest: int | None, where: str) -> None:
    """ValueError for a size of files that is none."""
    if largest is not None and not (isinstance(largest, numbers.Real) and largest >= 1):
        raise ValueError(
            f"{where}: max_shard_size={largest!r} must be positive, a number of bytes as 5 * 10**9"
        )


def write_files(
    path: Path,
    entries: Mapping[str, Entry],
    metadata: Callable[[Collection[str]], Mapping[str, str]],
    *,
    max_shard_size: int | None,
    progress: bool,
    group: Callable[[str], str] = str,
) -> None:
    """Write a file, or files of up to `max_shard_size` bytes of tensors and an index of them."""
    total = sum(entry.nbytes for entry in entries.values())
    with progress_bar("write", total, progress) as step:
        if max_shard_size is None:
            check_alone(path)
            if path.name == WHOLE and _named(path.parent):  # It tells of tensors that may go.
                (path.parent / INDEX).unlink()
            write(path, entries, metadata(entries), step)
            return
        path.mkdir(parents=True, exist_ok=True)
        _write_shards(path, _shards(entries, max_shard_size, group), metadata, step)


def check_alone(path: Path) -> None:
    """ValueError for a folder's one file beside the index of others."""
    if path.name == WHOLE and _named(path.parent) - {WHOLE}:
        raise ValueError(
            f"checkpoint: {path.parent} has an {INDEX} of other files, which readers of the folder "
            f"would go by; write to another folder, or remove {INDEX} and its files"
        )


def _write_shards(
    folder: Path,
    shards: list[dict[str, Entry]],
    metadata: Callable[[Collection[str]], Mapping[str, str]],
    step: Step,
) -> None:
    """Write files and their index: until that takes its place, an earlier checkpoint is read."""
    # What was never finished goes first, or a full disk would stay full. An index that is damaged
    # may be mended, and name any of the files.
    names = [file.name for file in folder.glob("*.safetensors")]
    numbered = [name for name in names if NUMBERED.fullmatch(name)]
    earlier = _named(folder)
    if not earlier:
        stopped = [] if (folder / INDEX).is_file() else _incomplete(numbered)
        whole = {*numbered}.difference(*(part for _, part in stopped))
        earlier = _replaced(whole)
    for name in {*numbered} - earlier:
        (folder / name).unlink()
    remove_partial(folder, ".model-*")
    mark = f"{secrets.token_hex(4)}-" if earlier else ""
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{mark}{number:05}-of-{len(shards):05}.safetensors"
        write(folder / name, shard, metadata(shard), step)
        weight_map |= dict.fromkeys(shard, name)
    new = {*weight_map.values()}
    if gone := [name for name in sorted(new) if not (folder / name).is_file()]:
        raise ValueError(
            f"checkpoint: {folder / gone[0]} was removed before all was written, as another that "
            "writes to the folder would; the checkpoint stays as it was; save again"
        )
    total = sum(entry.nbytes for shard in shards for entry in shard.values())
    write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    for name in {*numbered, WHOLE} - new:
        (folder / name).unlink(missing_ok=True)


def _replaced(names: set[str]) -> set[str]:
    """Of numbered files without an index, those of the earlier save."""
    # Marked names replace others: beside those they are of a save that was killed.
    matches = filter(None, map(NUMBERED.fullmatch, names))
    return {match[0] for match in matches if not match[1]} or names


def _incomplete(names: Iterable[str]) -> list[tuple[int, list[str]]]:
    """Numbered files by how many there should be, where one is missing, or there twice."""
    # Each save by itself: what was stopped does not make an earlier one incomplete.
    numbered: dict[tuple[str | None, str], list[re.Match[str]]] = {}
    for match in filter(None, map(NUMBERED.fullmatch, names)):
        numbered.setdefault((match[1], match[3]), []).append(match)
    return [
        (int(count), [match[0] for match in matches])
        for (_, count), matches in numbered.items()
        if not int(count) <= len({match[2] for match in matches}) == len(matches)
    ]


def _shards(
    entries: Mapping[str, Entry], max_shard_size: int, group: Callable[[str], str]
) -> list[dict[str, Entry]]:
    """The tensors in order, cut where a file would become too large; one file at least."""
    shards: list[dict[str, Entry]] = [{}]
    held = 0
    for _, names in itertools.groupby(entries, group):
        part = {name: entries[name] for name in names}
        size = sum(entry.nbytes for entry in part.values())
        if shards[-1] and held + size > max_shard_size:
            shards.append({})
            held = 0
        shards[-1] |= part
        held += size
    return shards


def _named(folder: Path) -> set[str]:
    """Files that a folder's index names; none where it has none, or a damaged one."""
    try:
        return set(json.loads((folder / INDEX).read_bytes())["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return set()


def readers_of(path: Path, where: str) -> tuple[list[Reader], dict[str, Entry]]:
    """The files of a checkpoint, and its tensors."""
    if not path.is_dir():
        reader = Reader.open(path)
        return [reader], dict(reader.tensors)
    index, named = path / INDEX, dict[str, Any]()
    if index.is_file():
        named = read_table(index, "checkpoint.read").get("weight_map")
        if not isinstance(named, dict):
            raise ValueError(f"{where}: {INDEX} has no weight_map")
        for file in named.values():
            if not isinstance(file, str) or PurePath(file).name != file:
                raise ValueError(
                    f"{where}: {INDEX} names {file!r}, which is no file of this folder"
                )
    files = sorted({path / file for file in named.values()} or path.glob("*.safetensors"))
    if not index.is_file():
        numbered = {file.name for file in files if NUMBERED.fullmatch(file.name)}
        # Beside one file for all they are of a save that was killed.
        kept = set[str]() if path / WHOLE in files else _replaced(numbered)
        files = [file for file in files if file.name not in numbered - kept]
    if not files and not index.is_file():
        raise FileNotFoundError(f"{where}: no safetensors file in this folder")
    for count, names in _incomplete(file.name for file in files):
        are = f"named by {INDEX}" if named else f"there and no {INDEX}"
        raise ValueError(
            f"{where}: {len(names)} of {count} files are {are}: it was not written to its end; "
            "write it again"
        )
    opened = {file.name: Reader.open(file) for file in files}
    entries: dict[str, Entry] = {}
    for file, reader in opened.items() if not named else ():
        for name in reader.tensors:
            if name in named:
                raise ValueError(
                    f"{where}: {name} is in two files, {named[name]} and {file}, and no {INDEX} "
                    "tells which counts; remove one"
                )
            named[name] = file
    for name, file in named.items():
        if name not in opened[file].tensors:
            raise ValueError(f"{where}: {INDEX} says that {name} is in {file}, which has no such")
        entries[name] = opened[file].tensors[name]
    return [*opened.values()], entries


# Beside the tensors ----------------------------------------------------------------------------


def read_table(path: Path, where: str) -> dict[str, Any]:
    """A JSON file's table; ValueError, which begins with `where`, if it holds none."""
    try:
        table = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: {path} is no JSON: {error}") from error
    if not isinstance(table, dict):
        raise ValueError(f"{where}: {path} holds no table, got {type(table).__name__}")
    return table


def write_json(path: Path, table: Mapping[str, Any]) -> None:
    """Write a JSON file atomically; arrays as lists."""
    with replacing(path) as file:
        text = json.dumps(table, indent=2, default=lambda array: array.tolist())
        file.write(text.encode() + b"\n")


@contextlib.contextmanager
def progress_bar(verb: str, total: int, shown: bool) -> Iterator[Step]:
    """Yields a function of a tensor's name and the bytes that are done; on stderr, or nowhere."""
    columns = TextColumn("{task.description:<40}"), BarColumn(), DownloadColumn()
    console = Console(stderr=True)
    with Progress(*columns, TimeRemainingColumn(), console=console, disable=not shown) as bar:
        task = bar.add_task(verb, total=total)
        yield lambda name, done: bar.update(task, description=f"{verb} {name}", advance=done)
