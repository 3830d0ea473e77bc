"""Bytes of whole products by default: what is committed is what XLA makes of them now."""

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


# Of bfloat16's bytes, by format; at 1 and 16 rows.
PACKED = {"mxfp8_e4m3": 0.55, "mxfp4": 0.3, "nvfp4": 0.3}


def test_recorded_ratios():
    """Of a step, of one whose passes are apart, and of products of few rows."""
    for what, limit in (("training step", 1.75), ("training step, passes apart", 2.15)):
        steps = [line for line in recorded() if line["what"] == what]
        assert len(steps) == 8 and all(line["ratio"] <= limit for line in steps)
    few = [line for line in recorded() if line.get("rows") in (1, 16) and line["by"] != "bfloat16"]
    packed = [line for line in few if line["what"].endswith("packed")]
    assert len(packed) == 6 and all(line["ratio"] <= PACKED[line["by"]] for line in packed)
    plain = [line for line in few if line not in packed]
    assert len(plain) == 6 and all(line["ratio"] <= 1.06 for line in plain)
    assert all(line["ratio"] <= 0.57 for line in plain if line["by"] == "mxfp8_e4m3")


def test_whole_axes():
    """Of float8_rowwise: each tensor is read twice, for one cast as for both of them."""
    moved = {(line["what"], line["by"]): line["MiB"] for line in recorded()}
    assert moved["whole axes", "float8_rowwise"] <= 650
    assert moved["whole axes, with gradients", "float8_rowwise"] <= 1300


@pytest.mark.slow
def test_traffic(tmp_path: Path):
    """The same on the version of JAX that it was recorded with; on others, as much at most."""
    lines = list(map(json.loads, run("plain_traffic.py", tmp_path, "sm_90a").splitlines()))
    same = json.loads(RECORDED.read_text())["jax"] == jax.__version__
    for line, before in zip(lines, recorded(), strict=True):
        assert {key: line[key] for key in ("what", "by")} == {k: before[k] for k in ("what", "by")}
        assert line["MiB"] == before["MiB"] if same else line["MiB"] <= 1.05 * before["MiB"]
