"""`python -m mx_jax`."""

import _thread
import gc
import signal
import sys
import time
from collections.abc import Callable
from typing import NoReturn


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


def _run() -> int:
    # What was imported stays.
    gc.freeze()
    signal.signal(signal.SIGTERM, _terminated)
    sys.unraisablehook = _unraisable
    try:
        from mx_jax.cli import main

        return main()
    except KeyboardInterrupt:
        print("mx_jax: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(_run())
