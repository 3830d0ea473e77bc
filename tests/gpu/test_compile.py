"""Ahead of time, for every architecture: no spills, few registers, tensor-core instructions found.

Needs the extra `gpu-compile`, no GPU: run with `pytest -m gpu`.
"""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mx_jax.backends.cudnn import PAIRS
from mx_jax.backends.pallas_gpu.architecture import TCGEN05, WGMMA, architecture_of, capabilities
from mx_jax.backends.pallas_gpu.layouts import stored_bits
from mx_jax.formats import BLOCK_FORMATS
from tests.gpu import tools
from tests.gpu.sass import issued, main_loop

# What ptxas calls each compute capability that has kernels.
GPUS = {f"sm_{major}{minor}{'a' * (major >= 9)}": (major, minor) for major, minor in capabilities()}
SCRIPT = Path(__file__).with_name("compile_for.py")
# 65536 registers, three warpgroups of 128 threads; one thread has at most 255.
MAX_REGISTERS = 168

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        importlib.util.find_spec("jax_cuda13_plugin") is None or tools.find("ptxas") is None,
        reason="needs jax-cuda13-plugin and ptxas: pip install '.[gpu-compile]'",
    ),
]


def slow(*case: Any) -> Any:
    """What CI has no time for."""
    return pytest.param(*case, marks=pytest.mark.slow)


def environment(folder: Path) -> dict[str, str]:
    root = os.pathsep.join([str(SCRIPT.parents[2]), os.environ.get("PYTHONPATH", "")])
    added = {"PYTHONPATH": root, "PATH": tools.search_path(), "MOSAIC_GPU_DUMP_TO": str(folder)}
    return os.environ | added


def bits_of(name: str) -> int:
    """Bits that a format's codes take in packed weights."""
    (format,) = (format for format in BLOCK_FORMATS if format.name == name)
    return stored_bits(format.element)


