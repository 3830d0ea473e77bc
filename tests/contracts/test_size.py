"""The project grows no further: what is added takes the place of something; and says its types."""

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# They only go down: docs/ and README in words, the others in lines. See sizes.md.
MOST = {
    "mx_jax/**/*.py": 31_630,
    "tests/**/*.py": 35_180,
    "custom_calls/**/*.cc": 3_990,
    "custom_calls/**/*.h": 8_425,
    "docs/*.md": 28_100,
    "README.md": 990,
}
MOST_FILES = 129
MOST_WORDS_OF_A_PAGE = 2_500
# What is made by a name, and in how many places: mechanisms that a reader has to know.
MOST_OF_A_KIND = {
    r"\bPrimitive\((?!\[)": 8,
    r"make_user_context\(|ContextVar\(|threading\.local\b": 6,
    r"class \w+\((?:\w+\.)*custom_vjp|@functools\.partial\(jax\.custom_vjp|@jax\.custom_vjp": 4,
}
# Functions of more than six parameters, `self` apart.
MOST_WITH_MANY_PARAMETERS = 15
# Of all parameters those that are `Any`, or have no type.
MOST_UNTYPED = 0.05


@pytest.mark.parametrize("files", MOST)
def test_lines_or_words(files: str):
    texts = [path.read_text(encoding="utf-8") for path in ROOT.glob(files)]
    assert texts
    is_prose = files.endswith(".md")
    assert (
        sum(len(text.split() if is_prose else text.splitlines()) for text in texts) <= MOST[files]
    )


def test_words_of_a_page():
    words = {page.name: len(page.read_text().split()) for page in ROOT.glob("docs/*.md")}
    assert words and {name: n for name, n in words.items() if n > MOST_WORDS_OF_A_PAGE} == {}


@pytest.mark.parametrize("pattern", MOST_OF_A_KIND)
def test_mechanisms(pattern: str):
    texts = [path.read_text(encoding="utf-8") for path in ROOT.glob("mx_jax/**/*.py")]
    assert 0 < sum(len(re.findall(pattern, text)) for text in texts) <= MOST_OF_A_KIND[pattern]


def test_programs_are_read_in_one_place():
    readers = {
        path.parent.name for path in ROOT.glob("mx_jax/**/*.py") if ".eqns" in path.read_text()
    }
    assert readers == {"jaxpr"}


def test_files():
    assert len([*ROOT.glob("mx_jax/**/*.py")]) <= MOST_FILES


@functools.cache
def functions() -> list[ast.arguments]:
    return [
        node.args
        for file in ROOT.glob("mx_jax/**/*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


def parameters(of: ast.arguments) -> list[ast.arg]:
    every = [*of.posonlyargs, *of.args, *of.kwonlyargs]
    return [x for x in every if x.arg not in ("self", "cls")]


def test_parameters_are_few():
    many = [of for of in functions() if len(parameters(of)) > 6]
    assert 0 < len(many) <= MOST_WITH_MANY_PARAMETERS


def test_parameters_have_types():
    types = [
        x.annotation for of in functions() for x in (*parameters(of), of.vararg, of.kwarg) if x
    ]
    untyped = [type for type in types if type is None or ast.unparse(type) == "Any"]
    assert len(untyped) <= MOST_UNTYPED * len(types)
