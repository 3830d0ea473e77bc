"""docs/migrate.md: our names exist, and none of theirs is left out."""

import importlib
import inspect
import pkgutil
import re
from pathlib import Path

import jax
import pytest

PAGE = Path(__file__).parents[2] / "docs" / "migrate.md"
ROW = re.compile(r"^\| (.*?) \| (.*) \|$", re.MULTILINE)
OURS = re.compile(r"\bmx_jax(?:\.\w+)+")
# Flax's own names for it all begin so; its functions below the layers are no way in.
FLAX_FLOAT8 = re.compile(r"Fp8\w+Op|Fp8DotGeneral|Fp8Einsum|NANOOFp8\w+")


def sections(text: str) -> dict[str, list[tuple[str, str]]]:
    """Rows of each table, theirs and ours, by the section's anchor."""
    parts = re.split(r"^## .* \{ #(\S+) \}$", text, flags=re.MULTILINE)
    return {
        anchor: [row for row in ROW.findall(body) if not set(row[0]) <= set("-|")][1:]
        for anchor, body in zip(parts[1::2], parts[2::2], strict=True)
    }


SECTIONS = sections(PAGE.read_text())


def their_names(anchor: str) -> set[str]:
    """What stands in code marks on the left: names, without what they are called with."""
    spans = [span for left, _ in SECTIONS[anchor] for span in re.findall(r"`([^`]+)`", left)]
    return {match[0] for span in spans if (match := re.match(r"[A-Za-z_][\w.]*", span))}


def test_tables_are_there():
    assert set(SECTIONS) == {
        "torchao-mx",
        "torchao-training",
        "torchao-float8",
        "torchmx",
        "qwix",
        "jax-nn",
        "flax",
        "transformerengine",
    }
    assert all(len(rows) >= 3 for rows in SECTIONS.values())


@pytest.mark.parametrize("name", sorted(set(OURS.findall(PAGE.read_text()))))
def test_our_names_exist(name: str):
    pkgutil.resolve_name(name)


def test_flax_is_complete():
    linen = importlib.import_module("flax.linen")
    theirs = {name for name in dir(linen) if FLAX_FLOAT8.fullmatch(name)}
    assert theirs == their_names("flax")


def test_jax_is_complete():
    theirs = {name for name in dir(jax.nn) if "scaled_" in name}
    assert theirs == their_names("jax-nn")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("anchor", "package"),
    [
        ("torchao-mx", "torchao.prototype.mx_formats"),
        ("torchao-training", "torchao.prototype.moe_training"),
        ("torchao-training", "torchao.prototype.moe_training.ep"),
        ("torchao-float8", "torchao.float8"),
        ("qwix", "qwix"),
    ],
)
def test_peers_are_complete(anchor: str, package: str):
    module = pytest.importorskip(package)
    public = getattr(module, "__all__", None) or {
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and (callable(value) or inspect.isclass(value))
    }
    words = re.findall(r"\w+", " ".join(left for left, _ in SECTIONS[anchor]))
    assert set(public) - set(words) == set()
