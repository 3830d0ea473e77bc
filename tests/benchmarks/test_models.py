"""Benchmarks of whole models, on tiny ones: calibration, decoding, training, sentences."""

import dataclasses
import functools
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

import mx_jax
from benchmarks import calibration, gradient_bias, language_model, residuals
from benchmarks import fp4_ablation as ablation
from benchmarks import sentence_embeddings as sentences
from benchmarks.decode_worker import OTHER, time_of_parts
from benchmarks.language_model_formats import calibrated_scales, empty_caches
from benchmarks.llama import GGUF, Generator, Llama, params_of
from mx_jax.nn.cache import read_rows
from tests.examples import bert
from tests.examples.tiny_llama import CONFIG, tensors
from tests.processes import ROOT
from tests.quick import quick


@pytest.mark.slow
def test_calibration_of_a_tiny_model(rng: np.random.Generator, tmp_path: Path, monkeypatch):
    # Matrices of two shapes: each other one is compiled anew.
    config = dataclasses.replace(CONFIG, layers=1, vocabulary=64, head_width=16, hidden=64)
    params = params_of(tensors(config), config, GGUF)
    known, held = rng.integers(0, config.vocabulary, (2, 3, 1, 9), np.int32)
    rows = [row for row in calibration.ROWS if row.format == "mxfp4"]
    monkeypatch.setattr(calibration, "ROWS", rows)
    options = SimpleNamespace(out=tmp_path / "result.json", rows=None, peers=())

    def measured() -> dict[str, Any]:
        calibration.measure(options, config, params, known, held)
        return json.loads(options.out.read_text())["rows"]

    result = measured()
    assert list(result) == ["float32", *(row.name for row in rows)]
    # The loss is that of the next token, by NumPy.
    model = calibration.Llama(config, mx_jax.recipes.high_precision())
    apply = quick(model.apply)
    for tokens, loss in zip(held, result["float32"]["losses"], strict=True):
        logits = np.asarray(apply({"params": params}, tokens)[0], np.float64)[:, :-1]
        chosen = np.take_along_axis(logits, tokens[:, 1:, None], -1)[..., 0]
        want = (np.log(np.exp(logits).sum(-1)) - chosen).mean()
        assert loss == pytest.approx(want, rel=1e-4)
    # No two are the same, and each counts what it stores.
    assert len({tuple(row["losses"]) for row in result.values()}) == len(result)
    size = sum(w.size for w in tensors(config).values() if w.ndim == 2)
    table, mixer = params["embedding"].size, config.width**2
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


def test_where_a_step_spends_its_time():
    params = params_of(tensors(), CONFIG, GGUF)
    generator = Generator(model=Llama(CONFIG, mx_jax.recipes.high_precision()), params=params)
    spent = time_of_parts(generator, 12)
    assert {"qkv", "gate_up", "down", "head", "attention", "norm"} <= set(spent)
    assert 0 < sum(spent.values()) < 1 and spent.get(OTHER, 0) < 0.5 * sum(spent.values())


def test_calibrated_scales_are_of_each_layer():
    """The largest that was seen is the largest that NVFP4 holds, of keys and of values."""
    config, shape = CONFIG, (1, 3, CONFIG.kv_heads, CONFIG.head_width)
    seen = [
        cache.append(jnp.full(shape, -3.0 - index), jnp.full(shape, 0.5 + index), 1)
        for index, cache in enumerate(empty_caches(config, 8))
    ]
    scales = calibrated_scales(tuple(seen))
    assert scales == tuple(((3.0 + i) / 2688, (0.5 + i) / 2688) for i in range(config.layers))
    fixed = empty_caches(config, 8, scales, format="nvfp4")
    for index, cache in enumerate(fixed):
        assert cache.keys.tensor_scale is not None and cache.keys.tensor_scale.shape == (1, 1, 1, 1)
        # Twice as large is cut off.
        kept = cache.append(jnp.full(shape, -3.0 - index), jnp.full(shape, 1.0 + 2 * index), 0)
        np.testing.assert_allclose(read_rows(kept.keys)[:, :, :3], -3.0 - index, rtol=1e-6)
        np.testing.assert_allclose(read_rows(kept.values)[:, :, :3], 0.5 + index, rtol=1e-6)


# The benchmarks that train or differentiate the language model --------------------------------


@pytest.mark.slow
def test_residuals(tmp_path, monkeypatch):
    """The model's own in float32 alone: one program to trace less for each row."""
    model_bytes = residuals.model_bytes
    of_float32 = functools.cache(
        lambda recipe, settings: model_bytes(recipe, jnp.float32, settings)
    )
    monkeypatch.setattr(
        residuals, "model_bytes", lambda recipe, dtype, settings: of_float32(recipe, settings)
    )
    out = tmp_path / "results.json"
    options = "--d-model 32 --layers 2 --batch 2 --context 32 --recipes mxfp8".split()
    residuals.main([*options, "--size", "64x64x64", "--out", str(out)])
    plain, primal, codes, high = json.loads(out.read_text())["rows"]
    for dtype in ("float32", "bfloat16"):
        for row in (primal, high):
            assert row["model_bytes"][dtype] == plain["model_bytes"][dtype]
        saved = [
            primal[what][dtype] - codes[what][dtype] for what in ("model_bytes", "linear_bytes")
        ]
        assert saved[0] > 0 and saved[1] > 0
    assert high["sqnr_db"]["grad_weight"] is None
    assert primal["sqnr_db"]["grad_weight"] >= codes["sqnr_db"]["grad_weight"] > 20
    assert "| mxfp8, codes kept | codes, requantized along the other axis |" in (
        out.with_suffix(".md").read_text()
    )


