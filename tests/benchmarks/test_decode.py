"""Tables of decoding, and the processes that hold its cases; the model itself is no test's."""

import os
import sys

import pytest

from benchmarks import decode, language_model_formats

pytestmark = pytest.mark.one_python(reason="texts and processes")

ECHO = (
    "import sys\nprint('{}', flush=True)\nfor line in sys.stdin: print(2 * int(line), flush=True)"
)


def test_workers_answer_on_their_cores():
    cores = {max(os.sched_getaffinity(0))}
    worker = decode.Worker([sys.executable, "-c", ECHO], cores)
    assert worker.ready == "{}\n" and worker.ask(21) == 42
    assert os.sched_getaffinity(worker._process.pid) == cores
    worker.close()
    with pytest.raises(SystemExit, match="ended with status 3"):
        decode.Worker([sys.executable, "-c", "raise SystemExit(3)"], cores)


def spread(value):
    return {"median": value, "q1": value, "q3": value, "smallest": value / 2}


def test_tables_of_speed():
    def row(case, threads, cpu, wall, **more):
        timings = {"cpu_ms": spread(cpu), "wall_ms": spread(wall)}
        return {"case": case, "threads": threads, "timings": timings, **more}

    ratios = {"speed over float32": {"median": 2.5}}
    parts = {"parts": {"qkv": 0.002, "head": 0.004}, "bytes": 72e6}
    none = {"parts": None, "bytes": None}
    rows = [row("MXFP4", 1, 10, 40, **parts, **ratios), row("MXFP4", 2, 10, 5, **none, **ratios)]
    one, two, spent = decode.sheets({"rows": rows})
    assert one.rows == [["MXFP4", "100.0", "200.0", "10.00", "2.50"]]
    assert two.rows == [["MXFP4", "200.0", "400.0", "5.00", "2.50"]]
    assert spent.columns[2:] == ["head", "qkv"]
    assert spent.rows == [["MXFP4", "72.0", "4.00", "2.00"]]


def test_table_of_loss():
    base = {"of": "weights and cache", "format": "float32", "bits": 32}
    rows = [
        {**base, "loss": 3.0, "kl": 0.0, "same": 1.0},
        {"of": "cache", "format": "mxfp4", "bits": 4.25, "loss": 3.25, "kl": 0.125, "same": 0.5},
    ]
    (sheet,) = language_model_formats.sheets({"rows": rows, "sequences": 1, "length": 2})
    assert sheet.rows[1] == ["mxfp4", "cache", "4.25", "3.2500", "+0.2500", "0.12500", "50.0%"]
