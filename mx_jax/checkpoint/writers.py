"""Files that appear whole."""

import contextlib
import glob
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Suffix of what is not complete yet.
_PARTIAL = ".mx_jax-partial"


def partial(path: Path) -> Path:
    """Where a file or folder is made before it takes its place: beside it, under a new name."""
    remove_partial(path.parent, f".{glob.escape(path.name)}")
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}{_PARTIAL}")


def remove_partial(folder: Path, start: str) -> None:
    """Remove what processes left that were killed; one that still writes it ends with an error."""
    for left in folder.glob(f"{start}.{'[0-9a-f]' * 8}{_PARTIAL}"):
        with contextlib.suppress(OSError):
            shutil.rmtree(left) if left.is_dir() else left.unlink()


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Any]:
    """A file beside `path` that takes its place at the end, or is gone; errors name `path`."""
    path = Path(os.path.realpath(path))  # A link stays, as with `open`.
    made = partial(path)
    try:
        with made.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(made, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            made.unlink()
        named = (None, os.fspath(made))  # None where the disk is full
        if isinstance(error, OSError) and error.errno is not None and error.filename in named:
            error.filename = os.fspath(path)
        raise


def check_apart(out: Path, source: Path) -> None:
    """ValueError if files are to be replaced that are read, by whatever path or link."""
    if _identities(out) & _identities(source):
        raise ValueError(f"{out} is what is read; write to another place")


def _identities(path: Path) -> set[tuple[int, int]]:
    """Of a path and, of a folder, the files in it: the same for all links to a file."""
    files = [file for file in path.iterdir() if file.is_file()] if path.is_dir() else []
    facts = [os.stat(file) for file in (path, *files) if file.exists()]
    return {(each.st_dev, each.st_ino) for each in facts}
