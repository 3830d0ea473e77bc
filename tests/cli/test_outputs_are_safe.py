"""What other processes, signals and links may do to an output while a command writes it."""

import errno
import fcntl
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mx_jax import checkpoint
from mx_jax.checkpoint import files
from mx_jax.commands import main, stream
from tests.checkpoint.killed import at_each_change
from tests.cli.conftest import Cli


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    up = np.ones((8, 33), np.float32)  # rows of no whole bytes in FP4
    checkpoint.write(folder / "model.safetensors", {"up.weight": up}, layout="torchao")
    return folder


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("out", ()),
        ("out.safetensors", ("--force",)),
        ("out", ("--max-shard-size", "1kB", "--force")),
    ],
)
@pytest.mark.parametrize("missing", ["read", "check_output"])
def test_an_output_that_another_process_writes(
    missing: str, name: str, more: tuple[str, ...], model: Path, cli: Cli, monkeypatch: Any
):
    """Refused before anything is read; if it began after that, before anything is written."""
    out = model.with_name(name)
    made = stream.partial_folder(out)
    made.mkdir()
    (made / "model.safetensors").write_text("theirs")
    handle = os.open(made, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    monkeypatch.setattr(stream, missing, lambda options: None)
    try:
        said = cli.error("quantize", model, out, "--format", "mxfp4", *more)
    finally:
        os.close(handle)
    assert f"another process is writing to {out}; try again" in said
    assert (made / "model.safetensors").read_text() == "theirs"


@pytest.mark.parametrize("name", ["out.safetensors", "out"])
@pytest.mark.parametrize("links", [True, False])
@pytest.mark.parametrize("when", ["read", "write"])
def test_an_output_that_appears_meanwhile_stays(
    when: str, links: bool, name: str, model: Path, tmp_path: Path, cli: Cli, monkeypatch: Any
):
    """After it was looked for, and after all is written; on disks without hard links too."""
    out = tmp_path / name
    module, during = (stream, "read") if when == "read" else (files, "write")
    act = getattr(module, during)

    def meanwhile(*rest: Any) -> Any:
        done = act(*rest)
        if not out.exists():
            checkpoint.save(out, {"theirs": np.ones(3, np.float32)}, max_shard_size=SIZE[name])
        return done

    def no_links(*_: Any) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    with monkeypatch.context() as patch:
        patch.setattr(module, during, meanwhile)
        if not links:
            patch.setattr(os, "link", no_links)
        words = ("quantize", model, out, "--format", "mxfp4")
        assert f"{out} is there already; replace it with --force" in cli.error(*words)
    assert checkpoint.load(out).keys() == {"theirs"}
    cli(*words, "--force")
    assert checkpoint.read(out).quantized and not [*tmp_path.glob(".*")]


# Of files in a folder; a file has none.
SIZE = {"out.safetensors": None, "out": 100}


@pytest.mark.parametrize("before", [False, True])
def test_a_file_is_whole_or_not_there(before: bool, model: Path, tmp_path: Path):
    """Stopped before and after every file operation; the next run leaves nothing of it."""
    out = tmp_path / "out.safetensors"
    words = ["quantize", str(model), str(out), "--format", "mxfp4"]

    def prepare() -> None:
        shutil.rmtree(stream.partial_folder(out), ignore_errors=True)
        out.unlink(missing_ok=True)
        if before:
            checkpoint.save(out, {"before": np.ones(3, np.float32)})

    def check(last: str) -> None:
        result = checkpoint.read(out) if before or not last or out.exists() else None
        assert result is None or result.quantized or (before and last), last
        if last.startswith("after"):
            assert main([*words, "--force"]) == 0
            assert checkpoint.read(out).quantized and not [*tmp_path.glob(".*")]

    at_each_change(prepare, lambda: main([*words, *(["--force"] if before else [])]), check)


def test_one_file_beside_the_index_of_others(model: Path, tmp_path: Path, cli: Cli):
    """Refused before anything is read: readers of the folder would go by the index."""
    folder = tmp_path / "folder"
    checkpoint.save(folder, {"a": np.ones(3, np.float32)}, max_shard_size=100)
    out = folder / "model.safetensors"
    said = cli.error("quantize", model, out, "--format", "mxfp4")
    assert "json of other files" in said and not [*folder.glob(".*")]


def test_nobody_begins_in_the_old_folder_while_it_is_removed(
    model: Path, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
):
    """Once it is replaced, it has the name under which another process would make its own."""
    out, remove, tried = tmp_path / "out", shutil.rmtree, list[Path]()
    out.mkdir()
    (out / "notes.txt").write_text("mine")

    def removing(path: Path) -> None:
        handle = os.open(path, os.O_RDONLY)
        with pytest.raises(BlockingIOError):
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(handle)
        tried.append(path)
        remove(path)

    monkeypatch.setattr(shutil, "rmtree", removing)
    cli("quantize", model, out, "--format", "mxfp4", "--force")
    assert tried == [stream.partial_folder(out)] and not tried[0].exists()
    assert sorted(os.listdir(out)) == ["model.safetensors", "notes.txt"]


@pytest.mark.parametrize("name", ["out", "out.safetensors"])
def test_a_link_to_itself(name: str, model: Path, tmp_path: Path, cli: Cli):
    (tmp_path / name).symlink_to(name)
    said = cli.error("quantize", model, tmp_path / name, "--format", "mxfp4")
    assert "is there already" in said and (tmp_path / name).is_symlink()


def test_what_may_not_be_read_or_replaced(
    model: Path, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
):
    out = tmp_path / "out"
    out.mkdir()
    monkeypatch.setattr(os, "access", lambda *_: False)  # as for all but root
    words = ("quantize", model, out, "--format", "mxfp4", "--force")
    assert "read-only" in cli.error(*words)
    monkeypatch.undo()
    (model / "model.safetensors").chmod(0)
    if os.geteuid():
        assert "Permission denied" in cli.error(*words)


@pytest.mark.parametrize("name", ["__metadata__", "up\n", "\ud800", "\x1b[31m"])
def test_a_name_that_no_reader_takes_replaces_nothing(name: str, tmp_path: Path):
    path, up = tmp_path / "model.safetensors", np.ones(3, np.float32)
    checkpoint.save(path, {"up": up})
    with pytest.raises(ValueError, match="a tensor is called"):
        checkpoint.save(path, {name: up})
    assert checkpoint.load(path).keys() == {"up"}
