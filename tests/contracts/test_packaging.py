"""pyproject.toml, README.md, CHANGELOG.md and .ci/run tell the same story."""

import re
import shutil
import subprocess
import tomllib
import zipfile
from pathlib import Path

import pytest

import mx_jax
from tests.processes import ROOT, run_python

README = (ROOT / "README.md").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

MAIN_JOB = (
    'python3 -m venv .venv && .venv/bin/pip install ".[examples]"'
    " && .venv/bin/python examples/train_lm.py"
)
TESTS = (
    'python3 -m venv .venv && .venv/bin/pip install -e ".[test]" && .venv/bin/python -m pytest -n 2'
)


def test_version():
    assert PROJECT["version"] == mx_jax.__version__
    assert f"\nversion: {mx_jax.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"## [{mx_jax.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.parametrize(("name", "command"), [("main job", MAIN_JOB), ("tests", TESTS)])
def test_readme_gives_the_command(name: str, command: str):
    assert f"<!-- command: {name} -->\n```sh\n{command}\n```\n" in README


@pytest.mark.parametrize("command", [MAIN_JOB, TESTS])
def test_commands_name_what_exists(command: str):
    extra = re.search(r'"\.\[(\w+)\]"', command)
    assert extra is not None
    assert extra[1] in PROJECT["optional-dependencies"]
    assert all((ROOT / script).exists() for script in re.findall(r"\S+\.py\b", command))


def test_ci_runs_the_command_of_the_readme():
    command = [ROOT / ".ci" / "run", "--show"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout == TESTS + "\n"


def test_a_build_without_the_library_says_so(tmp_path: Path):
    """As pip shows it with -v. A wheel is made all the same, in plain JAX."""
    pytest.importorskip("scikit_build_core")
    if shutil.which("cmake") is None:
        pytest.skip("needs CMake, which fails here for want of a compiler")
    code = f"import mx_jax_build; mx_jax_build.build_wheel({str(tmp_path)!r})"
    packaging = ROOT / "custom_calls" / "packaging"
    result = run_python("-c", code, PYTHONPATH=str(packaging), CXX="false")
    output = result.stdout + result.stderr
    assert result.returncode == 0, output
    assert "mx_jax: the C++ library was NOT built; the error is shown above." in output
    assert "python -m mx_jax env" in output
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.partition("-py3-")[2] == "none-any.whl"
    assert "mx_jax/py.typed" in zipfile.ZipFile(wheel).namelist()
