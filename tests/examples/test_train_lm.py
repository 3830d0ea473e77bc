"""The language model: its options, results, averages, and runs that stop, fail and go on."""

import dataclasses
import math
import signal
from pathlib import Path

import jax
import numpy as np
import pytest

from mx_jax import recipes

for package in ("matplotlib", "optax", "orbax.checkpoint", "rich", "tqdm"):
    pytest.importorskip(package)

STEPS = 6  # of the tiny runs in conftest.py
# The same in each test, so that programs are compiled once.
RECIPES = "float32,mxfp4_stochastic"


def fails(capsys, run) -> str:
    """The message of a call that exits with status 2."""
    with pytest.raises(SystemExit) as stop:
        run()
    assert stop.value.code == 2
    return " ".join(capsys.readouterr().err.split())


@pytest.mark.slow
def test_results_table_plot_log_and_sample(call, results, tmp_path, capfd):
    options = ("--recipes", RECIPES, "--seeds", "0,1")
    assert call(*options, "--sample", "9", "--prompt", "7 times") == 0
    document = results()
    assert document["config"]["steps"] == STEPS
    assert {"jax", "flax", "mx_jax", "python", "device"} <= document["environment"].keys()
    runs = {(run["recipe"], run["seed"]): run for run in document["runs"]}
    assert set(runs) == {
        (recipe, seed) for recipe in ("float32", "mxfp4_stochastic") for seed in (0, 1)
    }
    for run in runs.values():
        assert len(run["train_loss"]) == STEPS
        assert [step for step, _ in run["validation"]] == [3, 6]
        assert run["final_validation_loss"] == run["validation"][-1][1]
        # A quarter of so few steps is one: the average is the last step's weights.
        assert run["averaged_loss"] == run["final_validation_loss"]
        assert run["finished"] and run["seconds"] > 0 and run["tokens_per_second"] > 0
    # The same start and data, in another precision.
    assert runs["float32", 0]["train_loss"] != runs["mxfp4_stochastic", 0]["train_loss"]
    assert runs["float32", 0]["train_loss"][0] == pytest.approx(
        runs["mxfp4_stochastic", 0]["train_loss"][0], rel=0.01
    )
    assert (tmp_path / "out" / "loss.png").read_bytes().startswith(b"\x89PNG")
    output, errors = capfd.readouterr()
    assert "7 times" in output
    # A line each validation, and no bar.
    assert output.count("float32, seed 0: step ") == 2 and "%|" not in output + errors
    losses = {key: run["final_validation_loss"] for key, run in runs.items()}
    gap = np.mean(
        [losses["mxfp4_stochastic", seed] / losses["float32", seed] - 1 for seed in (0, 1)]
    )
    assert f"{100 * gap:+.2f} ±" in output


@pytest.mark.slow
def test_resumed_runs_end_bit_identical(call, results, example, at_step, tmp_path, capsys):
    def interrupt():
        signal.raise_signal(signal.SIGINT)

    def die():
        raise RuntimeError("as if the power failed")

    options = ("--recipes", RECIPES)
    assert call(*options, out="undisturbed") == 0

    at_step(STEPS + 3, interrupt)
    assert call(*options) == 130
    assert [len(run["train_loss"]) for run in results()["runs"]] == [STEPS, 3]
    printed = capsys.readouterr().out
    assert "mxfp4_stochastic, seed 0 is unfinished: step 3 of 6" in printed
    assert printed.splitlines()[-1].endswith("--recipes float32,mxfp4_stochastic --resume")

    # Resumes at 3, checkpoints at 4, is killed in the step after that.
    at_step(2, die)
    with pytest.raises(RuntimeError, match="power"):
        call(*options, "--resume")

    assert call(*options, "--resume") == 0
    assert "float32, seed 0: already done" in capsys.readouterr().out
    outs, states = ("out", "undisturbed"), []
    times = {"seconds", "step_seconds", "timed_steps", "tokens_per_second"}
    for runs in zip(*(results(out)["runs"] for out in outs), strict=True):
        ours, undisturbed = ({key: run[key] for key in run.keys() - times} for run in runs)
        assert ours == undisturbed
    for out in outs:
        path = tmp_path / out / "checkpoints" / "mxfp4_stochastic-seed0"
        with example("lm.storage").Checkpoints(path) as stored:
            state, run = stored.restore(None)
        assert run.step == STEPS
        states.append(state)
    jax.tree.map(np.testing.assert_array_equal, *states)


