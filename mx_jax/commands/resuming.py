"""What an interrupted run was asked, kept beside its files: they are taken up by its like alone."""

import argparse
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mx_jax.checkpoint.folder import read_table
from mx_jax.checkpoint.safetensors_file import replacing
from mx_jax.commands.output import partial_folder

RECORD = ".mx_jax_resume.json"
# Options that change nothing in the files.
_APART = ("out", "force", "resume", "dry_run", "run")


def check(options: argparse.Namespace) -> None:
    """Refuse to go on with what another command left.

    Raises:
      ValueError: OUT is whole, or another command began it; options that differ are named.
    """
    out: Path = options.out
    made = partial_folder(out)
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


def begin(options: argparse.Namespace, made: Path) -> None:
    """Say in the folder that is being made what is asked, and clear what a killed run left half."""
    for file in made.glob(".model*"):
        file.unlink()
    with replacing(made / RECORD) as file:
        file.write(json.dumps(_digests(options), indent=2).encode())


def end(out: Path) -> None:
    """The folder is whole and in its place; nothing is to be resumed."""
    (out / RECORD).unlink(missing_ok=True)


def _digests(options: argparse.Namespace) -> dict[str, str]:
    """A digest of each option, and of the files that it names; no path of this machine."""
    said = {name: value for name, value in vars(options).items() if name not in _APART}
    return {
        name: hashlib.sha256(json.dumps([*_facts(value)]).encode()).hexdigest()[:16]
        for name, value in sorted(said.items())
    }


def _facts(value: Any) -> Iterator[Any]:
    """What tells an option from another: of files their sizes and times, of others the text."""
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
