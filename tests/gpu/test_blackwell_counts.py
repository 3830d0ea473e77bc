"""What Blackwell's kernels cost by count: what is committed is what is compiled now."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest

from mx_jax.backends.pallas_gpu.architecture import SM100
from mx_jax.backends.pallas_gpu.kernels import TCGEN05
from mx_jax.formats import block_format
from tests.gpu import test_compile, tools

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "gpu"
DOCUMENT = json.loads((RESULTS / "blackwell_counts.json").read_text())
CASES: list[dict[str, Any]] = DOCUMENT["cases"]


def test_nothing_is_spilled_and_slots_are_left():
    """Tensor cores are the bound: at most a fifth of the slots, and half of one warp's own."""
    for case in CASES:
        assert case["spilled"] == 0 and case["registers"] <= test_compile.MAX_REGISTERS
        assert case["issue slots"] < 0.2
        assert max(case["multiplying"], case["copying"]) < 0.5 * case["cycles"]


def test_every_tile_of_the_table_and_of_the_tuner_is_recorded():
    for name in ("mxfp8_e4m3", "mxfp8_e5m2", "mxfp4", "nvfp4"):
        table = TCGEN05.tuning_of(block_format(name).element.bits).tiles
        wanted = {(own.m, own.n, own.k, own.stages, own.ctas, False) for _, own in table}
        names = "m", "n", "k", "stages", "ctas", "stays"
        found = {tuple(case[key] for key in names) for case in CASES if case["format"] == name}
        assert wanted <= found
        staying = {(m, n, ctas) for m, n, _, _, ctas, stays in found if stays}
        assert staying == set(TCGEN05.persistent)
    assert TCGEN05 in SM100.kernels


def test_the_page_has_the_numbers():
    page = (RESULTS / "blackwell_counts.md").read_text()
    for case in CASES:
        told = case | {"stays": "yes" if case["stays"] else "no"}
        assert f"| {' | '.join(map(str, told.values()))} |\n" in page


@pytest.mark.slow
@test_compile.pytestmark[0]
@test_compile.pytestmark[1]
def test_counts(tmp_path: Path):
    """The same on the version of JAX that it was recorded with; on others, as much at most."""
    script = Path(__file__).with_name("blackwell_counts.py")
    out = tmp_path / "counts.json"
    added = {
        "PYTHONPATH": str(script.parents[2]),
        "PATH": tools.search_path(),
        "MOSAIC_GPU_DUMP_TO": str(tmp_path),
    }
    command = [sys.executable, str(script), str(out)]
    subprocess.run(command, env=os.environ | added, check=True, stdout=subprocess.DEVNULL)
    for line, before in zip(json.loads(out.read_text()), CASES, strict=True):
        for key, found in line.items():
            if DOCUMENT["jax"] == jax.__version__ or not isinstance(found, int | float):
                assert found == before[key], (line, before)
            else:
                assert found <= 1.05 * before[key], (line, before)