@pytest.mark.slow
def test_earlier_runs_are_kept(call, results, tmp_path, capsys):
    options = ("--recipes", "float32")
    assert call(*options) == 0
    first = results()["runs"]

    message = fails(capsys, lambda: call(*options))
    assert "holds earlier runs; pass --resume to continue them, --overwrite" in message
    message = fails(capsys, lambda: call(*options, "--resume", "--lr", "0.5"))
    assert "made with other settings (lr: 0.003 then, 0.5 now)" in message
    assert call("--recipes", "mxfp4_stochastic", "--resume") == 0
    assert results()["runs"][0] == first[0]
    assert [run["recipe"] for run in results()["runs"]] == ["float32", "mxfp4_stochastic"]

    beside = tmp_path / "out" / "checkpoints" / "not-ours"
    beside.mkdir()
    assert call(*options, "--overwrite", "--seeds", "1") == 0
    assert [(run["recipe"], run["seed"]) for run in results()["runs"]] == [("float32", 1)]
    assert {path.name for path in (tmp_path / "out" / "checkpoints").iterdir()} == {
        beside.name,
        "float32-seed1",
    }


def test_divergence_is_reported(call, results, example, monkeypatch, capsys):
    training = example("lm.training")

    def train_step(state, tokens, seed, step, **_):
        return state, np.float32([3, 2, np.inf][step])

    monkeypatch.setattr(training, "train_step", train_step)
    assert call("--recipes", "float32") == 1
    (run,) = results()["runs"]
    assert run["diverged_at"] == len(run["train_loss"]) < STEPS
    assert run["final_validation_loss"] is None and not run["finished"]
    assert all(map(math.isfinite, run["train_loss"]))
    assert "float32, seed 0 DIVERGED: its loss was no longer finite" in capsys.readouterr().out
    # It would diverge again.
    assert call("--recipes", "float32", "--resume") == 1
    assert results()["runs"] == [run]


def test_a_run_is_healed_by_its_last_steps(call, results, example, monkeypatch, capsys):
    """What trains each step, and what its time counts: one program for each phase is compiled."""
    training, used = example("lm.training"), []

    def train_step(state, tokens, seed, step, *, model, settings):
        used.append(model.recipe.name)
        return state, np.float32(1)

    monkeypatch.setattr(training, "train_step", train_step)
    monkeypatch.setattr(training, "validate", lambda params, batches, model: np.float32(1))
    assert call("--recipes", "mxfp4", "--heal", "0.5") == 0
    assert used == ["mxfp4"] * 3 + ["high_precision"] * 3
    assert results()["runs"][0]["timed_steps"] == STEPS - 2
    message = fails(capsys, lambda: call("--recipes", "mxfp4", "--resume"))
    assert "made with other settings (heal: 0.5 then, 0.0 now)" in message


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--recipes", "mxfp4,mxfp9"],
            "unknown recipe 'mxfp9'; known: float32, bf16, mxfp8, mxfp8_hybrid, mxfp6",
        ),
        (["--recipes", "mxfp9+ends"], "unknown recipe 'mxfp9+ends'; known: "),
        (
            ["--recipes", "mxfp4+ends", "--layers", "2"],
            "mxfp4+ends keeps the first and the last block in high precision, and nothing lies "
            "between them, got layers=2; pass --layers 3 or more",
        ),
        (["--steps", "0"], "steps must be positive, got steps=0"),
        (["--heads", "3"], "multiple of 2 * heads (rotary positions turn pairs), got d_model=32"),
        (["--heal", "10"], "heal is a part of the steps, as 0.1, got heal=10.0"),
        (["--states", "fp4"], "states must be one of float32, mxfp8, got states=fp4"),
        (["--data", "missing.txt"], "no such file: missing.txt"),
    ],
)
def test_wrong_options_say_what_is_wrong(call, options, message, capsys):
    assert message in fails(capsys, lambda: call(*options))


def test_foreign_results_are_left_alone(call, tmp_path, capsys):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "results.json").write_text('{"theirs": 1}')
    assert "not a results file" in fails(capsys, lambda: call("--overwrite"))
    assert (tmp_path / "out" / "results.json").read_text() == '{"theirs": 1}'


