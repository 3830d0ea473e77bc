"""Each benchmark runs on tiny sizes, without peers, and writes JSON that makes sense."""

import importlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest

from benchmarks import limits
from benchmarks.cpu_goal_cases import FLOAT32, GROUPS, ONNX, READ, Group
from benchmarks.cpu_goals import GOALS, VNNI, sheet, verdicts
from benchmarks.timing import Samples
from tests.needs import needs_library
from tests.processes import ROOT, printed

RECIPES = ("mxfp8", "mxfp4")

# Runs a command with options; gives its JSON and its Markdown.
Runner = Callable[..., tuple[dict[str, Any], str]]


@pytest.fixture
def run(tmp_path: Path) -> Runner:
    def runner(name: str, *options: str) -> tuple[dict[str, Any], str]:
        out = tmp_path / "folder" / "result.json"
        importlib.import_module(f"benchmarks.{name}").main([*options, "--out", str(out)])
        result = json.loads(out.read_text())
        assert result["environment"]["cores"] >= 1
        assert result["environment"]["versions"]["jax"] != "not installed"
        return result, out.with_suffix(".md").read_text()

    return runner


# Commands on one core, which share a process that is pinned at once.
ON_ONE_CORE = {
    "ragged": "--formats mxfp4 --tokens 8 --experts 2 --size 64 --seconds 0 --min-rounds 3",
    "loading": "--size 64 --count 2 --rounds 3 --dtypes bfloat16",
    "packed_layers": "--formats mxfp4 --size 64 --seconds 0 --min-rounds 3",
    "compile_time": "--recipes mxfp4 --layers 2 --width 64 --rounds 2",
}
PROGRAM = """
import importlib, json, sys
from benchmarks import cores
cores.pin()
cores.on_one_core = lambda function, *arguments: function(*arguments)
for name, options in json.loads(sys.argv[1]).items():
    importlib.import_module(f"benchmarks.{name}").main(options)
"""


CAN_PIN = all(hasattr(os, name) for name in ("sched_setaffinity", "posix_fadvise"))
can_pin = pytest.mark.skipif(not CAN_PIN, reason="cannot pin a process or empty the cache here")


def check_spread(of: dict[str, float]) -> None:
    assert 0 < of["smallest"] <= of["q1"] <= of["median"] <= of["q3"]


def test_tpu_hardware(run: Runner, monkeypatch: pytest.MonkeyPatch):
    """On a CPU: bits that are the CPU's; other bits are seen."""
    result, table = run("tpu_hardware", "--programs")
    assert result["device"] is None and not any(result["bits"].values())
    assert result["habits"]["the MXU keeps subnormals of float8_e5m2 beside bfloat16"]
    assert "| casts with the CPU's bits | 14 of 14 |" in table
    hardware = importlib.import_module("benchmarks.tpu_hardware")
    with monkeypatch.context() as patch:
        patch.setattr(jax, "device_put", lambda x, _: x[::-1])
        assert all(hardware.bits().values())


def test_quantize(run: Runner):
    options = "--formats mxfp4 nvfp4 --shapes 32x64 --dtypes float32 --no-peers".split()
    pace = "--cores all --seconds 0.01 --min-rounds 3".split()
    result, table = run("quantize", *options, *pace)
    rows = result["rows"]
    assert [(row["operation"], row["format"]) for row in rows] == [
        (operation, format)
        for operation in ("quantize", "dequantize")
        for format in ("mxfp4", "nvfp4")
    ]
    for row in rows:
        assert row["shape"] == [32, 64]
        assert row["timings"].keys() == {"mx_jax", "x + 1", "copy"}
        for timing in row["timings"].values():
            check_spread(timing["wall_ms"])
            assert timing["samples"] >= 3
        check_spread(row["ratio_to_x_plus_1"])
        assert row["ratio_to_bound"] > 0
        assert f"| {row['operation']} {row['format']} " in table


@pytest.mark.slow
@needs_library
@can_pin
def test_commands_on_one_core(tmp_path: Path):
    out = {name: tmp_path / f"{name}.json" for name in ON_ONE_CORE}
    options = {name: [*ON_ONE_CORE[name].split(), "--out", str(out[name])] for name in out}
    printed("-c", PROGRAM, json.dumps(options), XLA_FLAGS=None)
    ragged, loading, packed, compiling = (
        json.loads(path.read_text())["rows"] for path in out.values()
    )
    assert [row["work"] for row in ragged] == ["forward"] * 5 + ["step"] * 3
    for row in (*ragged, *packed):
        check_spread(row["timings"]["cpu_ms"])

    assert [row["cache"] for row in loading] == ["warm"] * 4 + ["cold"] * 4
    assert {row["bytes"] > 2 * 64 * 64 * 2 for row in loading} == {True}
    for row in loading:
        check_spread(row["timings"]["wall_ms"])
        check_spread(row["pace"])
    assert all(row["pace"]["median"] == 1 for row in loading if row["case"] == "read")

    assert [row["case"].startswith("packed") for row in packed].count(True) == 4
    for row in packed:
        assert row["timings"]["samples"] >= 3
        check_spread(row["of_float32"])

    rows = {(row["backends"], row["case"]): row for row in compiling}
    assert len(rows) == 2 * 2
    for row in compiling:
        for phase in ("trace", "lower", "compile"):
            check_spread(row["seconds"][phase])
        assert row["before"]["computations"] >= 1 and row["rounds"] == 2
    plain, cast = (rows["reference", case]["after"] for case in ("float32", "mxfp4"))
    assert cast["instructions"] > plain["instructions"] > 0
    assert cast["computations"] > plain["computations"] > 0
    assert rows["default", "mxfp4"]["after"]["instructions"] < cast["instructions"]


