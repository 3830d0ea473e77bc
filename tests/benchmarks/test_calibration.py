"""The benchmark of calibration, on a tiny model."""

import argparse
import dataclasses
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


@pytest.mark.one_python(reason="cuts a list of numbers")
def test_texts_are_cut_into_sequences(benchmark):
    cut = benchmark.cut(range(10), 3, 3)
    assert cut.tolist() == [[[0, 1, 2]], [[3, 4, 5]], [[6, 7, 8]]]
    with pytest.raises(SystemExit, match="the text has 10 tokens, needs 12"):
        benchmark.cut(range(10), 4, 3)
    assert len(benchmark.manual()) > 100_000


@pytest.mark.slow
def test_rows_of_a_tiny_model(benchmark, rng: np.random.Generator):
    params = params_from_gguf(tensors(), CONFIG)
    known, held = rng.integers(0, CONFIG.vocabulary, (2, 3, 1, 9), np.int32)
    steps: list[str] = []
    rows = list(benchmark.rows(CONFIG, params, (known, held), ["mxfp4"], steps.append))
    ways = ["plain", "searched", "searched, weighed", "gptq of kernels", "gptq", "gptq, two tables"]
    assert [row["way"] for row in rows] == ["", *ways]
    assert len(steps) == 2 + 6
    # Each treats a table in another way.
    assert len({row["kl"] for row in rows}) == 7
    own, four = rows[:2]
    assert own["kl"] == 0 < 0.01 < four["kl"]
    # The loss is that of the next token, by NumPy.
    model = benchmark.Llama(CONFIG, mx_jax.recipes.high_precision())
    losses = []
    for tokens in held:
        logits = np.asarray(model.apply({"params": params}, tokens)[0], np.float64)[:, :-1]
        chosen = np.take_along_axis(logits, tokens[:, 1:, None], -1)[..., 0]
        losses.append((np.log(np.exp(logits).sum(-1)) - chosen).mean())
    assert own["loss"] == pytest.approx(np.mean(losses), rel=1e-4)
    gaps = {row["way"]: row["loss"] - own["loss"] for row in rows[1:]}
    assert rows[-2]["closed"] == pytest.approx(1 - gaps["gptq"] / gaps["plain"])
    (cells,) = (c for c in benchmark.sheet(rows, _options()).rows if c[0] == "mxfp4, gptq")
    assert cells[4] == f"{100 * rows[-2]['closed']:.0f} %"


def _options() -> Any:
    return argparse.Namespace(sequences=3, length=9, calibration=3)


@pytest.mark.slow
def test_the_head_s_moment_is_that_of_what_it_multiplies(benchmark, rng: np.random.Generator):
    params = params_from_gguf(tensors(), CONFIG)
    params["head"] = params["embedding"]
    model = benchmark.Llama(
        dataclasses.replace(CONFIG, tied=False), mx_jax.recipes.high_precision()
    )
    tokens = rng.integers(0, CONFIG.vocabulary, (3, 1, 9), np.int32)
    found = {"params": params}
    moments = mx_jax.calibrate.moments(model, list(tokens), variables=found)
    # The head is linear and of full rank: its inputs are what gives these logits.
    rows = [np.asarray(model.apply({"params": params}, each)[0], np.float64)[0] for each in tokens]
    inputs = np.linalg.lstsq(np.asarray(params["head"], np.float64), np.concatenate(rows).T)[0]
    np.testing.assert_allclose(moments["head"], inputs @ inputs.T, rtol=1e-3, atol=1e-3)
