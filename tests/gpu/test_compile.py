"""Ahead of time, for sm_90a: no spills, a register cap, and tensor-core instructions found.

Needs `jax-cuda13-plugin` and `ptxas`, no GPU: run with `pytest -m gpu_compile`.
"""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mx_jax.backends.pallas_gpu.tuning import TILES
from tests.gpu.sass import main_loop

SCRIPT = Path(__file__).with_name("compile_for.py")
# 65536 registers, three warpgroups of 128 threads.
MAX_REGISTERS = 168

pytestmark = [
    pytest.mark.gpu_compile,
    pytest.mark.skipif(
        importlib.util.find_spec("jax_cuda13_plugin") is None or shutil.which("ptxas") is None,
        reason="needs jax-cuda13-plugin and ptxas",
    ),
]


def environment(folder: Path) -> dict[str, str]:
    root = os.pathsep.join([str(SCRIPT.parents[2]), os.environ.get("PYTHONPATH", "")])
    return os.environ | {"PYTHONPATH": root, "MOSAIC_GPU_DUMP_TO": str(folder)}


def disassembler() -> str | None:
    """From the PATH, or from the wheel `nvidia-cuda-nvdisasm`."""
    wheels = Path(sys.prefix).glob("lib/python*/site-packages/nvidia/*/bin/nvdisasm")
    return shutil.which("nvdisasm") or next(map(str, wheels), None)


# Most instructions that a thread issues for a code; a little above what was found.
@pytest.mark.parametrize(
    ("name", "limit"),
    [
        ("mxfp4", 4.0),
        ("nvfp4", 4.2),
        ("mxfp8_e4m3", 4.2),
        ("mxfp8_e5m2", 6.8),
        ("mxfp6_e2m3", 4.2),
        ("mxint8", 4.7),
    ],
)
def test_compiles_without_spills(name: str, limit: float, tmp_path: Path):
    command = [sys.executable, str(SCRIPT), name]
    result = subprocess.run(
        command, env=environment(tmp_path), capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr[-3000:]
    reports = [path.read_text() for path in tmp_path.glob("*.ptxas")]
    table = TILES["sm90", 4 if name.endswith("fp4") else 8]
    assert len(reports) == 2 * len(table)
    for report in reports:
        assert "for 'sm_90a'" in report
        assert "0 bytes spill stores, 0 bytes spill loads" in report
        assert "erialized" not in report, "wgmma waits for each instruction"
        (registers,) = re.findall(r"Used (\d+) registers", report)
        assert int(registers) <= MAX_REGISTERS
    for path in tmp_path.glob("*.ptx"):
        assert re.search(r"wgmma\.mma_async\S*k16\.f32\.bf16\.bf16", path.read_text()), path
        assert "HGMMA.64x" in instructions(path), path
    loop = main_loop(instructions(tmp_path / f"mx_jax_sm90_{name}_0.ptx"), "HGMMA")
    codes = 64 * table[0][1].k / 128
    assert len(loop) / codes <= limit


def instructions(ptx: Path) -> str:
    """What ptxas makes of it."""
    tool = disassembler()
    if tool is None:
        pytest.skip("compiled without spills; to look for HGMMA, install nvidia-cuda-nvdisasm")
    cubin = str(ptx.with_suffix(".cubin"))
    subprocess.run(["ptxas", "-arch=sm_90a", str(ptx), "-o", cubin], check=True)
    return subprocess.run([tool, cubin], capture_output=True, text=True, check=True).stdout
