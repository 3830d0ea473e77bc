"""NVIDIA's command-line tools, from the PATH or from the wheels of the extra `gpu-compile`."""

import os
import shutil
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