@pytest.mark.slow
def test_fp4_ablation(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("\n".join(f"{n} times {n} is {n * n}" for n in range(200)))
    out = tmp_path / "results.json"
    sizes = "--steps 2 --d-model 32 --heads 1 --layers 2 --context 32 --batch 2 --eval-tokens 64"
    command = [*sizes.split(), "--data", str(text), "--work", str(tmp_path / "work"), "--seeds"]
    command += ["0", "--out", str(out), "--variants", "mxfp4_floor"]
    ablation.main(command)
    result = json.loads(out.read_text())
    rows = {row["name"]: row for row in result["rows"]}
    assert set(rows) == {"float32", "mxfp4_floor"}
    base = rows["float32"]["losses"][0]
    assert rows["mxfp4_floor"]["losses"][0] != pytest.approx(base, rel=1e-5)
    assert "</svg>" in out.with_suffix(".svg").read_text()
    # Everything is done already: the second time only reports.
    ablation.main(command)
    assert json.loads(out.read_text())["rows"] == result["rows"]
    # Others beside them.
    ablation.main([*command[:-1], "mxfp4, head too", "--keep"])
    kept = json.loads(out.read_text())["rows"]
    assert [row["name"] for row in kept] == ["float32", "mxfp4_floor", "mxfp4, head too"]
    assert f"at commit {kept[1]['commit']}: " in out.with_suffix(".md").read_text()


def test_tables_are_written_anew_without_training(tmp_path):
    """From the committed results: the tables in the docs are these."""
    committed = ROOT / "benchmarks" / "results" / "train_lm_fp4" / "results.json"
    out = tmp_path / "results.json"
    complaint = r"--report: there are no results in --out=.*results\.json"
    with pytest.raises(SystemExit, match=complaint):
        ablation.main(["--report", "--out", str(out)])
    out.write_text(committed.read_text())
    ablation.main(["--report", "--out", str(out)])
    assert out.read_text() == committed.read_text()
    assert out.with_suffix(".md").read_text() == committed.with_suffix(".md").read_text()
    docs = (ROOT / "docs" / "accuracy.md").read_text()
    shown = 0
    for row in json.loads(out.read_text())["rows"]:
        # The page leaves some rows out.
        if row["name"] != "float32" and len(row["seeds"]) > 1 and f"| {row['name']} |" in docs:
            gap = language_model.intervals.text(row["gaps_percent"], "+.2f")
            assert gap in docs, row["name"]
            shown += 1
    assert shown > 5


def test_ablation_compares_with_float32_of_the_same_seed():
    chosen = ablation.choose(["mxfp4", "mxfp4_floor"], 4)

    def run(name: str, seed: int, loss: float, **options: Any) -> Any:
        of = {"train_loss": [9.0] * 9 + [loss], "validation": [(10, loss)], "finished": True}
        return language_model.Run(recipe=name, seed=seed, **of | options)

    runs = [
        run("float32", 0, 2.0),
        run("float32", 1, 4.0),
        run("mxfp4", 0, 2.02),
        run("mxfp4", 1, 4.12),
        run("mxfp4_floor", 0, 2.2),
        run("mxfp4_floor", 1, 5.0, finished=False, diverged_at=3),
    ]
    rows = {row["name"]: row for row in ablation.rows_of(chosen, runs)}
    assert rows["mxfp4"]["gaps_percent"] == pytest.approx([1.0, 3.0])
    assert rows["mxfp4"]["training_gaps_percent"] == pytest.approx([1.0, 3.0])
    assert rows["mxfp4_floor"]["diverged"] == [1]


def test_intervals_are_student_s():
    """n = 3: 4.3027 s / sqrt(3), from a printed table of t."""
    intervals = language_model.intervals
    interval = intervals.interval([1.0, 2.0, 4.5])
    assert interval.mean == 2.5 and interval.n == 3 and not interval.tells
    assert interval.half_width == pytest.approx(4.3027 * math.sqrt(3.25) / math.sqrt(3), rel=1e-4)
    assert intervals.text([2.0, 2.1, 2.2], "+.2f") == "+2.10 ± 0.25"
    assert intervals.interval([2.0, 2.1, 2.2]).tells
    assert not intervals.interval([7.0]).tells and intervals.text([7.0], ".1f") == "7.0"
    assert intervals.interval([]) is None and intervals.text([], ".1f") == "-"
