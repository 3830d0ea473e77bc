"""A full disk and damaged checkpoints: one clear message, and nothing lost."""

import os
import signal
from pathlib import Path

import pytest

for package in ("matplotlib", "optax", "orbax.checkpoint", "rich", "tqdm"):
    pytest.importorskip(package)

OPTIONS = ("--recipes", "float32")
NAME = "float32-seed0"
NO_DISK = 3


@pytest.fixture
def checkpoints(tmp_path):
    return tmp_path / "out" / "checkpoints" / NAME


@pytest.fixture
def interrupted(call, at_step, checkpoints):
    """A run stopped after step 5 of 6, with checkpoints of steps 2, 4 and 5."""
    at_step(5, lambda: signal.raise_signal(signal.SIGINT))
    assert call(*OPTIONS) == 130
    assert {path.name for path in checkpoints.iterdir()} == {"2", "4", "5"}


def cut_short(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.slow
@pytest.mark.parametrize("damage", [cut_short, flip_a_bit])
def test_a_damaged_checkpoint_sends_the_run_back_to_the_one_before(
    damage, call, interrupted, checkpoints, capfd
):
    files = (checkpoints / "5").rglob("*")
    damaged = max(files, key=lambda path: path.is_file() * path.stat().st_size)
    damage(damaged)
    assert call(*OPTIONS, "--resume") == 0
    assert capfd.readouterr().err.splitlines()[-1] == (
        f"{NAME}: cannot read the checkpoint of step 5, going back to step 4 "
        f"({damaged.relative_to(checkpoints / '5')} is damaged)"
    )
    # Its steps are trained again.
    assert {path.name for path in checkpoints.iterdir()} == {"2", "4", "6"}


@pytest.mark.slow
def test_a_full_disk_is_one_message(example, call, results, checkpoints, monkeypatch, capfd):
    disk = example("lm.disk")
    usage = type(disk.shutil.disk_usage("/"))
    answers = [usage(10**9, 0, 10**9)]  # room for the first checkpoint
    full = usage(10**9, 10**9 - 12_345, 12_345)
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda _: answers.pop() if answers else full)
    assert call(*OPTIONS) == NO_DISK
    output, errors = capfd.readouterr()
    (line,) = errors.splitlines()
    assert "error: cannot write the checkpoint of step 4 (0.4 MB) to " in line
    assert f"{checkpoints}: No space left on device (0.0 MB of 1,000.0 MB free); " in line
    assert "the newest one is of step 2; free some space there, or use --out" in line
    assert output.splitlines()[-1].endswith("--recipes float32 --resume")
    assert [path.name for path in checkpoints.iterdir()] == ["2"]
    assert [len(run["train_loss"]) for run in results()["runs"]] == [4]

    monkeypatch.undo()
    assert call(*OPTIONS, "--resume") == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's /dev/full")
def test_results_that_do_not_fit_leave_the_old_ones(example, tmp_path):
    disk, path = example("lm.disk"), tmp_path / "results.json"
    path.write_text("old")
    (tmp_path / "results.json.partial").symlink_to("/dev/full")
    message = rf"cannot write the results to {path}: No space left on device \(.* free\); free some"
    with pytest.raises(disk.DiskError, match=message):
        disk.replace("the results", path, lambda file: file.write(b"new" * 10_000))
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["results.json"]


def test_a_folder_that_cannot_be_written_gives_another_remedy(example, tmp_path):
    disk, path = example("lm.disk"), tmp_path / "gone" / "results.json"
    with pytest.raises(disk.DiskError, match=r"No such file.*make that folder writable"):
        disk.replace("the results", path, lambda file: file.write(b"new"))
