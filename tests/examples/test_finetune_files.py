"""What a run of examples/finetune leaves alone, and what it is taken up from."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.examples.test_finetune import call, here, module, runs

__all__ = ["call", "here"]  # fixtures


def test_a_folder_that_is_no_runs_is_not_written_over(here: Path, call, capsys):
    (here / "finetuned" / "float32").mkdir(parents=True)
    (here / "finetuned" / "float32" / "model.safetensors").write_text("mine")
    assert call("--ways", "float32") == 2
    assert "finetuned/float32 is no run's, and would be written over" in capsys.readouterr().err
    assert (here / "finetuned" / "float32" / "model.safetensors").read_text() == "mine"


@pytest.mark.slow
def test_killed_while_its_checkpoints_are_removed(here: Path, call, monkeypatch, capsys):
    remove = shutil.rmtree

    def interrupted(folder: Path, *rest: Any, **options: Any) -> None:
        if Path(folder).name == "checkpoints":
            for path in [*Path(folder).rglob("*")][::2]:
                path.unlink() if path.is_file() else None
            raise KeyboardInterrupt
        remove(folder, *rest, **options)

    monkeypatch.setattr(module("train").shutil, "rmtree", interrupted)
    assert call("--ways", "float32") == 130
    monkeypatch.setattr(module("train").shutil, "rmtree", remove)
    assert call("--resume") == 0
    assert "float32: done before" in capsys.readouterr().out and "float32" in runs()
    assert not (here / "finetuned" / "float32" / "checkpoints").exists()
