"""ruff and pyright find nothing, files and functions stay short; each check can fail."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIBRARY = sorted((ROOT / "mx_jax").rglob("*.py"))
MAX_FILE_LINES = 300
# pyright is not among them: it reads the types of the installed packages.
reads_sources = pytest.mark.one_python(reason="reads the project's sources and nothing else")
MAX_FUNCTION_LINES = 40

TOOLS = {
    "ruff check": ["ruff", "check", "--no-cache"],
    "ruff format": ["ruff", "format", "--check", "--no-cache"],
    "pyright": ["pyright", "--warnings", "--pythonpath", sys.executable],
}
FLAWS = {
    "ruff check": "import os\n",
    "ruff format": "x = [1,2]\n",
    "pyright": 'x: int = "one"\n',
}


def run(tool: str, *paths: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *TOOLS[tool], *map(str, paths)],
        cwd=ROOT,
        env=os.environ | {"PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


# pyright takes half a minute.
BY_TOOL = pytest.mark.parametrize(
    "tool",
    [
        pytest.param(tool, marks=reads_sources if "ruff" in tool else pytest.mark.slow)
        for tool in TOOLS
    ],
)


@BY_TOOL
def test_tool_finds_nothing(tool: str):
    result = run(tool)
    assert result.returncode == 0, result.stdout + result.stderr


@BY_TOOL
def test_tool_finds_a_planted_flaw(tool: str, tmp_path: Path):
    flawed = tmp_path / "flawed.py"
    flawed.write_text(FLAWS[tool])
    result = run(tool, flawed)
    assert result.returncode == 1, result.stdout + result.stderr
    assert "flawed.py" in result.stdout


def too_long(path: Path) -> str | None:
    """Tell how far a file is over its limit; `None` where it is not."""
    lines = len(path.read_text().splitlines())
    return f"{path}: {lines} lines" if lines > MAX_FILE_LINES else None


def too_long_functions(path: Path) -> Iterator[str]:
    """Name each function whose lines, those of its docstring left out, are over the limit."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = _num_lines(node)
            if ast.get_docstring(node) is not None:
                lines -= _num_lines(node.body[0])
            if lines > MAX_FUNCTION_LINES:
                yield f"{path}:{node.lineno}: {node.name} has {lines} lines"


def _num_lines(node: ast.stmt) -> int:
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1


def test_files_are_short():
    assert [complaint for path in LIBRARY if (complaint := too_long(path))] == []


def test_functions_are_short():
    assert [complaint for path in LIBRARY for complaint in too_long_functions(path)] == []


def test_a_long_file_is_noticed(tmp_path: Path):
    path = tmp_path / "long.py"
    path.write_text("x = 1\n" * MAX_FILE_LINES)
    assert too_long(path) is None
    path.write_text("x = 1\n" * (MAX_FILE_LINES + 1))
    assert too_long(path) == f"{path}: 301 lines"


def test_a_long_function_is_noticed(tmp_path: Path):
    path = tmp_path / "long.py"
    docstring = '    """One.\n\n    Two.\n    """\n'
    path.write_text("def f():\n" + docstring + "    x = 1\n" * (MAX_FUNCTION_LINES - 1))
    assert list(too_long_functions(path)) == []
    path.write_text("def f():\n" + docstring + "    x = 1\n" * MAX_FUNCTION_LINES)
    assert list(too_long_functions(path)) == [f"{path}:1: f has 41 lines"]
