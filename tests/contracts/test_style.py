"""ruff and pyright find nothing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

TOOLS = {
    "ruff check": ["ruff", "check", "--no-cache"],
    "ruff format": ["ruff", "format", "--check", "--no-cache"],
    "pyright": ["pyright", "--warnings", "--pythonpath", sys.executable],
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
    [pytest.param(tool, marks=[] if "ruff" in tool else pytest.mark.slow) for tool in TOOLS],
)


@BY_TOOL
def test_tool_finds_nothing(tool: str):
    result = run(tool)
    assert result.returncode == 0, result.stdout + result.stderr
