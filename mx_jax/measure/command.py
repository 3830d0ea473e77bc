"""`python -m mx_jax gpu`: cases one after the other, each in a process of its own; then a table."""

import argparse
import contextlib
import dataclasses
import datetime
import importlib.metadata
import json
import math
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from mx_jax.backends import evidence
from mx_jax.backends.evidence import Row
from mx_jax.backends.select import known_backends, only_if_named
from mx_jax.backends.target import Target
from mx_jax.formats import block_format
from mx_jax.measure import worker
from mx_jax.measure.cases import Case, Wanted, all_cases, cases, default_path, one_of_each

_DESCRIPTION = """
Check every kernel on this machine's GPU, time it beside what computes without it and beside
bfloat16, and write what was found into your cache. From the next start of Python on, what is
right and faster than without it is used by default; mx_jax.inspect.explain quotes the measurement.
First come one case of each family of kernels, and of what computes by default, then the other
sizes. Each case runs in a process of its own with a time limit, so that one that hangs or crashes
costs one row; cases of the same kernel then come last. Run again, it measures what has no row
yet. MX_JAX_EVIDENCE=off switches all of it off.
"""
# Seconds for a process to say what machine this is.
_TO_START = 180.0
# Last words of the reason where a process did not end by itself.
_HANGS = "it hangs?"
_PACKAGES = ("jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin")

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
        if hasattr(signal, "alarm"):
            # By the system's own clock, whatever hangs, and though the command that began it ended.
            signal.alarm(math.ceil(options.limit) + 5)
        return worker.answer(options.one)
    deadline = time.monotonic() + 60 * options.minutes
    words = [sys.executable, "-m", "mx_jax", "gpu"]
    asleep = only_if_named()
    # Those behind the reference that say where their source is.
    backends = [own for own in known_backends() if own.name in asleep and own.source is not None]
    facts, asked = _machine(words), wanted_by(options)
    target = facts["target"]
    wanted = cases(backends, target, asked)
    if not wanted:
        reasons = []
        for own in backends:
            found = next(own.rejects(case.call, target) for case in all_cases(own))
            reasons.append(f"{own.name}: {found or 'takes none of what is asked for'}")
        got = f"platform={target.platform}, device_kind={target.device_kind!r}"
        raise ValueError(
            f"gpu: needs an NVIDIA GPU that a kernel runs on, got {got} ({'; '.join(reasons)}). On "
            'a machine with such a GPU install JAX for it, `pip install -U "jax[cuda13]"`; `python '
            "-m mx_jax env` shows what JAX finds"
        )
    first = *default_path(target, asked), *one_of_each(wanted)
    bench = Bench(words=words, limit=options.limit, **facts)
    queue = list(dict.fromkeys((*first, *wanted)))
    return measure(bench, queue, options.out or evidence.cache_path(), deadline, options.again)


# Processes ----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bench:
    """What measures cases.

    Attributes:
      target: the machine, as selection sees it.
      driver: version of NVIDIA's driver.
      versions: (package, version) of what is there.
      words: of the command, which options and the case follow.
      limit: seconds that a case may take.
    """

    target: Target
    driver: str | None
    versions: tuple[tuple[str, str], ...]
    words: Sequence[str]
    limit: float

    def row(self, case: Case) -> Row:
        """Measure a case in a process of its own: whatever that does, it costs one row."""
        found, why, last = run_process(self.words, json.dumps(dataclasses.asdict(case)), self.limit)
        failed = {"failed": f"{why}: {last}" if why else "the process gave no answer"}
        return self.row_of(case, found or failed)

    def row_of(self, case: Case, found: Mapping[str, Any]) -> Row:
        """What was found, as evidence."""
        backend = next(own for own in known_backends() if own.name == case.backend)
        kind = self.target.device_kind
        assert kind is not None, self.target
        numbers = ("error", "over_plain", "over_unpacking", "over_bfloat16")
        return Row(
            backend=case.backend,
            kernel=found.get("kernel") or backend.kernel(case.call, self.target),
            work=case.work,
            shape=case.shape,
            device_kind=kind,
            jax=jax.__version__,
            source=evidence.source_of(backend) or "",
            failed=found.get("failed", ""),
            plain=found.get("plain", ""),
            driver=self.driver,
            versions=self.versions,
            date=datetime.date.today().isoformat(),
            **{name: found.get(name) for name in numbers},
        )


def run_process(
    words: Sequence[str], case: str, seconds: float
) -> tuple[dict[str, Any] | None, str | None, str]:
    """Run the command for one case for at most so long; then it and what it started are killed.

    Returns:
      The last whole line of JSON that it wrote, why it did not end well, and its last words.
    """
    process = subprocess.Popen(
        [*words, "--limit", f"{seconds:g}", "--one", case],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        # A GPU's memory is shared with what else runs there; rows decide nothing.
        env={"XLA_PYTHON_CLIENT_PREALLOCATE": "false", **os.environ, evidence.VARIABLE: "off"},
        start_new_session=True,
    )
    why = None
    try:
        out, err = process.communicate(timeout=seconds)
        if status := process.returncode:
            shown = f"signal {signal.Signals(-status).name}" if status < 0 else None
            why = f"the process ended by {shown or f'exit status {status}'}"
    except BaseException as error:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        out, err = process.communicate()
        why = f"no answer after {seconds:g} s, {_HANGS}"
    found = None
    for line in out.splitlines():
        with contextlib.suppress(ValueError):
            found = json.loads(line) if line.startswith("{") else found
    return found, why, (err.strip().splitlines() or ["it said nothing"])[-1]


