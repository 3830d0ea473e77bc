"""Files that appear whole, and folders to which one writes at a time: threads and processes.

A lock ends with the process that holds it, however that ends. Disks that have none go without.
"""

import contextlib
import os
import secrets
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

# Suffix of what is not complete yet.
PARTIAL = ".mx_jax-partial"

# Files -----------------------------------------------------------------------------------------


@contextlib.contextmanager
def replacing(path: Path, *, replace: bool = True) -> Iterator[Any]:
    """A file beside `path` that takes its place at the end, or is gone; errors name `path`."""
    path = Path(os.path.realpath(path))  # A link stays, as with `open`.
    # What a process that was killed left there, so that nobody has it locked, goes when the next
    # one writes to the folder.
    if fcntl is not None:
        for left in path.parent.glob(f".*{PARTIAL}"):
            with contextlib.suppress(OSError), left.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                left.unlink()
    try:
        file, made = _partial(path)
    except OSError as error:
        error.filename = os.fspath(path)
        raise
    try:
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            if fcntl is None:
                file.close()  # Windows moves no open file.
            # Locked until it has its name: others take it for abandoned otherwise.
            move(made, path, replace=replace)
    except BaseException as error:
        with contextlib.suppress(FileNotFoundError):
            made.unlink()
        if isinstance(error, OSError) and error.errno is not None and error.filename is None:
            # Where the disk is full, the error names no file.
            error.filename = os.fspath(path)
        raise


def _partial(path: Path) -> tuple[Any, Path]:
    """A file beside `path`, locked until it is closed or the process ends, and where it is."""
    while True:
        made = path.with_name(f".{path.name}.{secrets.token_hex(4)}{PARTIAL}")
        file = made.open("xb")
        if fcntl is not None:
            with contextlib.suppress(OSError):  # no locks on that disk
                fcntl.flock(file, fcntl.LOCK_EX)
        if os.fstat(file.fileno()).st_nlink:
            return file, made
        file.close()  # Removed as if abandoned, before it was locked.


def move(made: Path, path: Path, *, replace: bool) -> None:
    """Give a file its place; unless it may replace one, ValueError where there is one by now."""
    if replace:
        os.replace(made, path)
        return
    try:
        try:
            os.link(made, path)
        except FileExistsError:
            raise
        except OSError:  # no hard links on that disk
            path.open("xb").close()
            os.replace(made, path)
        else:
            made.unlink()
    except FileExistsError:
        raise ValueError(is_there(path)) from None


def is_there(path: Path) -> str:
    """What is said of an output that is there already."""
    return f"{path} is there already; replace it with --force"


# Folders ---------------------------------------------------------------------------------------


class _Held(threading.local):
    """Folders that this thread has locked."""

    def __init__(self) -> None:
        self.folders: set[tuple[int, int]] = set()


_HELD = _Held()


@contextlib.contextmanager
def only_writer(folder: Path, busy: str | None = None) -> Iterator[None]:
    """Lock a folder for one thread of all processes; where another has it: wait, or ValueError."""
    if fcntl is None:
        yield
        return
    # A second lock of this thread's own would wait for the first.
    if busy is None and _identity(folder) in _HELD.folders:
        yield
        return
    handle = _locked(folder, wait=busy is None)
    if handle is None:
        raise ValueError(busy)
    identity = _identity(handle)
    assert identity is not None
    _HELD.folders.add(identity)
    try:
        yield
    finally:
        _HELD.folders.discard(identity)
        # Not by closing alone: a process that was forked meanwhile has the handle too.
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_UN)
        os.close(handle)


def _locked(folder: Path, wait: bool) -> int | None:
    """A handle of the folder at a path, locked; None where another has it and nobody waits."""
    assert fcntl is not None
    while True:
        # The lock is the handle's, not the process's, so that threads exclude each other.
        try:
            handle = os.open(folder, os.O_RDONLY | (0 if wait else os.O_NOFOLLOW))
        except FileNotFoundError:
            if wait:
                raise
            return None  # Another has just moved it into its place.
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            # Meanwhile another folder may have taken its place.
            if _identity(handle) == _identity(folder):
                return handle
        except BlockingIOError:
            os.close(handle)
            return None
        except OSError:  # no locks on that disk
            return handle
        except BaseException:  # Ctrl-C
            os.close(handle)
            raise
        os.close(handle)


def _identity(path: Path | int) -> tuple[int, int] | None:
    """What is the same for all links to a file, and for no other; None where there is none."""
    try:
        facts = os.stat(path)
    except OSError:
        return None
    return facts.st_dev, facts.st_ino


def check_apart(out: Path, source: Path, where: str) -> None:
    """ValueError if files are to be replaced that are read, by whatever path or link."""
    if _identities(out) & _identities(source):
        raise ValueError(f"{where}{out} is what is read; write to another place")


def _identities(path: Path) -> set[tuple[int, int] | None]:
    """Of a path and, of a folder, the files in it."""
    files = [file for file in path.iterdir() if file.is_file()] if path.is_dir() else []
    return {_identity(one) for one in (path, *files)} - {None}
