"""A checkpoint's folder: the file of each tensor, and what is said of them all."""

import json
from pathlib import Path, PurePath
from typing import Any

from mx_jax.checkpoint.safetensors_file import Reader
from mx_jax.checkpoint.shards import INDEX, check_whole

_READ = "checkpoint.read"


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
    named = read_table(index, _READ).get("weight_map")
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
        found = read_table(folder / "config.json", _READ)
    if "quantization_config" not in found and (folder / "hf_quant_config.json").is_file():
        stated = read_table(folder / "hf_quant_config.json", _READ).get("quantization") or {}
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
