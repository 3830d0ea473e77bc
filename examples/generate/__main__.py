"""Runs the program in `command.py`: `python examples/generate --help`."""

import os
import signal
import sys
from pathlib import Path


def stop(*_: object) -> None:
    """Ends at once with one line: an exception would be lost where JAX calls Python back."""
    line = "generate: interrupted\n"
    # On a terminal a text may have begun, and rich may have hidden the cursor.
    os.write(2, (f"\x1b[?25h\n{line}" if os.isatty(2) else line).encode())
    os._exit(130)


if __name__ == "__main__":
    # Before JAX is imported, which takes a second.
    signal.signal(signal.SIGINT, stop)
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from generate.command import main

    sys.exit(main())
