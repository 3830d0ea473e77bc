"""`python -m mx_jax gpu`."""

import argparse
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from mx_jax.backends.evidence import rows as files
from mx_jax.backends.evidence import sources
from mx_jax.backends.evidence.rows import Row
from mx_jax.backends.select import known_backends, only_if_named
from mx_jax.backends.target import Backend, Target
from mx_jax.measure import options, report, worker
from mx_jax.measure.cases import Case, all_cases, cases
from mx_jax.measure.process import end_with_parent, run_process
from mx_jax.measure.session import Machine, Session, environment, last_answer

# Seconds for a process to say what machine this is.
_TO_START = 180.0
_PACKAGES = ("jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin")


def add_to(commands: Any) -> None:
    """Add the command to a parser's subparsers."""
    options.add_to(commands).set_defaults(run=run)


def run(given: argparse.Namespace) -> int:
    """Run the command; returns the exit status.

    Raises:
      ValueError: there is no GPU here that a kernel runs on, or nowhere to write.
    """
    if given.one is not None:
        end_with_parent()
        return worker.answer(given.one, given.simulate, tuning=given.tune)
    deadline = time.monotonic() + 60 * given.minutes
    words = [sys.executable, "-m", "mx_jax", "gpu", *["--simulate"] * given.simulate, "--one"]
    machine, backends = _machine(words), _measured_backends()
    wanted = cases(backends, machine.target, options.wanted(given))
    if not wanted:
        raise ValueError(_what_is_missing(backends, machine.target, given.simulate))
    folder = sources.cache_path().parent
    name = "simulated.jsonl" if given.simulate else "gpu-session.jsonl"
    session = Session(
        machine=machine,
        backends=backends,
        worker=words,
        path=given.session or folder / name,
        limit=given.limit,
        tuning=given.tune,
        notes=clocks,
    )
    out = given.out or (None if given.simulate else sources.cache_path())
    return measure(session, wanted, out, deadline, given.again)


def _measured_backends() -> list[Backend]:
    """Those behind the reference that say where their source is."""
    asleep = only_if_named()
    return [own for own in known_backends() if own.name in asleep and own.source is not None]


def _machine(words: Sequence[str]) -> Machine:
    """What a process of its own finds: this one leaves the GPU alone."""
    ended = run_process([*words, json.dumps("machine")], _TO_START, environment())
    found = last_answer(ended.stdout)
    if found is None:
        last = (ended.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise ValueError(
            f"gpu: needs a JAX that finds a device; asking it failed, {ended.why}: {last}"
        )
    capability = found["compute_capability"]
    target = Target(
        platform=found["platform"],
        compute_capability=None if capability is None else tuple(capability),
        device_kind=found["device_kind"],
    )
    versions = [("Python", platform.python_version())]
    for name in _PACKAGES:
        try:
            versions.append((name, importlib.metadata.version(name)))
        except importlib.metadata.PackageNotFoundError:
            continue
    return Machine(
        target=target, jax=jax.__version__, driver=sources.driver(), versions=tuple(versions)
    )


def _what_is_missing(backends: Sequence[Backend], target: Target, simulated: bool) -> str:
    reasons = []
    for backend in backends:
        found = (backend.rejects(case.call, target) for case in all_cases(backend))
        reasons.append(f"{backend.name}: {next(found) or 'takes none of what is asked for'}")
    got = f"platform={target.platform}, device_kind={target.device_kind!r}"
    if simulated:
        return (
            f"gpu: --simulate interprets kernels that run on the simulated GPU, got {got}, "
            f"jax={jax.__version__} ({'; '.join(reasons)}). Install the version of JAX that they "
            "need, or choose other --formats, --sizes, --experts and --rows"
        )
    return (
        f"gpu: needs an NVIDIA GPU that a kernel runs on, got {got} ({'; '.join(reasons)}). On a "
        'machine with such a GPU install JAX for it, `pip install -U "jax[cuda13]"`; `python -m '
        "mx_jax env` shows what JAX finds. `--simulate` tries this command without a GPU"
    )


def clocks() -> str | None:
    """Clocks, power and temperature of the GPU now, as nvidia-smi says; None without it."""
    query = "clocks.sm,clocks.mem,power.draw,temperature.gpu"
    try:
        found = subprocess.run(
            ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return f"{query}: {found.stdout.strip()}"


def measure(
    session: Session, wanted: Sequence[Case], out: Path | None, deadline: float, again: bool = False
) -> int:
    """Measure cases, write rows as they come, print what was found; returns the exit status.

    Args:
      session: how.
      wanted: the cases, the most useful first.
      out: file of rows, which keeps those of other places; None writes none.
      deadline: of `time.monotonic()`.
      again: whether to measure also what an earlier session measured.
    """
    console = Console(width=None if sys.stdout.isatty() else 200, highlight=False)
    known = {} if again else session.earlier()
    rows = [known[case] for case in wanted if case in known]
    missing = [case for case in wanted if case not in known]
    kept = () if out is None else _kept(out, console)
    left = 0
    if out is not None and rows:
        _write(out, kept, rows)
    with _progress(console) as bar:
        task = bar.add_task("", total=len(missing))
        for case, row in session.run(missing, deadline):
            bar.update(task, description=str(case), advance=1)
            if row is None:
                left += 1
                continue
            rows.append(row)
            console.print(f"{case}: {_short(row)}", markup=False)
            if out is not None:
                _write(out, kept, rows)
    console.print(report.table(rows))
    for line in _closing(rows, out, left, len(rows) - len(missing) + left, session.path):
        console.print(line, markup=False)
    return 0 if any(not row.failed for row in rows) else 1


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(*columns, TimeElapsedColumn(), console=console, transient=True)


def _short(row: Row) -> str:
    beside = "" if row.over_bfloat16 is None else f", {row.over_bfloat16:.2g} of bfloat16's"
    return f"{str(row).partition(': ')[2]}{beside}"


def _kept(out: Path, console: Console) -> tuple[Row, ...]:
    """Rows that are there already; a damaged file is put aside."""
    if not out.exists():
        return ()
    try:
        return files.read(out, "gpu")
    except ValueError as error:
        aside = out.with_suffix(".damaged.json")
        out.replace(aside)
        console.print(f"{error}; put aside as {aside}", markup=False)
        return ()


def _write(out: Path, kept: Sequence[Row], rows: Sequence[Row]) -> None:
    try:
        files.write(out, files.merged(kept, rows))
    except OSError as error:
        raise ValueError(
            f"gpu: cannot write rows, got out={str(out)!r}: {error}; name another file with --out"
        ) from None


def _closing(
    rows: Sequence[Row], out: Path | None, left: int, known: int, session: Path
) -> list[str]:
    lines = report.summary(rows)
    heading = "Switched on by default" if lines else "Nothing is switched on"
    if out is None:
        heading = "Would be switched on, if this were a GPU" if lines else heading
    found = [f"{heading}:" if lines else f"{heading}.", *(f"  {line}" for line in lines)]
    if known:
        found.append(f"{known} cases were measured before; --again measures them anew.")
    if left:
        found.append(f"{left} cases were not begun for lack of time; run it again, and it goes on.")
    if out is not None:
        found.append(f"Rows are in {out}, from the next start of Python on.")
        if os.environ.get(sources.VARIABLE):
            found.append(f"Now {sources.VARIABLE}={os.environ[sources.VARIABLE]} decides instead.")
    return [*found, f"All that was found is in {session}."]
