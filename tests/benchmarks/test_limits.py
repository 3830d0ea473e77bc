"""The library that only the CPU benchmarks load: built as they say, and in no wheel."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

SCRIPT = """
import jax.numpy as jnp
from benchmarks import limits
data = jnp.arange(200, dtype=jnp.uint8)
assert (limits.copy(200, 100)(data) == data[:100]).all()
assert limits.copy(200, 300)(data).shape == (300,)
for instruction, run in limits.peaks().items():
    print(instruction, run())
print(sorted(limits.load().targets))
"""


def run(path: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", SCRIPT],
        cwd=ROOT,
        env=os.environ | {"MX_JAX_LIMITS_LIBRARY": str(path), "MX_JAX_CPU_ISA": ""},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.one_python(reason="compiles C++, which calls no Python")
def test_the_command_builds_what_benchmarks_load(tmp_path: Path):
    if shutil.which("cmake") is None:
        pytest.skip("needs CMake")
    configure = ["cmake", "-S", ROOT / "custom_calls", "-B", tmp_path]
    subprocess.run(
        [*configure, f"-DPython_EXECUTABLE={sys.executable}"], check=True, capture_output=True
    )
    build = ["cmake", "--build", tmp_path, "--target", "limits"]
    subprocess.run(build, check=True, capture_output=True)
    done = run(tmp_path / "limits.so")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "['mx_jax_cpu_peak', 'mx_jax_cpu_traffic']"
    assert not list(tmp_path.rglob("native*.so"))


def test_without_it_a_benchmark_names_the_command(tmp_path: Path):
    done = run(tmp_path / "limits.so")
    assert done.returncode == 1
    assert "cannot be loaded" in done.stderr
    assert "cmake --build build --target limits" in done.stderr
