"""`python -m mx_jax env`: what runs here and why, as tables and as JSON."""

import importlib.metadata
import sys

import jax
import pytest

import mx_jax
from mx_jax.backends.cpu_ffi import library
from tests.cli.conftest import Cli
from tests.needs import needs_library
from tests.processes import run_python

PLAIN = {"XLA_FLAGS": "", "JAX_PLATFORMS": "cpu", "MX_JAX_CPU_ISA": ""}


def test_versions_devices_and_variables(cli: Cli, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MX_JAX_CPU_ISA", "")
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    result = cli.json("env")
    versions = result["versions"]
    assert versions.pop("mx_jax") == mx_jax.__version__
    assert versions.pop("Python") == sys.version.split()[0]
    assert set(versions) == {"jax", "jaxlib", "flax", "ml_dtypes", "numpy"}
    assert versions == {name: importlib.metadata.version(name) for name in versions}
    kind = jax.devices()[0].device_kind
    assert result["devices"] == [{"platform": "cpu", "kind": kind, "number": 8}]
    assert result["machine"] == "on platform=cpu, num_devices=1"
    assert result["variables"]["MX_JAX_CPU_ISA"] == ""
    assert result["variables"]["JAX_PLATFORMS"] is None
    assert "xla_force_host_platform_device_count=8" in result["variables"]["XLA_FLAGS"]


@needs_library
def test_the_library_and_what_it_takes(cli: Cli):
    loaded = library.load()
    assert not isinstance(loaded, str)
    with mx_jax.testing.target("cpu"):
        result = cli.json("env")
    assert result["cpu_library"] == {
        "path": str(loaded.path),
        "instruction_set": loaded.isa,
        "best_instruction_set": loaded.detected_isa,
        "missing": None,
    }
    calls = result["calls"]
    assert {call["backend"] for call in calls.values()} == {"cpu_ffi"}
    assert calls["MXFP8 x MXFP8"]["reasons"] == [
        "not xla: XLA's dot has no native units for 8 bits on platform=cpu"
    ]


def test_as_tables(cli: Cli):
    text, _ = cli("env")
    for words in ("Versions", "C++ library", "Calls", "MXFP8 x MXFP8", jax.__version__):
        assert words in text


@pytest.mark.slow
def test_no_device_is_said_in_words():
    run = run_python("-m", "mx_jax", "env", **PLAIN | {"JAX_PLATFORMS": "tpux"})
    assert run.returncode == 1
    assert "JAX finds no device" in run.stdout and "tpux" in run.stdout
    assert "Traceback" not in run.stderr
    assert mx_jax.__version__ in run.stdout


CAST = "import mx_jax; [mx_jax.quantize([1.0], f).codes for f in ('mxfp4', 'mxfp8_e4m3')]"


@pytest.mark.slow
def test_falling_back_is_said_once():
    run = run_python("-c", CAST, **PLAIN, MX_JAX_CPU_LIBRARY="/no/such/file.so")
    assert run.returncode == 0, run.stderr
    (line,) = run.stderr.splitlines()
    assert line.startswith(
        "mx_jax: casts and products run in plain JAX, several times slower than in the C++ "
        "library, which is not used: cannot be loaded: /no/such/file.so"
    )
    assert line.endswith("MX_JAX_CPU_LIBRARY=none leaves it out without a word")


def test_a_library_that_is_not_built(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("MX_JAX_CPU_LIBRARY", raising=False)
    monkeypatch.setattr(library, "find", lambda: None)
    reason = library._load.__wrapped__()
    assert reason == "not built: with a C++ compiler, pip install -v . builds it, or shows why not"
