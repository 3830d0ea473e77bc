"""Checkpoints gone through tensor by tensor: what is read, changed and written is one at a time."""

import argparse
import ctypes
import dataclasses
import errno
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from mx_jax import checkpoint
from mx_jax.checkpoint import files
from mx_jax.checkpoint.foreign import entries_of
from mx_jax.checkpoint.gguf import is_gguf
from mx_jax.checkpoint.layouts import LAYOUTS, Layout, hf_quant_config, named
from mx_jax.checkpoint.scales import real_pairs
from mx_jax.checkpoint.torchao import TORCHAO
from mx_jax.checkpoint.weights import Stored, Weights
from mx_jax.checkpoint.wire import put
from mx_jax.commands.output import Commands, add_parser, say, size, watched
from mx_jax.mxarray import MXArray

# The name of mx_jax's files among layouts.
MX_JAX = "mx_jax"
# What a model's folder holds beside its tensors.
_BESIDE = ("*.json", "*.jinja", "*.txt", "*.model", "LICENSE*")
# What describes tensors as they were: indices of files, and how weights were quantized.
_OF_TENSORS = ("*.index.json", "hf_quant_config.json")
_QUANTIZED = ("quantization_config", "compression_config")
# What a GGUF file says of its model, in the folder that its tensors are written to.
GGUF_FIELDS = "gguf.json"
# Files of a folder that the one in its place does not get.
_REPLACED = ("*.safetensors", *_OF_TENSORS, GGUF_FIELDS)


def add_command(
    commands: Commands,
    run: Callable[[argparse.Namespace], int],
    name: str,
    *inputs: str,
    help: str,
    text: str | None,
    writes: bool = False,
) -> argparse.ArgumentParser:
    """Add a command that reads checkpoints, named by `inputs`, and may write OUT."""
    parser = add_parser(commands, run, name, help=help, text=text)
    for each in inputs:
        parser.add_argument(
            each,
            metavar=each.upper(),
            type=Path,
            help="a safetensors or GGUF file, one that mx_jax wrote, or a folder of a model",
        )
    parser.add_argument(
        "--from",
        dest="layout",
        metavar="LAYOUT",
        help="read this layout and no other; for files that fit several",
    )
    if writes:
        parser.add_argument(
            "out",
            metavar="OUT",
            type=_output,
            help="the file to write, if its name ends with .safetensors; else a folder, to which a "
            "folder's config.json, tokenizer and the like come too, or what a GGUF file says",
        )
        parser.add_argument("--force", action="store_true", help="replace OUT if it is there")
        parser.add_argument(
            "--max-shard-size",
            "--shard-size",
            metavar="SIZE",
            help="write files of at most that, as 5GB, and their index, to the folder OUT",
        )
    return parser


def _output(text: str) -> Path:
    """A path; a trailing slash contradicts the name of a file."""
    if text.endswith("/") and is_file_name(Path(text)):
        raise argparse.ArgumentTypeError(
            f"{text} ends as a file, .safetensors, and as a folder, /; leave out one of them"
        )
    return Path(text)


def read(options: argparse.Namespace) -> Weights:
    """The tensors of IN."""
    return checkpoint.read(vars(options)["in"], layout=options.layout)


def as_it_is(one: Stored, value: object = None) -> Any:
    """A tensor to be written as it was read; it is read now where no header has its dtype."""
    if one.host is not None and one.dtype is not None:
        return files.Entry(one.shape, one.dtype, one.host)
    return files.deferred(one.fetch, one.fetch() if value is None else value)


def check_output(options: argparse.Namespace) -> None:
    """ValueError, before anything is read, for an OUT that is there unasked or has no folder."""
    out, source = options.out, vars(options)["in"]
    check_replaceable(out, source)
    if options.max_shard_size is not None:
        _nbytes(options.max_shard_size)
    is_folder = options.max_shard_size is not None or not is_file_name(out)
    if not out.parent.is_dir() or (out.exists() and out.is_dir() != is_folder):
        raise ValueError(f"{out} must be a file or a folder in a folder that is there")
    files.check_alone(out)
    is_empty = out.is_dir() and not any(out.iterdir())
    if os.path.lexists(os.path.realpath(out)) and not is_empty and not options.force:
        raise ValueError(_is_there(out))


def _is_there(path: Path) -> str:
    return f"{path} is there already; replace it with --force"


