"""ruff and pyright find nothing."""

import sys

import pytest

from tests.processes import printed

TOOLS = {
    "ruff check": ["ruff", "check", "--no-cache"],
    "ruff format": ["ruff", "format", "--check", "--no-cache"],
    "pyright": ["pyright", "--warnings", "--pythonpath", sys.executable],
}


# pyright takes half a minute.
@pytest.mark.slow(but="ruff")
@pytest.mark.parametrize("tool", TOOLS)
def test_tool_finds_nothing(tool: str):
    printed("-m", *TOOLS[tool], PYRIGHT_PYTHON_IGNORE_WARNINGS="1")
