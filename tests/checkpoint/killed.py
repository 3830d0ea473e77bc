"""Processes that end before or after one of their file operations."""

import itertools
import os
from collections.abc import Iterable
from typing import Any

import pytest


class Killed(BaseException):
    """As far as a process came."""


OPERATIONS = ("replace", "fsync", "unlink", "chmod", "mkdir")


def killed_at(
    moment: int, monkeypatch: pytest.MonkeyPatch, names: Iterable[str] = OPERATIONS
) -> None:
    """Every second moment is before one of the file operations of `os`, the next one after it."""
    count = itertools.count()

    def wrapped(run: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if next(count) >= moment:
                raise Killed
            result = run(*args, **kwargs)
            if next(count) >= moment:
                raise Killed
            return result

        return call

    for name in names:
        monkeypatch.setattr(os, name, wrapped(getattr(os, name)))
