"""`python -m mx_jax`."""

import signal
import sys
from typing import Any, NoReturn


def _terminated(*_: Any) -> NoReturn:
    # What is half made is removed on the way out.
    sys.exit(128 + signal.SIGTERM)


def _run() -> int:
    signal.signal(signal.SIGTERM, _terminated)
    try:
        from mx_jax.cli import main

        return main()
    except KeyboardInterrupt:
        print("mx_jax: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(_run())
