"""A checkpoint in one file, or in several with an index: an earlier one stands until it is whole.

The index is what readers go by. Files of tensors get names that the earlier index does not have, so
the moment at which the new index takes its place is the one at which the checkpoint changes.
"""

import itertools
import json
import os
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Literal

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
    step: Callable[[str, int], None],
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
      step: told each tensor's name and bytes once it is there.
      group: from a tensor's name to what it belongs to: neighbours of one group share a file.

    Raises:
      ValueError: as `write` does; or `model.safetensors` beside an index of other files.
    """
    if largest is None:
        if path.name == WHOLE and _named(path.parent) - {WHOLE}:
            raise ValueError(
                f"checkpoint: {path.parent} has an {INDEX} of other files, which readers of the "
                f"folder would go by; write to another folder, or remove {INDEX} and its files"
            )
        write(path, entries, metadata(entries), step)
        return
    path.mkdir(parents=True, exist_ok=True)
    _keep_earlier(path)
    shards = _cut(entries, largest, group)
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
    total = sum(entry.nbytes for entry in entries.values())
    _commit(path, {"metadata": {"total_size": total}, "weight_map": named})


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
        reader.read(name).tobytes() == entry.fetch().tobytes()
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
