"""Benchmarks of whole models, on tiny ones: calibration, decoding, gradients, sentences."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import mx_jax
from benchmarks import calibration, gradient_bias
from benchmarks import sentence_embeddings as sentences
from benchmarks.llama import GGUF, params_of
from tests.examples import bert
from tests.examples.tiny_llama import CONFIG, tensors


@pytest.mark.slow
def test_calibration_of_a_tiny_model(rng: np.random.Generator, tmp_path: Path, monkeypatch):
    params = params_of(tensors(), CONFIG, GGUF)
    known, held = rng.integers(0, CONFIG.vocabulary, (2, 3, 1, 9), np.int32)
    rows = [row for row in calibration.ROWS if row.format == "mxfp4"]
    monkeypatch.setattr(calibration, "ROWS", rows)
    options = SimpleNamespace(out=tmp_path / "result.json", rows=None, peers=())

    def measured() -> dict[str, Any]:
        calibration.measure(options, CONFIG, params, known, held)
        return json.loads(options.out.read_text())["rows"]

    result = measured()
    assert list(result) == ["float32", *(row.name for row in rows)]
    # The loss is that of the next token, by NumPy.
    model = calibration.Llama(CONFIG, mx_jax.recipes.high_precision())
    for tokens, loss in zip(held, result["float32"]["losses"], strict=True):
        logits = np.asarray(model.apply({"params": params}, tokens)[0], np.float64)[:, :-1]
        chosen = np.take_along_axis(logits, tokens[:, 1:, None], -1)[..., 0]
        want = (np.log(np.exp(logits).sum(-1)) - chosen).mean()
        assert loss == pytest.approx(want, rel=1e-4)
    # No two are the same, and each counts what it stores.
    assert len({tuple(row["losses"]) for row in result.values()}) == len(result)
    size = sum(w.size for w in tensors().values() if w.ndim == 2)
    table, mixer = params["embedding"].size, CONFIG.width**2
    assert (result["mxfp4, GPTQ"]["bits"], result["mxfp4, GPTQ"]["size"]) == (4.25 * size, size)
    two = result["mxfp4, rotated, GPTQ, two tables"]
    assert two["bits"] == 4.25 * (size + table) + 16 * mixer
    assert result["mxfp4, GPTQ, head mxint8"]["bits"] == 4.25 * size + 4 * table
    # A second run measures what is not there.
    before = result.pop("mxfp4, GPTQ")
    held_back = {**json.loads(options.out.read_text()), "rows": result}
    held_back["rows"]["float32"]["losses"] = [1.0, 2.0, 3.0]
    options.out.write_text(json.dumps(held_back))
    again = measured()
    assert again["float32"]["losses"] == [1.0, 2.0, 3.0]
    assert again["mxfp4, GPTQ"]["losses"] == before["losses"]


TINY = (
    "--steps 4 --checkpoints 2 --seeds 0 --batches 3 --d-model 32 --heads 1 --layers 1 "
    "--context 16 --batch 2 --variants mxfp8"
).split()


def test_variants_of_gradient_bias():
    """Every variant of the ablation but the baseline, and passes of some."""
    names = [variant.name for variant in gradient_bias.rows_to_measure(4)]
    assert len(names) == len(set(names))
    assert {"mxfp4_floor", "mxfp4", "mxfp4, head too", "mxfp4_backward", "quartet_ii"} <= set(names)
    assert {"mxfp4, forward alone", "mxfp4_floor, backward alone"} <= set(names)
    assert "float32" not in names
    with pytest.raises(SystemExit, match="unknown mxfp5; known: bf16, mxfp8"):
        gradient_bias.choose(["mxfp5"], 4)


@pytest.mark.slow
def test_a_checkpoint_measured_and_not_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out, work = tmp_path / "results.json", tmp_path / "work"
    arguments = [*TINY, "--out", str(out), "--work", str(work)]
    gradient_bias.main(arguments)
    first = json.loads(out.read_text())
    (row,) = first["rows"]
    assert (row["seed"], row["step"], row["name"], row["draws"]) == (0, 2, "mxfp8", 3)
    assert 0 < row["one_batch"] < 0.5 and "blocks/up/kernel[0]" in row["parameters"]
    assert "| mxfp8 |" in out.with_suffix(".md").read_text()
    # Nothing is measured or trained twice: the kept row is marked to show it.
    row["bias"] = 0.5
    out.write_text(json.dumps(first))
    capsys.readouterr()
    gradient_bias.main(arguments)
    assert "step 2: 0 rows" in capsys.readouterr().err
    assert [row["bias"] for row in json.loads(out.read_text())["rows"]] == [0.5]
    assert "| 50.0 |" in out.with_suffix(".md").read_text()
    with pytest.raises(SystemExit, match="made with other settings"):
        gradient_bias.main([*arguments, "--batches", "4"])


@pytest.mark.slow
def test_sentences_of_a_tiny_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**bert.TINY, "vocab_size": 2100}))
    save_file(bert.tensors({**bert.TINY, "vocab_size": 2100}), folder / "model.safetensors")
    texts = [f"{'abcdefgh'[i % 8]}{chr(110 + i // 8)}{'xyz' * (i % 3)}" for i in range(40)]
    monkeypatch.setattr(sentences.encoder, "standard_library", lambda: texts)
    letters = lambda texts: [[*map(ord, text)] for text in texts]  # noqa: E731
    monkeypatch.setattr(sentences.encoder, "tokenizer", lambda folder: letters)
    monkeypatch.setattr(sentences, "BATCHES", ((2, 16),))
    # One of each kind.
    four, eight, words = (
        sentences.Choice("mxfp4", *rest) for rest in [(), (None, "mxint8"), (None, None, "mxfp4")]
    )
    chosen = [*map(sentences.Wanted, (four, eight, words)), sentences.Wanted(four, "searched")]
    monkeypatch.setattr(sentences, "wanted", lambda formats, rules: chosen)
    monkeypatch.setattr(sentences.encoder.batches, "__defaults__", (64,))
    out = tmp_path / "out.json"
    options = "--rules even --sentences 12 --known 20 --seconds 0 --min-rounds 3".split()
    sentences.main(["--model", str(folder), "--formats", "mxfp4", *options, "--out", str(out)])
    result = json.loads(out.read_text())
    assert result["sentences"] == 12 and result["known"] == 20
    rows = result["quality"]
    # Stored weights are those of each cast once, whatever activations are.
    quality = {(row["way"], row["activations"], row["words"]): row for row in rows}
    assert len(quality) == len(rows) == 4
    assert all(0.8 < row["smallest"] <= row["cosine"] < 0.9999 for row in rows)
    plain, both = quality["cast", None, None], quality["cast", "mxint8", None]
    assert both["cosine"] != plain["cosine"] and both["kernel_bytes"] == plain["kernel_bytes"]
    assert quality["cast", None, "mxfp4"]["table_bytes"] < plain["table_bytes"] / 2
    assert quality["searched", None, None]["cosine"] != plain["cosine"]
    assert [row["case"] for row in result["speed"]] == ["float32", "mxfp4", "mxfp4 x itself"]
    assert result["speed"][0]["faster"]["median"] == 1
    assert all(row["timings"]["samples"] >= 3 for row in result["speed"])
    assert "## Calibration" in out.with_suffix(".md").read_text()

    with pytest.raises(SystemExit, match="there are 40 sentences of at most 16 tokens, needs"):
        sentences.main(["--model", str(folder), "--sentences", "30", "--known", "20"])
    with pytest.raises(SystemExit, match=r"there is no model\.safetensors in"):
        sentences.main(["--model", str(tmp_path)])
