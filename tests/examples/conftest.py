"""The examples as modules: they are scripts, found beside each other and not installed."""

import functools
import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import jax
import numpy as np
import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.append(str(EXAMPLES))

STEPS = 6
TINY = (
    f"--steps {STEPS} --d-model 32 --layers 1 --heads 1 --context 32 --batch 4 "
    "--eval-every 3 --eval-tokens 256 --checkpoint-every 2 --sample 0"
).split()


def imported(folder: Path, name: str) -> ModuleType:
    """A module of a folder that is no package."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    return importlib.import_module(name)


def disturb(monkeypatch: pytest.MonkeyPatch, module: ModuleType, number: int, happening) -> None:
    """Let something happen during the n-th of a module's training steps from now."""
    step, calls = module.train_step, []

    def disturbed(*args, **kwargs):
        calls.append(1)
        if len(calls) == number:
            happening()
        return step(*args, **kwargs)

    monkeypatch.setattr(module, "train_step", disturbed)


@pytest.fixture(scope="session")
def example() -> Callable[[str], ModuleType]:
    """Imports an example, or a part of one, by its module name."""
    return functools.partial(imported, EXAMPLES)


@pytest.fixture
def train_lm(example):
    return example("train_lm")


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("\n".join(f"{n} times {n} is {n * n}" for n in range(200)))
    return path


@pytest.fixture
def call(train_lm, text, tmp_path):
    """Runs the program on the tiny text, in the folder `out` of this test."""

    def run(*options: str, out: str = "out") -> int:
        return train_lm.main(["--data", str(text), "--out", str(tmp_path / out), *TINY, *options])

    return run


@pytest.fixture
def results(tmp_path):
    """What a folder's results.json says."""
    return lambda out="out": json.loads((tmp_path / out / "results.json").read_text())


@pytest.fixture
def at_step(example, monkeypatch):
    """Lets something happen during the n-th optimizer step from now."""
    return functools.partial(disturb, monkeypatch, example("lm.training"))


@pytest.fixture
def measured(results):
    """What the runs of a folder measured, without the times."""
    times = ("seconds", "step_seconds", "timed_steps", "tokens_per_second")

    def read(out: str = "out") -> list[dict]:
        runs = results(out)["runs"]
        return [{key: value for key, value in run.items() if key not in times} for run in runs]

    return read


@pytest.fixture
def final_state(example, tmp_path):
    """Parameters and optimizer of a finished run, as a flat list of arrays."""

    def restore(out: str, name: str) -> list[np.ndarray]:
        with example("lm.storage").Checkpoints(tmp_path / out / "checkpoints" / name) as stored:
            state, run = stored.restore(None)
        assert run.step == STEPS
        return [np.asarray(leaf) for leaf in jax.tree.leaves(state)]

    return restore
