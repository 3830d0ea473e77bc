"""Bytes of whole products by default: what is committed is what XLA makes of them now."""

import json
from pathlib import Path

import jax
import pytest

from tests.gpu.tools import NEEDS_COMPILER, run, slow

RECORDED = Path(__file__).parents[2] / "benchmarks" / "results" / "gpu" / "plain_path.json"

pytestmark = NEEDS_COMPILER


def recorded() -> list[dict]:
    return json.loads(RECORDED.read_text())["cases"]


# Of bfloat16's bytes, by format; at 1 and 16 rows.
PACKED = {"mxfp8_e4m3": 0.55, "mxfp4": 0.3, "nvfp4": 0.3}


def test_recorded_ratios():
    """Of a step, of one whose passes are apart, and of products of few rows."""
    for what, limit in (("training step", 1.75), ("training step, passes apart", 2.15)):
        steps = [line for line in recorded() if line["what"] == what]
        assert len(steps) == 8 and all(line["ratio"] <= limit for line in steps)
    few = [
        line
        for line in recorded()
        if line.get("rows") in (1, 16) and "ratio" in line and line["by"] != "bfloat16"
    ]
    packed = [line for line in few if line["what"].endswith("packed")]
    assert len(packed) == 6 and all(line["ratio"] <= PACKED[line["by"]] for line in packed)
    plain = [line for line in few if line not in packed]
    assert len(plain) == 6 and all(line["ratio"] <= 1.06 for line in plain)
    assert all(line["ratio"] <= 0.57 for line in plain if line["by"] == "mxfp8_e4m3")


def test_whole_axes():
    """Of float8_rowwise: each tensor is read twice, for one cast as for both of them."""
    moved = {(line["what"], line["by"]): line["MiB"] for line in recorded()}
    assert moved["whole axes", "float8_rowwise"] <= 650
    assert moved["whole axes, with gradients", "float8_rowwise"] <= 1450


def check_experts(lines: list[dict]) -> None:
    """Matrices are read as they are packed, once: 347 MiB before, dequantized, in MXFP4."""
    moved = {(line["tokens"], line["by"]): line["MiB"] for line in lines if "tokens" in line}
    assert moved[64, "mxfp4"] <= 45 and moved[64, "nvfp4"] <= 47 and moved[64, "mxfp8_e4m3"] <= 77
    for name in PACKED:
        assert moved[4096, name] <= 0.85 * moved[4096, "bfloat16"]


def test_recorded_experts():
    check_experts(recorded())
    filled_up = {line["by"]: line["MiB"] for line in recorded() if line["what"].endswith("k=2880")}
    assert filled_up["mxfp8_e4m3"] <= 8.5 and filled_up["mxfp4"] <= 4.4


@pytest.mark.parametrize("target", ["sm_100a", slow("sm_90a")])
@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="XLA compiles FP4 from JAX 0.12 on")
def test_experts(target: str, tmp_path: Path):
    lines = run("plain_traffic.py", tmp_path, target, "experts").splitlines()
    check_experts(list(map(json.loads, lines)))


@pytest.mark.slow
def test_traffic(tmp_path: Path):
    """The same on the version of JAX that it was recorded with; on others, as much at most."""
    lines = list(map(json.loads, run("plain_traffic.py", tmp_path, "sm_100a").splitlines()))
    same = json.loads(RECORDED.read_text())["jax"] == jax.__version__
    for line, before in zip(lines, recorded(), strict=True):
        assert {key: line[key] for key in ("what", "by")} == {k: before[k] for k in ("what", "by")}
        assert line["MiB"] == before["MiB"] if same else line["MiB"] <= 1.05 * before["MiB"]
