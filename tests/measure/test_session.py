"""Cases in processes of their own: whatever one does, it costs one row."""

import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any

from mx_jax.backends.evidence.rows import Row, from_json
from mx_jax.backends.reference import REFERENCE
from mx_jax.backends.target import Target
from mx_jax.measure import report
from mx_jax.measure.cases import Case
from mx_jax.measure.session import Machine, Session, last_answer

PLANTED = dataclasses.replace(REFERENCE, name="planted", source=lambda: (Path(__file__),))
MACHINE = Machine(
    target=Target(platform="cuda", compute_capability=(9, 0), device_kind="planted"),
    jax="0.12.0",
    driver="580.95.05",
    versions=(("jaxlib", "0.12.0"),),
)
CASES = [
    Case(backend="planted", kind="product", formats=(None, "mxfp4"), shape=(m, 64, 64))
    for m in (1, 16, 64)
]
RIGHT = {"error": 0.5, "kernel": "k", "over_plain": 2.0, "over_bfloat16": 3.0}
SAY_RIGHT = f"print({json.dumps(json.dumps(RIGHT))}, flush=True)"


def session(path: Path, program: str, limit: float = 30.0, **changes: Any) -> Session:
    """A session whose worker is a program: `case` is the shape that it is asked for."""
    program = f"import json, os, sys, time\ncase = json.loads(sys.argv[1])['shape']\n{program}"
    facts: dict[str, Any] = dict(
        machine=MACHINE,
        backends=[PLANTED],
        worker=[sys.executable, "-I", "-S", "-c", program],
        path=path / "session.jsonl",
        limit=limit,
    )
    return Session(**facts | changes)


def measured(session: Session, cases: list[Case] | None = None) -> list[Row | None]:
    deadline = time.monotonic() + 60
    return [row for _, row in session.run(CASES if cases is None else cases, deadline)]


def test_a_hang_a_crash_and_a_refusal_cost_one_row_each(tmp_path: Path):
    hangs = "if case[0] == 1: time.sleep(60)\n"
    crashes = "if case[0] == 16: print('dying', file=sys.stderr, flush=True); os.abort()\n"
    started = time.monotonic()
    rows = measured(session(tmp_path, hangs + crashes + SAY_RIGHT, limit=2.0))
    assert time.monotonic() - started < 20
    hung, crashed, right = rows
    assert hung is not None and crashed is not None and right is not None
    assert hung.failed == "no answer after 2 s: it hangs?"
    assert crashed.failed == "the process ended by signal SIGABRT"
    assert [row.switches_on for row in (hung, crashed, right)] == [False, False, True]
    assert (right.error, right.over_plain, right.kernel) == (0.5, 2.0, "k")
    assert right.work == CASES[2].work and right.driver == MACHINE.driver
    lines = [json.loads(line) for line in (tmp_path / "session.jsonl").read_text().splitlines()]
    assert [from_json(line["row"]) for line in lines] == rows
    assert "dying" in lines[1]["stderr"] and "stderr" not in lines[2]
    verdicts = [report.verdict(row, [hung, crashed, right]) for row in (hung, crashed, right)]
    assert verdicts == [f"off: failed: {hung.failed}", f"off: failed: {crashed.failed}", "on"]


def test_what_was_said_before_the_end_counts(tmp_path: Path):
    """The GPU's own clock comes last, and may take the process with it."""
    (row,) = measured(session(tmp_path, SAY_RIGHT + "\nos.abort()"), CASES[:1])
    assert row is not None and row.switches_on
    line = json.loads((tmp_path / "session.jsonl").read_text())
    assert line["ended"] == "the process ended by signal SIGABRT"


def test_notes_are_taken_while_a_case_runs(tmp_path: Path):
    """Not once it has ended: then clocks are those of an idle GPU."""
    busy = tmp_path / "busy"
    program = f"""
open({str(busy)!r}, "w").close()
time.sleep(1.0)
os.remove({str(busy)!r})
time.sleep(0.5)
"""
    taken: list[bool] = []

    def notes() -> bool | None:
        taken.append(busy.exists())
        return taken[-1] or None

    own = session(tmp_path, program + SAY_RIGHT, notes=notes, every=0.05)
    (row,) = measured(own, CASES[:1])
    assert row is not None and row.switches_on
    line = json.loads((tmp_path / "session.jsonl").read_text())
    assert len(line["notes"]) > 2 and all(line["notes"])
    count = len(taken)
    time.sleep(0.2)
    assert len(taken) == count


def test_no_answer(tmp_path: Path):
    silent, failed = session(tmp_path, "print('hello')"), session(tmp_path, "sys.exit(3)")
    (row,) = measured(silent, CASES[:1])
    assert row is not None and row.failed == "the process gave no answer"
    (row,) = measured(failed, CASES[:1])
    assert row is not None and row.failed == "the process ended by exit status 3"


def test_the_last_whole_line_is_the_answer():
    text = 'noise\n{"error": 1}\nI0000 cuda: warning\n{"error": 2}\nend\n{"error": 3'
    assert last_answer(text) == {"error": 2}
    assert last_answer("noise") is None


def test_a_session_goes_on_where_it_ended(tmp_path: Path):
    once = session(tmp_path, SAY_RIGHT)
    rows = measured(once, CASES[:2])
    with once.path.open("a") as file:
        file.write('{"case": {"backend": "pla')  # torn, as by a power cut
    assert once.earlier() == dict(zip(CASES[:2], rows, strict=True))
    measured(once, CASES[2:])
    assert list(once.earlier()) == CASES

    def other(**changes: Any) -> Session:
        return dataclasses.replace(once, machine=dataclasses.replace(MACHINE, **changes))

    kind = dataclasses.replace(MACHINE.target, device_kind="another")
    changed = dataclasses.replace(PLANTED, source=lambda: ())
    for elsewhere in (
        other(jax="0.13.0"),
        other(driver=None),
        other(target=kind),
        dataclasses.replace(once, backends=[changed]),
        dataclasses.replace(once, path=tmp_path / "none.jsonl"),
    ):
        assert elsewhere.earlier() == {}


def test_nothing_is_begun_after_the_deadline(tmp_path: Path):
    late = session(tmp_path, SAY_RIGHT)
    assert [row for _, row in late.run(CASES, time.monotonic() - 1)] == [None] * 3
    assert not late.path.exists()


def test_every_size_of_a_kind_must_be_faster(tmp_path: Path):
    case = CASES[0]
    (row,) = measured(session(tmp_path, SAY_RIGHT), [case])
    assert row is not None
    slow = dataclasses.replace(row, shape=(1, 32, 64), over_plain=0.9)
    wrong = dataclasses.replace(row, shape=(1, 32, 32), error=3.0)
    assert report.verdict(row, [row, slow]) == "off: right and faster, but not at another size"
    assert report.verdict(slow, [row, slow]) == "off: right, not faster"
    assert report.verdict(wrong, [wrong]) == "off: wrong numbers"
    assert report.summary([row, slow]) == []
    (line,) = report.summary([row])
    assert (
        line == "planted: bf16 x mxfp4, up to 2^20 elements, 1 row: 2 times the plain path's speed"
    )
    assert report.table([row, slow, wrong]).row_count == 3
