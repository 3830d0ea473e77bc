"""Marks that leave a test out say why, where they stand."""

from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

CONFTEST = (Path(__file__).parents[1] / "conftest.py").read_text()
INI = "[pytest]\nmarkers =\n    one_python(reason): why\n"


@pytest.mark.parametrize(
    ("mark", "passes"),
    [
        ('one_python(reason="reads the sources alone")', True),
        ("one_python", False),
        ('one_python("reads the sources alone")', False),
        ('one_python(reason="slow")', False),
    ],
)
def test_one_python_needs_a_reason(pytester: pytest.Pytester, mark: str, passes: bool):
    pytester.makeini(INI)
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(f"import pytest\n\n@pytest.mark.{mark}\ndef test_it(): pass\n")
    result = pytester.runpytest_subprocess("--collect-only", "-q")
    assert (result.ret == 0) == passes, result.stdout.str()
    assert passes or "one_python needs reason=" in result.stdout.str() + result.stderr.str()
