"""`examples/train_sharded.py`: FSDP on virtual devices, of one process and of two."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def output(*options: str) -> str:
    command = [sys.executable, "examples/train_sharded.py", *options]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    return run.stdout


@pytest.mark.slow
def test_codes_travel_and_the_loss_falls():
    pytest.importorskip("sklearn")
    text = output("--processes", "2", "--steps", "6", "--recipe", "mxfp4")
    whole, share = map(float, re.findall(r"\(([\d.]+) of plain JAX's\)", text))
    assert whole == 1 and share <= 0.4
    assert re.search(r"mxfp4 .* as u8", text) and not re.search(r"float32 .* as u8", text)
    before, after = map(float, re.findall(r"step +\d+  loss ([\d.]+)", text))
    assert after < before - 0.2


def test_unknown_recipes_are_refused():
    command = [sys.executable, "examples/train_sharded.py", "--recipe", "mxfp5"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 2 and "mxfp5" in run.stderr
