"""Damaged files are read or refused with their name; and the search for others finds them."""

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint import mutate
from tests.checkpoint.samples import Reader, samples

pytestmark = pytest.mark.one_python(reason="bytes of files, read by NumPy and the standard library")


def test_a_few_inputs():
    """The full run is `python -m tests.checkpoint.mutate --count 100000`."""
    counts, findings = mutate.run(1, range(300))
    assert not findings
    assert sum(counts.values()) == 300
    kinds = {kind for kind, _ in counts}
    assert kinds == {sample.name for sample in samples()}
    assert {kind for kind, what in counts if what == "refused"} == kinds
    # Not everything breaks a file, and what does not has been read to its end.
    assert sum(counts[kind, "read"] for kind in kinds) > 20


def test_unchanged_files_are_read(tmp_path: Path):
    for sample in samples():
        folder = tmp_path / sample.name
        mutate.put(folder, sample.files)
        assert mutate.outcome(sample.read, folder) == "read", sample.name


def test_inputs_are_made_by_their_number():
    def made(numbers: range) -> list[Any]:
        return [files for _, _, files in mutate.inputs(0, numbers)]

    assert made(range(5, 8)) == made(range(8))[5:]
    assert made(range(3)) != [files for _, _, files in mutate.inputs(1, range(3))]


def raising(error: BaseException) -> Reader:
    def read(folder: Path) -> None:
        del folder
        raise error

    return read


def test_what_is_a_finding(tmp_path: Path):
    assert mutate.outcome(raising(ValueError(f"{tmp_path}: damaged")), tmp_path) == "refused"
    assert "which file" in mutate.outcome(raising(ValueError("damaged")), tmp_path)
    for error in (KeyError("x"), MemoryError(), RecursionError(), TypeError(f"{tmp_path}")):
        assert "another exception" in mutate.outcome(raising(error), tmp_path)
    assert "took more than" in mutate.outcome(lambda folder: time.sleep(5), tmp_path, seconds=0.05)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="limits memory as Linux does")
def test_a_bomb_is_an_exception():
    program = """
import numpy as np
from tests.checkpoint import mutate
mutate.limit_memory(64 << 20)
np.ones(32 << 20, np.uint8)
try:
    np.ones(512 << 20, np.uint8)
except MemoryError:
    print("refused")
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert done.stdout == "refused\n", done.stderr
