"""Every public class and function has an example, and the doctests find it."""

import ast
import doctest
import functools
import importlib
import inspect
import re
import sys
from pathlib import Path
from typing import Any

from tests.contracts.test_public_names import PUBLIC

ROOT = Path(__file__).parents[2]
# Names that pages of the reference show, some by the module that they lie in.
SHOWN = re.compile(r"^::: (mx_jax\S*)\.(\w+)$", re.MULTILINE)


def public() -> dict[str, Any]:
    """What is pinned, and what the reference shows of `nn.linen` and `nn.nnx`."""
    pages = (page.read_text() for page in sorted((ROOT / "docs" / "api").glob("*.md")))
    names = {pair for page in pages for pair in SHOWN.findall(page)}
    names |= {(module, name) for module, known in PUBLIC.items() for name in known}
    # `mx_jax.inspect.capture` is a module and, in its package, a function.
    modules = {module: importlib.import_module(module) for module, _ in names}
    return {f"{module}.{name}": getattr(modules[module], name) for module, name in names}


@functools.cache
def names_with_examples(module: str) -> frozenset[str]:
    """Names of a module of which doctest runs an example."""
    tests = doctest.DocTestFinder().find(sys.modules[module])
    return frozenset(test.name for test in tests if runs(test))


def runs(test: doctest.DocTest) -> bool:
    return any(not example.options.get(doctest.SKIP) for example in test.examples)


def described(names: dict[str, Any]) -> dict[str, Any]:
    """Classes and functions of this library among them."""
    kept = {name: x for name, x in names.items() if inspect.isclass(x) or inspect.isroutine(x)}
    # A policy for jax.checkpoint is JAX's function, described where it is assigned.
    return {name: x for name, x in kept.items() if x.__module__.startswith(("mx_jax", "tests"))}


def below_assignments() -> list[str]:
    """What is said of values below them, which doctest does not look at, if it has an example."""
    bodies = [ast.parse(path.read_text()).body[1:] for path in (ROOT / "mx_jax").rglob("*.py")]
    texts = [ast.get_docstring(ast.Module([node], [])) for body in bodies for node in body]
    return [text for text in texts if text and ">>>" in text]


def test_every_public_name_has_an_example():
    names = public()
    assert len(names) > 180, "not much is public"
    assert [
        name
        for name, x in described(names).items()
        if f"{x.__module__}.{x.__qualname__}" not in names_with_examples(x.__module__)
    ] == []


def test_the_reference_shows_them():
    pages = "".join(page.read_text() for page in (ROOT / "docs" / "api").glob("*.md"))
    shown = {name for _, name in SHOWN.findall(pages)}
    assert "mxfp8" in shown and "no_such_name" not in shown
    assert {name.rpartition(".")[2] for name in described(public())} - shown == set()


def test_examples_of_values():
    (save_quantized,) = below_assignments()
    test = doctest.DocTestParser().get_doctest(save_quantized, {}, "save_quantized", None, 0)
    assert len(test.examples) > 3 and doctest.DocTestRunner(verbose=False).run(test).failed == 0
