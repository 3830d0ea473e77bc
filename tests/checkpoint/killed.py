"""What a process leaves behind that is killed at any one of its changes to files."""

import builtins
import contextlib
import io
import itertools
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

_CHANGES = "replace rename unlink remove rmdir mkdir link fsync chmod open".split()


class Killed(BaseException):
    """In place of a signal: nobody catches it, and what handles it finds that nothing works."""


@contextlib.contextmanager
def killed(at: int) -> Iterator[list[str]]:
    """Kills before change `at // 2` to files, or after it; yields the changes until then."""
    changes: list[str] = []

    def dying(name: str, change: Callable[..., Any], changes_files: Callable[..., bool]) -> Any:
        def call(*args: Any, **named: Any) -> Any:
            if not changes_files(*args, **named):
                return change(*args, **named)
            if 2 * len(changes) > at:
                raise Killed
            changes.append(f"{name}{args}")
            if 2 * len(changes) - 2 == at:
                raise Killed
            done = change(*args, **named)
            if 2 * len(changes) - 1 == at:
                if isinstance(done, io.IOBase):
                    done.close()
                raise Killed
            return done

        return call

    def writes(file: Any, mode: str = "r", *args: Any, **named: Any) -> bool:
        # What is open already has been counted.
        return bool(set(mode) & set("wax+")) and not isinstance(file, int)

    def any_of(*args: Any, **named: Any) -> bool:
        return True

    with pytest.MonkeyPatch.context() as patch:
        for name in _CHANGES:
            patch.setattr(os, name, dying(name, getattr(os, name), any_of))
        for module in (io, builtins):
            patch.setattr(module, "open", dying("open", open, writes))
        with contextlib.suppress(Killed):
            yield changes


def at_each_change(
    prepare: Callable[[], None], act: Callable[[], Any], check: Callable[[str, int], None]
):
    """Kill `act` before and after each of its changes, then let it end; check what is there.

    Args:
      prepare: makes the state that each begins with.
      act: what is killed.
      check: of the last change before the end, `""` where it was not killed, and of `killed`'s
        number.
    """
    for at in itertools.count():
        prepare()
        ended = False
        with killed(at) as changes:
            act()
            ended = True
        check("" if ended else f"{'after' if at % 2 else 'before'} {changes[-1]}", at)
        if ended:
            assert len(changes) > 2, "what is patched is not what is called"
            return
