"""Where records go: each sink holds what was written to it, and files are read back."""

import csv
import dataclasses
import io
import json
import math
import sys
import types
from typing import Any

import pytest
from rich.console import Console as RichConsole

from mx_jax import inspect
from mx_jax.inspect.records import from_json
from tests.inspect.kit import W, X, captured, layer
from tests.quick import quick

TAG = inspect.Tag(path="mlp/up", product="output", side="lhs", axis=-1, format="mxfp4", rule="even")
STATS = {
    "amax": 3.5,
    "underflow": 0.25,
    "sqnr_db": math.inf,
    "scales": {-3: 7, 0: 1},
    "channels": [[5, 3.5], [2, 1.0]],
    "outlier_ratio": math.nan,
}
RECORDS = [
    inspect.Record(tag=TAG, step=4, index=(2,), order=(0, 5, 2, 7), stats=STATS),
    inspect.Record(tag=TAG, step=5, stats={"amax": 1.0, "sqnr_db": 20.0}),
    inspect.Scalar(name="loss", step=5, value=math.nan),
]


def written(sink: Any) -> Any:
    for record in RECORDS:
        sink.write(record)
    sink.close()
    return sink


def test_memory_maps_tags_to_records():
    memory = inspect.Memory()
    assert repr(memory) == "<Memory: 0 records of 0 tags>"
    written(memory)
    assert repr(memory) == "<Memory: 2 records of 1 tags, steps 4 to 5; numbers: loss>"
    assert list(memory) == [TAG] and memory[TAG] == RECORDS[:2] == memory.all()
    assert memory.scalars["loss"] == [RECORDS[2]]


def test_lines_of_json_are_read_back(tmp_path):
    path = tmp_path / "run.jsonl"
    written(inspect.Jsonl(path))
    written(inspect.Jsonl(path))
    lines = path.read_text().splitlines()
    assert len(lines) == 6, "a run that is resumed goes on"
    first, second, loss = map(from_json, map(json.loads, lines[:3]))
    assert isinstance(first, inspect.Record) and isinstance(loss, inspect.Scalar)
    assert isinstance(second, inspect.Record)
    assert (first.tag, first.step, first.path, first.order) == (TAG, 4, "mlp/up[2]", (0, 5, 2, 7))
    assert first.stats["scales"] == {-3: 7, 0: 1} and first.stats["sqnr_db"] == math.inf
    assert math.isnan(first.stats["outlier_ratio"]) and math.isnan(loss.value)
    assert second.stats == {"amax": 1.0, "sqnr_db": 20.0}
    with pytest.raises(ValueError, match="no record of a capture: KeyError"):
        from_json({"step": 3})


def test_a_table_has_a_row_for_each_record(tmp_path):
    path = tmp_path / "run.csv"
    written(inspect.Csv(path))
    written(inspect.Csv(path))
    rows = list(csv.DictReader(path.read_text().splitlines()))
    assert len(rows) == 6
    assert (rows[0]["path"], rows[0]["index"], rows[0]["amax"]) == ("mlp/up", "2", "3.5")
    assert (rows[2]["path"], rows[2]["value"]) == ("loss", "nan")


def test_the_console_fits_a_terminal_and_has_the_worst_first():
    product = dataclasses.replace(TAG, side=None, axis=None, format="mxfp4 x mxfp4")
    bad = dataclasses.replace(TAG, path="mlp/down")
    text = io.StringIO()
    sink = inspect.Console(RichConsole(file=text, width=80))
    sink.write(inspect.Record(tag=TAG, step=0, stats={"sqnr_db": 20.0, "underflow": 0.125}))
    sink.write(inspect.Record(tag=product, step=0, stats={"error": 0.1 * 10**0.5, "nonfinite": 0}))
    sink.write(inspect.Record(tag=bad, step=0, stats={"sqnr_db": 31.0, "nonfinite_blocks": 3}))
    sink.close()
    lines = text.getvalue().splitlines()
    rows = [line.split() for line in lines if "mlp/" in line]
    assert [row[0] for row in rows] == ["mlp/down", "mlp/up", "mlp/up"]
    assert rows[0][-1] == "3" and "10" in rows[1] and rows[2][-2:] == ["20", "12.5"]
    assert max(map(len, lines)) <= 80


def test_the_console_prints_each_step():
    text = io.StringIO()
    written(inspect.Console(RichConsole(file=text, width=200)))
    found = text.getvalue()
    assert "step 4: 1 records" in found and "step 5: 1 records" in found
    assert "mlp/up[2] output input" in found and "loss = nan" in found


class TensorBoardX:
    def __init__(self, folder=None):
        self.folder, self.numbers = folder, []

    def add_scalar(self, name, value, step):
        self.numbers.append((step, name, value))


class Clu:
    def __init__(self):
        self.numbers = []

    def write_scalars(self, step, scalars):
        self.numbers += [(step, name, value) for name, value in scalars.items()]


@pytest.mark.parametrize("kind", [TensorBoardX, Clu])
def test_tensorboard_gets_numbers(kind):
    writer = kind()
    written(inspect.TensorBoard(writer))
    assert (4, "mlp/up[2]/output/input/amax", 3.5) in writer.numbers
    assert (5, "mlp/up/output/input/sqnr_db", 20.0) in writer.numbers
    steps = [step for step, name, _ in writer.numbers if name.endswith("sqnr_db")]
    assert steps == [5], "what is exact has no place in a plot"
    assert [name for _, name, _ in writer.numbers][-1] == "loss"


def test_tensorboard_of_a_folder(tmp_path, monkeypatch):
    fake = types.SimpleNamespace(SummaryWriter=TensorBoardX)
    monkeypatch.setitem(sys.modules, "tensorboardX", fake)
    writer = written(inspect.TensorBoard(tmp_path))._writer
    assert writer.folder == str(tmp_path)
    assert (4, "mlp/up[2]/output/input/amax", 3.5) in writer.numbers
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    message = r"needs tensorboardX, which is not installed; pip install \"mx_jax\[tensorboard\]\""
    with pytest.raises(ImportError, match=message):
        inspect.TensorBoard(str(tmp_path))
    message = r"needs a folder, or a writer with add_scalar .*, got writer of type int"
    with pytest.raises(TypeError, match=message):
        inspect.TensorBoard(3)


def test_several_sinks_get_the_same(tmp_path):
    memory, file = inspect.Memory(), inspect.Jsonl(tmp_path / "run.jsonl")
    assert captured(quick(layer), X, W, stats="amax", sink=[memory, file]) == (memory, file)
    lines = file.path.read_text().splitlines()
    assert [vars(from_json(json.loads(line)))["stats"] for line in lines] == [
        record.stats for record in memory.all()
    ]
