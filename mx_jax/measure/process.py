"""A process that may hang or crash, or be left alone: whatever happens, it does not stay."""

import contextlib
import ctypes
import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# Seconds that a process has to end after it was killed; one that hangs in the driver may not.
_TO_DIE = 10.0
# Of Linux's prctl: the signal that a process gets when the one that started it ends.
_PR_SET_PDEATHSIG = 1
_STDIN = 0


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a process ended.

    Attributes:
      stdout: all of it.
      stderr: likewise.
      why: it gave no answer, in words; None if it ended well.
    """

    stdout: str
    stderr: str
    why: str | None


def run_process(
    command: Sequence[str], seconds: float, environment: Mapping[str, str] | None = None
) -> Ended:
    """Run a command for at most so long; whatever it does, this returns.

    Its stdin is a pipe into which nothing is written: its end says that this process has ended.

    Args:
      command: its words.
      seconds: after which the process, and what it started, is killed.
      environment: None: this process's own.
    """
    its_end, own_end = os.pipe()
    with os.fdopen(its_end) as lifeline, os.fdopen(own_end, "w"):
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdin=lifeline,
            text=True,
            errors="replace",
            env=environment,
            start_new_session=True,
        )
        return _ended(process, seconds)


def _ended(process: subprocess.Popen[str], seconds: float) -> Ended:
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        out, err = _killed(process)
        return Ended(stdout=out, stderr=err, why=f"no answer after {seconds:g} s: it hangs?")
    except BaseException:
        _killed(process)
        raise
    status = process.returncode
    if status == 0:
        return Ended(stdout=out, stderr=err, why=None)
    shown = f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
    return Ended(stdout=out, stderr=err, why=f"the process ended by {shown}")


def _killed(process: subprocess.Popen[str]) -> tuple[str, str]:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    try:
        return process.communicate(timeout=_TO_DIE)
    except subprocess.TimeoutExpired:
        return "", "the process could not be killed"


def end_with_parent() -> None:
    """Let this process end as soon as the one that runs it by `run_process` does, however it ends.

    On Linux the kernel sees to it, even where a hang leaves no Python thread a turn. Everywhere,
    and if it has ended already, the pipe that is stdin then has an end.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    follow_stdin()


def follow_stdin() -> None:
    """End this process, and what it started, when a pipe that is its stdin ends."""
    if stat.S_ISFIFO(os.fstat(_STDIN).st_mode):
        threading.Thread(target=_end_after_stdin, name="lifeline", daemon=True).start()


def _end_after_stdin() -> None:
    while os.read(_STDIN, 1024):
        pass
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)
