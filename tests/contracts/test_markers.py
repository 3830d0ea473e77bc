"""Marks that leave a test out say why, where they stand."""

from pathlib import Path

import pytest

pytest_plugins = ["pytester"]
pytestmark = pytest.mark.one_python(reason="asks pytest about marks, nothing else")

CONFTEST = (Path(__file__).parents[1] / "conftest.py").read_text()
MARKERS = (
    "slow: later",
    "one_python(reason): why",
    "sweep(reason, where): why",
    "by_default(ids): cases",
)
INI = "[pytest]\nmarkers =\n    " + "\n    ".join(MARKERS)


@pytest.mark.by_default("^one_python-|^sweep")
@pytest.mark.parametrize(
    ("mark", "passes"),
    [
        ('one_python(reason="reads the sources alone")', True),
        ("one_python", False),
        ('one_python("reads the sources alone")', False),
        ('one_python(reason="slow")', False),
        ('one_python(reason="reads the sources alone", where=bool)', False),
        ('sweep(reason="reads the sources alone", where=bool)', True),
        ("sweep(where=bool)", False),
    ],
)
def test_a_mark_needs_a_reason(pytester: pytest.Pytester, mark: str, passes: bool):
    pytester.makeini(INI)
    pytester.makeconftest(CONFTEST)
    one = '@pytest.mark.parametrize("n", [1])'
    pytester.makepyfile(f"import pytest\n\n{one}\n@pytest.mark.{mark}\ndef test_it(n): pass\n")
    result = pytester.runpytest_subprocess("--collect-only", "-q")
    assert (result.ret == 0) == passes, result.stdout.str()
    complaint = f"{mark.partition('(')[0]} needs reason="
    assert passes or complaint in result.stdout.str() + result.stderr.str()


def test_each_fifth_case_of_a_sweep_and_the_last_run_by_default(pytester: pytest.Pytester):
    pytester.makeini(INI)
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile("""
        import pytest

        mark = pytest.mark.sweep(reason="reads the sources alone", where=lambda p: p["n"] >= 0)

        @mark
        @pytest.mark.parametrize("n", range(-2, 13))
        def test_it(n): pass

        @mark
        @pytest.mark.parametrize("n", [7])
        def test_alone(n): pass
    """)
    result = pytester.runpytest_subprocess("--collect-only", "-q", "-m", "not slow")
    found = [line.partition("::")[2] for line in result.stdout.lines if "::" in line]
    cases = [f"test_it[{n}]" for n in (-2, -1, 0, 5, 10, 12)]
    assert found == [*cases, "test_alone[7]"]
    # On the newest Python: what no sweep has, and the cases that are left.
    result = pytester.runpytest_subprocess("--collect-only", "-q", "-m", "slow or not one_python")
    found = [line.partition("::")[2] for line in result.stdout.lines if "::" in line]
    assert found == [f"test_it[{n}]" for n in (-2, -1, *range(1, 5), *range(6, 10), 11)]


def test_files_with_slow_tests_begin(pytester: pytest.Pytester):
    """Whole files: neighbours share fixtures and programs."""
    pytester.makeini(INI)
    pytester.makeconftest(CONFTEST)
    quick, slow = "def test_1(): pass\n", "import pytest\n@pytest.mark.slow\ndef test_2(): pass\n"
    pytester.makepyfile(test_a=quick, test_b=quick + slow, test_c=quick, test_d=slow)
    result = pytester.runpytest_subprocess("--collect-only", "-q")
    found = [line for line in result.stdout.lines if "::" in line]
    names = ["test_b.py::test_1", "test_b.py::test_2", "test_d.py::test_2"]
    assert found == [*names, "test_a.py::test_1", "test_c.py::test_1"]


def test_cases_that_stand_for_the_others(pytester: pytest.Pytester):
    """All are collected, those without a match as slow; a pattern without any match is an error."""
    pytester.makeini(INI)
    pytester.makeconftest(CONFTEST)
    source = """
        import pytest

        @pytest.mark.by_default("PATTERN")
        @pytest.mark.parametrize("name", ["a", "ab", "c"])
        def test_it(name): pass
    """
    path = pytester.makepyfile(test_cases=source.replace("PATTERN", "^a$"))
    for marks, names in (("not slow", ["a"]), ("slow", ["ab", "c"])):
        result = pytester.runpytest_subprocess("--collect-only", "-q", "-m", marks)
        assert found(result) == [f"test_it[{name}]" for name in names]
    path.write_text(path.read_text().replace("^a$", "d"))
    result = pytester.runpytest_subprocess("--collect-only", "-q")
    assert result.ret != 0
    assert "by_default matches no case: [('test_cases.py::test_it', 'd')]" in result.stderr.str()
    # Who asks for one case gets it.
    result = pytester.runpytest_subprocess("--collect-only", "-q", "test_cases.py::test_it[ab]")
    assert found(result) == ["test_it[ab]"]


def found(result: pytest.RunResult) -> list[str]:
    return [line.partition("::")[2] for line in result.stdout.lines if "::" in line]
