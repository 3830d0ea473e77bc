"""`python -m mx_jax gpu`: cases in processes of their own, of which each costs one row at most."""

import argparse
import dataclasses
import json
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import pytest

from mx_jax.backends import evidence
from mx_jax.backends.evidence import read, write
from mx_jax.backends.reference import REFERENCE
from mx_jax.backends.select import BACKENDS
from mx_jax.backends.target import Target
from mx_jax.cli import main
from mx_jax.measure import command, worker
from mx_jax.measure.cases import Case, Wanted
from mx_jax.measure.command import Bench, best, run_process, verdict

PLANTED = dataclasses.replace(
    REFERENCE,
    name="planted",
    source=lambda: (Path(__file__),),
    kernel=lambda call, target: "many" if call.lhs.rows > 8 else "few",
)
MACHINE: dict[str, Any] = {
    "target": Target(platform="cuda", compute_capability=(9, 0), device_kind="planted"),
    "driver": "580.95.05",
    "versions": (("jaxlib", "0.12.0"),),
}
CASES = [
    Case(backend="planted", kind="product", formats=(None, "mxfp4"), shape=(m, 64, 64))
    for m in (1, 16, 64)
]
RIGHT = {"error": 0.5, "kernel": "k", "over_plain": 2.0, "over_bfloat16": 3.0}
SAY_RIGHT = f"print({json.dumps(json.dumps(RIGHT))}, flush=True)"


@pytest.fixture(autouse=True)
def planted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend that is asked only by name or where rows say so, and the table's."""
    monkeypatch.setattr(command, "known_backends", lambda: [PLANTED, *BACKENDS])
    monkeypatch.setattr(command, "only_if_named", lambda: {"planted"})


def bench(program: str, limit: float = 30.0, **changes: Any) -> Bench:
    """What measures by a program: `case` is the shape that it is asked for."""
    start = "import json, os, sys, time\ncase = json.loads(sys.argv[-1])['shape']\n"
    words = [sys.executable, "-I", "-S", "-c", start + program]
    return Bench(**{**MACHINE, "words": words, "limit": limit, **changes})


def run(
    out: Path,
    program: str,
    again: bool = False,
    seconds: float = 60.0,
    wanted: Sequence[Case] = CASES,
    **facts: Any,
) -> int:
    deadline = time.monotonic() + seconds
    return command.measure(bench(program, **facts), wanted, out, deadline, again)


