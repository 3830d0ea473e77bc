"""The environment of a result: machine, versions, date."""

import datetime
import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mx_jax.backends.cpu_ffi import library

LIBRARIES = ("jax", "jaxlib", "flax", "ml_dtypes", "numpy")


def describe(peers: Iterable[str] = ()) -> dict[str, Any]:
    """The environment as JSON: CPU, cores, memory, load, versions, commit, date.

    Args:
      peers: distributions measured beside the library.
    """
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "cpu": cpu_model(),
        "cores": usable_cores(),
        "memory_gib": _memory_gib(),
        "load_average_1min": _load_average(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": {name: version(name) for name in (*LIBRARIES, *peers)},
    }


def cpu_library(command: str) -> library.Library:
    """The library of C++ kernels. Raises SystemExit if it is missing."""
    loaded = library.load()
    if isinstance(loaded, str):
        raise SystemExit(f"{command}: the CPU library is {loaded}")
    return loaded


def version(distribution: str) -> str:
    """The installed version, or `"not installed"`."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def cpu_model() -> str:
    """The CPU's name with its family and model, which hypervisors hide least."""
    facts = {}
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    for line in lines:
        key, _, value = line.partition(":")
        facts.setdefault(key.strip(), value.strip())
    if "model name" not in facts:
        return platform.processor() or platform.machine()
    family, model = facts.get("cpu family", "?"), facts.get("model", "?")
    wide = ", AVX-512" if "avx512f" in facts.get("flags", "").split() else ""
    return f"{facts['model name']} (family {family}, model {model}{wide})"


def usable_cores() -> int:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1)
    except (AttributeError, ValueError, OSError):
        return None


def _load_average() -> float | None:
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def commit() -> str:
    """The commit that is checked out, marked if files differ from it."""
    try:
        hash = _git("rev-parse", "--short=12", "HEAD")
        return hash + (" with changes" if _git("status", "--porcelain", "mx_jax") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(*arguments: str) -> str:
    root = Path(__file__).parents[1]
    done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True)
    return done.stdout.strip()
