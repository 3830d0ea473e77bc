"""What other processes, signals and links may do to an output while a command writes it."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mx_jax import checkpoint
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


@pytest.mark.parametrize("before", [False, True])
def test_a_file_is_whole_or_not_there(before: bool, model: Path, tmp_path: Path):
    """Stopped before and after every file operation; the next run leaves nothing of it."""
    out = tmp_path / "out.safetensors"
    words = ["quantize", str(model), str(out), "--format", "mxfp4"]

    def prepare() -> None:
        for left in tmp_path.glob(".*"):
            left.unlink()
        out.unlink(missing_ok=True)
        if before:
            checkpoint.save(out, {"before": np.ones(3, np.float32)})

    def check(last: str, _: int) -> None:
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


def test_a_folder_that_another_process_filled_meanwhile(
    model: Path, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
):
    out, write_beside = tmp_path / "out", stream._write_beside

    def filled(*rest: Any) -> None:
        write_beside(*rest)
        out.mkdir()
        (out / "theirs.txt").write_text("theirs")

    monkeypatch.setattr(stream, "_write_beside", filled)
    said = cli.error("quantize", model, out, "--format", "mxfp4")
    assert f"{out} is there already; replace it with --force" in said
    assert os.listdir(out) == ["theirs.txt"] and not [*tmp_path.glob(".*")]


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
