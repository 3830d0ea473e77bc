"""Saves that are killed, and others that write or read one folder meanwhile."""

import errno
import json
import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors

from mx_jax import checkpoint
from mx_jax.checkpoint import files
from mx_jax.checkpoint.files import INDEX, Entry, Reader
from tests.processes import run_python

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="no locks that end with a process")


def generation(number: int) -> dict[str, np.ndarray]:
    return {name: np.full(4, number, np.float32) for name in "abc"}


def save(folder: Path, number: int, **changed: Any) -> None:
    """Three files, all of whose values are a number."""
    checkpoint.save(folder, generation(number) | changed, max_shard_size=16)


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


@pytest.mark.parametrize("during", [True, False])
def test_of_two_saves_at_once_one_is_an_error(
    during: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The one whose files another removes says so, and no index names them."""
    save(tmp_path, 1)
    write = files.write

    def act(*arguments: Any) -> None:
        monkeypatch.setattr(files, "write", write)
        write(*arguments)
        save(tmp_path, 2)

    def fetch() -> np.ndarray:
        save(tmp_path, 2)
        return np.ones(4, np.float32)

    last = {"c": Entry((4,), np.dtype(np.float32), fetch)} if during else {}
    if not during:
        monkeypatch.setattr(files, "write", act)
    kind = FileNotFoundError if during else ValueError
    with pytest.raises(kind, match=r"-0000(3|1)-of-00003\.safetensors('| was removed before all)"):
        save(tmp_path, 3, **last)
    assert loaded(tmp_path) == 2


# Files --------------------------------------------------------------------------------------------


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


def test_a_reader_sees_no_mixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Names that come again would give it files of two."""
    save(tmp_path, 0)
    after_the_first_file(monkeypatch, lambda: save(tmp_path, 1))
    with pytest.raises(FileNotFoundError, match=r"no file at .*00002-of-00003"):
        checkpoint.load(tmp_path)
    assert loaded(tmp_path) == 1


def test_names_never_come_again(tmp_path: Path):
    """For readers that do not look at the index twice; the first are as everybody's."""
    seen: list[str] = []
    for number in range(4):
        save(tmp_path, number)
        seen += [name for name in names(tmp_path) if name != INDEX]
    assert seen[:3] == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    assert len({*seen}) == 12 and all(files.NUMBERED.fullmatch(name) for name in seen)


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


def test_what_was_never_finished_goes_before_anything_is_written(tmp_path: Path):
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

    entry = Entry((4,), np.dtype(np.float32), full)
    for _ in range(3):
        with pytest.raises(OSError, match="No space left"):
            trees = {"a": entry} | {name: np.full(4, 2, np.float32) for name in "bc"}
            checkpoint.save(tmp_path, trees, max_shard_size=16)
    assert all({*first} <= {*there} and len(there) <= 5 for there in fetched)
    assert names(tmp_path) == first and loaded(tmp_path) == 1


def test_a_damaged_index_may_still_be_mended(tmp_path: Path):
    """It may have named any of the files: none goes before there is another checkpoint."""
    save(tmp_path, 1)
    index = (tmp_path / INDEX).read_bytes()
    (tmp_path / INDEX).write_bytes(index[:-9])

    def fetch() -> np.ndarray:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, 2, b=Entry((4,), np.dtype(np.float32), fetch))
    (tmp_path / INDEX).write_bytes(index)
    assert loaded(tmp_path) == 1
    (tmp_path / INDEX).write_bytes(index[:-9])
    save(tmp_path, 3)
    assert loaded(tmp_path) == 3
    check_clean(tmp_path)


def stopped_save(folder: Path) -> None:
    def fetch() -> np.ndarray:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        save(folder, 2, c=Entry((4,), np.dtype(np.float32), fetch))


@pytest.mark.parametrize("lost", [INDEX, None])
def test_files_of_a_stopped_save_are_not_read_beside_the_earlier(lost: str | None, tmp_path: Path):
    if lost is None:
        checkpoint.save(tmp_path / files.WHOLE, generation(1))
    else:
        save(tmp_path, 1)
        (tmp_path / lost).unlink()
    before = names(tmp_path)
    stopped_save(tmp_path)
    assert {*before} < {*names(tmp_path)} and loaded(tmp_path) == 1
    stopped_save(tmp_path)
    assert {*before} < {*names(tmp_path)} and loaded(tmp_path) == 1


