"""Running tests against one changed module, each time in a process of its own.

A process that has imported JAX, but started none of its threads, forks a child for each mutant. The
child reads the changed module from memory: no file of the checkout is touched. What XLA compiles is
kept on disk under the program's hash, so a child compiles only programs that its mutant changes.
"""

import contextlib
import dataclasses
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.mutation.core import ROOT, path_of

_MEMORY = 12 << 30


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What tests said.

    Attributes:
      passed: whether all of them passed.
      test: the first that failed, or why there is none.
      seconds: of CPU.
      output: what pytest wrote.
    """

    passed: bool
    test: str
    seconds: float
    output: str = dataclasses.field(repr=False, default="")


def prepare(cache: Path) -> None:
    """Import what every child needs. No JAX backend may have started: its threads do not fork."""
    os.environ |= {
        "JAX_COMPILATION_CACHE_DIR": str(cache / "xla"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        # The tests are there to compare the core with facts, not with the C++ library's casts.
        "MX_JAX_CPU_LIBRARY": "none",
        # What is imported already cannot be imported anew as a plugin.
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        # Bits are the same, compiling is shorter.
        "XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true",
    }
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    import hypothesis  # noqa: F401
    import jax
    import jax.numpy  # noqa: F401
    import pytest  # noqa: F401


def run(module: str, source: str | None, tests: Sequence[str], seconds: float) -> Outcome:
    """Run tests, in their order up to the first that fails, against a changed module.

    Args:
      module: dotted name.
      source: what it is instead of its file; None: as it is.
      tests: as pytest takes them.
      seconds: of CPU that the child may take; a mutant that loops for ever takes them all.
    """
    with tempfile.TemporaryFile("w+") as output, tempfile.NamedTemporaryFile("r") as verdict:
        child = os.fork()
        if child == 0:
            code = 70
            try:
                os.setsid()
                os.dup2(output.fileno(), 1)
                os.dup2(output.fileno(), 2)
                code = _child(module, source, tests, seconds, verdict.name)
            except BaseException:
                traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        status, usage = _wait(child, 10 * seconds + 60)
        output.seek(0)
        text, failed = output.read(), verdict.read()
    code = os.waitstatus_to_exitcode(status)
    spent = usage.ru_utime + usage.ru_stime
    if code < 0:
        reason = f"stopped by {signal.Signals(-code).name}"
        return Outcome(False, reason, spent, text)
    if code == 0:
        return Outcome(True, "", spent, text)
    return Outcome(False, json.loads(failed) if failed else f"pytest exits {code}", spent, text)


def _wait(child: int, wall: float) -> tuple[int, Any]:
    """The status of a child, killed with all that it started once the time is over."""
    try:
        end = time.monotonic() + wall
        while True:
            pid, status, usage = os.wait4(child, os.WNOHANG)
            if pid:
                return status, usage
            if time.monotonic() > end:
                os.killpg(child, signal.SIGKILL)
            time.sleep(0.02)
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        raise


def _child(
    module: str, source: str | None, tests: Sequence[str], seconds: float, verdict: str
) -> int:
    import pytest

    limit = int(seconds) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if source is not None:
        sys.meta_path.insert(0, _Finder(module, source))
    options = ["-x", "-q", "--tb=line", "--no-header", "-p", "no:cacheprovider", "--durations=8"]
    return int(pytest.main([*options, *tests], plugins=[_FirstFailure(Path(verdict))]))


class _FirstFailure:
    """Writes down which test failed; a module that cannot be imported fails in collection."""

    def __init__(self, path: Path):
        self.path = path

    def pytest_runtest_logreport(self, report: Any) -> None:
        self._note(report)

    def pytest_collectreport(self, report: Any) -> None:
        self._note(report)

    def _note(self, report: Any) -> None:
        if report.failed:
            self.path.write_text(json.dumps(report.nodeid or "importing"))


class _Finder(importlib.abc.MetaPathFinder):
    """Gives one module another source."""

    def __init__(self, module: str, source: str):
        self.module, self.source = module, source

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname != self.module:
            return None
        file = str(path_of(fullname))
        loader = _Loader(fullname, file, self.source)
        return importlib.util.spec_from_file_location(fullname, file, loader=loader)


class _Loader(importlib.machinery.SourceFileLoader):
    def __init__(self, fullname: str, path: str, source: str):
        super().__init__(fullname, path)
        self._source = source

    def get_code(self, fullname: str) -> Any:
        return compile(self._source, self.path, "exec", dont_inherit=True)
