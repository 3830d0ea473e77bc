"""What every test shares: eight CPU devices, repeatable randomness, one cache of programs."""

import gc
import os
import re
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NUM_CPU_DEVICES = 8

# Read when JAX's first backend starts, so it is set before any test imports JAX. The workers keep
# all cores busy: a program in parts, compiled by several threads, is the same and takes longer.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + f" --xla_force_host_platform_device_count={NUM_CPU_DEVICES}"
    " --xla_cpu_parallel_codegen_split_count=1"
).strip()

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
    compiled. The cache ends with the run, unless the environment names one, as CI does for runs
    under one Python after another.
    """
    check_instruction_set()
    if hasattr(config, "workerinput"):
        return
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        cache = tempfile.TemporaryDirectory(prefix="mx_jax_tests_", ignore_cleanup_errors=True)
        config.add_cleanup(cache.cleanup)
        os.environ["JAX_COMPILATION_CACHE_DIR"] = cache.name
    os.environ |= {
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }


def check_instruction_set() -> None:
    """The instruction set of the environment must be in force: tests would skip, or try another."""
    if isa := os.environ.get("MX_JAX_CPU_ISA"):
        from mx_jax.backends.cpu_ffi import library

        loaded = library.load()
        if getattr(loaded, "isa", None) != isa:
            raise pytest.UsageError(f"MX_JAX_CPU_ISA={isa} is not in force: {loaded}")


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


# Of what tests/quick.py is not for, these folders and files ask nothing.
QUICK_FOLDERS = {"benchmarks", "calibrate", "cli", "convert", "examples", "nn"}
QUICK_FOLDERS |= {"test_docs.py"}


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
def kernels_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels multiply any number of rows, which is XLA's dot's on some instruction sets."""
    from mx_jax.backends.cpu_ffi import library, products

    monkeypatch.setattr(products, "FLOAT32_ROWS", dict.fromkeys(library.ISAS, 2**31))


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """A generator of its own for each test, seeded by the test's name."""
    return np.random.default_rng(zlib.crc32(request.node.name.encode()))


# What depends on no version of Python or JAX, and why: CI runs it on 3.11, its slow tests on 3.12.
ONE_PYTHON = {
    "bytes of files in and out; what is computed is tested elsewhere": "checkpoint cli",
    "a C++ library, the same one, computes these bits": """
        backends/test_cast_statistics backends/test_cpu_calls backends/test_cpu_casts
        backends/test_cpu_matmul""",
    "frozen values, and what is chosen by them": """
        backends/test_identity backends/test_select formats recipes""",
    "the project's sources, pages and pictures; pages of docs are slow tests": """
        benchmarks examples contracts/test_docs contracts/test_examples
        contracts/test_import_time contracts/test_imports contracts/test_migrate
        contracts/test_packaging contracts/test_public_names contracts/test_site
        contracts/test_size contracts/test_style ../mx_jax""",
    "choices among codes, and laws of them, that tests/codecs has on every Python": """
        calibrate extending benchmarks/test_bias examples/test_choose_formats
        quantize/test_bad_input quantize/test_float_scales quantize/test_properties
        quantize/test_tensor_scales
        reference/test_scale_rules""",
}

# What an instruction set of the C++ library may change, and how: under the best of the machine CI
# runs it on 3.11, under others (MX_JAX_CPU_ISA) on 3.12; its slow tests under the best, on 3.12.
EVERY_SET = {
    "kernels of casts, products, packed weights and attention": """
        backends/test_cast_statistics backends/test_cpu_attend backends/test_cpu_calls
        backends/test_cpu_casts backends/test_cpu_ffi backends/test_cpu_matmul
        backends/test_cpu_programs backends/test_cpu_random_bits backends/test_suite
        conformance/test_quantized ops/test_extremes ops/test_matmul ops/test_packing
        ragged/test_products""",
    "by how many rows kernels are worth while, on each of several devices too": """
        cli/test_env contracts/test_docs convert/test_weights inspect/test_explain
        nn/test_stored_kernels sharding/test_packed sharding/test_partition""",
    "bits of whole programs": "fingerprint",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--newest",
        action="store_true",
        help="leave out what ONE_PYTHON and EVERY_SET of tests/conftest.py name",
    )
    parser.addoption(
        "--every-set", action="store_true", help="only what EVERY_SET of tests/conftest.py names"
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Under `--every-set` no other file is read."""
    if not config.getoption("--every-set") or collection_path.suffix != ".py":
        return None
    return not is_among(collection_path, named(EVERY_SET)) or None


def named(table: dict[str, str]) -> set[Path]:
    """Files, without their suffix, and folders."""
    here = Path(__file__).parent
    paths = {(here / name).resolve() for names in table.values() for name in names.split()}
    if lost := [path for path in paths if not (path.is_dir() or path.with_suffix(".py").exists())]:
        raise pytest.UsageError(f"tests/conftest.py names what is not there: {lost}")
    return paths


def is_among(path: Path, paths: set[Path]) -> bool:
    """Whether a file, or a folder that it is in, is one of the paths."""
    return not paths.isdisjoint((path.with_suffix(""), *path.parents))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Cases are thinned, and what takes long begins first: no worker ends waiting for another."""
    thin(items, whole=not any("::" in arg for arg in config.args))
    elsewhere = named(ONE_PYTHON) | named(EVERY_SET)
    if config.getoption("--newest"):
        leave_out(elsewhere, config, items)
    long = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in long)


def thin(items: list[pytest.Item], whole: bool) -> None:
    """`slow(but=...)`: these cases are not, where ids match a pattern, or each so-manieth and last.

    `where`, of a case's parameters, says which cases of a class are meant.
    """
    cases: dict[tuple[str, int], tuple[pytest.Mark, list[pytest.Function]]] = {}
    marked = set()
    for item in (item for item in items if isinstance(item, pytest.Function)):
        for node, mark in item.iter_markers_with_node("slow"):
            if "but" not in mark.kwargs:
                continue
            marked.add(node)
            if mark.kwargs.get("where", lambda params: True)(item.callspec.params):
                key = item.nodeid.partition("[")[0], id(mark)
                cases.setdefault(key, (mark, []))[1].append(item)
    for node in marked:
        node.own_markers[:] = [mark for mark in node.own_markers if "but" not in mark.kwargs]
    for (name, _), (mark, group) in cases.items():
        but = mark.kwargs["but"]
        if isinstance(but, int):
            kept = [*group[:-1:but], group[-1]]
        else:
            kept = [item for item in group if re.search(but, item.callspec.id)]
        if whole and not kept:
            raise pytest.UsageError(f"{name}: slow but for {but!r}, which matches no case")
        for item in set(group) - set(kept):
            item.add_marker(pytest.mark.slow)


def leave_out(paths: set[Path], config: pytest.Config, items: list[pytest.Item]) -> None:
    """Slow tests, and those that the other Python skips, stay."""
    left = [
        item
        for item in items
        if is_among(item.path, paths)
        and not item.get_closest_marker("slow")
        and not any("Python 3.12" in str(mark.kwargs) for mark in item.iter_markers("skipif"))
    ]
    config.hook.pytest_deselected(items=left)
    gone = set(left)
    items[:] = [item for item in items if item not in gone]
