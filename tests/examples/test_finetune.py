"""A Llama fine-tuned by each way, quantized by the command, and made to write."""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx
from generate import command
from generate import load as loading
from generate.load import open_model, params_of
from generate.model import Llama

from mx_jax import convert, recipes
from mx_jax.commands import main
from tests.examples import tiny_llama as tiny
from tests.examples.conftest import EXAMPLES, disturb, imported
from tests.quick import quick

for package in ("optax", "orbax.checkpoint", "rich"):
    pytest.importorskip(package)


STEPS = 4
SMALL = f"--steps {STEPS} --batch 2 --context 16 --windows 4 --every 2 --lr 3e-3 --rank 4".split()


module = functools.partial(imported, EXAMPLES / "finetune")


def save_model(folder: Path) -> Path:
    (tiny.put_folder(folder) / "tokenizer.json").write_text("{}")
    return folder


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where one is, with a tiny model and a text; a token is a letter."""
    monkeypatch.setattr(loading, "tokenizer_of_folder", lambda folder: tiny.tokenizer())
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


@pytest.fixture
def llama() -> ModuleType:
    return module("llama")


def logits_of(model: nnx.Module) -> np.ndarray:
    graph, state = nnx.split(model)

    def call(state: Any, tokens: Any) -> Any:
        model: Any = nnx.merge(graph, state)
        return model(tokens)

    return np.asarray(quick(call)(state, tiny.TOKENS))


@pytest.mark.slow
def test_trained_in_codes_stopped_resumed_served(call, monkeypatch, capsys):
    """From a folder to a text; what multiplied last in training is what is served."""
    way = ("--ways", "qat:mxfp4", "--layers", "1")
    assert call(*way, "--out", "whole") == 0

    def interrupt() -> None:
        raise KeyboardInterrupt

    disturb(monkeypatch, module("train"), STEPS, interrupt)
    assert call(*way) == 130
    assert not runs() and "--resume goes on" in capsys.readouterr().err
    assert module("train").main(["--resume"]) == 0
    assert losses("finetuned", "qat:mxfp4") == losses("whole", "qat:mxfp4")
    stored, resumed = (open_model(Path(out, "qat-mxfp4")).weights for out in ("whole", "finetuned"))
    for name in stored:
        np.testing.assert_array_equal(stored[name], resumed[name])
    measured = losses("whole", "qat:mxfp4")
    assert len(measured["train"]) == STEPS and len(measured["after"]) == 4
    assert np.mean(measured["after"]) < np.mean(measured["before"]) - 0.1

    to_serve = ["--format", "mxfp4", "--to", "compressed-tensors"]
    assert main(["quantize", "finetuned/qat-mxfp4", "small", *to_serve]) == 0
    assert len(open_model(Path("small")).weights.quantized) == 7
    assert module("train").main(["--evaluate", "small"]) == 0
    np.testing.assert_allclose(runs()["small"]["after"], measured["after"], rtol=1e-5)
    capsys.readouterr()
    assert command.main(["small", "--prompt", "9 times", "--max-tokens", "1"]) == 0
    assert capsys.readouterr().out.startswith("9 times")


@pytest.mark.parametrize("tied", [True, False])
def test_logits_are_those_that_generate_computes(llama, tmp_path: Path, tied: bool):
    folder = save_model(tmp_path / "model")
    if not tied:
        tensors = tiny.hub_tensors()
        tensors["lm_head.weight"] = 0.5 * tensors["model.embed_tokens.weight"][::-1]
        safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    model, source = llama.read_llama(folder, rngs=nnx.Rngs(0)), open_model(folder)
    assert (model.head is None) is tied
    theirs = Llama(source.config, recipes.high_precision())
    params = params_of(source.weights, source.config, source.names)
    expected = quick(theirs.apply)({"params": params}, tiny.TOKENS)[0]
    np.testing.assert_allclose(logits_of(model), expected, atol=2e-5)

    llama.write_llama(model, tmp_path / "again", folder)
    again = open_model(tmp_path / "again")
    assert again.config == source.config and again.weights.keys() == source.weights.keys()
    for name in again.weights:
        np.testing.assert_array_equal(again.weights[name], source.weights[name])


@pytest.mark.slow
def test_adapters_over_codes_are_written_as_one_matrix(llama, tmp_path: Path):
    folder = save_model(tmp_path / "model")
    model = llama.read_llama(folder, rank=4, rngs=nnx.Rngs(0))
    rule = convert.Rule("blocks/.*", recipes.weight_only("mxfp4"))
    model = convert.weights(model, rule)
    plain = logits_of(model)
    adapters = nnx.state(model, nnx.LoRAParam)
    nnx.update(model, jax.tree.map(lambda x: x + 0.1, adapters))
    adapted = logits_of(model)
    assert np.abs(adapted - plain).max() > 0.1
    llama.write_llama(model, tmp_path / "merged", folder)
    merged = llama.read_llama(tmp_path / "merged", rngs=nnx.Rngs(0))
    np.testing.assert_allclose(logits_of(merged), adapted, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["mxfp4_stochastic", "lora:mxfp4"])
def test_every_way_learns(way: str, call, capsys):
    states = ("--states", "mxfp8" if way == "mxfp4_stochastic" else "float32")
    assert call("--ways", way, "--layers", "1", *states) == 0
    result = losses("finetuned", way)
    assert np.mean(result["after"]) < np.mean(result["before"]) - 0.1
    capsys.readouterr()
    assert call("--resume") == 0
    assert f"{way}: done before" in capsys.readouterr().out


@pytest.mark.slow
def test_a_teacher_is_what_is_learned(here: Path, call):
    """Divergences: none from oneself, and less and less of what few bits cost."""
    gently = "--lr", "5e-4", "--steps", "12"
    assert (
        call("--ways", "float32,qat:mxfp4", "--teacher", "model", "--out", "distilled", *gently)
        == 0
    )
    itself, coarse = (losses("distilled", way) for way in ("float32", "qat:mxfp4"))
    assert abs(itself["train"][0]) < 1e-6
    assert 1e-3 < coarse["train"][-1] < 0.9 * coarse["train"][0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--teacher", "nowhere"), "there is no nowhere; a small model to try"),
        (("--ways", "mxfp5"), "mxfp5"),
        (("--ways", "ptq:mxfp4"), "a way is RECIPE, qat:FORMAT or lora:FORMAT, got 'ptq:mxfp4'"),
        (("--ways", "qat:mxfp5"), "mxfp5"),
        (("--steps", "0"), "--steps must be at least 1, got 0"),
        (("--windows", "1"), "--windows must be at least 2, got 1"),
        (("--lr", "0"), "--lr must be above 0, got 0.0"),
        (("--context", "400"), "the last tenth has 444 tokens, and --windows 4 of --context 400"),
        (("--text", "none.txt"), "none.txt"),
        (("--text", "model/model.safetensors"), "model/model.safetensors is no text in UTF-8"),
        (("--model", "nowhere"), "there is no nowhere; a small model to try"),
        (("--evaluate", "small"), "finetuned holds nothing"),
    ],
    ids=lambda x: "=".join(x).strip("-").replace("/", "-") if isinstance(x, tuple) else "",
)
def test_options_that_make_no_sense(options, message: str, call, capsys):
    assert call(*options) == 2
    assert message in capsys.readouterr().err


def test_a_run_goes_on_by_what_it_began_with(here: Path, call, capsys):
    began = module("train").parsed(["--model", "model", "--text", "text.txt", *SMALL])
    began.runs = {}
    module("train").save(began)
    resumed = module("train").parsed(["--resume"])
    assert vars(resumed) == vars(began) | {"resume": True}
    assert call("--resume", "--batch", "3", "--seed", "1") == 2
    assert "finetuned was begun with --batch 2, --seed 0" in capsys.readouterr().err
    assert call() == 2
    assert "finetuned holds earlier runs; go on with --resume" in capsys.readouterr().err


def test_batches_are_of_seed_and_step_alone(here: Path):
    train = module("train")
    options = train.parsed(["--model", "model", "--text", "text.txt", *SMALL])
    options.path = Path("model")
    data = train.Data(options)
    first, again, other = (data.batch(options, step) for step in (3, 3, 4))
    np.testing.assert_array_equal(first, again)
    assert first.shape == (2, 17) and (first != other).any()
    # Held out: nothing of it is trained on.
    spoken = "".join(chr(32 + token) for token in data.windows[0])
    assert spoken in Path("text.txt").read_text() and spoken not in data.text


# What a run of examples/finetune leaves alone, and what it is taken up from.


def test_a_folder_that_is_no_runs_is_not_written_over(here: Path, call, capsys):
    (here / "finetuned" / "float32").mkdir(parents=True)
    (here / "finetuned" / "float32" / "model.safetensors").write_text("mine")
    assert call("--ways", "float32") == 2
    assert "finetuned/float32 is no run's, and would be written over" in capsys.readouterr().err
    assert (here / "finetuned" / "float32" / "model.safetensors").read_text() == "mine"
