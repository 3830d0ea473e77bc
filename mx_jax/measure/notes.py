"""What is noted of a machine while a case runs, such as its clocks: once it ended they are idle."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def noted(notes: Callable[[], Any], every: float) -> Iterator[list[Any]]:
    """A context in which a thread notes something again and again.

    Args:
      notes: gives what is noted; None is left out.
      every: so many seconds, the first time after so many.

    Returns:
      What was noted, complete once the context ends.
    """
    found: list[Any] = []
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(every):
            note = notes()
            if note is not None:
                found.append(note)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        ended.set()
        thread.join()
