"""The project grows no further: what is added takes the place of something; and says its types."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# They only go down, but for the kernels for TPUs that mx_jax got since it was at 36,000; docs/ and
# README in words, the others in lines. See sizes.md.
MOST = {
    "mx_jax/**/*.py": 36_420,
    "tests/**/*.py": 40_930,
    "custom_calls/**/*.cc": 3_640,
    "custom_calls/**/*.h": 9_360,
    "docs/*.md": 33_950,
    "README.md": 1_040,
}
MOST_FILES = 135
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


def test_files():
    assert len([*ROOT.glob("mx_jax/**/*.py")]) <= MOST_FILES


def test_parameters_have_types():
    types: list[ast.expr | None] = []
    for file in ROOT.glob("mx_jax/**/*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                of = node.args
                parameters = [*of.posonlyargs, *of.args, *of.kwonlyargs, of.vararg, of.kwarg]
                types += [x.annotation for x in parameters if x and x.arg not in ("self", "cls")]
    untyped = [type for type in types if type is None or ast.unparse(type) == "Any"]
    assert len(untyped) <= MOST_UNTYPED * len(types)
