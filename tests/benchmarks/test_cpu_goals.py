"""Goals on a CPU: what is said of what was measured, and where the library of bounds is missing."""

from pathlib import Path

import pytest

from benchmarks import limits
from benchmarks.cpu_goal_cases import FLOAT32, GROUPS, ONNX, READ, Group
from benchmarks.cpu_goals import GOALS, VNNI, sheet, verdicts
from benchmarks.timing import Samples

OUT_OF_CACHE = "1 row, weights beyond the cache"
ROW, BOTH = "float32 x mxfp4, packed", "mxint8 x mxfp4, packed"


def took(*seconds: float) -> Samples:
    return Samples(wall=[*seconds], cpu=[*seconds], faults=[0.0] * len(seconds))


def test_a_goal_is_met_missed_or_not_measured():
    group = Group(cases=[], left_out={ONNX: "cannot import onnxruntime"})
    samples = {READ: took(2, 2), ROW: took(2.5, 2.5), BOTH: took(4, 4)}
    by_goal = {
        (verdict.goal.what, verdict.goal.over): verdict
        for verdict in verdicts(OUT_OF_CACHE, group, samples)
    }
    assert str(by_goal[ROW, READ]) == "met" and by_goal[ROW, READ].missed_by is None
    assert str(by_goal[BOTH, READ]) == "missed by 44.4 %"
    assert str(by_goal[ROW, ONNX]) == "not measured here: cannot import onnxruntime"
    (line, *_) = sheet([verdict.as_json() for verdict in by_goal.values()]).rows
    assert line[-4:] == ["-", "0.80", "0.80 to 0.80", "met"]


def test_a_peak_counts_for_the_work_of_a_case():
    # The peak runs four times the products: a quarter of its time is the bound.
    group = Group(cases=[], work={VNNI: 0.25})
    samples = {VNNI: took(4.0), FLOAT32: took(8.0), "mxint8 x mxint8": took(1.25)}
    (verdict,) = (v for v in verdicts("square", group, samples) if v.ratio is not None)
    assert verdict.ratio is not None and verdict.ratio.median == 0.8 and str(verdict) == "met"
    samples = {VNNI: took(4.0), FLOAT32: took(8.0), BOTH: took(2.0)}
    (verdict,) = (v for v in verdicts("32 rows", group, samples) if v.ratio is not None)
    assert verdict.ratio is not None and (verdict.ratio.median, verdict.limit) == (4.0, 8.0)


def test_every_goal_is_of_a_group_that_there_is():
    assert {goal.group for goal in GOALS} == GROUPS.keys()


def test_without_it_a_benchmark_names_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(limits.VARIABLE, str(tmp_path / "limits.so"))
    limits.load.cache_clear()
    with pytest.raises(SystemExit, match=r"cannot be loaded.*cmake --build build --target limits"):
        limits.load()