def test_a_hang_a_crash_and_what_is_wrong_cost_one_row_each(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(evidence.VARIABLE, "shipped")
    program = """
import resource; resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
if case[0] == 1: time.sleep(60)
if case[0] == 16: os.abort()
if case[0] == 32: x = bytearray(1 << 40)
if case[0] == 256: print(json.dumps({'error': 7.0})); sys.exit()
"""
    wanted = [dataclasses.replace(CASES[0], shape=(m, 64, 64)) for m in (1, 16, 32, 256, 64)]
    started, out = time.monotonic(), tmp_path / "rows.json"
    assert run(out, program + SAY_RIGHT, limit=3.0, wanted=wanted) == 0
    assert time.monotonic() - started < 20
    hung, crashed, full, wrong, right = rows = read(out)
    assert hung.failed == "no answer after 3 s, it hangs?: it said nothing"
    assert crashed.failed == "the process ended by signal SIGABRT: it said nothing"
    assert full.failed == "the process ended by exit status 1: MemoryError"
    assert wrong.error == 7.0
    assert [row.switches_on for row in rows] == [False] * 4 + [True]
    assert (right.error, right.over_plain, right.kernel) == (0.5, 2.0, "k")
    assert right.work == CASES[2].work and right.driver == MACHINE["driver"]
    failed = [f"off: failed: {row.failed}" for row in rows[:3]]
    assert [verdict(row, rows) for row in rows] == [*failed, "off: wrong numbers", "on"]
    text = capsys.readouterr().out
    assert "2/5 planted: bf16 x mxfp4, 16 x 64 x 64: failed: the process ended by signal SI" in text
    assert "Switched on by default: 1 of 4 rows of kernels." in text
    assert f"Now {evidence.VARIABLE}=shipped decides instead." in text


@pytest.mark.parametrize(
    ("program", "failed"),
    [
        # The GPU's own clock comes last, and may take the process with it.
        (f"{SAY_RIGHT}\nos.abort()", ""),
        ("print('hello')", "the process gave no answer"),
        ("sys.exit('why')", "the process ended by exit status 1: why"),
        # Of several lines the last whole one counts.
        (f"print('noise')\n{SAY_RIGHT}\nprint('I0000 cuda: warning')\nprint('{{\"err')", ""),
    ],
)
def test_what_was_said_before_the_end_counts(program: str, failed: str):
    row = bench(program).row(CASES[0])
    assert row.failed == failed and row.switches_on == (not failed)


def test_run_again_it_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "rows.json"
    assert run(out, SAY_RIGHT, seconds=-1) == 1
    said = "3 cases were not begun for lack of time; run it again, and it goes on."
    assert said in capsys.readouterr().out and not out.exists()
    assert run(out, SAY_RIGHT) == 0
    rows = read(out)
    assert [row.shape for row in rows] == [case.shape for case in CASES]
    # Nothing is left to do, and what is there stays.
    assert run(out, "sys.exit(1)") == 0
    assert "3 cases were measured before; --again measures them anew." in capsys.readouterr().out
    assert read(out) == rows
    # Of another driver, nothing is known; rows of the first one stay.
    assert run(out, SAY_RIGHT, driver=None) == 0 and len(read(out)) == 6
    write(out, rows)
    assert run(out, "sys.exit(1)", again=True) == 1
    assert "Switched on by default: 0 of 3 rows of kernels." in capsys.readouterr().out
    assert {row.failed for row in read(out)} == {
        "the process ended by exit status 1: it said nothing"
    }


def test_nowhere_to_write(tmp_path: Path):
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(ValueError, match="gpu: cannot write rows, got out="):
        run(file / "rows.json", SAY_RIGHT)


def test_every_size_of_a_kind_must_be_faster():
    row = bench("").row_of(CASES[0], RIGHT)
    slow = dataclasses.replace(row, shape=(1, 32, 64), over_plain=0.9)
    wrong = dataclasses.replace(row, shape=(1, 32, 32), error=3.0)
    assert command.verdict(row, [row, slow]) == "off: right and faster, but not at another size"
    assert verdict(slow, [row, slow]) == "off: right, not faster"
    assert verdict(wrong, [wrong]) == "off: wrong numbers"
    assert command.table([row, slow, wrong]).row_count == 3


def test_slower_than_bfloat16_is_said():
    """Operands are quantized: the kernel is on where nothing else multiplies them as fast."""
    row = bench("").row_of(CASES[0], RIGHT | {"over_bfloat16": 0.8, "plain": "xla_scaled"})
    assert row.switches_on and verdict(row, [row]) == "on, slower than bfloat16"
    assert str(row).endswith("the plain path's speed, slower than bfloat16 (0.8 of its speed)")
    assert best(row) == 0.8
    # The plain path is the best where the kernel is slower, or wrong.
    assert best(dataclasses.replace(row, over_plain=0.5)) == 1.6
    assert best(dataclasses.replace(row, error=2.0)) == 0.4
    default = dataclasses.replace(row, backend="xla_scaled", over_plain=None, plain="xla_scaled")
    assert verdict(default, [default]) == "default, slower than bfloat16"
    assert best(default) == 0.8
    wrong = dataclasses.replace(default, error=2.0)
    assert verdict(wrong, [wrong]) == "default: wrong numbers"


def test_cases_of_a_kernel_that_hangs_come_last(tmp_path: Path):
    """Of one, eight and four rows; others do not wait for them."""
    one, eight, four = (dataclasses.replace(CASES[0], shape=(m, 64, 64)) for m in (1, 8, 4))
    wanted, asked, out = [one, eight, *CASES[1:], four], tmp_path / "asked", tmp_path / "rows.json"
    right = {key: value for key, value in RIGHT.items() if key != "kernel"}
    say = f"open({str(asked)!r}, 'a').write(f'{{case[0]}} ')\n"
    say += "if case[0] == 1: time.sleep(60)\n" + f"print({json.dumps(json.dumps(right))})"
    run(out, say, wanted=wanted, limit=1.0)
    assert asked.read_text().split() == ["1", "16", "64", "8", "4"]
    # Also those of a hang that an earlier run met.
    asked.unlink()
    write(out, [row for row in read(out) if row.shape[0] == 1])
    run(out, say, wanted=wanted)
    assert asked.read_text().split() == ["16", "64", "8", "4"]


def test_what_computes_by_default_has_rows_too(tmp_path: Path):
    default = dataclasses.replace(CASES[0], backend="xla_bfloat16")
    say = f"print({json.dumps(json.dumps({'error': 0.5, 'over_bfloat16': 0.9}))})"
    assert run(tmp_path / "rows.json", say, wanted=[default]) == 0
    (row,) = read(tmp_path / "rows.json")
    assert (row.backend, row.source, row.failed) == ("xla_bfloat16", "", "")
    assert verdict(row, [row]) == "default, slower than bfloat16"


# Processes ----------------------------------------------------------------------------------------


def test_what_a_process_started_ends_with_it(tmp_path: Path):
    mark = tmp_path / "mark"
    child = f"import time; time.sleep(1.5); open({str(mark)!r}, 'w')"
    program = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    _, why, _ = run_process([sys.executable, "-c", program], "{}", 0.7)
    assert why == "no answer after 0.7 s, it hangs?"
    time.sleep(1.5)
    assert not mark.exists()


def test_a_case_ends_by_itself(monkeypatch: pytest.MonkeyPatch):
    """By the system's clock, though the command that started it has ended."""
    asked: list[int] = []
    monkeypatch.setattr(signal, "alarm", asked.append)
    monkeypatch.setattr(worker, "answer", lambda text: 0)
    assert main(["gpu", "--limit", "2.5", "--one", "{}"]) == 0
    assert asked == [8]


# As it is typed -----------------------------------------------------------------------------------


def test_without_a_gpu(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.undo()
    assert main(["gpu"]) == 2
    text = capsys.readouterr().err
    assert text.startswith(
        "mx_jax: gpu: needs an NVIDIA GPU that a kernel runs on, got platform=cpu, device_kind=None"
    )
    assert "pallas_gpu: runs on platform=cuda, got platform=cpu" in text
    assert 'pip install -U "jax[cuda13]"' in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--sizes", "8192"], "needs numbers as 8192x8192, got '8192'"),
        (["--sizes", "0x4"], "needs numbers as 8192x8192"),
        (["--experts", "8x4"], "needs numbers as 8x14336x4096, got '8x4'"),
        (["--rows", "-1"], "needs numbers as 16, got '-1'"),
        (["--formats", "mxfp5"], "mxfp5"),
    ],
)
def test_wrong_words(words: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        main(["gpu", *words])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_sizes_of_one_kind_leave_out_the_other():
    def chosen(*words: str) -> Wanted:
        parser = argparse.ArgumentParser()
        command.add_to(parser.add_subparsers())
        return command.wanted_by(parser.parse_args(["gpu", *words]))

    assert chosen() == Wanted()
    assert chosen("--sizes", "64x32") == Wanted(sizes=[(64, 32)], experts=())
    assert chosen("--experts", "4x64x32") == Wanted(sizes=(), experts=[(4, 64, 32)])
    rows = chosen("--rows", "7", "--formats", "mxfp4")
    assert rows == Wanted(formats=["mxfp4"], rows=[7], ragged_rows=[7])


def test_the_command_measures_with_itself(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """From its words to rows: the process of a case is the command's own."""
    monkeypatch.setattr(command, "_machine", lambda words: MACHINE)
    monkeypatch.setattr(command, "default_path", lambda target, wanted: [])
    monkeypatch.setattr(command, "cases", lambda backends, target, wanted: CASES[:1])
    assert main(["gpu", "--out", str(tmp_path / "rows.json")]) == 1
    rows = read(tmp_path / "rows.json")
    assert rows and {row.jax for row in rows} == {jax.__version__}
    assert all("knows no backend of this name" in row.failed for row in rows)
