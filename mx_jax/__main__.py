"""`python -m mx_jax`."""

import _thread
import gc
import os
import signal
import sys
import threading
from typing import NoReturn


def _terminated(*_: object) -> NoReturn:
    # What is half made is removed on the way out.
    sys.exit(128 + signal.SIGTERM)


def _unraisable(error: "sys.UnraisableHookArgs") -> None:
    # Python drops what is raised in a callback, as JAX's for garbage collection: again after it.
    by = {KeyboardInterrupt: signal.SIGINT, SystemExit: signal.SIGTERM}.get(error.exc_type)
    if by is None:
        sys.__unraisablehook__(error)
    else:
        threading.Timer(0.1, _thread.interrupt_main, (by,)).start()


def _run() -> int:
    # What was imported stays.
    gc.freeze()
    signal.signal(signal.SIGTERM, _terminated)
    sys.unraisablehook = _unraisable
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # as shells have it in the background
        # From here on something may be half made: until now mx_jax/__init__.py ended the program.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        from mx_jax.commands import main

        return main()
    except KeyboardInterrupt:
        print("mx_jax: interrupted", file=sys.stderr, flush=True)
        os._exit(128 + signal.SIGINT)  # Half loaded, JAX may crash where Python ends.
    except BrokenPipeError:
        # Who read it has left, as `head` does: what is still buffered goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


if __name__ == "__main__":
    sys.exit(_run())
