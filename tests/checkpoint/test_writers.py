"""Several threads and processes that save, load, and are killed in one folder."""

import contextlib
import errno
import json
import os
import shutil
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors

from mx_jax import checkpoint
from mx_jax.checkpoint import files, writers
from mx_jax.checkpoint.files import INDEX, Entry, Reader
from tests.checkpoint.killed import at_each_change, killed

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="no locks that end with a process")


def generation(number: int) -> dict[str, np.ndarray]:
    return {name: np.full(4, number, np.float32) for name in "abc"}


def save(folder: Path, number: int, **changed: Any) -> None:
    """Three files, all of whose values are a number."""
    checkpoint.save(folder, generation(number) | changed, max_shard_size=16)


def entry(fetch: Callable[[], np.ndarray]) -> Entry:
    """A tensor that is fetched while a save writes it."""
    return Entry((4,), np.dtype(np.float32), fetch)


def interrupt() -> np.ndarray:
    raise KeyboardInterrupt


def loaded(path: Path) -> int:
    """The one number that all three tensors of a checkpoint hold."""
    tree = checkpoint.load(path)
    (number,) = {float(value) for leaf in tree.values() for value in leaf}
    assert tree.keys() == {*"abc"}
    return int(number)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def check_clean(folder: Path) -> None:
    """An index, the files that it names, and nothing else."""
    index = json.loads((folder / INDEX).read_text())["weight_map"]
    assert names(folder) == sorted({INDEX, *index.values()})


@contextlib.contextmanager
def a_save_that_stops(folder: Path, number: int) -> Iterator[threading.Thread]:
    """A thread that saves and waits after the first file, until the end."""
    begun, go_on = threading.Event(), threading.Event()

    def fetch() -> np.ndarray:
        begun.set()
        assert go_on.wait(60)
        return np.full(4, number, np.float32)

    options = {"b": entry(fetch)}
    thread = threading.Thread(target=save, args=(folder, number), kwargs=options)
    thread.start()
    assert begun.wait(60)
    try:
        yield thread
    finally:
        go_on.set()
        thread.join()


# Threads ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("before", [False, True])
def test_threads_wait_as_processes_do(before: bool, tmp_path: Path):
    if before:
        save(tmp_path, 1)
    with a_save_that_stops(tmp_path, 2):
        second = threading.Thread(target=save, args=(tmp_path, 3))
        second.start()
        second.join(0.2)
        assert second.is_alive()
        assert not before or loaded(tmp_path) == 1
    second.join()
    assert loaded(tmp_path) == 3
    check_clean(tmp_path)


def test_a_file_for_the_whole_folder_waits_too(tmp_path: Path):
    """model.safetensors is what others read where it is, index or not."""
    checkpoint.save(tmp_path / files.WHOLE, generation(1))
    refused: list[str] = []

    def one() -> None:
        with pytest.raises(ValueError, match="json of other files"):
            checkpoint.save(tmp_path / files.WHOLE, generation(3))
        refused.append("")

    with a_save_that_stops(tmp_path, 2):
        second = threading.Thread(target=one)
        second.start()
        second.join(0.2)
        assert second.is_alive() and loaded(tmp_path) == 1
    second.join()
    assert refused and loaded(tmp_path) == 2
    check_clean(tmp_path)


def test_a_folder_that_moves_while_one_waits_for_it(tmp_path: Path):
    """As a command does that replaces a folder: what was locked has another place by then."""
    folder, apart = tmp_path / "m", tmp_path / "apart"
    save(folder, 1)
    with contextlib.ExitStack() as stack:
        with writers.only_writer(folder):
            waiting = threading.Thread(target=save, args=(folder, 2))
            waiting.start()
            waiting.join(0.1)
            folder.rename(apart)
            stack.enter_context(a_save_that_stops(folder, 3))
        waiting.join(0.2)
        assert waiting.is_alive()
    waiting.join()
    assert (loaded(apart), loaded(folder)) == (1, 2)


def test_a_lock_ends_with_its_holder_though_a_child_has_the_handle(tmp_path: Path):
    with writers.only_writer(tmp_path):
        (held,) = (each for each in os.listdir("/proc/self/fd") if is_folder(each, tmp_path))
        child = os.dup(int(held))
    with writers.only_writer(tmp_path, "busy"):
        pass
    os.close(child)


def is_folder(handle: str, folder: Path) -> bool:
    with contextlib.suppress(OSError):
        return os.path.samefile(int(handle), folder)
    return False


