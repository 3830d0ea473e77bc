"""What an interrupted run was asked, kept beside its files: they are taken up by its like alone."""

import argparse
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mx_jax.checkpoint.folder import read_table
from mx_jax.checkpoint.safetensors_file import replacing
from mx_jax.checkpoint.shards import INDEX

RECORD = ".mx_jax_resume.json"
_FILES = "model-*-of-*.safetensors"
# Options that change nothing in the files.
_APART = ("out", "force", "resume", "dry_run", "run")


def check(options: argparse.Namespace) -> None:
    """Refuse to go on with what another command left.

    Raises:
      ValueError: OUT is whole, or another command began it; options that differ are named.
    """
    out: Path = options.out
    record = out / RECORD
    if not record.is_file():
        if (out / INDEX).is_file():
            raise ValueError(f"{out} is whole already; replace it with --force, without --resume")
        if any(out.glob(_FILES)):
            raise ValueError(
                f"{out} holds files and no {RECORD}, which tells how they were made; replace them "
                "with --force, without --resume"
            )
        return
    before, now = read_table(record, "resume"), _digests(options)
    unlike = [name for name in now | before if before.get(name) != now.get(name)]
    if unlike:
        raise ValueError(
            f"{out} was begun by another command: {', '.join(unlike)} differ; give what it was "
            "given, or replace its files with --force, without --resume"
        )


def begin(options: argparse.Namespace) -> None:
    """Say in OUT what is asked; files that an earlier run left are gone unless they are resumed."""
    out, source = options.out, vars(options)["in"]
    out.mkdir(parents=True, exist_ok=True)
    folder = source if source.is_dir() else source.parent
    if not options.resume and not out.samefile(folder):
        for file in out.glob(_FILES):
            file.unlink()
    with replacing(out / RECORD) as file:
        file.write(json.dumps(_digests(options), indent=2).encode())


def end(out: Path) -> None:
    """OUT is whole; nothing is to be resumed."""
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
