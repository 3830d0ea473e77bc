"""Sentences that every Python carries: the first ones of its standard library's docstrings."""

import ast
import re
import sysconfig
from pathlib import Path

DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
FIRST = re.compile(r"(.+?[.!?])(?:\s|$)", re.DOTALL)


def standard_library(limit: int | None = None) -> list[str]:
    """First sentences of docstrings, of six to forty words, each once, in the order of the files.

    With a limit that many, spread evenly over all. They differ between versions of Python.
    """
    folder = Path(sysconfig.get_paths()["stdlib"])
    unique: dict[str, None] = {}
    for path in sorted(folder.glob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, DOCUMENTED):
                unique |= dict.fromkeys(first_sentence(ast.get_docstring(node) or ""))
    sentences = list(unique)
    if limit is None or limit >= len(sentences):
        return sentences
    return [sentences[index * len(sentences) // limit] for index in range(limit)]


def first_sentence(text: str) -> list[str]:
    """The first sentence of a docstring, if it is English prose of some length; none otherwise."""
    match = FIRST.match(text)
    sentence = " ".join(match[1].split()) if match else ""
    words = sentence.split()
    prose = sum(word.strip(",.").isalpha() for word in words) >= 0.7 * len(words)
    return [sentence] if 6 <= len(words) <= 40 and prose else []


def of_file(path: Path) -> list[str]:
    """The lines of a UTF-8 file that are not empty, each a sentence."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [line.strip() for line in lines if line.strip()]
