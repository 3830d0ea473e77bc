"""A checkpoint in several files with an index, written so that it can be taken up again."""

import hashlib
import itertools
import json
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Literal

from mx_jax.checkpoint.safetensors_file import Entry, Reader, header_of, replacing, write

INDEX = "model.safetensors.index.json"
# Whether files of an earlier call are kept: never, after comparing every value, or by the word of
# a caller who knows that what it was asked is the same.
Resume = bool | Literal["vouched"]
_SHARD = re.compile(r"model-(\d{5})-of-(\d{5})(-[0-9a-f]{8})?\.safetensors")


def check_sizes(largest: int | None, resume: Resume, where: str) -> None:
    """ValueError for a size of files that is none, or something to resume where there is one."""
    if resume not in (False, True, "vouched"):
        raise ValueError(f"{where}: resume={resume!r} must be True, False or 'vouched'")
    if largest is not None and largest < 1:
        raise ValueError(f"{where}: max_shard_size={largest} must be positive")
    if resume and largest is None:
        raise ValueError(f"{where}: resume needs several files; give max_shard_size")


def write_shards(
    folder: Path,
    entries: Mapping[str, Entry],
    metadata: Callable[[Collection[str]], Mapping[str, str]],
    *,
    largest: int,
    resume: Resume,
    step: Callable[[str, int], None],
    group: Callable[[str], str] = str,
) -> None:
    """Write files of up to `largest` bytes of tensors, and an index of them.

    Each file appears when it is whole, the index when all are: a folder without one is not whole,
    and is not read. Over an earlier checkpoint the files get names of their own, and its index is
    replaced at the end: at any moment the folder holds all of the old one or all of the new one.
    Files that the new index does not name are then removed.

    Args:
      folder: made if it is not there.
      entries: tensors by name; one at a time is in memory.
      metadata: of a file's header, by the names of its tensors.
      largest: bytes of a file's tensors; a larger tensor has a file of its own.
      resume: whether to keep files that an earlier call left, if they have the same tensors of the
        same values; of what is vouched for, only a file's first is fetched and compared.
      step: told each tensor's name and bytes once it is there.
      group: from a tensor's name to what it belongs to: neighbours of one group share a file.

    Raises:
      ValueError: as `write` does.
    """
    folder.mkdir(parents=True, exist_ok=True)
    index, before = folder / INDEX, set[str]()
    tag = ""
    if index.is_file():
        text = index.read_bytes()
        # The same for a call that takes up an interrupted one.
        tag = "-" + hashlib.sha256(text).hexdigest()[:8]
        before = {name for name in files_of(text) if _SHARD.fullmatch(name)}
    shards = _cut(entries, largest, group)
    named: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        stem = f"model-{number:05}-of-{len(shards):05}"
        path, said = folder / f"{stem}{tag}.safetensors", metadata(shard)
        compared = 1 if resume == "vouched" else len(shard)
        known = [path, *(folder / name for name in sorted(before) if name.startswith(stem))]
        there = [own for own in known if resume and _is_there(own, shard, said, compared)]
        if there:
            path = there[0]
            for name, entry in shard.items():
                step(name, entry.nbytes)
        else:
            write(path, shard, said, step)
        named |= dict.fromkeys(shard, path.name)
    total = sum(entry.nbytes for entry in entries.values())
    listed = {"metadata": {"total_size": total}, "weight_map": named}
    with replacing(index) as file:
        file.write(json.dumps(listed, indent=2).encode())
    for stale in folder.glob("model-*.safetensors"):
        if _SHARD.fullmatch(stale.name) and stale.name not in named.values():
            stale.unlink()


def files_of(index: bytes) -> set[str]:
    """The files that an index names; none of a damaged one."""
    try:
        named = json.loads(index)["weight_map"].values()
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return set()
    return {name for name in named if isinstance(name, str)}


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


def check_whole(files: list[Path], where: str) -> None:
    """ValueError for files of a checkpoint that has no index, if some of them are missing."""
    found: dict[str, set[str]] = {}
    for file in files:
        shard = _SHARD.fullmatch(file.name)
        if shard is not None:
            found.setdefault(shard[2], set()).add(shard[1])
    for count, numbers in found.items():
        if len(numbers) < int(count):
            raise ValueError(
                f"{where}: {len(numbers)} of {int(count)} files are there and no {INDEX}: it was "
                "not written to its end; write it again, or with resume=True"
            )
