"""Processes of one job trace one program, whatever was measured on their machines."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mx_jax.backends import evidence
from mx_jax.backends.evidence import write
from tests.backends.evidence_process import ROWS, K, N, row

ROOT = Path(__file__).parents[2]


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def _start(folder: Path, process: int, count: int, port: int) -> subprocess.Popen[str]:
    """One process, with a cache of its own that has a row for the last process alone."""
    cache = folder / f"cache{process}"
    if process == count - 1:
        write(cache / "mx_jax" / "evidence.json", [row()])
    own = {"XDG_CACHE_HOME": str(cache), "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}
    kept = {name: value for name, value in os.environ.items() if name != evidence.VARIABLE}
    words = [sys.executable, "-m", "tests.backends.evidence_process"]
    return subprocess.Popen(
        [*words, *map(str, (process, count, port))],
        cwd=ROOT,
        env=kept | own | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _run(folder: Path, count: int) -> list[dict[str, Any]]:
    """What each process of a job prints."""
    port = _free_port()
    started = [_start(folder, process, count, port) for process in range(count)]
    found = []
    try:
        for process in started:
            out, err = process.communicate(timeout=120)
            assert process.returncode == 0, err
            found.append(json.loads(out.splitlines()[-1]))
    finally:
        for process in started:
            process.kill()
    return found


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="a cache that a variable of Linux names")
def test_two_processes_trace_one_program(tmp_path: Path):
    first, second = _run(tmp_path / "two", 2)
    assert first["processes"] == second["processes"] == 2
    assert first == second, "one had a row in its cache"
    assert first["backend"] == "xla_scaled" and first["sum"] == ROWS * N * K
    # Alone, the same cache switches on what it is about: the row is one that counts.
    (alone,) = _run(tmp_path / "one", 1)
    # It is lowered for this machine, a CPU, all the same.
    assert alone["backend"] == "planted" and alone["sum"] == ROWS * N * K
    assert alone["program"] != first["program"]
