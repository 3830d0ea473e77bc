"""Names that left the package say where they went, wherever they were taken."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import mx_jax
from mx_jax import checkpoint, inspect, recipes
from mx_jax.checkpoint import LAYOUTS
from mx_jax.commands import COMMANDS, main
from mx_jax.formats.removed import REMOVED
from mx_jax.reference.scale_rules import SCALE_RULES

ROOT = Path(__file__).parents[2]
MODULES = mx_jax, mx_jax.nn.linen, checkpoint, recipes, inspect
WHERE = "former, which left mx_jax in 0.2: see the new place"


@pytest.fixture(autouse=True)
def former(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(REMOVED, "former", "see the new place")


@pytest.mark.parametrize("module", MODULES)
def test_an_attribute(module: Any):
    with pytest.raises(AttributeError, match="has no attribute 'former', which left mx_jax"):
        module.former  # noqa: B018
    with pytest.raises(AttributeError, match=r"has no attribute 'never'$"):
        module.never  # noqa: B018


TAKE: dict[str, Callable[[str], object]] = {
    "recipe": recipes.from_name,
    "rule": lambda name: mx_jax.quantize([1.0], "nvfp4", scale_rule=name),
    "format": lambda name: mx_jax.quantize([1.0], name),
    "layout": lambda name: checkpoint.write("model.safetensors", {}, layout=name),
}


@pytest.mark.parametrize("take", TAKE.values(), ids=TAKE)
def test_a_name(take: Callable[[str], object]):
    with pytest.raises(ValueError, match=r"='former', which left mx_jax in 0\.2: see the new"):
        take("former")


def test_a_word_of_a_recipe():
    with pytest.raises(TypeError, match=r"'former', which left mx_jax in 0\.2: see the new"):
        recipes.mxfp4().with_(former=True)  # pyright: ignore[reportCallIssue]


def test_a_command(capsys: pytest.CaptureFixture[str]):
    assert main(["former", "--option"]) == 2
    assert capsys.readouterr().err == f"mx_jax: no command {WHERE}\n"


@pytest.mark.parametrize("option", ["--former", "--former=3"])
def test_an_option_of_a_command(option: str, capsys: pytest.CaptureFixture[str]):
    for words in ([option, "--never", "formats"], ["inspect", "model.safetensors", option]):
        with pytest.raises(SystemExit) as ended:
            main(words)
        said = capsys.readouterr().err
        assert ended.value.code == 2
        assert "unrecognized arguments: " in said and f"{WHERE.removeprefix('former')}\n" in said


def test_none_is_there_still():
    known = {*recipes.names(), *(rule.name for rule in SCALE_RULES), *COMMANDS}
    known |= {row.name.replace("-", "_") for row in LAYOUTS}
    for name in REMOVED:
        assert name not in known
        assert not any(name in vars(module) for module in MODULES)


def test_files_to_copy_are_there():
    places = " ".join(REMOVED.values())
    files = re.findall(r"\bexamples/[\w/]+(?:\.py)?", places)
    assert files and [file for file in files if not (ROOT / file).exists()] == []
