"""A checkpoint in one file, or in several with an index: an earlier one stands until it is whole.

The index is what readers go by. Files of tensors get names that the earlier index does not have, so
the moment at which the new index takes its place is the one at which the checkpoint changes.
"""

import contextlib
import itertools
import json
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any, Literal

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from mx_jax.checkpoint.safetensors_file import Entry, Reader, header_of, replacing, write

INDEX = "model.safetensors.index.json"
WHOLE = "model.safetensors"
# Whether files of an earlier call are kept: never, after comparing every value, or by the word of
# a caller who knows that what it was asked is the same.
Resume = bool | Literal["vouched"]
NUMBERED = re.compile(r"model-(\d{5})-of-(\d{5})(?:-\d+)?\.safetensors")


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
    largest: int | None,
    resume: Resume,
    progress: bool,
    group: Callable[[str], str] = str,
) -> None:
    """Write a file, or files of up to `largest` bytes of tensors and an index of them.

    Each file appears when it is whole, the index when all are. Until then an earlier checkpoint in
    the folder is read as it was; then its files `model.safetensors` and `model-...` go.

    Args:
      path: of the file; of the folder, which is made if it is not there.
      entries: tensors by name; one at a time is in memory.
      metadata: of a file's header, by the names of its tensors.
      largest: bytes of a file's tensors; a larger tensor has a file of its own. None: one file.
      resume: whether to keep files that an earlier call left, if they have the same tensors of the
        same values; of what is vouched for, only a file's first is fetched and compared.
      progress: whether to show a bar.
      group: from a tensor's name to what it belongs to: neighbours of one group share a file.

    Raises:
      ValueError: as `write` does; or `model.safetensors` beside an index of other files.
    """
    if largest is None and path.name == WHOLE and _named(path.parent) - {WHOLE}:
        raise ValueError(
            f"checkpoint: {path.parent} has an {INDEX} of other files, which readers of the folder "
            f"would go by; write to another folder, or remove {INDEX} and its files"
        )
    total = sum(entry.nbytes for entry in entries.values())
    with progress_bar("write", total, progress) as step:
        if largest is None:
            write(path, entries, metadata(entries), step)
            return
        path.mkdir(parents=True, exist_ok=True)
        _keep_earlier(path)
        named = _write_shards(path, _cut(entries, largest, group), metadata, resume, step)
    _commit(path, {"metadata": {"total_size": total}, "weight_map": named})


def _write_shards(
    path: Path,
    shards: Sequence[Mapping[str, Entry]],
    metadata: Callable[[Collection[str]], Mapping[str, str]],
    resume: Resume,
    step: Callable[[str, int], None],
) -> dict[str, str]:
    """The file of each tensor, all of them written, or kept where they are there."""
    named: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        said = metadata(shard)
        compared = 1 if resume == "vouched" else len(shard)
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        there = sorted(path.glob(name.replace(".", "*."))) if resume else []
        file = next((one for one in there if _is_there(one, shard, said, compared)), None)
        if file is None:
            file = path / _free(path, name)
            write(file, shard, said, step)
        else:
            for name, entry in shard.items():
                step(name, entry.nbytes)
        named |= dict.fromkeys(shard, file.name)
    return named


