"""`python -m mx_jax`."""

import gc
import os
import signal
import sys
from typing import NoReturn


def _terminated(*_: object) -> NoReturn:
    # What is half made is removed on the way out.
    sys.exit(128 + signal.SIGTERM)


def _run() -> int:
    # What was imported stays.
    gc.freeze()
    signal.signal(signal.SIGTERM, _terminated)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # as shells have it in the background
        # From here on something may be half made: until now mx_jax/__init__.py ended the program.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        from mx_jax.commands import main

        return main()
    except KeyboardInterrupt:
        print("mx_jax: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except BrokenPipeError:
        # Who read it has left, as `head` does: what is still buffered goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


if __name__ == "__main__":
    sys.exit(_run())
