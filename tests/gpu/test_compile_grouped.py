"""Rows in groups, ahead of time: the dense kernel's instructions, no spills; bytes moved.

Needs the extra `gpu-compile`, no GPU: run with `pytest -m gpu`.
"""

import json
import re
from pathlib import Path

import jax
import pytest

from mx_jax.backends.pallas_gpu.architecture import TCGEN05, WGMMA
from tests.gpu import sass, test_compile
from tests.gpu.test_compile import (
    assert_few_registers,
    bits_of,
    disassembly,
    registers_asked,
    registers_given,
    slow,
)
from tests.gpu.test_compile_quantize import run

RECORDED = Path(__file__).parents[2] / "benchmarks" / "results" / "gpu" / "grouped.json"

pytestmark = test_compile.pytestmark


def compiled(folder: Path, *what: str, target: str = "sm_90a") -> list[Path]:
    """PTX of the kernels, in order: none spills or waits for each product by itself."""
    run("compile_grouped.py", folder, target, *what)
    found = sorted(folder.glob("*.ptxas"), key=lambda path: int(path.stem.rsplit("_", 1)[1]))
    for path in found:
        report = path.read_text()
        assert f"for '{target}'" in report and "erialized" not in report
        assert "0 bytes spill stores, 0 bytes spill loads" in report
        assert_few_registers(path.with_suffix(".ptx"))
    return [path.with_suffix(".ptx") for path in found]


# Most instructions that are issued for a code, copies too, of few rows: as without groups. The
# entries for many rows keep less in flight between their steps.
@pytest.mark.parametrize(
    ("name", "limit"), [("mxfp4", 3.55), slow("nvfp4", 3.75), slow("mxfp8_e4m3", 4.15)]
)
def test_groups(name: str, limit: float, tmp_path: Path):
    table = WGMMA.tuning_of(bits_of(name)).tiles
    found = compiled(tmp_path, name)
    assert len(found) == 2 * len(table)
    for path, (_, tiles) in zip(found, [each for each in table for _ in range(2)], strict=True):
        text = disassembly(path, "sm_90a")
        # Copies of activations, codes and scales; one of eight rows of the result, two of one.
        assert "UTMALDG" in text and text.count("UTMASTG") >= 3, path
        assert registers_asked(path.read_text()) <= registers_given(path), path
        assert sum(sass.issued(text, tiles)) <= limit + 0.35 * (tiles.m > 16), path


def test_sums(tmp_path: Path):
    for path in compiled(tmp_path, "sums"):
        loops = sass.loops(disassembly(path, "sm_90a"), "HGMMA")
        # 64 rows at a time in eight products of 64 x 128 x 16, each of 64 cycles; then 16.
        whole = min((loop for loop in loops if _products(loop) == 8), key=len)
        assert len(whole) <= 120, "four warps issue as many in as many cycles"
        assert min(_products(loop) for loop in loops) == 2


@pytest.mark.parametrize("name", ["nvfp4", slow("mxfp8_e4m3"), slow("mxfp4")])
def test_groups_on_blackwell(name: str, tmp_path: Path):
    """The dense kernel's products and copies; rows are stored eight at a time and one by one."""
    found = compiled(tmp_path, name, "scaled", target="sm_100a")
    eight = name.startswith("mxfp8")
    assert len(found) == len(TCGEN05.tuning_of(8 if eight else 4).tiles)
    for path in found:
        assert re.search(r"tcgen05\.mma\.cta_group::1\.\S*block_scale", path.read_text())
        text = disassembly(path, "sm_100a")
        assert text.count("UTMASTG") >= 3, path
        assert len(sass.main_loop(text, "UTCQMMA" if eight else "UTCOMMA")) <= 150


def _products(loop: list[str]) -> int:
    return sum("HGMMA" in instruction for instruction in loop)


def test_recorded_bytes():
    """Few-bit experts: a quarter of what bfloat16's move, and less in a training step too."""
    cases = json.loads(RECORDED.read_text())["cases"]
    moved = {(line["what"], line["tokens"], line["by"]): line["MiB"] for line in cases}
    for (what, tokens, by), found in moved.items():
        if what == "experts that are stored" and by in ("mxfp4", "nvfp4"):
            assert (
                found
                <= (0.28 if tokens == 64 else 0.17)
                * moved[what, tokens, "bfloat16, lax.ragged_dot"]
            )
        if by.endswith("kernels"):
            assert found <= 0.72 * moved[what, tokens, "high_precision"]


@pytest.mark.slow
def test_traffic(tmp_path: Path):
    """The same on the version of JAX that it was recorded with; on others, as much at most."""
    lines = run("compile_grouped.py", tmp_path, "sm_90a", "traffic").splitlines()
    recorded = json.loads(RECORDED.read_text())
    same = recorded["jax"] == jax.__version__
    for line, before in zip(map(json.loads, lines), recorded["cases"], strict=True):
        assert {**line, "MiB": 0, "kernels": 0} == {**before, "MiB": 0, "kernels": 0}
        assert line["MiB"] == before["MiB"] if same else line["MiB"] <= 1.05 * before["MiB"]
