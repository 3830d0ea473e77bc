"""Words that commands refuse before they read or write, and streams that are closed."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mx_jax import checkpoint
from mx_jax.cli import main
from tests.cli.conftest import Cli

ROOT = Path(__file__).parents[2]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    checkpoint.save(path, {"up": np.ones((8, 64), np.float32)})
    return path


@pytest.mark.parametrize("size", ["much", "0", "0.0001kB", 400 * "9"])
def test_a_size_of_files_that_is_none(size: str, file: Path, cli: Cli):
    out = file.with_name("out")
    said = cli.error("quantize", file, out, "--format", "mxfp4", "--max-shard-size", size)
    assert f"--max-shard-size needs a size as 5GB, got {size!r}" in said
    # Else the same with a size would be refused: OUT is there already.
    assert not out.exists()


def test_closed_streams_are_no_error(file: Path, monkeypatch: pytest.MonkeyPatch):
    """A daemon's: Python has None in their place."""
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    assert main(["inspect", str(file)]) == 0
    sys.stdout.close()
    sys.stderr.close()


# Without JAX: what the program does around a command, which a stand-in has the place of.
STOPPED = """
import importlib.util, os, signal, sys, time
from types import ModuleType

cli = sys.modules["mx_jax.cli"] = ModuleType("cli")
sys.modules["mx_jax"] = ModuleType("mx_jax")
spec = importlib.util.spec_from_file_location("program", "mx_jax/__main__.py")
program = importlib.util.module_from_spec(spec)
spec.loader.exec_module(program)

# Ignored, if who runs the tests ignores it, as shells have commands in the background do.
signal.signal(signal.SIGINT, signal.default_int_handler)

def run(arguments=None):
    os.kill(os.getpid(), signal.{name})
    signal.pause()

cli.main = run
sys.exit(program._run())
"""


# The same, where the signal comes while Python calls back, and drops what is raised.
IN_A_CALLBACK = """
import gc
def callback(phase, facts):
    gc.callbacks.remove(callback)
    os.kill(os.getpid(), signal.{name})
    sum(range(1000))

def run(arguments=None):
    gc.callbacks.append(callback)
    gc.collect()
    for _ in range(2000):
        time.sleep(0.005)
"""


@pytest.mark.parametrize("where", ["", IN_A_CALLBACK])
@pytest.mark.parametrize(
    ("name", "status", "said"), [("SIGINT", 130, "mx_jax: interrupted\n"), ("SIGTERM", 143, "")]
)
def test_a_stopped_command_says_one_line_at_most(name: str, status: int, said: str, where: str):
    script = STOPPED.replace("cli.main = run", f"{where}\ncli.main = run").format(name=name)
    words = [sys.executable, "-c", script]
    result = subprocess.run(
        words, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120
    )
    assert (result.returncode, result.stderr) == (status, said)


def test_a_reader_that_has_gone(file: Path, monkeypatch: pytest.MonkeyPatch):
    """Few lines wait until the end; a table is written by rich, here by a program that ends."""
    reading, writing = os.pipe()
    os.close(reading)
    result = subprocess.run(
        [sys.executable, "-m", "mx_jax", "formats"],
        stdout=writing,
        stderr=subprocess.PIPE,
        cwd=ROOT,
        env=os.environ | {"PYTHONUNBUFFERED": ""},
        check=False,
    )
    assert (result.returncode, result.stderr) == (0, b"")
    with os.fdopen(writing, "w") as gone:
        monkeypatch.setattr(sys, "stdout", gone)
        assert main(["inspect", str(file), "--json"]) == 0
