"""Names that left the package say where they went, wherever they were taken."""

from collections.abc import Callable

import pytest

import mx_jax
from mx_jax import inspect, recipes
from mx_jax.cli import main
from mx_jax.formats.removed import REMOVED

WHERE = "former, which left mx_jax in 0.2: see the new place"


@pytest.fixture(autouse=True)
def former(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(REMOVED, "former", "see the new place")


@pytest.mark.parametrize("module", [mx_jax, recipes, inspect])
def test_an_attribute(module: object):
    with pytest.raises(AttributeError, match="has no attribute 'former', which left mx_jax"):
        module.former  # noqa: B018
    with pytest.raises(AttributeError, match=r"has no attribute 'never'$"):
        module.never  # noqa: B018


@pytest.mark.parametrize(
    "take",
    [
        recipes.from_name,
        lambda name: mx_jax.quantize([1.0], "mxfp4", scale_rule=name),
        lambda name: mx_jax.quantize([1.0], name),
    ],
    ids=["recipe", "rule", "format"],
)
def test_a_name(take: Callable[[str], object]):
    with pytest.raises(ValueError, match=r"='former', which left mx_jax in 0\.2: see the new"):
        take("former")


def test_a_word_of_a_recipe():
    with pytest.raises(
        TypeError, match=r"'former', which left mx_jax in 0\.2: see the new place, f"
    ):
        recipes.mxfp4().with_(former=True)  # pyright: ignore[reportCallIssue]


def test_a_command(capsys: pytest.CaptureFixture[str]):
    assert main(["former", "--option"]) == 2
    assert capsys.readouterr().err == f"mx_jax: no command {WHERE}\n"


def test_none_is_there_still():
    for name in REMOVED:
        assert not any(name in vars(module) for module in (mx_jax, recipes, inspect))
