"""The command around the mutants, as far as it needs no cosmic-ray: each part can say no."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutation import report
from tests.mutation.core import CORE, ROOT, path_of
from tests.mutation.explained import EXPLAINED, Explanation
from tests.mutation.left_out import left_out
from tests.mutation.mutants import Mutant, Place, change, draw
from tests.mutation.server import Outcome
from tests.mutation.session import Known, Session

HERE = Path(__file__).parent
reads_sources = pytest.mark.one_python(reason="reads the project's sources and results alone")

SOURCE = '''"""A module, 1."""

def f(x: 2, *, y=3) -> 4:
    """Five, 5."""
    if x > 6:
        raise ValueError(f"{x + 7}", 8)
    return zip(f"é {x - 9}", x + 10, strict=11)

class C:
    def __repr__(self):
        return 12
'''


def test_what_is_left_out():
    """The numbers that stay are the default, the condition and what is returned."""
    stretches = left_out(SOURCE)
    lines = SOURCE.splitlines()

    def is_left_out(word: str) -> bool:
        line = next(number for number, text in enumerate(lines) if word in text)
        place = line + 1, lines[line].index(word)
        return any(first <= place < last for first, last in stretches)

    kept = [number for number in range(1, 13) if not is_left_out(str(number))]
    assert kept == [3, 6, 10]
    assert is_left_out("*")


def places(number: int) -> list[Place]:
    return [Place("some.module", "NumberReplacer", index, index) for index in range(number)]


def test_a_larger_share_draws_the_same_and_more():
    few, many = (draw(places(50), share, seed=1) for share in (0.1, 0.5))
    assert (len(few), len(many)) == (5, 25)
    assert many[:5] == few and len(set(many)) == 25
    assert draw(places(50), 0.1, seed=2) != few
    assert set(draw(places(50), 1.0, seed=1)) == set(places(50))
    assert draw([], 0.5, seed=1) == []


def mutant(number: int, line: str = "x = 1") -> Mutant:
    place = places(number + 1)[-1]
    return Mutant(place, line, f"x = {number}", f"source {number}")


def test_change_is_one_line():
    assert change("a\nb = (1 +\n  2)\n", "a\nb = (1 -\n  2)\n") == ("b = (1 +", "b = (1 -")


def test_a_session_resumes(tmp_path: Path):
    path = tmp_path / "build" / "session.jsonl"
    first = Session(path)
    assert first.get(mutant(1).id) is None
    first.add(mutant(1).id, Outcome(True, "", 1.0))
    first.add(mutant(2).id, Outcome(False, "tests/test_x.py::test_y", 2.0))
    first.add(mutant(1).id, Outcome(False, "tests/test_new.py::test_z", 3.0))
    second = Session(path)
    assert second.get(mutant(1).id) == Known(mutant(1).id, True, "tests/test_new.py::test_z", 3.0)
    assert second.get(mutant(2).id) == Known(mutant(2).id, True, "tests/test_x.py::test_y", 2.0)
    assert second.get(mutant(3).id) is None
    assert [session.at_once(mutant(1).id) for session in (first, second)] == [False, False]
    assert second.at_once(mutant(2).id)


def result(number: int, killed: bool) -> report.Result:
    return report.Result(mutant(number), Known(mutant(number).id, killed, "", 0.0), killed)


def test_score(monkeypatch: pytest.MonkeyPatch):
    """Nine of ten killed; of twelve tried, one is equivalent and one accepted."""
    monkeypatch.setitem(EXPLAINED, ("some.module", "x = 1", "x = 10"), Explanation(True, "why"))
    monkeypatch.setitem(EXPLAINED, ("some.module", "x = 1", "x = 11"), Explanation(False, "so"))
    results = [result(number, killed=number < 9) for number in (*range(9), 10, 11)]
    found = report.score(100, results)
    assert (found.killed, found.equivalent, found.survivors, found.value) == (9, 1, 1, 0.9)
    # Wilson's interval of 9 in 10, from a table.
    assert found.interval == pytest.approx((0.596, 0.982), abs=1e-3)
    assert report.score(11, results).interval == (0.9, 0.9)
    made = {"date": "now", "tool": "t", "jax": "j", "python": "p", "seed": 0, "share": 0.5}
    text = report.page(report.record({"some.module": 100}, results, made))
    assert "| some.module | 100 | 11 | 9 | 1 | 1 | 0.90 |" in text
    assert "Killed at the first\ntry were 9." in text
    survivors, equivalent = text.split("## Equivalent mutants")
    assert "- is `x = 11`\n    - so" in survivors and "- is `x = 10`\n    - why" in equivalent


RUN = """
import sys
from pathlib import Path
from tests.mutation import server
from tests.mutation.core import path_of

folder, module = Path(sys.argv[1]), "mx_jax.formats.scale"
server.prepare(folder)
test = folder / "test_it.py"
test.write_text("def test_it():\\n    from mx_jax.formats import E8M0\\n    assert E8M0.bits == 8")
source = path_of(module).read_text()
changed = source.replace('kind="exponent", bits=8', 'kind="exponent", bits=9')
endless = source + "while True:\\n    pass\\n"
for text in (None, source, changed, endless):
    outcome = server.run(module, text, ["-c", "pyproject.toml", "--rootdir=.", str(test)], 4)
    print(outcome.passed, outcome.test.partition("::")[2] or outcome.test)
"""


@pytest.mark.slow
def test_mutants_are_run_apart(tmp_path: Path):
    """The source as it is passes; one that is changed fails, and so does one that never ends."""
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    *known, endless = done.stdout.splitlines()
    assert known == ["True ", "True ", "False test_it"], done
    assert endless in ("False stopped by SIGKILL", "False stopped by SIGXCPU")


@reads_sources
def test_tests_of_the_core_exist():
    for path in {path for paths in CORE.values() for path in paths}:
        file, _, name = path.removeprefix("--deselect=").partition("::")
        assert (ROOT / file).exists(), path
        assert f"def {name.partition('[')[0]}" in ((ROOT / file).read_text() if name else "def ")


@reads_sources
def test_explanations_are_of_lines_that_are_there():
    for module, before, _ in EXPLAINED:
        lines = {" ".join(line.split()) for line in path_of(module).read_text().splitlines()}
        assert before in lines, f"{module} has no line {before!r} now: drop its explanation"


@reads_sources
def test_results_are_what_the_command_wrote():
    record = json.loads((HERE / "results.json").read_text())
    assert (HERE / "results.md").read_text() == report.page(record)
    assert record["score"] >= report.THRESHOLD
    assert all(one["why"] for one in record["survivors"])
    assert set(record["modules"]) == {*CORE, "all"}
