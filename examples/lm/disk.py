"""Writing that succeeds for good, or fails with one sentence."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import re
import shutil
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

CHECKSUMS = "checksums.json"
FULL = (errno.ENOSPC, errno.EDQUOT)


class DiskError(Exception):
    """A file could not be written or read; the message says which, why, and what to do."""


def system_error(error: BaseException) -> int | None:
    """The number of the system's error behind an exception; `None` if it is of another kind."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    # TensorStore, which writes checkpoints, has the number in its text alone.
    match = re.search(r"os_error_code='(\d+)'", str(error))
    return int(match[1]) if match else None


@contextmanager
def writing(what: str, path: Path, safe: Callable[[], str] | None = None) -> Iterator[None]:
    """Turns the system's refusal to write `what` to `path` into a `DiskError`.

    `safe` is called after a failure: it removes what is half written, and says what is left.
    """
    try:
        yield
    except (OSError, ValueError) as error:
        number = system_error(error)
        if number is None:
            raise
        left = [safe()] if safe else []
        remedy = (
            "free some space there, or use --out with a folder on another disk"
            if number in FULL
            else "make that folder writable, or use --out with another one"
        )
        problem = f"cannot write {what} to {path}: {os.strerror(number)} ({room(path)})"
        raise DiskError("; ".join([problem, *left, remedy])) from error


def room(path: Path) -> str:
    """How much of the file system that holds `path`, or will hold it, is free."""
    folder = next(parent for parent in (path, *path.absolute().parents) if parent.is_dir())
    usage = shutil.disk_usage(folder)
    return f"{usage.free / 1e6:,.1f} MB of {usage.total / 1e6:,.1f} MB free"


def check_room(folder: Path, size: int) -> None:
    """Raises the system's error for a full disk if `size` bytes are not free there.

    Asked before a checkpoint, whose writer leaves threads behind that complain when it fails.
    """
    if shutil.disk_usage(folder).free < size:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def replace(what: str, path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Replaces a file as a whole: after a crash or a power cut it holds the old bytes or the new.

    The bytes are on the disk before the name points to them, and the name is before this returns.
    """
    partial = path.with_name(path.name + ".partial")
    with writing(what, path):
        try:
            with partial.open("wb") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def record_checksums(folder: Path) -> None:
    """Leaves a file in a finished folder by which `check_checksums` finds damage later."""
    text = json.dumps(dict(_checksums(folder)), indent=1)
    replace("checksums", folder / CHECKSUMS, lambda file: file.write(text.encode()))


def check_checksums(folder: Path) -> None:
    """Raises `DiskError` if a file differs from what was recorded; passes if nothing was."""
    if not (folder / CHECKSUMS).exists():
        return
    try:
        recorded = json.loads((folder / CHECKSUMS).read_text())
    except ValueError:
        raise DiskError(f"{CHECKSUMS} is damaged") from None
    present = dict(_checksums(folder))
    for name, checksum in recorded.items():
        if present.get(name) != checksum:
            raise DiskError(f"{name} is {'damaged' if name in present else 'missing'}")


def _checksums(folder: Path) -> Iterator[tuple[str, str]]:
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != CHECKSUMS:
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            yield path.relative_to(folder).as_posix(), digest


@contextmanager
def one_message() -> Iterator[None]:
    """Reports a failure of Orbax once, by its exception.

    Its log prints one some four times, with tracebacks, and its threads go on printing what they
    find broken, each array by itself, even after the call has returned.
    """
    _ignore_threads_of_orbax()
    logs = [logging.getLogger(name) for name in ("absl", "asyncio")]
    levels = [log.level for log in logs]
    for log in logs:
        log.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        for log, level in zip(logs, levels, strict=True):
            log.setLevel(level)


def _ignore_threads_of_orbax() -> None:
    if not isinstance(sys.unraisablehook, _Hook):
        sys.unraisablehook = _Hook(sys.unraisablehook)


class _Hook:
    """Hands on to `earlier` what did not come from a thread of Orbax or its event loop."""

    def __init__(self, earlier: Callable[[sys.UnraisableHookArgs], object]) -> None:
        self._earlier = earlier

    def __call__(self, unraisable: sys.UnraisableHookArgs) -> None:
        frames = traceback.walk_tb(unraisable.exc_traceback)
        files = [Path(frame.f_code.co_filename).parts for frame, _ in frames]
        if not any("orbax" in parts or "asyncio" in parts for parts in files):
            self._earlier(unraisable)