def test_without_locks_an_error_and_the_earlier_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Some network disks: the one whose files another removes says so, and names none of them."""
    monkeypatch.setattr(writers, "fcntl", None)
    save(tmp_path, 1)

    def fetch() -> np.ndarray:
        save(tmp_path, 2)
        return np.ones(4, np.float32)

    complaint = r"-00001-of-00003\.safetensors was removed before all was"
    with pytest.raises(ValueError, match=complaint):
        save(tmp_path, 3, b=entry(fetch))
    assert loaded(tmp_path) == 2


# Files --------------------------------------------------------------------------------------------


def test_nobody_takes_a_file_for_abandoned_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    replace = os.replace

    def replacing(made: Path, path: Path) -> None:
        monkeypatch.setattr(os, "replace", replace)
        checkpoint.save(tmp_path / "other.safetensors", generation(2))
        replace(made, path)

    monkeypatch.setattr(os, "replace", replacing)
    checkpoint.save(tmp_path / "one.safetensors", generation(1))
    assert names(tmp_path) == ["one.safetensors", "other.safetensors"]


@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_the_umask_of_the_process_stays(mask: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """It is every thread's: files get its modes, and nobody changes it to ask."""
    before = os.umask(mask)
    try:
        with monkeypatch.context() as patch:
            patch.delattr(os, "umask")
            save(tmp_path, 1)
    finally:
        os.umask(before)
    assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == {0o666 & ~mask}


def test_a_link_stays(tmp_path: Path):
    """What it names is replaced, as by `open` and by commands."""
    (tmp_path / "there").mkdir()
    target, link = tmp_path / "there" / "target.safetensors", tmp_path / "link.safetensors"
    link.symlink_to("there/target.safetensors")
    for number in (1, 2):
        checkpoint.save(link, generation(number))
        assert link.is_symlink() and loaded(target) == number
    assert names(tmp_path / "there") == [target.name] and len(names(tmp_path)) == 2


# Readers ------------------------------------------------------------------------------------------


def after_the_first_file(monkeypatch: pytest.MonkeyPatch, act: Callable[[], None]) -> None:
    """Have something done when a reader has opened one file."""
    opened = Reader.open

    def opening(path: Path) -> Reader:
        reader = opened(path)
        monkeypatch.setattr(Reader, "open", opened)
        act()
        return reader

    monkeypatch.setattr(Reader, "open", opening)


@pytest.mark.parametrize("saves", [1, 2, 3])
@pytest.mark.parametrize("indexed", [True, False])
def test_a_reader_sees_one_checkpoint(
    indexed: bool, saves: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Names that come again would give it files of two."""
    save(tmp_path, 0)
    if not indexed:
        (tmp_path / INDEX).unlink()

    def saving() -> None:
        for number in range(1, saves + 1):
            save(tmp_path, number)

    after_the_first_file(monkeypatch, saving)
    assert loaded(tmp_path) == saves


def test_names_never_come_again(tmp_path: Path):
    """For readers that do not look at the index twice; the first are as everybody's."""
    seen: list[str] = []
    for number in range(4):
        save(tmp_path, number)
        seen += [name for name in names(tmp_path) if name != INDEX]
    assert seen[:3] == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    assert len({*seen}) == 12 and all(files.NUMBERED.fullmatch(name) for name in seen)


def test_a_reader_of_a_folder_that_another_takes_the_place_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """By the same names, with the same index: of each folder the first checkpoint."""
    folder, other = tmp_path / "m", tmp_path / "other"
    save(folder, 1)
    save(other, 2)
    assert (folder / INDEX).read_bytes() == (other / INDEX).read_bytes()

    def exchange() -> None:
        folder.rename(tmp_path / "apart")
        other.rename(folder)

    after_the_first_file(monkeypatch, exchange)
    assert loaded(folder) == 2


def test_a_file_that_is_gone_is_still_an_error(tmp_path: Path):
    save(tmp_path, 1)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"no file at .*00002-of-00003"):
        checkpoint.load(tmp_path)


def test_the_header_is_of_the_file_that_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Not that of the one which was checked, where another has taken its place."""
    path, checked = tmp_path / "one.safetensors", safetensors.safe_open
    checkpoint.save(path, {"before": np.ones(2, np.float32)})

    def checking(*args: Any, **named: Any) -> Any:
        monkeypatch.setattr(safetensors, "safe_open", checked)
        file = checked(*args, **named)
        checkpoint.save(path, {"after": np.ones(3, np.float32)})
        return file

    monkeypatch.setattr(safetensors, "safe_open", checking)
    assert {name: one.shape for name, one in checkpoint.load(path).items()} == {"after": (3,)}


# What was never finished --------------------------------------------------------------------------


@pytest.mark.parametrize("resume", [False, True])
def test_what_was_never_finished_goes_before_anything_is_written(
    resume: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Else a disk that is full stays full."""
    save(tmp_path, 1)
    first = names(tmp_path)
    # Left by saves that were killed: of other sizes, and of other values.
    for left in ("model-0000000a-00001-of-00009", "model-00001-of-00002", "model-00004-of-00004-2"):
        (tmp_path / f"{left}.safetensors").write_bytes(bytes(100))
    fetched: list[list[str]] = []

    def full() -> np.ndarray:
        fetched.append(names(tmp_path))
        raise OSError(errno.ENOSPC, "No space left on device")

    tree = generation(2) | {"a": entry(full)}
    for _ in range(3):
        with pytest.raises(OSError, match="No space left"):
            checkpoint.save(tmp_path, tree, max_shard_size=16, resume=resume)
    assert all({*first} <= {*there} and len(there) <= 5 for there in fetched)
    assert names(tmp_path) == first and loaded(tmp_path) == 1


