"""What Blackwell's block-scaled kernels cost by count, compiled ahead of time for a B200.

    python tests/gpu/blackwell_counts.py [FILE]

A process of its own, as `compile_for` is. One line of JSON for each kernel; with a FILE, all of
them as one list. Instructions are those of a turn of each warp's loop in the disassembly, registers
and spills what ptxas reports, cycles what the tensor cores take for the step at their peak.
"""

import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("MOSAIC_GPU_DUMP_TO", tempfile.mkdtemp())

from mx_jax.backends.pallas_gpu.tuning.tiles import Tiles
from tests.gpu import tools
from tests.gpu.compile_for import (
    FORMATS,
    GPUS,
    compile_persistent,
    compile_scaled,
    persistent_tiles,
)
from tests.gpu.sass import main_loop

TARGET = "sm_100a"
GPU = GPUS[TARGET]
NAMES = ("mxfp8_e4m3", "mxfp8_e5m2", "mxfp4", "nvfp4")
FOLDER = Path(os.environ["MOSAIC_GPU_DUMP_TO"])
# 4.5 PFLOP/s of float8, twice that of FP4, on 148 processors at 1.85 GHz: of products a cycle.
PRODUCTS = {8: 4.5e15 / 2 / 148 / 1.85e9, 4: 9e15 / 2 / 148 / 1.85e9}


def described(name: str, tiles: Tiles, stem: str) -> dict[str, Any]:
    """What is counted of one kernel, by the files that its compilation left."""
    bits = FORMATS[name].element.bits
    code = tools.disassemble(FOLDER / f"{stem}.ptx", TARGET)
    report = (FOLDER / f"{stem}.ptxas").read_text()
    (registers,) = re.findall(r"Used (\d+) registers", report)
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", report)
    multiply = "UTCQMMA" if bits == 8 else "UTCOMMA"
    multiplying, copying = main_loop(code, multiply), main_loop(code, "UTMALDG", multiply)
    codes = tiles.k * (tiles.m + tiles.n)
    cycles = tiles.m // tiles.ctas * tiles.n * tiles.k / PRODUCTS[bits]
    return {
        "format": name,
        "m": tiles.m,
        "n": tiles.n,
        "k": tiles.k,
        "stages": tiles.stages,
        "ctas": tiles.ctas,
        "stays": bool(tiles.programs),
        "registers": int(registers),
        "spilled": sum(int(size) for pair in spills for size in pair),
        "multiplying": len(multiplying),
        "copying": len(copying),
        "instructions for a code": round((len(multiplying) + len(copying)) / codes, 4),
        "cycles": round(cycles),
        # A processor issues four instructions a cycle, one from each of its quarters.
        "issue slots": round((len(multiplying) + len(copying)) / (4 * cycles), 3),
    }


def new_stems(before: set[Path]) -> list[str]:
    """Of what was compiled since, in that order."""
    return [path.stem for path in sorted({*FOLDER.glob("*.ptx")} - before, key=_number)]


def _number(path: Path) -> int:
    return int(path.stem.rsplit("_", 1)[1])


def lines() -> Iterator[dict[str, Any]]:
    """Every kernel with a float32 result once: of the table, then of programs that stay."""
    for name in NAMES:
        kernel = GPU.architecture.kernel(FORMATS[name], FORMATS[name])
        before = {*FOLDER.glob("*.ptx")}
        compile_scaled(GPU, name, name)
        table = kernel.tuning_of(FORMATS[name].element.bits).tiles
        for (_, tiles), stem in zip(table, new_stems(before)[::2], strict=True):
            yield described(name, tiles, stem)
        before = {*FOLDER.glob("*.ptx")}
        compile_persistent(GPU, name, "")
        for tiles, stem in zip(persistent_tiles(GPU, name), new_stems(before), strict=True):
            yield described(name, tiles, stem)


if __name__ == "__main__":
    found = []
    for line in lines():
        found.append(line)
        print(json.dumps(line), flush=True)
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(json.dumps(found, indent=1) + "\n")
