"""NVIDIA's command-line tools, from the PATH or from the wheels of the extra `gpu-compile`; what
compiles by them, in processes of their own."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import printed

_WHEELS = "lib/python*/site-packages/nvidia/*/bin"
FOLDER = Path(__file__).parent
# 65536 registers, three warpgroups of 128 threads; one thread has at most 255.
MAX_REGISTERS = 168


def search_path() -> str:
    """The PATH, and after it the folders of the wheels."""
    wheels = sorted(map(str, Path(sys.prefix).glob(_WHEELS)))
    return os.pathsep.join([os.environ.get("PATH", os.defpath), *wheels])


def find(name: str) -> str | None:
    """Where a tool is, e.g. `"ptxas"`."""
    return shutil.which(name, path=search_path())


NEEDS_COMPILER = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        importlib.util.find_spec("jax_cuda13_plugin") is None or find("ptxas") is None,
        reason="needs jax-cuda13-plugin and ptxas: pip install '.[gpu-compile]'",
    ),
]


def run(script: str | Path, folder: Path, *arguments: str) -> str:
    """What a script, by default of this folder, prints; ptxas's reports land in `folder`."""
    added = {"PATH": search_path(), "MOSAIC_GPU_DUMP_TO": str(folder)}
    return printed(FOLDER / script, *arguments, **added)


def compiled(folder: Path, target: str, *what: str) -> list[Path]:
    """PTX of the kernels that `compile_for` compiles, in order: none spills, all have few
    registers, and no wgmma waits for each instruction."""
    run("compile_for.py", folder, target, *what)
    reports = sorted(folder.glob("*.ptxas"), key=lambda path: int(path.stem.rsplit("_", 1)[1]))
    for path in reports:
        report = path.read_text()
        assert f"for '{target}'" in report and "erialized" not in report
        assert "0 bytes spill stores, 0 bytes spill loads" in report
        # As many as three warpgroups can have; of a kernel of two, as those can.
        threads = re.findall(r"\.maxntid (\d+)", path.with_suffix(".ptx").read_text())
        assert registers(path) <= (255 if threads == ["256"] else MAX_REGISTERS), path
    return [path.with_suffix(".ptx") for path in reports]


def registers(path: Path) -> int:
    """Of a thread, as ptxas reports them."""
    (count,) = re.findall(r"Used (\d+) registers", path.with_suffix(".ptxas").read_text())
    return int(count)


def disassembly(ptx: Path, architecture: str) -> str:
    """What ptxas makes of a file, as nvdisasm prints it."""
    assembler, tool = find("ptxas"), find("nvdisasm")
    if tool is None:
        pytest.skip(
            "compiled without spills; to look at instructions, install nvidia-cuda-nvdisasm"
        )
    assert assembler is not None
    cubin = str(ptx.with_suffix(".cubin"))
    subprocess.run([assembler, f"-arch={architecture}", str(ptx), "-o", cubin], check=True)
    return subprocess.run([tool, cubin], capture_output=True, text=True, check=True).stdout
