"""The benchmarks that train or differentiate the language model, in tiny sizes."""

import dataclasses
import functools
import json
import math
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

for package in ("matplotlib", "optax", "orbax.checkpoint", "tqdm"):
    pytest.importorskip(package)

from benchmarks import fp4_ablation as ablation  # noqa: E402
from benchmarks import language_model, residuals  # noqa: E402

ROOT = Path(__file__).parents[2]


# A model whose sizes are multiples of the block.
SETTINGS = dataclasses.replace(
    ablation.SETTINGS, d_model=32, heads=1, layers=2, context=32, batch=2
)


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