def check_replaceable(out: Path, source: Path) -> None:
    """ValueError for an output that is part of the input, or a folder whose files would be lost."""
    if _identities(out) & _identities(source):
        raise ValueError(f"{out} is what is read; write to another place")
    if out.exists() and not (out.is_file() or out.is_dir()):
        raise ValueError(f"{out} is a device or a pipe; name a file, or a new one")
    if out.is_dir() and (os.path.ismount(out) or out.samefile(Path.cwd())):
        raise ValueError(
            f"{out} is a mount point or the folder that you are in, and a new one cannot take its "
            "place; write to a folder in it"
        )
    if out.is_dir() and not os.access(out, os.W_OK):
        raise ValueError(f"{out} is read-only; write to another place")
    for path in out.iterdir() if out.is_dir() else ():
        if path.is_dir():
            raise ValueError(f"{out} holds a folder, {path.name}; write to another place")
        if (
            path.suffix == ".safetensors"
            and path.name != files.WHOLE
            and not files.NUMBERED.match(path.name)
        ):
            raise ValueError(f"{out} holds other tensors, in {path.name}; write to another place")


def _identities(path: Path) -> set[tuple[int, int]]:
    """Of a path and, of a folder, the files in it: the same for all links to a file."""
    files = [file for file in path.iterdir() if file.is_file()] if path.is_dir() else []
    facts = [os.stat(file) for file in (path, *files) if file.exists()]
    return {(each.st_dev, each.st_ino) for each in facts}


_RENAME_EXCHANGE, _AT_FDCWD = 2, -100


