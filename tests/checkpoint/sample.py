"""What a sample is: a good checkpoint as bytes, and what is to read it."""

import contextlib
import dataclasses
import os
from collections.abc import Callable
from pathlib import Path

from mx_jax import checkpoint
from mx_jax.cli import command_parser

Reader = Callable[[Path], None]
Files = dict[str, bytes]


def read_all(path: Path) -> None:
    """Every tensor of somebody's checkpoint."""
    weights = checkpoint.read(path, rotated=True)
    repr(weights)
    for name in weights:
        weights[name]


def load(path: Path) -> None:
    """One of our own."""
    checkpoint.load(path / "model.safetensors")


def load_shards(path: Path) -> None:
    """Several files of our own, both ways."""
    read_all(path)
    checkpoint.load(path)


def quietly(*words: str) -> None:
    """Run a command, which says nothing."""
    options = command_parser().parse_args(words)
    with contextlib.ExitStack() as stack:
        nowhere = stack.enter_context(open(os.devnull, "w"))
        stack.enter_context(contextlib.redirect_stdout(nowhere))
        stack.enter_context(contextlib.redirect_stderr(nowhere))
        options.run(options)


def convert_to(*words: str) -> Reader:
    """What the command makes of a folder, its own file and what config.json says of it included."""

    def convert(path: Path) -> None:
        (path / "out").mkdir()
        quietly("convert", str(path), str(path / "out"), *words)

    return convert


@dataclasses.dataclass(frozen=True)
class Sample:
    """A good checkpoint, whose files are then changed.

    Attributes:
      name: of its kind.
      files: of a folder, by name; one in a folder of it by its path there.
      read: what is to read the folder.
    """

    name: str
    files: Files
    read: Reader
