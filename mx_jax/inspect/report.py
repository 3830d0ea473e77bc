"""A run or a checkpoint as one page."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mx_jax.checkpoint.foreign import read as read_weights
from mx_jax.checkpoint.safetensors_file import check_apart, replacing
from mx_jax.checkpoint.weights import Weights
from mx_jax.inspect.capture_record import from_json
from mx_jax.inspect.report_checkpoint import checkpoint_page
from mx_jax.inspect.report_run import run_page
from mx_jax.inspect.sinks import Memory
from mx_jax.inspect.tensor_facts import facts_of

FilePath = str | os.PathLike[str]


def report(
    source: Memory | Weights | FilePath,
    out: FilePath,
    *,
    reference: Mapping[str, Any] | FilePath | None = None,
    title: str | None = None,
) -> None:
    """Write one HTML page on a run or a checkpoint, with all that it shows inside: light and dark,
    no script.

    Of a run it has what is out of the ordinary, in the order in which it happened; numbers such as
    the loss; the SQNR of each layer and the error of its products, over time; the layers with the
    lowest SQNR; where values saturate; and which exponents scales have.

    Of a checkpoint it has what is out of the ordinary; the SQNR against a reference, layer by
    layer, and the tensors with the lowest; how many codes lie at their format's limit and how many
    values are zero; the exponents of scales; and a table of all tensors.

    Args:
      source: what a capture told, or a file that `Jsonl` wrote; or a checkpoint: what
        `checkpoint.read` gave, or a file or folder that it reads.
      out: path of the page.
      reference: weights in high precision, for a checkpoint's errors: a checkpoint too, or arrays
        by name. Tensors are compared with those of the same name.
      title: what run or checkpoint it is.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: a line that is no record, a damaged checkpoint, a reference of another shape or
        for a run, or nothing at all; or an `out` that is read.

    Examples:
      >>> import tempfile, pathlib, jax, jax.numpy as jnp, mx_jax
      >>> layer = jax.jit(lambda x, w: mx_jax.matmul(x, w, recipe="mxfp8"))
      >>> with mx_jax.inspect.capture() as records:
      ...     _ = layer(jnp.ones((4, 64)), jnp.ones((64, 8)))
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     page = pathlib.Path(folder) / "run.html"
      ...     mx_jax.inspect.report(records, page)
      ...     print(page.read_text().splitlines()[0])
      <!DOCTYPE html>
    """
    for one in (source, reference):
        path = one.path if isinstance(one, Weights) else one
        if isinstance(path, str | os.PathLike):
            check_apart(Path(out), Path(path), "report: ")
    if isinstance(source, str | os.PathLike):
        source = read_weights(source) if _is_checkpoint(Path(source)) else read(source)
    if isinstance(source, Weights):
        page = _of_checkpoint(source, reference, title)
    elif reference is not None:
        raise ValueError(
            "report: a reference belongs to a checkpoint, got the records of a run and "
            f"reference={_named(reference)!r}; what a run lost its records tell: leave it out"
        )
    else:
        page = _of_run(source, title)
    with replacing(Path(out)) as file:
        file.write(page.encode())


def _is_checkpoint(path: Path) -> bool:
    """Whether a path is a folder or a file of numbers, not of lines."""
    if path.is_dir():
        return True
    with path.open("rb") as file:
        # safetensors begins with a length in 64 bits, GGUF with a version in 32: neither uses all
        # of its bytes. JSON has no zero bytes.
        return 0 in file.read(8)


def _of_run(records: Memory, title: str | None) -> str:
    if not records.all() and not records.scalars:
        raise ValueError(f"report: needs records, got none in records={records!r}")
    return run_page("Run" if title is None else title, records)


def _of_checkpoint(
    weights: Weights, reference: Mapping[str, Any] | FilePath | None, title: str | None
) -> str:
    if not weights:
        raise ValueError(f"report: needs tensors, got none in {weights!r}")
    exact = read_weights(reference) if isinstance(reference, str | os.PathLike) else reference
    found = facts_of(weights, weights, exact, operation="report")
    return checkpoint_page(
        str(weights.path) if title is None else title,
        found,
        None if reference is None else _named(reference),
    )


def _named(reference: Mapping[str, Any] | FilePath) -> str:
    if isinstance(reference, Weights):
        return str(reference.path)
    if isinstance(reference, Mapping):
        return "the given arrays"
    return os.fspath(reference)


def read(path: FilePath) -> Memory:
    """What a file of `Jsonl` holds.

    Raises:
      ValueError: a line that is no record.
    """
    memory = Memory()
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
        try:
            memory.write(from_json(json.loads(line)))
        except ValueError as error:
            raise ValueError(f"report: {path}, line {number}: {error}") from error
    return memory