def test_every_named_recipe_is_known_once(example):
    settings, recipe_list = example("lm.settings"), example("lm.cli").recipe_list
    known = list(settings.known_recipes())
    assert recipe_list("all") == known
    for name in recipes.names():
        (chosen,) = recipe_list(name)
        assert chosen in known
        assert settings.precision(chosen).recipe == recipes.from_name(name)
    assert recipe_list("rowwise,float8_rowwise,high_precision") == ["float8_rowwise", "float32"]
    assert recipe_list("mxfp4+ends,rowwise+ends") == ["mxfp4+ends", "float8_rowwise+ends"]
    assert len({settings.precision(name) for name in known}) == len(known)


def test_weights_are_averaged_over_the_last_quarter(example, train_lm):
    training, settings = example("lm.training"), dataclasses.replace(train_lm.DEFAULT, steps=8)
    steps = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
    average = np.zeros(3, np.float32)
    for step, params in enumerate(steps):
        average = training.averaged(average, params, step, settings)
        if step < 6:
            np.testing.assert_array_equal(average, params)
    np.testing.assert_allclose(average, steps[-2:].mean(0), rtol=1e-6)


def test_default_text_is_english_and_batches_are_reproducible(example):
    data = example("lm.data")
    text = data.standard_library_text()
    assert len(text) > 400_000
    corpus = data.Corpus.from_text(text, batch=16, context=64)
    assert corpus.decode(corpus.encode("the while statement")) == "the while statement"
    assert corpus.decode(np.concatenate([corpus.train, corpus.validation])) == text
    batch = corpus.batch(seed=1, step=2, batch=4, context=8)
    np.testing.assert_array_equal(batch, corpus.batch(seed=1, step=2, batch=4, context=8))
    assert not np.array_equal(batch, corpus.batch(seed=1, step=3, batch=4, context=8))
    windows = corpus.validation_batches(batch=4, context=8, tokens=64)
    assert windows.shape == (2, 4, 9)
    np.testing.assert_array_equal(windows.reshape(8, 9)[:, :8].ravel(), corpus.validation[:64])


# A full disk and damaged checkpoints: one clear message, and nothing lost ------------------------

OPTIONS = ("--recipes", "float32")
NAME = "float32-seed0"


@pytest.fixture
def checkpoints(tmp_path):
    return tmp_path / "out" / "checkpoints" / NAME


@pytest.mark.slow
def test_damaged_checkpoints_send_the_run_back_to_the_one_before(call, at_step, checkpoints, capfd):
    """A file cut short, and one with a bit flipped."""
    at_step(5, lambda: signal.raise_signal(signal.SIGINT))
    assert call(*OPTIONS) == 130
    assert {path.name for path in checkpoints.iterdir()} == {"2", "4", "5"}
    expected = []
    for step in ("5", "4"):
        files = (checkpoints / step).rglob("*")
        damaged = max(files, key=lambda path: path.is_file() * path.stat().st_size)
        content = bytearray(damaged.read_bytes())
        content[len(content) // 2] ^= 1
        damaged.write_bytes(content if step == "5" else content[: len(content) // 2])
        expected.append(
            f"{NAME}: cannot read the checkpoint of step {step}, going back to step 2 "
            f"({damaged.relative_to(checkpoints / step)} is damaged)"
        )
    assert call(*OPTIONS, "--resume") == 0
    assert capfd.readouterr().err.splitlines()[-2:] == expected
    # Their steps are trained again.
    assert {path.name for path in checkpoints.iterdir()} == {"2", "4", "6"}


@pytest.mark.slow
def test_a_full_disk_is_one_message(example, call, results, checkpoints, monkeypatch, capfd):
    disk = example("lm.disk")
    usage = type(disk.shutil.disk_usage("/"))
    answers = [usage(10**9, 0, 10**9)]  # room for the first checkpoint
    full = usage(10**9, 10**9 - 12_345, 12_345)
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda _: answers.pop() if answers else full)
    assert call(*OPTIONS) == 3
    output, errors = capfd.readouterr()
    (line,) = errors.splitlines()
    assert "error: cannot write the checkpoint of step 4 (0.2 MB) to " in line
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
