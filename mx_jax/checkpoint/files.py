"""safetensors files, one or several with an index, written and read one tensor at a time.

The package of that name checks what is read. It writes only what is in memory whole, so writing is
done here. Files get names that the earlier index does not have: the checkpoint changes at the
moment at which the new index takes its place.
"""

import contextlib
import dataclasses
import itertools
import json
import math
import os
import re
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path, PurePath
from typing import Any, Literal

import jax
import ml_dtypes
import numpy as np
import safetensors
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

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
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_METADATA = "__metadata__"
# Tensors start at multiples of it.
_ALIGNMENT = 8
# Suffix of files that are not complete yet.
_PARTIAL = ".mx_jax-partial"

INDEX = "model.safetensors.index.json"
WHOLE = "model.safetensors"
NUMBERED = re.compile(r"model-(\d{5})-of-(\d{5})(?:-\d+)?\.safetensors")
# Whether complete files of an interrupted call are reused: never, after comparing every value, or
# ("vouched") after comparing the first, where the caller knows that the arguments were the same.
Resume = bool | Literal["vouched"]
# Called with a tensor's name and its bytes once they are done.
Step = Callable[[str, int], None]


def check_name(name: str, where: str) -> None:
    """ValueError for a tensor's name that a terminal would take for a command, or a line's end."""
    if not name.isprintable():
        raise ValueError(f"{where}: a tensor is called {name!r}: no name, but control characters")


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
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def kind(self) -> str:
        """The format's name of its dtype."""
        return DTYPE_NAMES[self.dtype]

    def __array__(self, dtype: np.dtype | None = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.fetch(), dtype=dtype)

    def __str__(self) -> str:
        return f"{self.kind}{list(self.shape)}"


def deferred(make: Callable[[], Any], like: object) -> Any:
    """`like` with an Entry for each array: `make` gives them when the first one is written."""
    # Each array is handed out once; asked for again, it is made again.
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
            file.write(np.ascontiguousarray(tensor).reshape(-1).view(np.uint8))
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
        begin, end = end, end + entry.nbytes
        header[name] = {
            "dtype": DTYPE_NAMES[entry.dtype],
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


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Any]:
    """A file beside `path` that takes its place at the end, or is gone; errors name `path`."""
    # What a process that was killed left there, so that nobody has it locked, goes when the next
    # one writes to the folder.
    if fcntl is not None:
        for left in path.parent.glob(f".*{_PARTIAL}"):
            with contextlib.suppress(OSError), left.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                left.unlink()
    try:
        made, name = _partial(path)
    except OSError as error:
        error.filename = os.fspath(path)
        raise
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
            # Where the disk is full, the error names no file.
            error.filename = os.fspath(path)
        raise


# Folders that this process has locked: a second lock of its own would wait for the first.
_LOCKED: set[tuple[int, int]] = set()


@contextlib.contextmanager
def only_writer(folder: Path, *, wait: bool = False) -> Iterator[None]:
    """Lock a folder for one process that writes to it; where another has: `wait`, or ValueError."""
    if fcntl is None:
        yield
        return
    handle = os.open(folder, os.O_RDONLY | (0 if wait else os.O_NOFOLLOW))
    facts = os.fstat(handle)
    own = {(facts.st_dev, facts.st_ino)} - _LOCKED
    try:
        try:
            if own:
                fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            # Before that another process may have moved it into its place.
            busy = not (wait or own <= _identities(folder))
        except OSError as error:  # others: no locks on that disk
            busy = isinstance(error, BlockingIOError)
        if busy:
            raise ValueError(f"another process is writing to {folder}; try again when it has ended")
        _LOCKED.update(own)
        yield
    finally:
        _LOCKED.difference_update(own)
        os.close(handle)


def check_apart(out: Path, source: Path, where: str) -> None:
    """ValueError if files are to be replaced that are read, by whatever path or link."""
    if _identities(out) & _identities(source):
        raise ValueError(f"{where}{out} is what is read; write to another place")


def _identities(path: Path) -> set[tuple[int, int]]:
    """Of a path and, of a folder, the files in it: what is the same for all links."""
    files = [file for file in path.iterdir() if file.is_file()] if path.is_dir() else []
    facts = [one.stat() for one in (path, *files) if one.exists()]
    return {(one.st_dev, one.st_ino) for one in facts}


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
            with safetensors.safe_open(str(path), framework="numpy") as checked:
                metadata = checked.metadata() or {}
        except (safetensors.SafetensorError, OSError, ValueError) as error:
            raise ValueError(f"checkpoint: {path} is no whole safetensors file: {error}") from error
        # A plain view: slices of a memmap are slow.
        content = np.asarray(np.memmap(path, np.uint8, mode="r"))
        start = 8 + int.from_bytes(content[:8].tobytes(), "little")
        header = json.loads(content[8:start].tobytes())
        header.pop(_METADATA, None)
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
            fetch = lambda x=stored, dtype=dtype, shape=shape: x.view(dtype).reshape(shape)  # noqa: E731
            tensors[name] = Entry(shape, dtype, fetch)
        return cls(path, metadata, tensors)

    def __getitem__(self, name: str) -> Entry:
        if name not in self.tensors:
            raise ValueError(f"checkpoint: {self.path} has no tensor {name!r}")
        return self.tensors[name]


# Several files ---------------------------------------------------------------------------------


def check_sizes(largest: int | None, resume: Resume, where: str) -> None:
    """ValueError for a size of files that is none, or something to resume where there is one."""
    if resume not in (False, True, "vouched"):
        raise ValueError(f"{where}: resume={resume!r} must be True, False or 'vouched'")
    if largest is not None and largest < 1:
        raise ValueError(f"{where}: max_shard_size={largest} must be positive")
    if resume and largest is None:
        raise ValueError(f"{where}: resume needs several files; give max_shard_size")


