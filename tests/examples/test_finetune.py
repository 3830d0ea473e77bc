"""The flagship: a Llama fine-tuned by each way, quantized by the command, and made to write."""

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from mx_jax.cli import main
from mx_jax.generate import load as loading
from mx_jax.generate.load import open_model
from mx_jax.generate.tokenizer import Tokenizer
from tests.examples.conftest import EXAMPLES
from tests.generate import tiny
from tests.generate.test_command import Letters

for package in ("optax", "orbax.checkpoint", "rich"):
    pytest.importorskip(package)

FOLDER = EXAMPLES / "finetune"
STEPS = 4
SMALL = f"--steps {STEPS} --batch 2 --context 16 --windows 4 --every 2 --lr 3e-3 --rank 4".split()
TO_SERVE = ["--format", "mxfp4", "--to", "compressed-tensors"]


def module(name: str) -> ModuleType:
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
    return importlib.import_module(name)


def save_model(folder: Path, **config: Any) -> Path:
    folder.mkdir()
    safetensors.numpy.save_file(tiny.hub_tensors(), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(tiny.HUB_CONFIG | config))
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where one is, with a tiny model and a text; a token is a letter."""

    def tokenizer(folder: Path) -> Tokenizer:
        return Tokenizer(encoder=Letters(), first=None, stop=frozenset(), template=None, words={})

    monkeypatch.setattr(loading, "tokenizer_of_folder", tokenizer)
    save_model(tmp_path / "model")
    text = " ".join(f"{n} times {n} is {n * n};" for n in range(200))
    (tmp_path / "text.txt").write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def call(here: Path) -> Callable[..., int]:
    def run(*options: str) -> int:
        return module("train").main(["--model", "model", "--text", "text.txt", *SMALL, *options])

    return run


def runs(out: str = "finetuned") -> dict[str, Any]:
    return json.loads(Path(out, "results.json").read_text())["runs"]


def losses(out: str, way: str) -> dict[str, Any]:
    return {name: runs(out)[way][name] for name in ("before", "train", "after")}


def stop_at(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the middle of a step, once."""
    train = module("train")
    whole, calls = train.train_step, []

    def interrupted(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == step:
            raise KeyboardInterrupt
        return whole(*args)

    monkeypatch.setattr(train, "train_step", interrupted)


def test_trained_in_codes_stopped_resumed_served(call, monkeypatch, capsys):
    """From a folder to a text; what multiplied last in training is what is served."""
    way = ("--ways", "qat:mxfp4")
    assert call(*way, "--out", "whole") == 0
    stop_at(STEPS, monkeypatch)
    assert call(*way) == 130
    assert not runs() and "--resume goes on" in capsys.readouterr().err
    assert call(*way) == 2
    assert "finetuned holds earlier runs; go on with --resume" in capsys.readouterr().err
    assert module("train").main(["--resume"]) == 0
    assert losses("finetuned", "qat:mxfp4") == losses("whole", "qat:mxfp4")
    stored, resumed = (open_model(Path(out, "qat-mxfp4")).weights for out in ("whole", "finetuned"))
    for name in stored:
        np.testing.assert_array_equal(stored[name], resumed[name])
    found = losses("whole", "qat:mxfp4")
    assert len(found["train"]) == STEPS and len(found["after"]) == 4
    assert np.mean(found["after"]) < np.mean(found["before"]) - 0.1

    assert main(["quantize", "finetuned/qat-mxfp4", "small", *TO_SERVE]) == 0
    assert len(open_model(Path("small")).weights.quantized) == 2 * 7
    assert module("train").main(["--evaluate", "small"]) == 0
    np.testing.assert_allclose(runs()["small"]["after"], found["after"], rtol=1e-5)
    capsys.readouterr()
    assert main(["generate", "small", "--prompt", "9 times", "--max-tokens", "1"]) == 0
    assert capsys.readouterr().out.startswith("9 times")
