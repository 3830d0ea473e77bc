"""Ahead of time, for every architecture: casts spill nothing and take few instructions an element.

Needs the extra `gpu-compile`, no GPU: run with `pytest -m gpu`.
"""

import json
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from mx_jax.backends.pallas_gpu.architecture import SM100, architecture_of
from tests.gpu import sass, test_compile
from tests.gpu.test_compile import GPUS, disassembly, environment, slow

FOLDER = Path(__file__).parent
# Of 65536: three programs of 128 threads at a time, two where elements are rounded by additions.
MAX_REGISTERS, MAX_REGISTERS_ONE_BY_ONE = 168, 200

pytestmark = test_compile.pytestmark

# Most instructions that a thread issues for an element; a little above what was found.
QUICK = {
    "mxfp8_e4m3:bfloat16:rows": 10.5,
    "mxfp8_e4m3:bfloat16:both": 19.0,
    "mxfp4:bfloat16:rows": 20.0,
}
SLOW = {
    "mxfp8_e4m3:bfloat16:columns": 13.0,
    "mxfp4:bfloat16:both": 36.0,
    "mxfp8_e5m2:bfloat16:rows": 10.5,
    "mxfp4:bfloat16:columns": 21.0,
    "mxfp6_e2m3:bfloat16:rows": 20.0,
    "mxint8:bfloat16:rows": 13.5,
    "mxint8:bfloat16:both": 23.5,
    "mxfp8_e4m3:float32:rows": 11.5,
    "mxfp8_e4m3:float32:columns": 10.5,
    "mxfp8_e4m3:float32:both": 20.0,
    "mxfp4:float32:rows": 20.0,
    "mxfp4:float32:both": 36.0,
    "mxfp4:float16:rows": 17.5,
    "nvfp4:bfloat16:rows": 32.0,
    "nvfp4:bfloat16:columns": 43.5,
    "nvfp4:float32:rows": 40.5,
}
BEFORE_HOPPER = {"mxfp8_e4m3:bfloat16:rows": 21.0, "mxint8:bfloat16:both": 24.0}
THOR = {"mxfp8_e4m3:bfloat16:rows": 14.5}
BLACKWELL = {
    "mxfp8_e4m3:bfloat16:rows": 10.5,
    "mxfp8_e4m3:bfloat16:both": 17.5,
    "mxfp4:bfloat16:rows": 19.0,
    "nvfp4:bfloat16:rows": 32.0,
}


def run(script: str, folder: Path, *arguments: str) -> str:
    """What a script of this folder prints, in a process of its own."""
    command = [sys.executable, str(FOLDER / script), *arguments]
    result = subprocess.run(
        command, env=environment(folder), capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


def counted(target: str, casts: Iterable[str], folder: Path) -> dict[str, tuple[float, int]]:
    """Instructions an element and registers of each cast, none of which spills."""
    casts = list(casts)
    elements = json.loads(run("compile_quantize.py", folder, target, *casts))
    found = {}
    for i, (cast, count) in enumerate(zip(casts, elements, strict=True)):
        (report,) = folder.glob(f"*_{i}.ptxas")
        text = report.read_text()
        assert f"for '{target}'" in text and "0 bytes spill stores, 0 bytes spill loads" in text
        registers = int(text.split("Used ")[1].split()[0])
        ptx = report.with_suffix(".ptx").read_text()
        inexact = re.findall(r"\S*(?:\.ftz|\.approx|\.full)\S*", ptx)
        assert not inexact, f"what is not rounded as IEEE 754 says: {inexact}"
        issued = sass.instructions(disassembly(report.with_suffix(".ptx"), target))
        assert sum("LD.E.128" in each or "LDG.E.128" in each for each in issued) >= 1, cast
        found[cast] = (len(issued) / count, registers)
    return found


def few(target: str) -> dict[str, float]:
    """What is compiled for a GPU that is not Hopper."""
    if architecture_of(GPUS[target]) != SM100:
        return BEFORE_HOPPER
    return THOR if target == "sm_110a" else BLACKWELL


@pytest.mark.parametrize(
    ("target", "limits"),
    [
        ("sm_90a", QUICK),
        slow("sm_90a", SLOW),
        *(slow(target, few(target)) for target in GPUS if target != "sm_90a"),
    ],
)
def test_casts(target: str, limits: dict[str, float], tmp_path: Path):
    for cast, (instructions, registers) in counted(target, limits, tmp_path).items():
        assert limits[cast] / 1.25 < instructions <= limits[cast], cast
        converted = cast.startswith("mxfp8") and limits is not BEFORE_HOPPER
        assert registers <= (MAX_REGISTERS if converted else MAX_REGISTERS_ONE_BY_ONE), cast


@pytest.mark.slow
def test_traffic(tmp_path: Path):
    """Why there is a kernel: XLA reads the tensor twice; and why not for dequantizing."""
    lines = map(json.loads, run("traffic.py", tmp_path, "sm_90a").splitlines())
    moved = {(line["what"], line["dtype"], line["by"]): line["bytes"] for line in lines}
    for way, written in (("rows", 1), ("columns", 1), ("both", 2)):
        for dtype, read in (("bfloat16", 2), ("float32", 4)):
            kernel, plain = (moved[f"quantize {way}", dtype, by] for by in ("kernel", "XLA"))
            assert kernel == pytest.approx(read + written * 33 / 32, abs=2e-3)
            assert plain == pytest.approx(kernel + read, rel=0.02)
    assert moved["dequantize", "bfloat16", "XLA"] < 1.05 * (2 + 33 / 32)
