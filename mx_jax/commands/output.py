"""How commands print, and how what they write takes its place.

What an interrupted run was asked is written beside its files: the same command alone resumes it.
"""

import argparse
import ctypes
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from mx_jax.checkpoint.files import NUMBERED, WHOLE, check_apart, read_table, write_json
from mx_jax.generate.load import GGUF_FIELDS

# What an interrupted run was asked.
RECORD = ".mx_jax_resume.json"
# Options that change nothing in the files.
_APART = ("out", "force", "resume", "dry_run", "run")


def console() -> Console:
    """Where tables go."""
    # Through a pipe there is no terminal to fit, and a cut table would be of no use. Names of
    # tensors are printed, and a bracket in one is no markup.
    return Console(width=None if sys.stdout.isatty() else 160, highlight=False, markup=False)


def print_table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], left: Collection[str], **options: Any
) -> None:
    """Print rows of cells; `left`: the columns that begin at the left, as names do."""
    table = Table(title_justify="left", **options)
    for column in columns:
        table.add_column(column, justify="left" if column in left else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    console().print(table)


def say(text: str) -> None:
    """A line for people, past what another program reads."""
    print(f"mx_jax: {text}", file=sys.stderr)


def watched() -> bool:
    """Whether somebody sees a progress bar."""
    return sys.stderr.isatty()


# Files of a checkpoint's folder that speak of its tensors: those of the folder before do not stay.
_OF_TENSORS = ("*.safetensors", "*.index.json", "hf_quant_config.json", GGUF_FIELDS, RECORD)


def partial_folder(out: Path) -> Path:
    """Where a folder is made: beside its place, which a link may name."""
    out = out.resolve()
    return out.with_name(f".{out.name}.partial")


def check_replaceable(out: Path, source: Path) -> None:
    """ValueError for an output that is part of the input, or a folder whose files would be lost."""
    check_apart(out, source, "")
    if out.is_dir() and (os.path.ismount(out) or out.samefile(Path.cwd())):
        raise ValueError(
            f"{out} is a mount point or the folder that you are in, and a new one cannot take its "
            "place; write to a folder in it"
        )
    for path in out.iterdir() if out.is_dir() else ():
        if path.is_dir():
            raise ValueError(f"{out} holds a folder, {path.name}; write to another place")
        if path.suffix == ".safetensors" and path.name != WHOLE and not NUMBERED.match(path.name):
            raise ValueError(f"{out} holds other tensors, in {path.name}; write to another place")


def move_into_place(made: Path, out: Path) -> None:
    """Replace a folder by a complete one, in one step where the system can exchange folders.

    Files of the old folder that are no tensors, and that the new one lacks, are linked into it.
    """
    if not out.exists():
        made.rename(out)
        return
    for path in out.iterdir():
        own = any(path.match(pattern) for pattern in _OF_TENSORS)
        if not own and not (made / path.name).exists():
            try:
                os.link(path, made / path.name)
            except OSError:  # no hard links there
                shutil.copy2(path, made / path.name)
    _exchange(made, out)
    shutil.rmtree(made)


_RENAME_EXCHANGE, _AT_FDCWD = 2, -100


def _exchange(one: Path, other: Path) -> None:
    """Two folders change places."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
        names = (os.fsencode(one), os.fsencode(other))
        if rename(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0:
            return
    except (AttributeError, OSError):  # not Linux
        pass
    apart = one.with_name(f"{one.name}.before")
    other.rename(apart)
    one.rename(other)
    apart.rename(one)


def check_resumable(options: argparse.Namespace) -> None:
    """ValueError where OUT is whole, or another command began it; options that differ are named."""
    out, made = options.out, partial_folder(options.out)
    if not made.is_dir():
        if out.exists():
            raise ValueError(f"{out} is whole already; replace it with --force, without --resume")
        return
    if not (made / RECORD).is_file():
        raise ValueError(
            f"{made} has no {RECORD}, which tells how its files were made; begin anew with "
            "--force, without --resume"
        )
    before, now = read_table(made / RECORD, "resume"), _digests(options)
    unlike = [name for name in now | before if before.get(name) != now.get(name)]
    if unlike:
        raise ValueError(
            f"{out} was begun by another command: {', '.join(unlike)} differ; give what it was "
            "given, or begin anew with --force, without --resume"
        )


def record_options(options: argparse.Namespace, made: Path) -> None:
    """Write what is asked to the folder that is being made; clear what a killed run left half."""
    for file in made.glob(".model*"):
        file.unlink()
    write_json(made / RECORD, _digests(options))


def _digests(options: argparse.Namespace) -> dict[str, str]:
    """A digest of each option, and of the files that it names; no path of this machine."""
    said = {name: value for name, value in vars(options).items() if name not in _APART}
    return {
        name: hashlib.sha256(json.dumps([*_facts(value)]).encode()).hexdigest()[:16]
        for name, value in sorted(said.items())
    }


def _facts(value: Any) -> Iterator[Any]:
    """What identifies an option's value: of files their sizes and times, of others the text."""
    if isinstance(value, list | tuple):
        for each in value:
            yield from _facts(each)
    elif isinstance(value, Path):
        yield str(value.resolve())
        files = sorted(value.glob("*.safetensors")) if value.is_dir() else [value]
        for file in files:
            if file.is_file():
                yield file.name, file.stat().st_size, file.stat().st_mtime_ns
    else:
        yield repr(value)
