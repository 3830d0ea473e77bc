"""The compiled handlers of the CPU: loading, instruction sets, threads.

Skipped where nothing was built; that they are bit for bit the reference's, the shared suite checks.
"""

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import pytest

import mx_jax
from mx_jax.backends.cpu_ffi import library
from mx_jax.backends.select import only_backend
from mx_jax.testing.compare import assert_bitwise_equal
from tests.needs import needs_library
from tests.processes import printed, run_python


def test_an_installed_library_serves_a_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """One that is shadowed by the checkout's own package."""
    monkeypatch.delenv(library.LIBRARY_VARIABLE, raising=False)
    monkeypatch.setattr(library.importlib.util, "find_spec", lambda name: None)
    installed = tmp_path / "mx_jax" / "backends" / "cpu_ffi" / "native.abi3.so"
    installed.parent.mkdir(parents=True)
    installed.write_bytes(b"")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "elsewhere"), str(tmp_path)])
    assert library.find() == installed


@pytest.mark.parametrize(
    ("interface", "built", "runtime", "reason"),
    [
        (library.INTERFACE, (0, 3), (0, 5), None),
        (0, (0, 3), (0, 3), f"built from other sources (interface 0, not {library.INTERFACE})"),
        (library.INTERFACE, (0, 5), (0, 3), "built for XLA FFI 0.5, but this jaxlib has 0.3"),
        (library.INTERFACE, (1, 0), (0, 3), "built for XLA FFI 1.0, but this jaxlib has 0.3"),
        (library.INTERFACE, (0, 3), None, "jaxlib does not say which FFI version it has"),
    ],
)
def test_a_misfit_is_refused(interface, built, runtime, reason: str | None):
    assert str(reason) in str(library.misfit(interface, built, runtime))


def test_the_runtime_says_its_version():
    version = library.runtime_api_version()
    assert version is not None and version >= (0, 3)


LOAD = "from mx_jax.backends.cpu_ffi import library; print(library.load())\n"


@pytest.mark.slow
def test_without_a_library_everything_works(tmp_path: Path):
    cast = "import mx_jax; print(mx_jax.quantize([1.0], 'mxfp4').codes)"
    result = run_python("-c", LOAD + cast, MX_JAX_CPU_LIBRARY="none")
    assert result.stdout.splitlines() == ["left out: MX_JAX_CPU_LIBRARY=none", "[6]"]
    assert result.stderr == "", "asked for, it is nothing to warn of"
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"no library")
    assert printed("-c", LOAD, MX_JAX_CPU_LIBRARY=str(broken)).startswith("cannot be loaded: ")


@pytest.mark.slow
@needs_library
def test_an_unknown_instruction_set_is_a_reason():
    reason = printed("-c", LOAD, MX_JAX_CPU_ISA="mmx")
    assert reason.startswith("MX_JAX_CPU_ISA=mmx is unknown or not on this machine, which")
    assert f"known, from least to most: {', '.join(library.ISAS)}" in reason


@needs_library
@pytest.mark.usefixtures("insist")
def test_threads_share_nothing():
    @jax.jit
    def cast(x):
        q = mx_jax.quantize(x, "mxfp8_e4m3")
        return q.codes, q.scales, mx_jax.dequantize(q)

    def run(x):
        with only_backend("cpu_ffi"):  # contexts belong to one thread
            return cast(x)

    arrays = [jax.random.normal(jax.random.key(seed), (64, 512)) for seed in range(8)]
    expected = [run(x) for x in arrays]
    with ThreadPoolExecutor(8) as pool:
        for _ in range(5):
            for actual, wanted in zip(pool.map(run, arrays), expected, strict=True):
                jax.tree.map(assert_bitwise_equal, actual, wanted)