def test_an_index_does_not_outlive_its_file(tmp_path: Path):
    checkpoint.save(tmp_path, generation(1), max_shard_size=1000)
    (only,) = tmp_path.glob("*.safetensors")
    only.rename(tmp_path / files.WHOLE)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys("abc", files.WHOLE)}))
    checkpoint.save(tmp_path / files.WHOLE, {"a": np.ones(3, np.float32)})
    assert checkpoint.read(tmp_path).keys() == {"a"} and names(tmp_path) == [files.WHOLE]


def test_a_partial_file_of_another_output_stays(tmp_path: Path):
    theirs = tmp_path / ".m.bf16.safetensors.01234567.mx_jax-partial"
    theirs.touch()
    (tmp_path / ".m.89abcdef.mx_jax-partial").touch()
    checkpoint.save(tmp_path / "m", generation(1))
    assert names(tmp_path) == [theirs.name, "m"]


# Killed by the system before each of the operations that Python reports, twice over; then a save
# that ends. Tensors are read as NumPy's, so that no thread of XLA's is there to be forked.
KILLED = """
import os, shutil, signal, sys
from pathlib import Path
import numpy as np
from mx_jax import checkpoint
from mx_jax.checkpoint import files

folder, start = Path(sys.argv[1]) / "m", Path(sys.argv[1]) / "start"
one = lambda folder: folder / files.WHOLE
EVENTS = "open os.rename os.remove os.link os.mkdir os.rmdir fsync".split()

def save(number, path, size=None):
    tree = {name: np.full(4, number, np.float32) for name in "abc"}
    checkpoint.save(path, tree, max_shard_size=size)

def loaded():
    try:
        _, found = files.readers_of(folder, "")
    except (FileNotFoundError, ValueError):
        return None
    assert found.keys() == {*"abc"}, found
    (number,) = {float(value) for entry in found.values() for value in np.asarray(entry)}
    return number

def killed(at, act):
    if child := os.fork():
        return os.waitpid(child, 0)[1] == signal.SIGKILL
    seen = []
    def hook(event, arguments):
        if event in EVENTS:
            seen.append(event)
            if len(seen) > at:
                os.kill(os.getpid(), signal.SIGKILL)
    try:
        os.fsync = lambda file: sys.audit("fsync")
        sys.addaudithook(hook)
        act()
        os._exit(0)
    finally:
        os._exit(1)

def check(prepare, act, most, before=(1.0,), others=()):
    prepare(start)
    (start / "model-notes.txt").write_text("mine")
    at = 0
    while True:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(start, folder)
        again = killed(at, act)
        assert loaded() in ({*before, 2.0} if again else {2.0}), at
        assert (folder / "model-notes.txt").read_text() == "mine"
        if not again:
            break
        killed(at, act)  # What the first left, the second does not add to.
        assert loaded() in (*before, 2.0), at
        assert len(list(folder.glob("*.safetensors"))) <= most, os.listdir(folder)
        act()
        assert loaded() == 2.0
        assert not list(folder.glob(".*")), os.listdir(folder)
        named = files._named(folder) or {files.WHOLE}
        assert {file.name for file in folder.glob("*.safetensors")} == {*named, *others}
        at += 1
    shutil.rmtree(start)
    print(at)

def several(start, *gone):
    save(1, start, 16)
    for name in gone:
        (start / name).unlink()

def two(start):
    start.mkdir()
    for name, part in ("x", "a"), ("y", "bc"):
        arrays = {each: np.full(4, 1, np.float32) for each in part}
        checkpoint.save(start / f"{name}.safetensors", arrays)

lost = lambda start: several(start, files.INDEX)
stopped = lambda start: several(start, files.INDEX, "model-00003-of-00003.safetensors")
whole = lambda start: start.mkdir() or save(1, one(start))
act = lambda: save(2, folder, 16)
# What has no index is not told from the files of a save that was killed.
check(several, act, 6)
check(lost, act, 8)
check(stopped, act, 6, before=(None,))
check(Path.mkdir, act, 6, before=(None,))
check(several, lambda: save(2, folder, 32), 5)
check(two, act, 8, before=(1.0, None), others=["x.safetensors", "y.safetensors"])
check(whole, act, 7)
check(whole, lambda: save(2, one(folder)), 1)
"""


def test_killed_at_each_operation(tmp_path: Path):
    done = run_python("-c", KILLED, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    operations = [int(number) for number in done.stdout.split()]
    assert len(operations) == 8 and min(operations[:-1]) > 10 and operations[-1] > 2