def _named(folder: Path) -> set[str]:
    """Files that a folder's index names; none where it has none, or a damaged one."""
    try:
        return set(json.loads((folder / INDEX).read_bytes())["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return set()


def _keep_earlier(folder: Path) -> None:
    """Give an index to a checkpoint that is read without: what comes beside it is no part of it."""
    files = sorted(folder.glob("*.safetensors"))
    if (folder / INDEX).is_file() or not files:
        return
    try:
        check_whole(files, "")
        tables = {file.name: Reader.open(file).tensors for file in files}
    except ValueError:
        return  # Nothing that could be read.
    _write_index(folder, {"weight_map": {t: name for name in tables for t in tables[name]}})


def _free(folder: Path, name: str) -> str:
    """The name, or with a number the first that no file has."""
    stem = name.removesuffix(".safetensors")
    names = itertools.chain([name], (f"{stem}-{i}.safetensors" for i in itertools.count(2)))
    return next(one for one in names if not os.path.lexists(folder / one))


def _commit(folder: Path, index: Mapping[str, object]) -> None:
    """Put the index in place of the earlier one, and remove what only that named."""
    whole = {WHOLE} & _named(folder)
    _write_index(folder, index)
    new = _named(folder)
    for file in sorted(folder.glob("*.safetensors")):
        if file.name not in new and (NUMBERED.fullmatch(file.name) or file.name in whole):
            file.unlink()


def _write_index(folder: Path, index: Mapping[str, object]) -> None:
    with replacing(folder / INDEX) as file:
        file.write(json.dumps(index, indent=2).encode())


def _cut(
    entries: Mapping[str, Entry], largest: int, group: Callable[[str], str]
) -> list[dict[str, Entry]]:
    """The tensors in order, cut where a file would become too large; one file at least."""
    shards: list[dict[str, Entry]] = [{}]
    held = 0
    for _, names in itertools.groupby(entries, group):
        part = {name: entries[name] for name in names}
        size = sum(entry.nbytes for entry in part.values())
        if shards[-1] and held + size > largest:
            shards.append({})
            held = 0
        shards[-1] |= part
        held += size
    return shards


def _is_there(
    path: Path, shard: Mapping[str, Entry], metadata: Mapping[str, str], compared: int
) -> bool:
    """Whether a file is what would be written, as far as its header and first tensors tell."""
    text = header_of(shard, metadata)
    if not path.is_file():
        return False
    with path.open("rb") as file:
        if file.read(len(text)) != text:
            return False
    try:
        reader = Reader.open(path)
    except ValueError:
        return False
    return all(
        reader.read(name).tobytes() == np.asarray(entry).tobytes()
        for name, entry in itertools.islice(shard.items(), compared)
    )


def check_whole(files: list[Path], where: str, are: str = f"there and no {INDEX}") -> None:
    """ValueError if numbered files are missing, or one is there twice; `are`: known how."""
    found: dict[str, list[str]] = {}
    for file in files:
        shard = NUMBERED.fullmatch(file.name)
        if shard is not None:
            found.setdefault(shard[2], []).append(shard[1])
    for count, numbers in found.items():
        if len({*numbers}) < int(count) or len(numbers) > len({*numbers}):
            raise ValueError(
                f"{where}: {len(numbers)} of {int(count)} files are {are}: it was "
                "not written to its end; write it again, or with resume=True"
            )


def readers_of(path: Path, where: str) -> tuple[list[Reader], dict[str, Reader]]:
    """The files of a checkpoint, and the one of each tensor."""
    if not path.is_dir():
        reader = Reader.open(path)
        return [reader], dict.fromkeys(reader.tensors, reader)
    index = path / INDEX
    if not index.is_file():
        files = sorted(path.glob("*.safetensors"))
        if not files:
            raise FileNotFoundError(f"{where}: no safetensors file in this folder")
        check_whole(files, where)
        opened = [Reader.open(file) for file in files]
        found: dict[str, Reader] = {}
        for reader in opened:
            for name in reader.tensors:
                if name in found:
                    raise ValueError(
                        f"{where}: {name} is in two files, {found[name].path.name} and "
                        f"{reader.path.name}, and no {INDEX} tells which counts; remove one"
                    )
                found[name] = reader
        return opened, found
    named = read_table(index, "checkpoint.read").get("weight_map")
    if not isinstance(named, dict):
        raise ValueError(f"{where}: {INDEX} has no weight_map")
    for file in named.values():
        if not isinstance(file, str) or PurePath(file).name != file:
            raise ValueError(f"{where}: {INDEX} names {file!r}, which is no file of this folder")
    check_whole([path / file for file in set(named.values())], where, f"named by {INDEX}")
    readers = {file: Reader.open(path / file) for file in sorted(set(named.values()))}
    for name, file in named.items():
        if name not in readers[file].tensors:
            raise ValueError(f"{where}: {INDEX} says that {name} is in {file}, which has no such")
    return [*readers.values()], {name: readers[file] for name, file in named.items()}


def config_of(path: Path) -> dict[str, Any]:
    """config.json, with ModelOpt's own file in its place for quantization."""
    folder = path if path.is_dir() else path.parent
    found: dict[str, Any] = {}
    if (folder / "config.json").is_file():
        found = read_table(folder / "config.json", "checkpoint.read")
    if "quantization_config" not in found and (folder / "hf_quant_config.json").is_file():
        stated = (
            read_table(folder / "hf_quant_config.json", "checkpoint.read").get("quantization") or {}
        )
        if not isinstance(stated, dict):
            raise ValueError(
                f"checkpoint.read: {folder / 'hf_quant_config.json'}: quantization is no table, "
                f"got {stated!r}"
            )
        found["quantization_config"] = {"quant_method": "modelopt"} | stated
    return found


def read_table(path: Path, where: str) -> dict[str, Any]:
    """A JSON file's table.

    Args:
      path: of the file.
      where: what reads it, for errors.

    Raises:
      ValueError: it is no JSON, or no table.
    """
    try:
        found = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: {path} is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{where}: {path} holds no table, got {type(found).__name__}")
    return found


@contextlib.contextmanager
def progress_bar(verb: str, total: int, shown: bool) -> Iterator[Callable[[str, int], None]]:
    """Yields a function of a tensor's name and the bytes that are done; on stderr, or nowhere."""
    columns = (TextColumn("{task.description:<40}"), BarColumn(), DownloadColumn())
    with Progress(
        *columns, TimeRemainingColumn(), console=Console(stderr=True), disable=not shown
    ) as bar:
        task = bar.add_task(verb, total=total)
        yield lambda name, done: bar.update(task, description=f"{verb} {name}", advance=done)