def _move_into_place(made: Path, out: Path, force: bool) -> None:
    """Replace a folder by a complete one, in one step where the system can exchange folders."""
    try:
        made.rename(out)  # where there is none, or an empty one
        return
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise
        if not force:  # Another process has filled it meanwhile.
            raise ValueError(_is_there(out)) from None
    # Its files that are no tensors, and that the new one lacks, are linked into that.
    for path in out.iterdir():
        is_replaced = any(path.match(pattern) for pattern in _REPLACED)
        if not is_replaced and not (made / path.name).exists():
            try:
                os.link(path, made / path.name)
            except OSError:  # no hard links there
                shutil.copy2(path, made / path.name)
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
        names = (os.fsencode(made), os.fsencode(out))
        done = rename(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0
    except (AttributeError, OSError):  # not Linux
        done = False
    if not done:
        apart = made.with_name(f"{made.name}.before")
        out.rename(apart)
        try:
            made.rename(out)
        except BaseException:
            if not out.exists():
                apart.rename(out)
            raise
        apart.rename(made)
    shutil.rmtree(made)


def is_file_name(out: Path) -> bool:
    """Whether OUT names a file; else it is a folder."""
    return out.suffix == ".safetensors" and not out.is_dir()


def check_layout(tensors: Mapping[str, Any], layout: str, *, values: bool = False) -> None:
    """ValueError for tensors that `write_out` would refuse; `values`: each one is made."""
    written: Any = tensors
    if layout != MX_JAX:
        written, _ = entries_of(tensors, layout)
    for part in jax.tree.leaves(written) if values else ():
        np.asarray(part)


def write_out(
    options: argparse.Namespace,
    weights: Weights,
    tensors: Mapping[str, Any],
    layout: str | None = None,
    to: str | None = None,
) -> str:
    """Write tensors one at a time, and say what bytes they took and take."""
    out, largest, stated = Path(os.path.realpath(options.out)), options.max_shard_size, None
    if layout in {row.name for row in LAYOUTS}:
        program = to if to in programs() else None
        stated = checkpoint.quantization_config(tensors, layout=layout, program=program)
    if largest is None and is_file_name(out):
        _write_tensors(options, out, weights, tensors, layout)
    else:
        # The folder appears when it is complete, made beside its place.
        made = files.partial(out)
        made.mkdir()
        try:
            path = made / files.WHOLE if largest is None else made
            _write_tensors(options, path, weights, tensors, layout)
            _write_beside(weights, made, out, stated)
            _move_into_place(made, out, options.force)
        except BaseException:
            shutil.rmtree(made, ignore_errors=True)
            raise
    written = options.out.glob("*.safetensors") if options.out.is_dir() else [options.out]
    after = sum(file.stat().st_size for file in written)
    return f"{size(stored_bytes(weights))} -> {size(after)}"


def _write_tensors(
    options: argparse.Namespace,
    path: Path,
    weights: Weights,
    tensors: Mapping[str, Any],
    layout: str | None,
) -> None:
    """The file, or a folder's files and their index."""
    largest, paths = options.max_shard_size, weights.metadata.get("paths")
    how: dict[str, Any] = {
        "max_shard_size": None if largest is None else _nbytes(largest),
        "progress": watched(),
    }
    if layout == MX_JAX or (layout is None and paths is not None):
        tree: dict[Any, Any] = {}
        for name, tensor in tensors.items():
            put(tree, paths[name] if paths else (name,), tensor, f"{path}")
        for keys in weights.metadata["empty"] if paths is not None else ():
            put(tree, keys, {}, f"{path}")
        checkpoint.save(path, tree, **how)
    elif layout is not None:
        checkpoint.write(path, tensors, layout=layout, **how)
    else:  # arrays that any reader reads
        entries = {name: files.Entry.of(tensor) for name, tensor in tensors.items()}
        files.write_files(path, entries, lambda _: {"format": "pt"}, **how)


def _write_beside(
    weights: Weights, made: Path, out: Path, stated: Mapping[str, Any] | None
) -> None:
    """Write what a folder has beside tensors; `stated`: its `quantization_config`."""
    if weights.path.is_dir():
        for path in sorted({path for pattern in _BESIDE for path in weights.path.glob(pattern)}):
            if any(path.match(pattern) for pattern in _OF_TENSORS) or not path.is_file():
                continue
            if path.name == "config.json":
                _write_config(path, made, stated)
            else:
                with files.replacing(made / path.name) as file:
                    file.write(path.read_bytes())
        # ModelOpt's loaders read a second file as well.
        if stated is not None and "quant_algo" in stated:
            files.write_json(made / "hf_quant_config.json", hf_quant_config(stated))
    elif is_gguf(weights.path):
        files.write_json(made / GGUF_FIELDS, weights.metadata)
    if (out / "config.json").is_file() and not (made / "config.json").is_file():
        # It stays, and may not speak of tensors that are gone.
        _write_config(out / "config.json", made, stated)


def _write_config(path: Path, out: Path, stated: Mapping[str, Any] | None) -> None:
    config = files.read_table(path, "checkpoint.read")
    kept = {key: value for key, value in config.items() if key not in _QUANTIZED}
    kept |= {} if stated is None else {"quantization_config": dict(stated)}
    files.write_json(out / path.name, kept)


def _nbytes(text: str) -> int:
    match = re.fullmatch(r"(\d{1,15}(?:\.\d+)?) ?([kKMGT]?)B?", text)
    thousands = 0 if match is None else " KMGT".index(match[2].upper() or " ")
    size = 0 if match is None else int(float(match[1]) * 1000**thousands)
    if match is None or size < 1:
        raise ValueError(f"--max-shard-size needs a size as 5GB, got {text!r}")
    return size


def stored_bytes(weights: Weights, names: Iterable[str] | None = None) -> int:
    """Bytes that tensors take in their file; default: all of them."""
    return sum(weights.stored[name].nbytes for name in (weights if names is None else names))


def values_of(value: object) -> np.ndarray:
    """Values on the host: floats in float32 or wider, integers as they are, complex as pairs."""
    if isinstance(value, MXArray):
        return np.asarray(value.dequantize(np.float32))
    array = real_pairs(np.asarray(value))
    if array.dtype.kind in "biu" or array.dtype == np.float64:
        return array
    return array.astype(np.float32)


def report_dequantized(weights: Weights, names: Iterable[str]) -> None:
    """Print which tensors are written as the values that they stand for, and take more bytes."""
    layouts = [weights.stored[name].layout for name in names if weights.stored[name].dequantized]
    for layout in dict.fromkeys(layouts):
        say(f"{layouts.count(layout)} tensors of {layout}, which is read only, become float32")


def layout_for(to: str, tensors: Mapping[str, Any], where: Path) -> str:
    """The layout of that name, or the one of a program's that holds the tensors' formats."""
    known = programs()
    if to not in known:
        return to if to in (MX_JAX, TORCHAO) else named(to).name
    held = {name: x.format for name, x in tensors.items() if isinstance(x, MXArray)}
    fitting = [
        row.name
        for row in known[to]
        if all(dataclasses.replace(f, name=row.format.name) == row.format for f in held.values())
    ]
    if held and len(fitting) == 1:
        return fitting[0]
    formats = {format.name: name for name, format in held.items()}
    shown = ", ".join(f"{format} ({name})" for format, name in formats.items()) or "no MXArray"
    names = ", ".join(fitting or [row.name for row in known[to]])
    raise ValueError(f"{where}: {to} has no one layout for {shown}; name one of {names}")


def programs() -> dict[str, list[Layout]]:
    """Layouts by the programs that a `quantization_config` names."""
    by_program: dict[str, list[Layout]] = {}
    for row in LAYOUTS:
        for pairs in row.configs:
            rows = by_program.setdefault(dict(pairs).get("quant_method", ""), [])
            rows += [] if row in rows else [row]
    return by_program
