"""Bytes of whole products by default: what is committed is what XLA makes of them now."""

import json
from pathlib import Path

import jax
import pytest

from tests.gpu.tools import NEEDS_COMPILER, run

RECORDED = Path(__file__).parents[2] / "benchmarks" / "results" / "gpu" / "plain_path.json"

pytestmark = NEEDS_COMPILER


def recorded() -> list[dict]:
    return json.loads(RECORDED.read_text())["cases"]


def test_recorded_ratios():
    """Of a step, and of one whose passes are apart."""
    for what, limit in (("training step", 1.75), ("training step, passes apart", 2.15)):
        steps = [line for line in recorded() if line["what"] == what]
        assert len(steps) == 8 and all(line["ratio"] <= limit for line in steps)


def test_whole_axes():
    """Of float8_rowwise: each tensor is read twice, for one cast as for both of them."""
    moved = {(line["what"], line["by"]): line["MiB"] for line in recorded()}
    assert moved["whole axes", "float8_rowwise"] <= 650
    assert moved["whole axes, with gradients", "float8_rowwise"] <= 1450


@pytest.mark.slow
def test_traffic(tmp_path: Path):
    """The same on the version of JAX that it was recorded with; on others, as much at most."""
    lines = list(map(json.loads, run("plain_traffic.py", tmp_path, "sm_100a").splitlines()))
    same = json.loads(RECORDED.read_text())["jax"] == jax.__version__
    for line, before in zip(lines, recorded(), strict=True):
        assert {key: line[key] for key in ("what", "by")} == {k: before[k] for k in ("what", "by")}
        assert line["MiB"] == before["MiB"] if same else line["MiB"] <= 1.05 * before["MiB"]
