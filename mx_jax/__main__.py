"""`python -m mx_jax`."""

import _thread
import gc
import io
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any, NoReturn

# Whether Ctrl-C was pressed: what raises KeyboardInterrupt may be dropped, or become another error.
_interrupts: list[int] = []


def _interrupted(number: int, _: object) -> NoReturn:
    _interrupts.append(number)
    raise KeyboardInterrupt


def _terminated(*_: object) -> NoReturn:
    # What is half made is removed on the way out.
    sys.exit(128 + signal.SIGTERM)


def _unraisable(
    error: "sys.UnraisableHookArgs",
    report: Callable[["sys.UnraisableHookArgs"], object] = sys.unraisablehook,
) -> None:
    """Python drops what is raised in a callback, such as JAX's for garbage collection."""
    if issubclass(error.exc_type, KeyboardInterrupt):
        _thread.start_new_thread(_interrupt_later, (signal.SIGINT,))
    elif issubclass(error.exc_type, SystemExit):
        _thread.start_new_thread(_interrupt_later, (signal.SIGTERM,))
    else:
        report(error)


def _interrupt_later(by: signal.Signals) -> None:
    time.sleep(0.1)  # until the callback has returned
    _thread.interrupt_main(by)


class _Output(io.FileIO):
    """A stream whose reader may leave, as `head` does: the rest goes nowhere, the status stays."""

    def write(self, data: Any) -> int | None:
        try:
            return super().write(data)
        except BrokenPipeError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            return memoryview(data).nbytes


def _outlive_readers() -> None:
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        try:
            raw = _Output(stream.fileno(), "w", closefd=False)
        except (AttributeError, OSError):  # None, where it was closed; a notebook's
            continue
        how = {key: getattr(stream, key) for key in ("encoding", "errors", "line_buffering")}
        buffer: Any = raw if stream.write_through else io.BufferedWriter(raw)
        made = io.TextIOWrapper(buffer, **how, write_through=stream.write_through)
        setattr(sys, name, made)


def _run() -> int:
    # What was imported stays.
    gc.freeze()
    signal.signal(signal.SIGTERM, _terminated)
    sys.unraisablehook = _unraisable
    _outlive_readers()
    # Until the command's modules are loaded nothing is half made, and mx_jax/__init__.py ends the
    # program; afterwards it may be, and is removed on the way out.
    loading = signal.getsignal(signal.SIGINT)

    def started() -> None:
        if loading is not signal.SIG_IGN:  # as shells have commands in the background
            signal.signal(signal.SIGINT, _interrupted)

    status = 0
    try:
        from mx_jax.commands import main

        status = main(started=started)
    except BaseException:
        if not _interrupts:
            raise
    finally:
        # All is done: what takes JAX down would print of an exception, or drop it.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    if _interrupts:
        print("mx_jax: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    return status


if __name__ == "__main__":
    sys.exit(_run())
