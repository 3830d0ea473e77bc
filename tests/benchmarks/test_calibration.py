"""The benchmark of calibration, on a tiny model."""

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mx_jax
from mx_jax.generate.weights import params_from_gguf
from tests.generate.tiny import CONFIG, tensors

ROOT = Path(__file__).parents[2]


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("benchmarks.calibration")


def test_unknown_formats_are_named(benchmark):
    with pytest.raises(SystemExit, match="--formats: unknown mxfp9; known: mxint8, mxfp8_e4m3, "):
        benchmark.main(["--formats", "mxfp9"])


@pytest.mark.slow
def test_rows_of_a_tiny_model(benchmark, rng: np.random.Generator):
    params = params_from_gguf(tensors(), CONFIG)
    tokens = rng.integers(0, CONFIG.vocabulary, (3, 2, 9), np.int32)
    text = benchmark.Text(calibration=tokens[:1], held=tokens[1:])
    rows = list(benchmark.measure(CONFIG, params, text, ["mxint8", "mxfp4"]))
    names = [(row["format"], row["way"]) for row in rows]
    assert names[:3] == [("float32", ""), ("mxint8", "plain"), ("mxfp4", "plain")]
    assert [way for _, way in names[3:]] == ["searched", "searched, weighed", "gptq"]
    own, eight, four = rows[:3]
    # Kept in bfloat16, its own distribution is not quite itself.
    assert abs(own["kl"]) < 0.01 < four["kl"] and abs(eight["loss"] - own["loss"]) < 0.05
    # The loss is that of the next token, by NumPy.
    model = benchmark.Llama(CONFIG, mx_jax.recipes.high_precision())
    losses = []
    for batch in tokens[1:]:
        logits = np.asarray(model.apply({"params": params}, batch)[0], np.float64)[:, :-1]
        chosen = np.take_along_axis(logits, batch[:, 1:, None], -1)[..., 0]
        losses.append((np.log(np.exp(logits).sum(-1)) - chosen).mean())
    assert own["loss"] == pytest.approx(np.mean(losses), rel=1e-4)
    gaps = {row["way"]: row["loss"] - own["loss"] for row in rows[2:]}
    assert rows[-1]["closed"] == pytest.approx(1 - gaps["gptq"] / gaps["plain"])
