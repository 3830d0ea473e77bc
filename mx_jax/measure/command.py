"""`python -m mx_jax gpu`: cases one after the other, each in a process of its own; then a table."""

import argparse
import contextlib
import ctypes
import dataclasses
import datetime
import importlib.metadata
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from mx_jax.backends import evidence
from mx_jax.backends.evidence import Row
from mx_jax.backends.select import known_backends, only_if_named
from mx_jax.backends.target import Backend, Target
from mx_jax.formats import block_format
from mx_jax.measure import worker
from mx_jax.measure.cases import Case, Wanted, all_cases, cases

_DESCRIPTION = """
Check every kernel on this machine's GPU, time it beside what computes without it and beside
bfloat16, and write what was found into your cache. From the next start of Python on, what is
right and faster is used by default; mx_jax.inspect.explain quotes the measurement. Each case
runs in a process of its own with a time limit, so that one that hangs or crashes costs one row.
Run again, it measures what has no row yet. MX_JAX_EVIDENCE=off switches all of it off.
"""
# Seconds for a process to say what machine this is.
_TO_START = 180.0
_PACKAGES = ("jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin")
# Of Linux's prctl: the signal that a process gets when the one that started it ends.
_PR_SET_PDEATHSIG = 1

# Options ------------------------------------------------------------------------------------------


def add_to(commands: Any) -> None:
    """Add the command to a parser's subparsers."""
    parser = commands.add_parser(
        "gpu",
        help="check and time the GPU kernels here, and switch on what is right and faster",
        description=_DESCRIPTION,
    )
    add = parser.add_argument
    add("--formats", nargs="+", type=_format, metavar="FORMAT", help="block formats, by name")
    for name, form, metavar, text in (
        ("--sizes", "8192x8192", "NxK", "of weights"),
        ("--experts", "8x14336x4096", "GxNxK", "of a mixture"),
        ("--rows", "16", "M", "of activations"),
    ):
        help = f"{text}, as {form}"
        add(name, nargs="+", type=_numbers(form), metavar=metavar, help=help)
    add("--minutes", type=float, default=10.0, help="after which no case is begun (default: 10)")
    add("--limit", type=float, default=120.0, help="seconds that a case may take (default: 120)")
    add(
        "--tune",
        type=float,
        default=worker.THOROUGH.tuning,
        metavar="SECONDS",
        help="for other tiles of a case's kernel, each checked, then timed (default: "
        f"{worker.THOROUGH.tuning:g}; 0 tries none)",
    )
    add("--again", action="store_true", help="measure also what was measured here")
    add("--out", type=Path, metavar="FILE.json", help="instead of your cache")
    add("--one", metavar="CASE", help=argparse.SUPPRESS)
    parser.set_defaults(run=run)


def _format(text: str) -> str:
    try:
        return block_format(text).name
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _numbers(form: str) -> Callable[[str], tuple[int, ...]]:
    """A parser of numbers with x between them, as an example has them."""

    def parse(text: str) -> tuple[int, ...]:
        parts = text.lower().split("x")
        if len(parts) != len(form.split("x")) or not all(p.isdecimal() and int(p) for p in parts):
            raise argparse.ArgumentTypeError(f"needs numbers as {form}, got {text!r}")
        return tuple(map(int, parts))

    return parse


def wanted_by(options: argparse.Namespace) -> Wanted:
    """What the options choose; sizes of one kind alone leave out the other."""
    found = Wanted()
    if options.sizes or options.experts:
        sizes, experts = options.sizes or (), options.experts or ()
        found = dataclasses.replace(found, sizes=sizes, experts=experts)
    if options.rows:
        rows = [rows for (rows,) in options.rows]
        found = dataclasses.replace(found, rows=rows, ragged_rows=rows)
    return dataclasses.replace(found, formats=options.formats or found.formats)


def run(options: argparse.Namespace) -> int:
    """Run the command; returns the exit status.

    Raises:
      ValueError: there is no GPU here that a kernel runs on, or nowhere to write.
    """
    if options.one is not None:
        _end_with_parent()
        return worker.answer(options.one, tuning=options.tune)
    deadline = time.monotonic() + 60 * options.minutes
    words = [sys.executable, "-m", "mx_jax", "gpu", "--one"]
    asleep = only_if_named()
    # Those behind the reference that say where their source is.
    backends = [own for own in known_backends() if own.name in asleep and own.source is not None]
    machine = _machine(words)
    wanted = cases(backends, machine.target, wanted_by(options))
    if not wanted:
        raise ValueError(_what_is_missing(backends, machine.target))
    bench = Bench(
        machine=machine, backends=backends, words=words, limit=options.limit, tuning=options.tune
    )
    return measure(bench, wanted, options.out or evidence.cache_path(), deadline, options.again)


