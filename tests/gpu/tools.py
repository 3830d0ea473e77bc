"""NVIDIA's command-line tools, from the PATH or from the wheels of the extra `gpu-compile`."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

_WHEELS = "lib/python*/site-packages/nvidia/*/bin"


def search_path() -> str:
    """The PATH, and after it the folders of the wheels."""
    wheels = sorted(map(str, Path(sys.prefix).glob(_WHEELS)))
    return os.pathsep.join([os.environ.get("PATH", os.defpath), *wheels])


def find(name: str) -> str | None:
    """Where a tool is, e.g. `"ptxas"`."""
    return shutil.which(name, path=search_path())


def disassemble(ptx: Path, architecture: str) -> str:
    """What ptxas makes of a file, as nvdisasm prints it."""
    assembler, tool = find("ptxas"), find("nvdisasm")
    assert assembler is not None and tool is not None
    cubin = str(ptx.with_suffix(".cubin"))
    subprocess.run([assembler, f"-arch={architecture}", str(ptx), "-o", cubin], check=True)
    return subprocess.run([tool, cubin], capture_output=True, text=True, check=True).stdout
