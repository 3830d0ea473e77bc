"""Sizes of the code by folder, of two checkouts beside each other, as a table in Markdown.

    git worktree add /tmp/before 9e91af4
    python -m tests.contracts.sizes /tmp/before .

Import lines are counted among those of code.
"""

import ast
import sys
from collections import Counter
from pathlib import Path


def sizes(root: Path) -> dict[str, Counter[str]]:
    """Counts by folder of the package; of tests and docs as wholes."""
    found: dict[str, Counter[str]] = {}
    for file in sorted([*root.glob("mx_jax/**/*.py"), *root.glob("tests/**/*.py")]):
        top, *inner = file.relative_to(root).parts
        name = f"{top}/{inner[0]}/" if top == "mx_jax" and len(inner) > 1 else f"{top}/"
        found.setdefault(name, Counter()).update(_of_file(file))
    pages = sorted(root.glob("docs/**/*.md"))
    words = sum(len(page.read_text().split()) for page in pages)
    return found | {"docs/": Counter(files=len(pages), words=words)}


def _of_file(file: Path) -> Counter[str]:
    text = file.read_text()
    nodes = [*ast.walk(ast.parse(text))]
    texts = [
        node
        for node in nodes
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    ]
    imports = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
    written = {i for i, line in enumerate(text.splitlines(), 1) if line.strip(" ")[:1] not in "#"}
    types = _types(nodes)
    return Counter(
        files=1,
        lines=len(text.splitlines()),
        imports=len(_lines(imports)),
        code=len(written - _lines(texts)),
        parameters=len(types),
        untyped=sum(type in (None, "Any") for type in types),
    )


def _lines(nodes: list[ast.Expr] | list[ast.stmt]) -> set[int]:
    return {i for node in nodes for i in range(node.lineno, (node.end_lineno or 0) + 1)}


def _types(nodes: list[ast.AST]) -> list[str | None]:
    """Of parameters, as written; None of bare ones."""
    arguments = [node.args for node in nodes if isinstance(node, ast.FunctionDef)]
    given = [a for own in arguments for a in (*own.posonlyargs, *own.args, *own.kwonlyargs)]
    given += [a for own in arguments for a in (own.vararg, own.kwarg) if a is not None]
    found = [a.annotation for a in given if a.arg not in ("self", "cls")]
    return [None if type is None else ast.unparse(type) for type in found]


def _cells(counts: Counter[str]) -> list[str]:
    shares = (("imports", "code"), ("untyped", "parameters"))
    percents = [
        f"{100 * counts[of] / counts[all]:.1f}" if counts[all] else "" for of, all in shares
    ]
    return [f"{counts[name]:,}" if counts[name] else "" for name in ("files", "lines", "words")] + [
        *percents
    ]


def main(before: Path, after: Path) -> None:
    """Print the table."""
    old, new = sizes(before), sizes(after)
    for each in (old, new):
        package = (counts for name, counts in each.items() if name.startswith("mx_jax"))
        each["mx_jax, all"] = sum(package, Counter[str]())
    print(
        "| folder | files | lines | words | imports, % of code | `Any` or bare, % of parameters |"
    )
    print("|---|---|---|---|---|---|")
    for name in sorted(old | new):
        pairs = zip(_cells(old.get(name, Counter())), _cells(new.get(name, Counter())), strict=True)
        cells = (f"{one or '-'} -> {other or '-'}" * bool(one or other) for one, other in pairs)
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