def write_files(
    path: Path,
    entries: Mapping[str, Entry],
    metadata: Callable[[Collection[str]], Mapping[str, str]],
    *,
    max_shard_size: int | None,
    resume: Resume,
    progress: bool,
    group: Callable[[str], str] = str,
) -> None:
    """Write a file, or files of up to `max_shard_size` bytes of tensors and an index of them."""
    # Each file appears when it is whole, the index when all are. Until then an earlier checkpoint
    # in the folder is read as it was; then its files go. Neighbours of one `group` share a file.
    if max_shard_size is None and path.name == WHOLE and _named(path.parent) - {WHOLE}:
        raise ValueError(
            f"checkpoint: {path.parent} has an {INDEX} of other files, which readers of the folder "
            f"would go by; write to another folder, or remove {INDEX} and its files"
        )
    total = sum(entry.nbytes for entry in entries.values())
    with progress_bar("write", total, progress) as step:
        if max_shard_size is None:
            write(path, entries, metadata(entries), step)
            return
        path.mkdir(parents=True, exist_ok=True)
        with only_writer(path, wait=True):
            if not (path / INDEX).is_file():
                # A checkpoint that is read without gets one: what comes beside it is no part of it.
                with contextlib.suppress(ValueError, FileNotFoundError):  # nothing that can be read
                    opened, _ = readers_of(path, "")
                    own = {name: reader.path.name for reader in opened for name in reader.tensors}
                    write_json(path / INDEX, {"weight_map": own})
            shards = _shards(entries, max_shard_size, group)
            named: dict[str, str] = {}
            for number, shard in enumerate(shards, 1):
                name = f"model-{number:05}-of-{len(shards):05}.safetensors"
                file = _write_shard(path, name, shard, metadata(shard), resume, step)
                named |= dict.fromkeys(shard, file)
            # The index takes the place of the earlier one, and what only that named is removed.
            whole, new = {WHOLE} & _named(path), set(named.values())
            write_json(path / INDEX, {"metadata": {"total_size": total}, "weight_map": named})
            for left in sorted(path.glob("*.safetensors")):
                is_own = NUMBERED.fullmatch(left.name) or left.name in whole
                if is_own and left.name not in new:
                    left.unlink()


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


def _write_shard(
    folder: Path,
    name: str,
    shard: Mapping[str, Entry],
    metadata: Mapping[str, str],
    resume: Resume,
    step: Step,
) -> str:
    """Write a shard, unless an equal one is there; returns the name of its file."""
    text = _header(shard, metadata)
    compared = list(shard.items())[: 1 if resume == "vouched" else None]
    like_it = sorted(folder.glob(name.replace(".", "*."))) if resume else []
    for there in filter(Path.is_file, like_it):
        with there.open("rb") as file:
            if file.read(len(text)) != text:
                continue
        try:
            reader = Reader.open(there)
        except ValueError:
            continue
        if all(
            np.asarray(reader[tensor]).tobytes() == np.asarray(entry).tobytes()
            for tensor, entry in compared
        ):
            for tensor, entry in shard.items():
                step(tensor, entry.nbytes)
            return there.name
    # The name, or with a number the first that no file has.
    stem = name.removesuffix(".safetensors")
    names = itertools.chain([name], (f"{stem}-{i}.safetensors" for i in itertools.count(2)))
    free = next(one for one in names if not os.path.lexists(folder / one))
    write(folder / free, shard, metadata, step)
    return free


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
    index, named = path / INDEX, None
    if index.is_file():
        named = read_table(index, "checkpoint.read").get("weight_map")
        if not isinstance(named, dict):
            raise ValueError(f"{where}: {INDEX} has no weight_map")
        for file in named.values():
            if not isinstance(file, str) or PurePath(file).name != file:
                raise ValueError(
                    f"{where}: {INDEX} names {file!r}, which is no file of this folder"
                )
        files = [path / file for file in sorted(set(named.values()))]
    else:
        files = sorted(path.glob("*.safetensors"))
        if not files:
            raise FileNotFoundError(f"{where}: no safetensors file in this folder")
    # Of numbered files none may be missing, or there twice.
    numbered: dict[str, list[str]] = {}
    for shard in filter(None, (NUMBERED.fullmatch(file.name) for file in files)):
        numbered.setdefault(shard[2], []).append(shard[1])
    for count, numbers in numbered.items():
        if len({*numbers}) < int(count) or len(numbers) > len({*numbers}):
            are = f"there and no {INDEX}" if named is None else f"named by {INDEX}"
            raise ValueError(
                f"{where}: {len(numbers)} of {int(count)} files are {are}: it was "
                "not written to its end; write it again, or with resume=True"
            )
    opened = {file.name: Reader.open(file) for file in files}
    if named is None:
        named = {}
        for file, reader in opened.items():
            for name in reader.tensors:
                if name in named:
                    raise ValueError(
                        f"{where}: {name} is in two files, {named[name]} and {file}, and no "
                        f"{INDEX} tells which counts; remove one"
                    )
                named[name] = file
    found: dict[str, Entry] = {}
    for name, file in named.items():
        if name not in opened[file].tensors:
            raise ValueError(f"{where}: {INDEX} says that {name} is in {file}, which has no such")
        found[name] = opened[file].tensors[name]
    return [*opened.values()], found


# Beside the tensors ----------------------------------------------------------------------------


def read_table(path: Path, where: str) -> dict[str, Any]:
    """A JSON file's table; ValueError, which begins with `where`, if it holds none."""
    try:
        found = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: {path} is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{where}: {path} holds no table, got {type(found).__name__}")
    return found


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
