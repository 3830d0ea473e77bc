"""What Hopper's kernel costs by count: what is committed is what is compiled now."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from mx_jax.backends.pallas_gpu.architecture import SM90
from mx_jax.backends.pallas_gpu.kernels import WGMMA
from mx_jax.backends.pallas_gpu.tuning.plan import Sizes, choose
from tests.gpu import test_compile, tools

RECORDED = Path(__file__).parents[2] / "benchmarks" / "results" / "gpu" / "decoding_counts.json"


def recorded(what: str) -> list[dict]:
    cases = [case for case in json.loads(RECORDED.read_text())["cases"] if case["what"] == what]
    assert cases
    return cases


def test_recorded_filling():
    """What models' shapes were recorded to fill is what the plan fills now, 85 % at least."""
    for case in recorded("product"):
        sizes = {"m": case["rows"], "n": case["n"], "k": case["k"]}
        tiles = choose(SM90, WGMMA, 4, batch=1, **sizes)
        full = Sizes(batch=1, **sizes).filling(tiles, SM90.at_once(WGMMA))
        assert round(full, 3) == case["full"] >= 0.85


def test_recorded_instructions():
    """FP4 is bound by memory, copies counted in; nothing got worse."""
    for case in recorded("instructions for a code"):
        assert case["sum"] < case["before"]["sum"]
        if case["rows"] <= 16:
            assert case["sum"] < {"mxfp4": 3.9, "nvfp4": 4.3, "mxfp8_e4m3": 7.4}[case["weights"]]


@pytest.mark.slow
@test_compile.pytestmark[0]
@test_compile.pytestmark[1]
def test_counts(tmp_path: Path):
    """The same on the version of JAX that it was recorded with; on others, as much at most."""
    script = Path(__file__).with_name("decoding_counts.py")
    environment = os.environ | {"PYTHONPATH": str(script.parents[2]), "PATH": tools.search_path()}
    out = tmp_path / "counts.json"
    subprocess.run([sys.executable, str(script), str(out)], env=environment, check=True)
    document = json.loads(RECORDED.read_text())
    for line, before in zip(json.loads(out.read_text()), document["cases"], strict=True):
        for key, found in line.items():
            if document["jax"] == jax.__version__ or not isinstance(found, int | float):
                assert found == before[key], (line, before)
            else:
                assert found <= 1.05 * before[key], (line, before)