def test_a_damaged_index_may_still_be_mended(tmp_path: Path):
    """It may have named any of the files: none goes before there is another checkpoint."""
    save(tmp_path, 1)
    index = (tmp_path / INDEX).read_bytes()
    (tmp_path / INDEX).write_bytes(index[:-9])

    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, 2, b=entry(interrupt))
    (tmp_path / INDEX).write_bytes(index)
    assert loaded(tmp_path) == 1
    (tmp_path / INDEX).write_bytes(index[:-9])
    save(tmp_path, 3)
    assert loaded(tmp_path) == 3
    check_clean(tmp_path)


def test_an_index_of_a_save_that_was_stopped_does_not_outlive_the_file(tmp_path: Path):
    """It names the tensors of the model.safetensors that was there."""
    checkpoint.save(tmp_path / files.WHOLE, generation(1))

    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, 2, b=entry(interrupt))
    assert len(names(tmp_path)) == 3 and loaded(tmp_path) == 1
    checkpoint.save(tmp_path / files.WHOLE, {"new": np.ones(3, np.float32)})
    assert names(tmp_path) == [files.WHOLE]
    assert checkpoint.read(tmp_path).keys() == {"new"}


# Killed at each of its changes to files, and killed again; then a save that ends.

LAST = "model-00003-of-00003.safetensors"


def save_without(*missing: str) -> Callable[[Path], None]:
    def start(folder: Path) -> None:
        save(folder, 1)
        for name in missing:
            (folder / name).unlink()

    return start


def save_whole(folder: Path, number: int = 1) -> None:
    folder.mkdir(exist_ok=True)
    checkpoint.save(folder / files.WHOLE, generation(number))


def save_under_other_names(folder: Path) -> None:
    folder.mkdir()
    checkpoint.save(folder / "x.safetensors", {"a": generation(1)["a"]})
    checkpoint.save(folder / "y.safetensors", {name: generation(1)[name] for name in "bc"})


def save_of_size(size: int, **options: Any) -> Callable[[Path], None]:
    return lambda folder: checkpoint.save(folder, generation(2), max_shard_size=size, **options)


RESUMED = save_of_size(16, resume=True)
# What is there before, which number it is read as, what is killed, and most files after two kills:
# those of the checkpoint that is whole, and those of the next.
KILLED: dict[str, tuple[Any, int | None, Any, int]] = {
    "several": (save_without(), 1, save_of_size(16), 6),
    "several, resumed": (save_without(), 1, RESUMED, 6),
    "no index": (save_without(INDEX), 1, save_of_size(16), 6),
    "no index, resumed": (save_without(INDEX), 1, RESUMED, 6),
    "unfinished": (save_without(INDEX, LAST), None, save_of_size(16), 6),
    "unfinished, resumed": (save_without(INDEX, LAST), None, RESUMED, 5),
    "nothing": (Path.mkdir, None, RESUMED, 3),
    "fewer": (save_without(), 1, save_of_size(32), 5),
    "other names": (save_under_other_names, 1, RESUMED, 5),
    "one file": (save_whole, 1, RESUMED, 4),
    "one file by one": (save_whole, 1, lambda folder: save_whole(folder, 2), 1),
}


@pytest.mark.parametrize(("start", "before", "act", "most"), KILLED.values(), ids=KILLED)
def test_killed_at_each_operation(
    start: Any, before: int | None, act: Any, most: int, tmp_path: Path, monkeypatch: Any
):
    folder, others, kills = tmp_path / "m", {"model-notes.txt"}, list[int]()
    monkeypatch.setattr(os, "fsync", lambda file: None)
    if start is save_under_other_names:
        others |= {"x.safetensors", "y.safetensors"}

    def prepare() -> None:
        kills.append(len(kills))
        shutil.rmtree(folder, ignore_errors=True)
        start(folder)
        (folder / "model-notes.txt").write_text("mine")

    def number() -> int | None:
        with contextlib.suppress(FileNotFoundError, ValueError):
            return loaded(folder)

    def check(last: str) -> None:
        assert number() in ({before, 2} if last else {2}), last
        if last.startswith("before"):
            # What the first left, the second does not add to.
            with killed(kills[-1]):
                act(folder)
            assert number() in (before, 2), last
            assert len([*folder.glob("*.safetensors")]) <= most, names(folder)
        if last:
            act(folder)
        assert number() == 2 and (folder / "model-notes.txt").read_text() == "mine"
        named = files._named(folder)
        assert {*names(folder)} == others | ({INDEX, *named} if named else {files.WHOLE})

    at_each_change(prepare, lambda: act(folder), check)
