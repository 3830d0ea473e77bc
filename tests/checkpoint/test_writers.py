"""Several files with an index: whole or not there, with little memory; saves that are killed, and
others that write or read one folder meanwhile."""

import errno
import functools
import json
import os
import shutil
import stat
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from mx_jax import checkpoint
from mx_jax.checkpoint import files
from mx_jax.checkpoint.files import INDEX, Entry, Reader
from mx_jax.formats import MXFP4
from tests.checkpoint.killed import at_each_change, killed
from tests.checkpoint.stored import draw

posix = pytest.mark.skipif(sys.platform == "win32", reason="has other modes and links")


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


@posix
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


@posix
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


# Several files with an index: whole or not there, and little memory ----------------------------

LAYOUT = "mxfp4-pack-quantized"


@pytest.fixture
def weights(rng: np.random.Generator) -> dict[str, Any]:
    """Four weights of 8 * 32 + 8 * 2 bytes, and a small one."""
    mx = {f"{i}.weight": draw(MXFP4, (8, 64), rng) for i in range(4)}
    return mx | {"norm": jnp.arange(3.0)}


def codes(weights: Mapping[str, Any], name: str) -> np.ndarray:
    return np.asarray(weights[name].codes)


@pytest.mark.parametrize("layout", [LAYOUT, "torchao"])
def test_several_files_there_and_back(layout: str, weights: dict[str, Any], tmp_path: Path):
    checkpoint.write(tmp_path, weights, layout=layout, max_shard_size=600)
    assert names(tmp_path) == [*(f"model-0000{i}-of-00002.safetensors" for i in (1, 2)), INDEX]
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["metadata"]["total_size"] == 4 * 272 + 12
    back = checkpoint.read(tmp_path)
    assert set(back) == set(weights)
    for name in back.quantized:
        np.testing.assert_array_equal(codes(back, name), codes(weights, name))
    # A tensor that is larger than a file has one of its own.
    checkpoint.write(tmp_path / "b", weights, layout=layout, max_shard_size=1)
    assert len(names(tmp_path / "b")) == 10 if layout == LAYOUT else 9
    checkpoint.write(tmp_path / "c", {}, layout=layout, max_shard_size=1)
    assert len(checkpoint.read(tmp_path / "c")) == 0


class Failing(Mapping[str, Any]):
    """Weights that are fetched to be described, and then fail at one."""

    def __init__(self, weights: Mapping[str, Any], fails: str | None):
        self.weights, self.fails, self.fetched = weights, fails, list[str]()
        self.made: list[weakref.ref[Any]] = []

    def __iter__(self) -> Iterator[str]:
        return iter(self.weights)

    def __len__(self) -> int:
        return len(self.weights)

    def __getitem__(self, name: str) -> Any:
        if name == self.fails and name in self.fetched:
            raise OSError("disk full")
        self.fetched.append(name)
        # The one before may still be at hand, those before it not.
        assert sum(made() is not None for made in self.made) <= 1
        copy = jax.tree.map(lambda part: part, self.weights[name])
        self.made.append(weakref.ref(copy))
        return copy


def test_stopped_and_written_again(weights: dict[str, Any], tmp_path: Path):
    """A folder without an index is not read."""
    with pytest.raises(OSError, match="disk full"):
        checkpoint.write(tmp_path, Failing(weights, "2.weight"), layout=LAYOUT, max_shard_size=300)
    assert names(tmp_path) == [f"model-0000{i}-of-00004.safetensors" for i in (1, 2)]
    with pytest.raises(ValueError, match="2 of 4 files are there and no model"):
        checkpoint.read(tmp_path)
    checkpoint.write(tmp_path, weights, layout=LAYOUT, max_shard_size=300)
    result = checkpoint.read(tmp_path, layout=LAYOUT)
    for name in result.quantized:
        np.testing.assert_array_equal(codes(result, name), codes(weights, name))


def test_a_name_in_two_files_and_files_that_the_index_lost(tmp_path: Path):
    """Which of the two is meant nobody knows; neither did a file go without a trace."""
    for file in ("x", "y"):
        np.save(tmp_path / file, 1)  # what is no tensor is passed over
        safetensors.numpy.save_file({"a": np.ones(4)}, tmp_path / f"{file}.safetensors")
    with pytest.raises(ValueError, match=r"a is in two files, x.safetensors and y.safetensors"):
        checkpoint.read(tmp_path)
    folder = tmp_path / "m"
    save(folder, 1)
    index = json.loads((folder / INDEX).read_text())
    del index["weight_map"]["b"]
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"2 of 3 files are named by model\.safetensors\."):
        checkpoint.load(folder)