def _machine(words: Sequence[str]) -> dict[str, Any]:
    """What a process of its own finds, as a `Bench` has it: this one leaves the GPU alone."""
    found, why, last = run_process(words, json.dumps("machine"), _TO_START)
    if found is None or "failed" in found:
        why = found["failed"] if found else f"{why}: {last}"
        raise ValueError(f"gpu: needs a JAX that finds a device; asking it failed, {why}")
    capability = found.pop("compute_capability")
    target = Target(compute_capability=capability and tuple(capability), **found)
    versions = [("Python", platform.python_version())]
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions.append((name, importlib.metadata.version(name)))
    return {"target": target, "driver": evidence.driver(), "versions": tuple(versions)}


# Rows and tables ----------------------------------------------------------------------------------


def measure(
    bench: Bench, wanted: Sequence[Case], out: Path, deadline: float, again: bool = False
) -> int:
    """Measure cases, write rows as they come, print what was found; returns the exit status.

    Args:
      bench: how.
      wanted: the cases, in order.
      out: file of rows, which keeps those of other places.
      deadline: of `time.monotonic()`.
      again: whether to measure also what has a row there.
    """
    console = Console(width=None if sys.stdout.isatty() else 200, highlight=False)
    known = evidence.read(out, "gpu") if out.exists() else ()
    places = {} if again else {row.place: row for row in known}
    blank = {case: bench.row_of(case, {}) for case in wanted}
    queue = [case for case in wanted if blank[case].place not in places]
    rows = [places[row.place] for row in blank.values() if row.place in places]
    before = len(rows)
    hung = {(row.backend, row.kernel) for row in rows if _HANGS in row.failed}
    while queue and time.monotonic() < deadline:
        # Of a kernel that hangs, the next case may hang too.
        waits = [(blank[case].backend, blank[case].kernel) in hung for case in queue]
        case = queue.pop(waits.index(min(waits)))
        row = bench.row(case)
        if _HANGS in row.failed:
            hung.add((row.backend, row.kernel))
        rows.append(row)
        try:
            evidence.write(out, evidence.merged(known, rows))
        except OSError as error:
            raise ValueError(
                f"gpu: cannot write rows, got out={str(out)!r}: {error}; name another file with "
                "--out"
            ) from None
        beside = f", {row.over_bfloat16:.2g} of bfloat16's" if row.over_bfloat16 else ""
        place = f"{len(rows) - before}/{len(rows) - before + len(queue)}"
        console.print(f"{place} {case}: {str(row).partition(': ')[2]}{beside}", markup=False)
    console.print(table(rows))
    # What computes by default has no plain path beside it.
    of_kernels = [row for row in rows if row.failed or row.over_plain is not None]
    on = [_switched_on(row, rows) for row in of_kernels]
    console.print(f"Switched on by default: {sum(on)} of {len(on)} rows of kernels.")
    when = "from the next start of Python on"
    if out != evidence.cache_path():
        when = f"where {evidence.VARIABLE} names that file; they alone count then"
    console.print(f"Rows are in {out}, {when}.", markup=False)
    if decides := os.environ.get(evidence.VARIABLE):
        console.print(f"Now {evidence.VARIABLE}={decides} decides instead.", markup=False)
    if before:
        console.print(f"{before} cases were measured before; --again measures them anew.")
    if queue:
        said = "cases were not begun for lack of time; run it again, and it goes on."
        console.print(f"{len(queue)} {said}")
    return 0 if any(not row.failed for row in rows) else 1


def _switched_on(row: Row, rows: Iterable[Row]) -> bool:
    """Whether a kernel takes what a row stands for: every row of that must say so."""
    alike = (other for other in rows if (other.backend, other.work) == (row.backend, row.work))
    return all(other.switches_on for other in alike)


def verdict(row: Row, rows: Iterable[Row]) -> str:
    """On or off, and why; what computes by default is on anyway, right or wrong."""
    default = row.backend not in only_if_named()
    off = "default" if default else "off"
    if row.failed:
        return f"{off}: failed: {row.failed}"
    if not row.is_right:
        return f"{off}: wrong numbers"
    if not default and not row.switches_on:
        return "off: right, not faster"
    if not default and not _switched_on(row, rows):
        return "off: right and faster, but not at another size"
    return ("default" if default else "on") + ", slower than bfloat16" * row.is_slower_than_bfloat16


def table(rows: Sequence[Row]) -> Table:
    """A line for each row, with its verdict."""
    found = Table(title="Kernels beside what computes without them", title_justify="left")
    for name in ("kernel", "of", "shape"):
        found.add_column(name)
    for name in ("error over allowed", "x plain path", "x unpacking", "x bfloat16"):
        found.add_column(name, justify="right")
    found.add_column("best x bfloat16", justify="right")
    found.add_column("verdict")
    for row in rows:
        numbers = (row.error, row.over_plain, row.over_unpacking, row.over_bfloat16, best(row))
        shown = ["-" if value is None else f"{value:.3g}" for value in numbers]
        if row.plain and row.over_plain is not None:
            shown[1] += f" {row.plain}"
        shape = " x ".join(map(str, row.shape))
        named = f"{row.backend} {row.kernel}".strip()
        found.add_row(named, str(row.work), shape, *shown, verdict(row, rows))
    return found


def best(row: Row) -> float | None:
    """Speed over bfloat16's of the kernel if it is right, or of the plain path."""
    if row.over_bfloat16 is None:
        return None
    plain = row.over_bfloat16 / row.over_plain if row.over_plain else 0.0
    return max(row.over_bfloat16 if row.is_right else 0.0, plain)
