"""Cases one after the other, each in a process of its own; results as they come, in a file."""

import dataclasses
import datetime
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from mx_jax.backends.evidence import rows as files
from mx_jax.backends.evidence import sources
from mx_jax.backends.evidence.rows import Row
from mx_jax.backends.target import Backend, Target
from mx_jax.measure.cases import Case
from mx_jax.measure.notes import noted
from mx_jax.measure.process import run_process

# What a process left on stderr, in a session's file.
_LAST_WORDS = 4000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """What is measured on.

    Attributes:
      target: as selection sees it.
      jax: version.
      driver: version of NVIDIA's driver.
      versions: (package, version) of what else is there.
    """

    target: Target
    jax: str
    driver: str | None
    versions: tuple[tuple[str, str], ...]


def environment() -> dict[str, str]:
    """What a case's process sees."""
    found = dict(os.environ)
    # A GPU's memory is shared with what else runs there.
    found.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    platforms = found.get("JAX_PLATFORMS", "")
    if platforms and "cpu" not in platforms.split(","):
        # Casts are compared with the reference there.
        found["JAX_PLATFORMS"] = f"{platforms},cpu"
    return found


def last_answer(text: str) -> dict[str, Any] | None:
    """The last whole line of JSON that a process wrote."""
    for line in reversed(text.splitlines()):
        if line.startswith("{"):
            try:
                return json.loads(line)
            except ValueError:
                continue
    return None


def row_of(case: Case, backend: Backend, machine: Machine, found: dict[str, Any]) -> Row:
    """What was found, as evidence."""
    assert machine.target.device_kind is not None, machine
    numbers = ("error", "over_plain", "over_unpacking", "over_bfloat16")
    return Row(
        backend=case.backend,
        kernel=found.get("kernel") or backend.kernel(case.call, machine.target),
        work=case.work,
        shape=case.shape,
        device_kind=machine.target.device_kind,
        jax=machine.jax,
        source=sources.source_of(backend) or "",
        config=tuple(sorted(found.get("config", {}).items())),
        failed=found.get("failed", ""),
        driver=machine.driver,
        versions=machine.versions,
        date=datetime.date.today().isoformat(),
        **{name: found.get(name) for name in numbers},
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Session:
    """A run of the command.

    Attributes:
      machine: what is measured on.
      backends: whose kernels are measured.
      worker: words of the command that measures one case, whose JSON comes last.
      path: a line of JSON for each case; a later session goes on where this one ended.
      limit: seconds that a case may take.
      tuning: seconds that a case may spend on other tiles of its kernel.
      notes: what is noted while a case runs, such as clocks; all of it stands beside the result.
      every: seconds from one note to the next.
    """

    machine: Machine
    backends: Sequence[Backend]
    worker: Sequence[str]
    path: Path
    limit: float
    tuning: float = 0.0
    notes: Callable[[], Any] = lambda: None
    every: float = 3.0

    def earlier(self) -> dict[Case, Row]:
        """What earlier sessions found of the same machine and source; torn lines are left out."""
        found = {}
        for line in self.path.read_text(encoding="utf-8").splitlines() if self._is_there else ():
            try:
                entry = json.loads(line)
                case, row = Case.from_json(entry["case"]), files.from_json(entry["row"])
                fresh = row_of(case, self._backend(case), self.machine, {})
            except (KeyError, TypeError, ValueError, StopIteration):
                continue
            if row.place == fresh.place:
                found[case] = row
        return found

    def run(self, cases: Sequence[Case], deadline: float) -> Iterator[tuple[Case, Row | None]]:
        """Measure each case, and give its row; None of what was not begun before the deadline.

        Args:
          cases: the most useful first.
          deadline: of `time.monotonic()`.
        """
        for case in cases:
            left = deadline - time.monotonic()
            yield case, self._one(case, min(self.tuning, left)) if left > 0 else None

    def _one(self, case: Case, tuning: float) -> Row:
        started = time.monotonic()
        words = [json.dumps(case.as_json()), "--tune", f"{tuning:.1f}"]
        with noted(self.notes, self.every) as notes:
            ended = run_process([*self.worker, *words], self.limit, environment())
        found = last_answer(ended.stdout)
        if found is None:
            found = {"failed": ended.why or "the process gave no answer"}
        row = row_of(case, self._backend(case), self.machine, found)
        more = {"seconds": round(time.monotonic() - started, 1), "ended": ended.why}
        if row.failed or ended.why:
            more["stderr"] = ended.stderr[-_LAST_WORDS:]
        entry = {"case": case.as_json(), "row": files.as_json(row), "found": found, **more}
        self._append(entry | {"notes": notes})
        return row

    @property
    def _is_there(self) -> bool:
        return self.path.exists()

    def _backend(self, case: Case) -> Backend:
        return next(own for own in self.backends if own.name == case.backend)

    def _append(self, entry: dict[str, Any]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # A session that was killed may have left half a line.
        torn = self._is_there and not self.path.read_bytes().endswith(b"\n")
        with self.path.open("a", encoding="utf-8") as file:
            file.write("\n" * torn + json.dumps(entry) + "\n")
