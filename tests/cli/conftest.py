"""What tests of commands share."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mx_jax.commands import main


class Cli:
    """Runs commands in this process, and gives what they print."""

    def __init__(self, capsys: pytest.CaptureFixture[str]):
        self._capsys = capsys

    def __call__(self, *words: Any, status: int = 0) -> tuple[str, str]:
        """Standard output and standard error of a command that ends with that status."""
        assert main([str(word) for word in words]) == status
        captured = self._capsys.readouterr()
        return captured.out, captured.err

    def json(self, *words: Any, status: int = 0) -> Any:
        """What a command prints with --json."""
        return json.loads(self(*words, "--json", status=status)[0])

    def error(self, *words: Any) -> str:
        """The one line that a command ends with that refuses its words."""
        _, text = self(*words, status=2)
        assert text.startswith("mx_jax: ") and text.count("\n") == 1
        return text


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    return Cli(capsys)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """A file to be written."""
    return tmp_path / "out.safetensors"


@pytest.fixture
def rules(tmp_path: Path) -> Callable[..., Path]:
    """Writes a file of rules, of a text or of the keys of one rule each."""

    def write(text: str = "", *each: dict[str, Any]) -> Path:
        for one in each:
            lines = (f"{key} = {json.dumps(value)}" for key, value in one.items())
            text += "\n".join(["[[rule]]", *lines, ""])
        (tmp_path / "rules.toml").write_text(text)
        return tmp_path / "rules.toml"

    return write
