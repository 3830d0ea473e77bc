"""The command on a simulated GPU, from cases to rows: real processes, with faults planted."""

import json
import sys
import time
from pathlib import Path
from typing import Any

import jax
import pytest

from mx_jax.backends.evidence.rows import Row, read
from mx_jax.measure import command, simulation
from mx_jax.measure.cases import Case
from mx_jax.measure.session import Machine, Session
from tests.backends.mosaic import needs_newer_mosaic
from tests.measure.planted_gpu import CRASHES, HANGS, RIGHT, WRONG

MACHINE = Machine(target=simulation.TARGET, jax=jax.__version__, driver=None, versions=())


def case_of(rows: int) -> Case:
    return Case(backend="pallas_gpu", kind="product", formats=(None, "mxfp4"), shape=(rows, 64, 64))


@pytest.mark.slow
@needs_newer_mosaic
def test_faults_cost_a_row_each_and_a_restart_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    out, path = tmp_path / "rows.json", tmp_path / "session.jsonl"

    def run(*rows: int, limit: float = 300.0, tuning: float = 0.0) -> dict[int, Row]:
        session = Session(
            machine=MACHINE,
            backends=[simulation.backend()],
            worker=[sys.executable, "-m", "tests.measure.planted_gpu"],
            path=path,
            limit=limit,
            tuning=tuning,
        )
        wanted = [case_of(m) for m in rows]
        command.measure(session, wanted, out, time.monotonic() + 600)
        return {row.shape[0]: row for row in read(out)}

    hung = run(HANGS, limit=8)
    assert hung[HANGS].failed == "no answer after 8 s: it hangs?"
    # Another start goes on: what was measured is not measured again, and all of it counts.
    found = run(HANGS, CRASHES, WRONG, RIGHT, tuning=30)
    assert "1 cases were measured before" in capsys.readouterr().out
    assert found[HANGS] == hung[HANGS]
    assert found[CRASHES].failed == "the process ended by signal SIGABRT"
    wrong, right = found[WRONG], found[RIGHT]
    assert not wrong.failed and not wrong.is_right and wrong.over_plain is None
    assert right.is_right and right.over_plain is not None and right.over_plain > 0
    lines: list[dict[str, Any]] = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["case"]["shape"][0] for line in lines] == [HANGS, CRASHES, WRONG, RIGHT]
    assert "an illegal address" in lines[1]["stderr"]
    # Other tiles were tried of what is right, and checked: in time for one at the least.
    tried = lines[3]["found"]["tried"]
    assert tried and all(one["error"] <= 1 and one["speed"] > 0 for one in tried)
    assert "tried" not in lines[2]["found"]
    assert set(run(RIGHT)) == {HANGS, CRASHES, WRONG, RIGHT}
    assert len(path.read_text().splitlines()) == 4