needs_limits = pytest.mark.skipif(
    not Path(os.environ.get(limits.VARIABLE) or ROOT / "build" / "limits.so").exists(),
    reason=f"needs {limits.BUILD}",
)


@needs_library
@needs_limits
@pytest.mark.slow
@can_pin
def test_casts_and_products_in_cpp(tmp_path: Path):
    out, pace = tmp_path / "out.json", "--data normal --seconds 0 --min-rounds 2".split()
    options = ["--shape", "64x64", "--no-peers", *pace, "--out", out]
    printed("-m", "benchmarks.cpu_quantize", *options, XLA_FLAGS=None)
    casts = json.loads(out.read_text())["casts"]["rows"]
    assert {row["operation"] for row in casts} == {"quantize", "both", "dequantize"}
    for row in casts:
        check_spread(row["share_of_copy"])
    options = ["--sizes", "64", "--rows", *pace, "--out", out]
    printed("-m", "benchmarks.cpu_matmul", *options, XLA_FLAGS=None)
    products = json.loads(out.read_text())["rows"]
    assert {"cpu_ffi mxfp4 x mxfp4", "jnp.dot float32"} <= {row["case"] for row in products}
    for row in products:
        check_spread(row["timings"]["cpu_ms"])


@needs_library
@needs_limits
@pytest.mark.slow
@can_pin
def test_every_case_of_a_goal_runs(tmp_path: Path):
    options = "--size 256 --square 96 --many 2 --seconds 0 --min-rounds 2".split()
    out = tmp_path / "out.json"
    # A process as a user starts it: of one device, where weights are packed.
    shown = printed("-m", "benchmarks.cpu_goals", *options, "--out", out, XLA_FLAGS=None)
    rows = json.loads(out.read_text())["rows"]
    assert len(rows) == len(GOALS)
    unmeasured = {row["why"] for row in rows if row["ratio"] is None}
    assert unmeasured <= {
        "cannot import onnxruntime",
        "cannot import onnx",
        "this machine has no AVX512-VNNI",
    }
    assert "Goals on one CPU core" in shown


def test_peers_that_are_missing_are_named(run: Runner, monkeypatch: pytest.MonkeyPatch):
    peers = importlib.import_module("benchmarks.peers")
    monkeypatch.setattr(peers, "PEERS", (peers.PEERS[1],))
    monkeypatch.setitem(sys.modules, "qwix", None)
    options = "--formats mxfp4 --shapes 8x32 --dtypes float32 --cores all --seconds 0".split()
    result, table = run("quantize", *options)
    assert all("cannot import qwix" in row["peers_left_out"]["Qwix"] for row in result["rows"])
    assert "Left out: Qwix, quantize mxfp4: cannot import qwix" in table


@pytest.mark.slow
def test_sqnr(run: Runner):
    formats = ["mxfp8_e4m3", "mxfp4", "mxint8"]
    options = ["--size", "32x64x32", "--recipes", *RECIPES, "--formats", *formats]
    result, table = run("sqnr", *options)
    layer = {row["recipe"]: row for row in result["layer"]}
    assert layer.keys() == set(RECIPES)
    for product in ("output", "grad_input", "grad_weight"):
        assert layer["mxfp8"][product] > 20 > layer["mxfp4"][product] > 8
    casts = {(row["format"], row["scale_rule"]): row["sqnr"] for row in result["cast"]}
    assert casts["mxint8", "floor"] > casts["mxfp8_e4m3", "rceil"] > casts["mxfp4", "even"] > 15
    assert "| mxfp8 |" in table


@pytest.mark.slow
def test_rounding(run: Runner):
    options = ["--size", "128", "--draws", "8", "--data", "normal", "--recipes", "nvfp4_unbiased"]
    options += ["--ways", "nearest, amax", "stochastic, amax_headroom", "MS-EDEN"]
    result, table = run("rounding", *options)
    casts = {row["way"]: row for row in result["casts"]}
    slope = casts["MS-EDEN"]["slope"]
    assert abs(slope["mean"] - 1) < 2 * slope["half"] < 5e-3
    # Nothing is drawn: no average removes any of the error.
    nearest = casts["nearest, amax"]
    assert nearest["bias"]["mean"] == pytest.approx(nearest["error"]["mean"])
    (gradients,) = result["gradients"]
    assert 0.02 < gradients["dw"]["error"]["mean"] < 0.04
    assert 0.005 < gradients["dx"]["bias"]["mean"] < gradients["dx"]["error"]["mean"] / 2
    assert "| nvfp4_unbiased |" in table


def test_train_step(run: Runner):
    options = ["--size", "32x32x32", "--recipes", *RECIPES, "--cores", "all"]
    result, table = run("train_step", *options, "--seconds", "0.01", "--min-rounds", "3")
    assert {row["recipe"] for row in result["rows"]} == set(RECIPES)
    parts = {"float32", "step", "quantize", "dequantize and multiply"}
    for row in result["rows"]:
        assert row["timings"].keys() == parts
        assert row["overhead_percent"] > -100
        for timing in row["timings"].values():
            check_spread(timing["wall_ms"])
    assert "| mxfp4 |" in table


# Goals on a CPU: what is said of what was measured.

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