# Processes ----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """What is measured on.

    Attributes:
      target: as selection sees it.
      driver: version of NVIDIA's driver.
      versions: (package, version) of what is there.
    """

    target: Target
    driver: str | None
    versions: tuple[tuple[str, str], ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bench:
    """What measures cases.

    Attributes:
      machine: on which.
      backends: whose kernels.
      words: of the command that measures one case, whose JSON comes last.
      limit: seconds that a case may take.
      tuning: seconds that a case may spend on other tiles of its kernel.
    """

    machine: Machine
    backends: Sequence[Backend]
    words: Sequence[str]
    limit: float
    tuning: float = 0.0

    def row(self, case: Case, seconds_left: float) -> Row:
        """Measure a case in a process of its own: whatever that does, it costs one row."""
        tuning = f"{min(self.tuning, seconds_left):.1f}"
        words = [*self.words, json.dumps(dataclasses.asdict(case)), "--tune", tuning]
        found, why, _ = run_process(words, self.limit)
        return self.row_of(case, found or {"failed": why or "the process gave no answer"})

    def row_of(self, case: Case, found: dict[str, Any]) -> Row:
        """What was found, as evidence."""
        machine = self.machine
        assert machine.target.device_kind is not None, machine
        backend = next(own for own in self.backends if own.name == case.backend)
        numbers = ("error", "over_plain", "over_unpacking", "over_bfloat16")
        return Row(
            backend=case.backend,
            kernel=found.get("kernel") or backend.kernel(case.call, machine.target),
            work=case.work,
            shape=case.shape,
            device_kind=machine.target.device_kind,
            jax=jax.__version__,
            source=evidence.source_of(backend) or "",
            config=tuple(sorted(found.get("config", {}).items())),
            failed=found.get("failed", ""),
            driver=machine.driver,
            versions=machine.versions,
            date=datetime.date.today().isoformat(),
            **{name: found.get(name) for name in numbers},
        )


def run_process(
    words: Sequence[str], seconds: float
) -> tuple[dict[str, Any] | None, str | None, str]:
    """Run a command for at most so long; then it and what it started are killed.

    Returns:
      The last whole line of JSON that it wrote, why it did not end well, and its last words.
    """
    process = subprocess.Popen(
        words,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=_environment(),
        start_new_session=True,
    )
    why = None
    try:
        out, err = process.communicate(timeout=seconds)
        if status := process.returncode:
            shown = f"signal {signal.Signals(-status).name}" if status < 0 else None
            why = f"the process ended by {shown or f'exit status {status}'}"
    except subprocess.TimeoutExpired:
        _kill(process)
        out, err = process.communicate()
        why = f"no answer after {seconds:g} s: it hangs?"
    except BaseException:
        _kill(process)
        raise
    return _last_answer(out), why, (err.strip().splitlines() or ["it said nothing"])[-1]


def _kill(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _end_with_parent() -> None:
    """Let this process end with the command that started it, however that ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _environment() -> dict[str, str]:
    """What a case's process sees."""
    found = dict(os.environ)
    # A GPU's memory is shared with what else runs there.
    found.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    platforms = found.get("JAX_PLATFORMS", "")
    if platforms and "cpu" not in platforms.split(","):
        # Casts are compared with the reference there.
        found["JAX_PLATFORMS"] = f"{platforms},cpu"
    return found


def _last_answer(text: str) -> dict[str, Any] | None:
    for line in reversed(text.splitlines()):
        if line.startswith("{"):
            with contextlib.suppress(ValueError):
                return json.loads(line)
    return None


def _machine(words: Sequence[str]) -> Machine:
    """What a process of its own finds: this one leaves the GPU alone."""
    found, why, last = run_process([*words, json.dumps("machine")], _TO_START)
    if found is None:
        raise ValueError(f"gpu: needs a JAX that finds a device; asking it failed, {why}: {last}")
    capability = found["compute_capability"]
    target = Target(
        platform=found["platform"],
        compute_capability=None if capability is None else tuple(capability),
        device_kind=found["device_kind"],
    )
    versions = [("Python", platform.python_version())]
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions.append((name, importlib.metadata.version(name)))
    return Machine(target=target, driver=evidence.driver(), versions=tuple(versions))


