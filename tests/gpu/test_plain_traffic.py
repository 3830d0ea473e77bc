"""Bytes of whole products without a kernel: what is committed is what XLA makes of them now."""

import json
from pathlib import Path

import jax
import pytest

from tests.gpu import test_compile
from tests.gpu.test_compile_quantize import run

RECORDED = Path(__file__).parents[2] / "benchmarks" / "results" / "gpu" / "plain_path.json"

pytestmark = test_compile.pytestmark


def recorded() -> list[dict]:
    return json.loads(RECORDED.read_text())["cases"]


def test_recorded_ratios():
    """A step at most 2.5 times bfloat16's bytes; a product of few rows 1.3 times two passes."""
    steps = [line for line in recorded() if line["what"] == "training step"]
    assert len(steps) == 8 and all(line["ratio"] <= 2.5 for line in steps)
    apart = [line for line in recorded() if line["what"] == "training step, passes apart"]
    assert len(apart) == 8 and all(line["ratio"] <= 2.9 for line in apart)
    few = [line for line in recorded() if line.get("rows") in (1, 16) and line["by"] != "bfloat16"]
    assert len(few) == 6 and all(line["ratio to two passes"] <= 1.3 for line in few)


@pytest.mark.slow
def test_traffic(tmp_path: Path):
    """The same on the version of JAX that it was recorded with; on others, as much at most."""
    lines = list(map(json.loads, run("plain_traffic.py", tmp_path, "sm_90a").splitlines()))
    same = json.loads(RECORDED.read_text())["jax"] == jax.__version__
    for line, before in zip(lines, recorded(), strict=True):
        assert {key: line[key] for key in ("what", "by")} == {k: before[k] for k in ("what", "by")}
        assert line["MiB"] == before["MiB"] if same else line["MiB"] <= 1.05 * before["MiB"]