def test_what_is_not_written(weights: dict[str, Any], tmp_path: Path):
    doubled = weights | {"0.weight_packed": jnp.ones(3)}

    def refused(source: dict[str, Any], complaint: str, **changed: Any) -> None:
        with pytest.raises(ValueError, match=complaint):
            checkpoint.write(tmp_path / "a", source, layout=LAYOUT, **changed)

    for size in (0, float("nan"), "5GB"):
        refused(weights, f"max_shard_size={size!r} must be positive", max_shard_size=size)
    refused(doubled, "two tensors would be named '0.weight_packed'")
    assert not names(tmp_path)


def test_one_weight_in_memory(weights: dict[str, Any], tmp_path: Path):
    """Each is fetched to be described and to be written, its tensors together."""
    del weights["norm"]  # arrays are not copied
    counted = Failing(weights, None)
    checkpoint.write(tmp_path / "a", counted, layout=LAYOUT)
    assert counted.fetched == [*weights, *weights]


def test_trees(weights: dict[str, Any], tmp_path: Path):
    """Each describes its own tensors, codes and scales in one file; together they are the tree."""
    tree = {"layers": {i: {"kernel": weights[f"{i}.weight"]} for i in range(4)}}
    tree |= {"norm": weights["norm"]}
    # A weight is 256 bytes of codes and 16 of scales, which would not fit beside the next one's.
    checkpoint.save(tmp_path, tree, max_shard_size=540)
    assert names(tmp_path) == [*(f"model-0000{i}-of-00004.safetensors" for i in range(1, 5)), INDEX]
    alone = checkpoint.load(tmp_path / "model-00002-of-00004.safetensors")
    assert [*alone["layers"]] == [1] and "norm" not in alone
    back = checkpoint.load(tmp_path)
    assert jax.tree.structure(back) == jax.tree.structure(tree)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), back, tree))
    result = checkpoint.read(tmp_path)
    assert result.metadata["paths"]["layers/2/kernel"] == ("layers", 2, "kernel")
    assert {*result.quantized.values()} == {"mx_jax"} and len(result) == 5
    # A file of somebody else's among them is not passed over.
    weight = {"a": jnp.ones(2)}
    checkpoint.write(tmp_path / names(tmp_path)[0], weight, layout=LAYOUT)
    (tmp_path / INDEX).unlink()
    with pytest.raises(
        ValueError, match=r"model-00001-of-00004\.safetensors is a safetensors file"
    ):
        checkpoint.read(tmp_path)


# Killed at each change to its files, twice over; then a save that ends.


def several(folder: Path, gone: Sequence[str] = ()) -> None:
    save(folder, 1)
    for name in gone:
        (folder / name).unlink()


def others(folder: Path) -> None:
    """Two files that go by no number."""
    folder.mkdir()
    for name, tensors in ("x", "a"), ("y", "bc"):
        tree = {tensor: generation(1)[tensor] for tensor in tensors}
        checkpoint.save(folder / f"{name}.safetensors", tree)


def whole(folder: Path) -> None:
    folder.mkdir()
    checkpoint.save(folder / files.WHOLE, generation(1))


LOST = functools.partial(several, gone=[INDEX])
STOPPED = functools.partial(several, gone=[INDEX, "model-00003-of-00003.safetensors"])


@pytest.mark.parametrize(
    ("before", "size", "most", "held_before"),
    [
        (several, 16, 6, {1}),
        # What has no index is not told from the files of a save that was killed.
        (LOST, 16, 8, {1}),
        (STOPPED, 16, 6, {None}),
        (Path.mkdir, 16, 6, {None}),
        (several, 32, 5, {1}),
        (others, 16, 8, {1, None}),
        (whole, 16, 7, {1}),
        (whole, None, 1, {1}),
    ],
    ids="several lost stopped nothing larger others whole one_file".split(),
)
def test_killed_at_each_change(
    before: Any, size: int | None, most: int, held_before: set[int | None], tmp_path: Path
):
    start, folder = tmp_path / "start", tmp_path / "m"
    before(start)
    (start / "model-notes.txt").write_text("mine")
    kept = {"x.safetensors", "y.safetensors"} & {*names(start)}

    def held() -> int | None:
        try:
            return loaded(folder)
        except (FileNotFoundError, ValueError):
            return None

    def begin() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(start, folder)

    def act() -> None:
        path = folder / files.WHOLE if size is None else folder
        checkpoint.save(path, generation(2), max_shard_size=size)

    def check(last: str, at: int) -> None:
        assert held() in (held_before | {2} if last else {2}), last
        if not last:
            return
        # What the first left, the second does not add to.
        with killed(at):
            act()
        assert held() in held_before | {2}, last
        assert len([*folder.glob("*.safetensors")]) <= most, names(folder)
        act()
        assert held() == 2 and not [*folder.glob(".*")], names(folder)
        assert (folder / "model-notes.txt").read_text() == "mine"
        index = folder / INDEX
        named = json.loads(index.read_text())["weight_map"].values() if index.exists() else ()
        assert {*names(folder)} - {INDEX, "model-notes.txt"} == ({*named} or {files.WHOLE}) | kept

    at_each_change(begin, act, check)