def _what_is_missing(backends: Sequence[Backend], target: Target) -> str:
    reasons = []
    for backend in backends:
        found = (backend.rejects(case.call, target) for case in all_cases(backend))
        reasons.append(f"{backend.name}: {next(found) or 'takes none of what is asked for'}")
    got = f"platform={target.platform}, device_kind={target.device_kind!r}"
    return (
        f"gpu: needs an NVIDIA GPU that a kernel runs on, got {got} ({'; '.join(reasons)}). On a "
        'machine with such a GPU install JAX for it, `pip install -U "jax[cuda13]"`; `python -m '
        "mx_jax env` shows what JAX finds"
    )


# Rows and tables ----------------------------------------------------------------------------------


def measure(
    bench: Bench, wanted: Sequence[Case], out: Path, deadline: float, again: bool = False
) -> int:
    """Measure cases, write rows as they come, print what was found; returns the exit status.

    Args:
      bench: how.
      wanted: the cases, the most useful first.
      out: file of rows, which keeps those of other places.
      deadline: of `time.monotonic()`.
      again: whether to measure also what has a row there.
    """
    console = Console(width=None if sys.stdout.isatty() else 200, highlight=False)
    known = _known(out, console)
    places = {} if again else {row.place: row for row in known}
    measured = {case: places.get(bench.row_of(case, {}).place) for case in wanted}
    rows = [row for row in measured.values() if row is not None]
    missing, left = [case for case in wanted if measured[case] is None], 0
    for i, case in enumerate(missing):
        seconds = deadline - time.monotonic()
        if seconds <= 0:
            left = len(missing) - i
            break
        rows.append(row := bench.row(case, seconds))
        _write(out, known, rows)
        beside = row.over_bfloat16
        more = "" if beside is None else f", {beside:.2g} of bfloat16's"
        found = str(row).partition(": ")[2]
        console.print(f"{i + 1}/{len(missing)} {case}: {found}{more}", markup=False)
    console.print(table(rows))
    for line in _closing(rows, out, left, len(wanted) - len(missing)):
        console.print(line, markup=False)
    return 0 if any(not row.failed for row in rows) else 1


def _known(out: Path, console: Console) -> tuple[Row, ...]:
    """Rows that are there already; a damaged file is put aside."""
    if not out.exists():
        return ()
    try:
        return evidence.read(out, "gpu")
    except ValueError as error:
        aside = out.with_suffix(".damaged.json")
        out.replace(aside)
        console.print(f"{error}; put aside as {aside}", markup=False)
        return ()


def _write(out: Path, known: Sequence[Row], rows: Sequence[Row]) -> None:
    try:
        evidence.write(out, evidence.merged(known, rows))
    except OSError as error:
        raise ValueError(
            f"gpu: cannot write rows, got out={str(out)!r}: {error}; name another file with --out"
        ) from None


def _closing(rows: Sequence[Row], out: Path, left: int, known: int) -> Iterator[str]:
    on = sum(_switched_on(row, rows) for row in rows)
    yield f"Switched on by default: {on} of {len(rows)} rows."
    if known:
        yield f"{known} cases were measured before; --again measures them anew."
    if left:
        yield f"{left} cases were not begun for lack of time; run it again, and it goes on."
    yield f"Rows are in {out}, from the next start of Python on."
    if os.environ.get(evidence.VARIABLE):
        yield f"Now {evidence.VARIABLE}={os.environ[evidence.VARIABLE]} decides instead."


def _switched_on(row: Row, rows: Iterable[Row]) -> bool:
    """Whether a kernel takes what a row stands for: every row of that must say so."""
    alike = (other for other in rows if (other.backend, other.work) == (row.backend, row.work))
    return all(other.switches_on for other in alike)


def verdict(row: Row, rows: Iterable[Row]) -> str:
    """On or off, and why."""
    if row.failed:
        return f"off: failed: {row.failed}"
    if not row.is_right:
        return "off: wrong numbers"
    if not row.switches_on:
        return "off: right, not faster"
    return "on" if _switched_on(row, rows) else "off: right and faster, but not at another size"


def table(rows: Sequence[Row]) -> Table:
    """A line for each row, with its verdict; casts have a copy where products have bfloat16."""
    found = Table(title="Kernels beside what computes without them", title_justify="left")
    for name in ("kernel", "of", "shape"):
        found.add_column(name)
    for name in ("error over allowed", "x plain path", "x unpacking", "x bfloat16, copy"):
        found.add_column(name, justify="right")
    found.add_column("verdict")
    for row in rows:
        numbers = (row.error, row.over_plain, row.over_unpacking, row.over_bfloat16)
        found.add_row(
            f"{row.backend} {row.kernel}".strip(),
            str(row.work),
            " x ".join(map(str, row.shape)),
            *("-" if value is None else f"{value:.3g}" for value in numbers),
            verdict(row, rows),
        )
    return found
