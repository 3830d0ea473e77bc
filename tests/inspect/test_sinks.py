"""Where records go: each sink holds what was written to it, and files are read back."""

import json
import math
from typing import Any

import pytest

from mx_jax import inspect
from mx_jax.inspect.records import from_json
from tests.inspect.kit import W, X, captured, layer

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


def test_a_file_has_numbers_of_all_devices_once(tmp_path):
    sink = inspect.Jsonl(tmp_path / "run.jsonl")
    for device in range(2):
        sink.write(inspect.Record(tag=TAG, step=0, stats={}, shard={"data": device}))
    sink.close()
    assert len(sink.path.read_text().splitlines()) == 1


def test_several_sinks_get_the_same(tmp_path):
    memory, file = inspect.Memory(), inspect.Jsonl(tmp_path / "run.jsonl")
    assert captured(layer, X, W, stats="amax", sink=[memory, file]) == (memory, file)
    file.close()
    lines = file.path.read_text().splitlines()
    assert [vars(from_json(json.loads(line)))["stats"] for line in lines] == [
        record.stats for record in memory.all()
    ]
