"""The compiled handlers of the CPU: loading, every instruction set, threads, and use in training.

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
from mx_jax.ops import product
from mx_jax.testing.compare import assert_bitwise_equal
from tests.needs import needs_library
from tests.processes import printed, run_python

LOADED = library.load()


# Loading ------------------------------------------------------------------------------------------


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


REJECTS = """
from mx_jax.backends.target import Target
from mx_jax.backends.cpu_ffi import CPU_FFI
from mx_jax.testing.cases import QuantizeCase
from mx_jax.formats import MXFP4
call = QuantizeCase(format=MXFP4, shape=(4, 64)).call
print(CPU_FFI.rejects(call, Target(platform="cpu")))
"""


@pytest.mark.slow
def test_without_a_library_everything_works(tmp_path: Path):
    result = run_python(
        "-c",
        REJECTS + "import mx_jax; print(mx_jax.quantize([1.0], 'mxfp4').codes)",
        MX_JAX_CPU_LIBRARY="none",
    )
    assert result.stdout.splitlines() == ["left out: MX_JAX_CPU_LIBRARY=none", "[6]"]
    assert result.stderr == "", "asked for, it is nothing to warn of"
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"no library")
    result = run_python("-c", REJECTS, MX_JAX_CPU_LIBRARY=str(broken))
    assert result.stdout.startswith("cannot be loaded: "), result.stderr


@pytest.mark.slow
@needs_library
def test_an_unknown_instruction_set_is_a_reason():
    result = run_python("-c", REJECTS, MX_JAX_CPU_ISA="mmx")
    assert result.stdout.startswith("MX_JAX_CPU_ISA=mmx is unknown or not on this machine, which")
    assert f"known, from least to most: {', '.join(library.ISAS)}" in result.stdout


# Instruction sets ---------------------------------------------------------------------------------


@needs_library
def test_programs_that_tests_start_have_the_set_of_the_tests():
    """`MX_JAX_CPU_ISA` is theirs too; tests/conftest.py sees to it that it is in force here."""
    assert isinstance(LOADED, library.Library)
    asked = "from mx_jax.backends.cpu_ffi import library; print(library.load().isa)"
    assert printed("-c", asked).split() == [LOADED.isa]


# Threads ------------------------------------------------------------------------------------------


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


# Training -----------------------------------------------------------------------------------------


def gradient(recipe, key=None):
    """The gradients of a product, compiled anew, and the program."""

    def loss(x, w):
        return (mx_jax.matmul(x, w, recipe=recipe, key=key) ** 2).sum()

    x = jax.random.normal(jax.random.key(0), (2, 64, 96))
    w = jax.random.normal(jax.random.key(1), (96, 128))
    lowered = jax.jit(jax.grad(loss, (0, 1))).lower(x, w)
    return lowered.compile()(x, w), lowered.as_text()


@needs_library
@pytest.mark.usefixtures("insist")
@pytest.mark.slow(but="True")
@pytest.mark.parametrize("stochastic", [False, True])
def test_training_reads_cotangents_once(stochastic: bool, monkeypatch: pytest.MonkeyPatch):
    key = jax.random.key(3) if stochastic else None
    recipe = mx_jax.recipes.mxfp8()
    if stochastic:
        recipe = recipe.with_(gradients={"format": "mxfp8_e5m2", "rounding": "stochastic"})
    together, text = gradient(recipe, key)
    assert text.count("@mx_jax_cpu_quantize_both") == 1
    monkeypatch.setattr(product, "cast_for_both", lambda *_: None)
    apart, text = gradient(recipe, key)
    assert "@mx_jax_cpu_quantize_both" not in text
    for left, right in zip(together, apart, strict=True):
        assert_bitwise_equal(left, right)
