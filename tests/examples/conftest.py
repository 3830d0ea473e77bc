"""The examples as modules: they are scripts, found beside each other and not installed."""

import functools
import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

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
def integration() -> Callable[[str], ModuleType]:
    """Imports an example of another library by its name."""
    return functools.partial(imported, EXAMPLES / "integrations")


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
