"""The examples in README.md and docs/ do what they show, and links lead somewhere."""

import doctest
import re
import textwrap
from pathlib import Path
from typing import Any

import pytest
from markdown.extensions.toc import slugify

from tests.processes import ROOT

PACKAGE = ROOT / "mx_jax"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# Tabs indent what they show.
BLOCK = re.compile(r"^( *)```python\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)


LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)#?([^)\s]*)\)")
# What MkDocs does not look at.
OUTSIDE = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "custom_calls/README.md")


def broken_links(page: Path, text: str | None = None) -> list[str]:
    """Links to files that are not there, and to headings that these do not have."""
    broken = []
    for path, anchor in LINK.findall(page.read_text() if text is None else text):
        target = (page.parent / path).resolve() if path else page
        if target.is_file() and target.suffix == ".md":
            headings = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
            anchors = {slugify(heading, "-") for heading in headings}
        else:
            anchors = set()
        if not target.exists() or (anchor and anchor not in anchors):
            broken.append(f"{path}#{anchor}")
    return broken


@pytest.mark.parametrize("page", OUTSIDE)
def test_links_outside_of_docs(page: str):
    assert not broken_links(ROOT / page)


def test_files_of_the_architecture_exist():
    text = (ROOT / "docs" / "architecture.md").read_text()
    named = set(re.findall(r"`((?:[a-z_]+/)+[a-z_]+\.py)`", text))
    assert len(named) > 5
    assert [path for path in named if not any((at / path).exists() for at in (ROOT, PACKAGE))] == []


def section(page: Path, heading: str) -> dict[str, Any]:
    """What the examples below one heading of a page define; they must not fail."""
    text, namespace = page.read_text().partition(f"\n## {heading}\n")[2], dict[str, Any]()
    complaints = run_examples(page, text.partition("\n## ")[0], namespace)
    assert not complaints, "".join(complaints)
    return namespace


def run_examples(page: Path, text: str, namespace: dict[str, Any]) -> list[str]:
    """Run the python blocks of a page's text in one namespace, and collect what went wrong."""
    complaints: list[str] = []
    options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    runner = doctest.DocTestRunner(verbose=False, optionflags=options)
    for block in BLOCK.finditer(text):
        line, code = text.count("\n", 0, block.start(2)), textwrap.dedent(block[2])
        if ">>>" in code:
            test = doctest.DocTestParser().get_doctest(code, namespace, page.name, str(page), line)
            runner.run(test, out=complaints.append, clear_globs=False)
            namespace.update(test.globs)
        else:
            exec(compile("\n" * line + code, page, "exec"), namespace)
    return complaints


# What newcomers read first is run by README's test command, every page in CI.
FIRST = ("README.md", "docs/index.md")


def _name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=() if _name(page) in FIRST else pytest.mark.slow, id=_name(page))
        for page in PAGES
    ],
)
def test_examples(page: Path):
    complaints = run_examples(page, page.read_text(), {"__name__": "__main__"})
    assert not complaints, "".join(complaints)
