"""The flagship: a Llama fine-tuned by each way, quantized by the command, and made to write."""

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import safetensors.numpy

from mx_jax.cli import main
from mx_jax.generate import load as loading
from mx_jax.generate.tokenizer import Tokenizer
from tests.examples.conftest import EXAMPLES
from tests.generate import smollm2, tiny
from tests.generate.test_command import Letters

for package in ("optax", "orbax.checkpoint", "rich"):
    pytest.importorskip(package)

STEPS = 4
SMALL = f"--steps {STEPS} --batch 2 --context 16 --windows 4 --every 2 --lr 3e-3 --rank 4".split()


def module(name: str) -> ModuleType:
    folder = str(EXAMPLES / "finetune")
    if folder not in sys.path:
        sys.path.append(folder)
    return importlib.import_module(name)


@pytest.fixture
def train() -> ModuleType:
    return module("train")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a tiny model and a text; a token is a letter."""

    def tokenizer(folder: Path) -> Tokenizer:
        return Tokenizer(
            encoder=Letters(), first=None, stop=frozenset(), template=None, words={}
        )

    monkeypatch.setattr(loading, "tokenizer_of_folder", tokenizer)
    model = tmp_path / "model"
    model.mkdir()
    safetensors.numpy.save_file(tiny.hub_tensors(), model / "model.safetensors")
    (model / "config.json").write_text(json.dumps(tiny.HUB_CONFIG))
    (model / "tokenizer.json").write_text("{}")
    text = " ".join(f"{n} times {n} is {n * n};" for n in range(200))
    (tmp_path / "text.txt").write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def call(train: ModuleType, *options: str) -> int:
    return train.main(["--model", "model", "--text", "text.txt", *SMALL, *options])


def runs(here: Path, out: str = "finetuned") -> dict:
    return json.loads((here / out / "results.json").read_text())["runs"]


def test_from_a_folder_to_a_text(train, here: Path, capsys):
    assert call(train, "--ways", "mxfp8,qat:mxfp4,lora:mxfp4") == 0
    print(capsys.readouterr().out)
    for way, run in runs(here).items():
        assert len(run["train"]) == STEPS and len(run["after"]) == 4, way
        assert np.mean(run["after"]) < np.mean(run["before"]) - 0.1, way
    words = ["--format", "mxfp4", "--to", "compressed-tensors"]
    assert main(["quantize", "finetuned/qat-mxfp4", "small", *words]) == 0
    capsys.readouterr()
    assert call(train, "--evaluate", "small") == 0
    print(capsys.readouterr().out)