def compile_for(folder: Path, *arguments: str) -> list[str]:
    """Compile in a process of its own; ptxas's reports, checked for spills."""
    command = [sys.executable, str(SCRIPT), *arguments]
    result = subprocess.run(
        command, env=environment(folder), capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr[-3000:]
    reports = [path.read_text() for path in folder.glob("*.ptxas")]
    for report in reports:
        assert "0 bytes spill stores, 0 bytes spill loads" in report
    for path in folder.glob("*.ptx"):
        assert_few_registers(path)
    return reports


def assert_few_registers(ptx: Path) -> None:
    """As many as three warpgroups can have; of a kernel of two, as those can."""
    (registers,) = re.findall(r"Used (\d+) registers", ptx.with_suffix(".ptxas").read_text())
    threads = re.findall(r"\.maxntid (\d+)", ptx.read_text())
    assert int(registers) <= (255 if threads == ["256"] else MAX_REGISTERS), ptx


# Most instructions that are issued for a code, copies too; a little above what was found.
@pytest.mark.parametrize(
    ("name", "limit"),
    [
        ("mxfp4", 3.55),
        slow("nvfp4", 3.75),
        slow("mxfp8_e4m3", 4.15),
        slow("mxfp8_e5m2", 6.65),
        slow("mxfp6_e2m3", 4.4),
        slow("mxfp6_e3m2", 4.65),
        slow("mxint8", 4.6),
    ],
)
def test_hopper(name: str, limit: float, tmp_path: Path):
    table = WGMMA.tuning_of(bits_of(name)).tiles
    reports = compile_for(tmp_path, "sm_90a", name)
    assert len(reports) == 2 * len(table)
    for report in reports:
        assert "for 'sm_90a'" in report
        assert "erialized" not in report, "wgmma waits for each instruction"
    for path in tmp_path.glob("*.ptx"):
        assert re.search(r"wgmma\.mma_async\S*k16\.f32\.bf16\.bf16", path.read_text()), path
        assert registers_asked(path.read_text()) <= registers_given(path), path
        assert "HGMMA.64x" in disassembly(path, "sm_90a"), path
    # Of the tile of four warpgroups, the loops of whose copies `issued` finds.
    place, tiles = next((i, own) for i, (_, own) in enumerate(table) if own.n == 256)
    first = tmp_path / f"mx_jax_wgmma_{name}_{2 * place}.ptx"
    assert sum(issued(disassembly(first, "sm_90a"), tiles)) <= limit


def registers_asked(ptx: str) -> int:
    """What a thread of each warpgroup asks for, all together: one copies, the others multiply."""
    (threads,) = re.findall(r"\.maxntid (\d+)", ptx)
    (copying,) = set(re.findall(r"setmaxnreg\.dec\S* (\d+);", ptx))
    (multiplying,) = set(re.findall(r"setmaxnreg\.inc\S* (\d+);", ptx))
    return int(copying) + (int(threads) // 128 - 1) * int(multiplying)


def registers_given(ptx: Path) -> int:
    """What ptxas starts threads with, one of each warpgroup: more would be waited for for ever."""
    (threads,) = re.findall(r"\.maxntid (\d+)", ptx.read_text())
    (registers,) = re.findall(r"Used (\d+) registers", ptx.with_suffix(".ptxas").read_text())
    return int(threads) // 128 * int(registers)


@pytest.mark.parametrize(
    ("target", "name", "limit"),
    [
        ("sm_80", "mxfp4", 3.9),
        slow("sm_80", "mxfp6_e2m3", 4.2),
        slow("sm_80", "mxfp8_e4m3", 4.4),
        slow("sm_86", "mxfp4", 3.9),
        slow("sm_87", "mxfp4", 3.9),
        slow("sm_89", "mxfp4", 3.9),
        slow("sm_100a", "mxfp4", 3.9),
        slow("sm_100a", "mxfp8_e5m2", 6.8),
        slow("sm_100a", "mxfp6_e3m2", 4.5),
        slow("sm_103a", "mxfp4", 3.9),
        slow("sm_110a", "mxfp4", 3.9),
        slow("sm_120a", "mxfp4", 3.9),
        slow("sm_121a", "mxfp4", 3.9),
    ],
)
def test_ampere_and_what_decodes_like_it(target: str, name: str, limit: float, tmp_path: Path):
    architecture = architecture_of(GPUS[target])
    assert architecture is not None
    table = architecture.decoding.tuning_of(bits_of(name)).tiles
    reports = compile_for(tmp_path, target, name)
    assert len(reports) == 2 * len(table)
    for report in reports:
        assert f"for '{target}'" in report
    for path in tmp_path.glob("*.ptx"):
        text = path.read_text()
        assert "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32" in text, path
        copy = "cp.async.bulk.tensor" if target.endswith("a") else "cp.async.cg.shared.global"
        assert copy in text and re.search(r"(fma\.rn|mul)\.bf16x2", text), path
    first = tmp_path / f"mx_jax_mma_{name}_0.ptx"
    loop = main_loop(disassembly(first, target), "HMMA")
    assert len(loop) / (64 * table[0][1].k / 128) <= limit


@pytest.mark.parametrize(
    ("target", "lhs", "rhs", "kind"),
    [
        ("sm_100a", "mxfp8_e4m3", "mxfp8_e5m2", "mxf8f6f4.block_scale.scale_vec::1X"),
        slow("sm_100a", "mxfp4", "mxfp4", "mxf4nvf4.block_scale.scale_vec::2X"),
        ("sm_100a", "nvfp4", "nvfp4", "mxf4nvf4.block_scale.scale_vec::4X"),
        slow("sm_103a", "mxfp8_e5m2", "mxfp8_e4m3", "mxf8f6f4.block_scale.scale_vec::1X"),
        slow("sm_103a", "nvfp4", "nvfp4", "mxf4nvf4.block_scale.scale_vec::4X"),
        slow("sm_110a", "mxfp4", "mxfp4", "mxf4nvf4.block_scale.scale_vec::2X"),
    ],
)
def test_blackwell(target: str, lhs: str, rhs: str, kind: str, tmp_path: Path):
    reports = compile_for(tmp_path, target, lhs, rhs)
    assert len(reports) == 2 * len(TCGEN05.tuning_of(4 if lhs.endswith("fp4") else 8).tiles)
    for report in reports:
        assert f"for '{target}'" in report
    for path in tmp_path.glob("*.ptx"):
        assert f"tcgen05.mma.cta_group::1.kind::{kind}" in path.read_text(), path
        expected = "UTCQMMA" if lhs.startswith("mxfp8") else "UTCOMMA"
        assert expected in disassembly(path, target), path


def test_cudnn_gets_every_product_that_its_backend_takes(tmp_path: Path):
    command = [sys.executable, str(SCRIPT.with_name("compile_cudnn.py"))]
    result = subprocess.run(
        command, env=environment(tmp_path), capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr[-3000:]
    found = json.loads(result.stdout)
    assert len(found) == 3 * len(PAIRS)
    assert set(map(tuple, found.values())) == {("__cudnn$blockScaledDot",)}


def disassembly(ptx: Path, architecture: str) -> str:
    """What ptxas makes of it."""
    if tools.find("nvdisasm") is None:
        pytest.skip(
            "compiled without spills; to look at instructions, install nvidia-cuda-nvdisasm"
        )
    return tools.disassemble(ptx, architecture)
