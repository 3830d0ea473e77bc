"""`benchmarks.gradient_bias`: measures, goes on where it was, and writes a table."""

import json
from pathlib import Path

import pytest

from benchmarks import gradient_bias

TINY = (
    "--steps 4 --checkpoints 2 --seeds 0 --batches 3 --d-model 32 --heads 1 --layers 1 "
    "--context 16 --batch 2 --variants mxfp8"
).split()


def test_rows():
    """Every variant of the ablation but the baseline, and passes of some."""
    names = [variant.name for variant in gradient_bias.rows_to_measure(4)]
    assert len(names) == len(set(names))
    assert {"mxfp4_floor", "mxfp4", "mxfp4, head too", "mxfp4_backward", "quartet"} <= set(names)
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
    assert 0 < row["one"] < 0.5 and "blocks/up/kernel[0]" in row["parameters"]
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
