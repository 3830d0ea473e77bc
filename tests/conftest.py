"""What every test shares: eight CPU devices, repeatable randomness, one cache of programs."""

import gc
import os
import re
import tempfile
import zlib
from collections.abc import Iterator
from typing import Any

NUM_CPU_DEVICES = 8

# Read when JAX's first backend starts, so it is set before any test imports JAX. The workers keep
# all cores busy: a program in parts, compiled by several threads, is the same and takes longer.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + f" --xla_force_host_platform_device_count={NUM_CPU_DEVICES}"
    " --xla_cpu_parallel_codegen_split_count=1"
).strip()

# What was measured on the machine that runs the tests is no part of them.
os.environ["MX_JAX_EVIDENCE"] = "shipped"

import hypothesis  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402

# The same examples on every run. `--hypothesis-profile=explore` looks for new ones.
hypothesis.settings.register_profile("repeatable", deadline=None, derandomize=True, database=None)
hypothesis.settings.register_profile("explore", deadline=None, max_examples=2000)
hypothesis.settings.load_profile("repeatable")


def pytest_configure(config: pytest.Config) -> None:
    """Compiling is most of the time, so no program is compiled twice in a run.

    Workers, and the programs that tests start, find by its code and options what another has
    compiled. The cache ends with the run: the next compiles everything anew.
    """
    if hasattr(config, "workerinput"):
        return
    cache = tempfile.TemporaryDirectory(prefix="mx_jax_tests_", ignore_cleanup_errors=True)
    config.add_cleanup(cache.cleanup)
    os.environ |= {
        "JAX_COMPILATION_CACHE_DIR": cache.name,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }


def pytest_collection_finish() -> None:
    """What is imported by now stays: the collector need not walk through it again and again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 50)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Neighbours share programs: each worker gets tests in a row, and ends with others' last.

    Under `-n` alone; who asks for another `--dist` gets it.
    """
    if config.getoption("dist") != "load":
        return None
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log)


# Of what tests/quick.py is not for, these folders ask nothing.
QUICK_FOLDERS = {"benchmarks", "calibrate", "cli", "convert", "examples", "generate", "nn"}


@pytest.fixture(scope="module", autouse=True)
def _quick_programs(request: pytest.FixtureRequest) -> Iterator[None]:
    """Programs are optimized less, those of processes that a test starts too."""
    if QUICK_FOLDERS.isdisjoint(request.path.parts):
        yield
        return
    import jax

    jax.config.update("jax_disable_most_optimizations", True)
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
    yield
    jax.config.update("jax_disable_most_optimizations", False)
    del os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"]


@pytest.fixture
def insist() -> Iterator[None]:
    """The library is asked, which nobody else would do where tests have several devices."""
    from mx_jax.backends.select import only_backend

    with only_backend("cpu_ffi"):
        yield


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """A generator of its own for each test, seeded by the test's name."""
    return np.random.default_rng(zlib.crc32(request.node.name.encode()))


def pytest_itemcollected(item: pytest.Item) -> None:
    """Who leaves a test out on one Python says why, in a sentence that a reader can check."""
    for mark in (*item.iter_markers("one_python"), *item.iter_markers("sweep")):
        reason, names = mark.kwargs.get("reason", ""), {"reason", "where"}
        allowed = names if mark.name == "sweep" else names - {"where"}
        if mark.args or not set(mark.kwargs) <= allowed or len(reason.split()) < 3:
            raise pytest.UsageError(
                f"{item.nodeid}: {mark.name} needs reason='why it depends on no version', got "
                f"args={mark.args}, kwargs={mark.kwargs}"
            )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Cases are thinned, and what takes long begins first: no worker ends waiting for another."""
    thin_sweeps(items)
    thin_others(items, whole=not any("::" in arg for arg in config.args))
    long = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in long)


def thin_sweeps(items: list[pytest.Item]) -> None:
    """Of a sweep's cases each fifth, and the last, run by default; the others become slow.

    CI runs the first on 3.11 alone and the others on 3.12: every case once, each Python a part.
    """
    cases: dict[Any, list[tuple[pytest.Item, str]]] = {}
    for item in (item for item in items if isinstance(item, pytest.Function)):
        for mark in item.iter_markers("sweep"):
            if mark.kwargs.get("where", lambda params: True)(item.callspec.params):
                case = item, mark.kwargs["reason"]
                cases.setdefault((item.parent, item.function), []).append(case)
    for group in cases.values():
        for number, (item, reason) in enumerate(group, 1):
            by_default = number % 5 == 1 or number == len(group)
            item.add_marker(
                pytest.mark.one_python(reason=reason) if by_default else pytest.mark.slow
            )


def thin_others(items: list[pytest.Item], whole: bool) -> None:
    """Of a test marked `by_default` the cases whose ids do not match are slow."""
    kept: dict[Any, bool] = {}
    for item in (item for item in items if isinstance(item, pytest.Function)):
        for mark in item.iter_markers("by_default"):
            runs = re.search(mark.args[0], item.callspec.id) is not None
            key = item.nodeid.partition("[")[0], mark.args[0]
            kept[key] = kept.get(key, False) or runs
            if not runs:
                item.add_marker(pytest.mark.slow)
    if whole and (lost := [name for name, any_case in kept.items() if not any_case]):
        raise pytest.UsageError(f"by_default matches no case: {lost}")
