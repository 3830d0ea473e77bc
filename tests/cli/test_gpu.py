"""`python -m mx_jax gpu` on a machine without a GPU, and with one that is simulated."""

import argparse
import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import jax
import pytest

from mx_jax.backends.evidence import sources
from mx_jax.backends.evidence.rows import read, write
from mx_jax.backends.pallas_gpu import architecture
from mx_jax.cli import main
from mx_jax.measure import command, options, simulation, worker
from mx_jax.measure.cases import Case, Wanted, cases
from mx_jax.measure.session import Machine
from tests.backends.mosaic import needs_newer_mosaic
from tests.measure.test_session import CASES, SAY_RIGHT, session


def test_without_a_gpu(capsys: pytest.CaptureFixture[str]):
    assert main(["gpu"]) == 2
    text = capsys.readouterr().err
    assert text.startswith(
        "mx_jax: gpu: needs an NVIDIA GPU that a kernel runs on, got platform=cpu, device_kind=None"
    )
    assert "pallas_gpu: runs on platform=cuda, got platform=cpu" in text
    assert 'pip install -U "jax[cuda13]"' in text and "--simulate" in text


def test_simulating_needs_a_version_of_jax(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """And no GPU: where JAX is too old, that is what is said."""
    rows = [dataclasses.replace(row, min_jax=(99, 1)) for row in architecture.ARCHITECTURES]
    monkeypatch.setattr(architecture, "ARCHITECTURES", tuple(rows))
    found = Machine(target=simulation.TARGET, jax=jax.__version__, driver=None, versions=())
    monkeypatch.setattr(command, "_machine", lambda words: found)
    assert main(["gpu", "--simulate"]) == 2
    text = capsys.readouterr().err
    assert text.startswith("mx_jax: gpu: --simulate interprets kernels that run on the simulated")
    assert f"jax={jax.__version__} (pallas_gpu: needs jax>=99.1, got jax==" in text
    assert "needs an NVIDIA GPU" not in text and "without a GPU" not in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--sizes", "8192"], "needs NxK, as 8192x8192, got '8192'"),
        (["--sizes", "0x4"], "needs NxK"),
        (["--experts", "8x4"], "needs GxNxK, as 8x14336x4096, got '8x4'"),
        (["--rows", "-1"], "needs a number of rows, got '-1'"),
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
        options.add_to(parser.add_subparsers())
        return options.wanted(parser.parse_args(["gpu", *words]))

    assert chosen() == Wanted()
    assert chosen("--sizes", "64x32") == Wanted(sizes=[(64, 32)], experts=())
    assert chosen("--experts", "4x64x32") == Wanted(sizes=(), experts=[(4, 64, 32)])
    rows = chosen("--rows", "7", "--formats", "mxfp4")
    assert rows == Wanted(formats=["mxfp4"], rows=[7], ragged_rows=[7])


def test_help_says_what_it_does(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main(["gpu", "--help"])
    text = capsys.readouterr().out
    for option in ("--minutes", "--formats", "--sizes", "--limit", "--again", "--simulate"):
        assert option in text
    assert "--one" not in text and "MX_JAX_EVIDENCE=off" in " ".join(text.split())
    assert "Check every kernel on this machine's GPU" in " ".join(text.split())


def run(folder: Path, program: str, again: bool = False, seconds: float = 60.0) -> int:
    own = session(folder, program)
    return command.measure(own, CASES, folder / "rows.json", time.monotonic() + seconds, again)


def test_rows_are_written_as_they_come(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    crashes = "if case[0] == 16: os.abort()\n"
    assert run(tmp_path, crashes + SAY_RIGHT) == 0
    text = capsys.readouterr().out
    assert (
        "planted: bf16 x mxfp4, 16 x 64 x 64: failed: the process ended by signal SIGABRT" in text
    )
    assert "Switched on by default:\n" in text
    kind = "planted: bf16 x mxfp4, up to 2^20 elements, 33 to 64 rows"
    assert f"  {kind}: 2 times the plain path's speed" in text
    assert f"Now {sources.VARIABLE}=shipped decides instead." in text
    rows = read(tmp_path / "rows.json")
    assert [row.shape for row in rows] == [case.shape for case in CASES]
    # Again: nothing is left to do, and what is there stays.
    assert run(tmp_path, "sys.exit(1)") == 0
    assert "3 cases were measured before; --again measures them anew." in capsys.readouterr().out
    assert read(tmp_path / "rows.json") == rows
    assert run(tmp_path, "sys.exit(1)", again=True) == 1
    assert "Nothing is switched on." in capsys.readouterr().out
    assert {row.failed for row in read(tmp_path / "rows.json")} == {
        "the process ended by exit status 1"
    }


def test_no_time_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert run(tmp_path, SAY_RIGHT, seconds=-1) == 1
    text = capsys.readouterr().out
    assert "3 cases were not begun for lack of time; run it again, and it goes on." in text


def test_rows_of_other_machines_stay_and_damaged_files_go_aside(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    out = tmp_path / "rows.json"
    assert run(tmp_path, SAY_RIGHT) == 0
    other = [dataclasses.replace(row, device_kind="NVIDIA B200") for row in read(out)]
    write(out, other)
    assert run(tmp_path, SAY_RIGHT) == 0
    assert len(read(out)) == 6 and set(other) < set(read(out))
    out.write_text("{")
    capsys.readouterr()
    assert run(tmp_path, SAY_RIGHT) == 0
    assert "put aside as" in capsys.readouterr().out
    assert (tmp_path / "rows.damaged.json").read_text() == "{" and len(read(out)) == 3


def test_nowhere_to_write(tmp_path: Path):
    file = tmp_path / "file"
    file.write_text("")
    own = session(tmp_path, SAY_RIGHT)
    with pytest.raises(ValueError, match="gpu: cannot write rows, got out="):
        command.measure(own, CASES[:1], file / "rows.json", time.monotonic() + 60)


@needs_newer_mosaic
@pytest.mark.slow
def test_a_simulated_gpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """Every part of the command but the GPU, by a case of each kind; kernels are interpreted."""

    def one_of_each(*asked: Any) -> list[Case]:
        # The last is the first of its kind.
        return list({case.kind: case for case in reversed(cases(*asked))}.values())

    monkeypatch.setattr(command, "cases", one_of_each)
    path = tmp_path / "session.jsonl"
    assert main(["gpu", "--simulate", "--tune", "0", "--session", str(path)]) == 0
    lines: list[dict[str, Any]] = [json.loads(line) for line in path.read_text().splitlines()]
    assert {line["case"]["kind"] for line in lines} == set(worker.SUBJECTS)
    assert all(not line["row"]["failed"] for line in lines), lines
    assert all(line["row"]["error"] <= 1 for line in lines)
    # An interpreter is slower than anything.
    assert "Nothing is switched on." in capsys.readouterr().out
