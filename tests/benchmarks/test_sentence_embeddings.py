"""The benchmark of sentence embeddings, on a tiny model."""

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import save_file

from tests.examples import bert

ROOT = Path(__file__).parents[2]


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("benchmarks.sentence_embeddings")


@pytest.mark.one_python(reason="names of formats and rules")
def test_every_format_and_rule_is_wanted(benchmark):
    rows = benchmark.wanted(benchmark.FORMATS, benchmark.RULES)
    assert len(rows) == len(set(rows))
    casts = [row.choice for row in rows if row.way == "cast" and row.choice.words is None]
    # Six MX formats under four rules, and three with rules of their own; alone and both.
    assert len(casts) == 2 * (6 * 4 + 3)
    assert sum(choice.activations is None for choice in casts) == 27
    assert all(choice.activations in (None, choice.weights) for choice in casts)
    assert {(row.choice.weights, row.way) for row in rows if row.way != "cast"} == {
        (name, way) for name in ("mxfp4", "nvfp4") for way in ("searched", "gptq")
    }
    assert {row.choice.words for row in rows} - {None} == {*benchmark.MX, "nvfp4"}


def row(**changes: Any) -> dict[str, Any]:
    shares = {"cosine": 0.9, "smallest": 0.8, "nearest": 0.75, "ten": 0.5}
    choice = {"weights": "mxfp4", "activations": None, "words": None, "scale_rule": None}
    size = {"kernel_bytes": 5_680_000, "table_bytes": 12_900_000}
    return {**choice, "way": "cast", "rule": "even", **shares, **size, **changes}


@pytest.mark.one_python(reason="makes text of numbers")
def test_what_calibration_takes_back_is_told_of_the_best_cast(benchmark):
    rows = [row(cosine=0.8), row(), row(activations="mxfp4", cosine=0.5)]
    rows += [row(way="gptq", cosine=0.94), row(way="gptq", activations="mxint8", cosine=0.9)]
    rows += [row(way="gptq", activations="mxfp4", cosine=0.6), row(words="mxint8", cosine=0.99)]
    result = {"quality": rows, "speed": [], "sentences": 9, "known": 7}
    result |= {"float32_kernel_bytes": 42_500_000, "float32_table_bytes": 47_700_000}
    casts, calibrated, words = benchmark.sheets(result)
    assert casts.rows[1] == [
        *("mxfp4", "even", "float32", "0.90000", "0.80000", "75.0 %", "50.0 %", "5.68")
    ]
    assert [cells[-1] for cells in calibrated.rows] == ["40 %", "-", "20 %"]
    assert len(casts.rows) == 3 and [cells[0] for cells in words.rows] == ["mxint8"]


def letters(texts: list[str]) -> list[list[int]]:
    return [[ord(letter) for letter in text] for text in texts]


@pytest.mark.slow
def test_rows_of_a_tiny_model(benchmark, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**bert.TINY, "vocab_size": 2100}))
    save_file(bert.tensors({**bert.TINY, "vocab_size": 2100}), folder / "model.safetensors")
    texts = [f"{'abcdefgh'[i % 8]}{chr(110 + i // 8)}{'xyz' * (i % 3)}" for i in range(40)]
    monkeypatch.setattr(benchmark.encoder, "standard_library", lambda: texts)
    monkeypatch.setattr(benchmark.encoder, "tokenizer", lambda folder: letters)
    monkeypatch.setattr(benchmark, "BATCHES", ((2, 16),))
    # One of each kind.
    four, eight, words = (
        benchmark.Choice("mxfp4", *rest) for rest in [(), (None, "mxint8"), (None, None, "mxfp4")]
    )
    chosen = [*map(benchmark.Wanted, (four, eight, words)), benchmark.Wanted(four, "searched")]
    monkeypatch.setattr(benchmark, "wanted", lambda formats, rules: chosen)
    monkeypatch.setattr(benchmark.encoder.batches, "__defaults__", (64,))
    out = tmp_path / "out.json"
    options = "--rules even --sentences 12 --known 20 --seconds 0 --min-rounds 3".split()
    benchmark.main(["--model", str(folder), "--formats", "mxfp4", *options, "--out", str(out)])
    result = json.loads(out.read_text())
    assert result["sentences"] == 12 and result["known"] == 20
    rows = result["quality"]
    # Stored weights are those of each cast once, whatever activations are.
    found = {(row["way"], row["activations"], row["words"]): row for row in rows}
    assert len(found) == len(rows) == 4
    assert all(0.8 < row["smallest"] <= row["cosine"] < 0.9999 for row in rows)
    plain, both = found["cast", None, None], found["cast", "mxint8", None]
    assert both["cosine"] != plain["cosine"] and both["kernel_bytes"] == plain["kernel_bytes"]
    assert found["cast", None, "mxfp4"]["table_bytes"] < plain["table_bytes"] / 2
    assert found["searched", None, None]["cosine"] != plain["cosine"]
    assert [row["case"] for row in result["speed"]] == ["float32", "mxfp4", "mxfp4 x itself"]
    assert result["speed"][0]["faster"]["median"] == 1
    assert all(row["timings"]["samples"] >= 3 for row in result["speed"])
    assert "## Calibration" in out.with_suffix(".md").read_text()

    with pytest.raises(SystemExit, match="there are 40 sentences of at most 16 tokens, needs"):
        benchmark.main(["--model", str(folder), "--sentences", "30", "--known", "20"])
    with pytest.raises(SystemExit, match=r"there is no model\.safetensors in"):
        benchmark.main(["--model", str(tmp_path)])
