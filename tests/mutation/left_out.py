"""What of a module is not mutated, since it says nothing about numbers."""

import ast
import re

Position = tuple[int, int]


def left_out(source: str) -> list[tuple[Position, Position]]:
    """Stretches of a source, (line, column) each, that say nothing about numbers.

    Annotations, what is raised (not the condition for it), formatted text, reprs, docstrings,
    the bare star of a signature, and `strict=` of zip, which speaks of errors.
    """
    found: list[ast.AST] = []
    for node in ast.walk(ast.parse(source)):
        formatted = isinstance(node, ast.Raise | ast.JoinedStr)
        shown = isinstance(node, ast.FunctionDef) and node.name in ("__repr__", "__str__")
        strict = isinstance(node, ast.keyword) and node.arg == "strict"
        docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        parts = (getattr(node, field, None) for field in ("annotation", "returns"))
        found += [node] * (formatted or shown or docstring or strict) + [
            part for part in parts if part
        ]
    stretches = [_stretch(node, source.splitlines()) for node in found]
    stars = re.finditer(r"(?:^\s*|\(|, )(\*),\s", source, re.MULTILINE)
    for star in stars:
        line = source.count("\n", 0, star.start(1))
        column = star.start(1) - source.rfind("\n", 0, star.start(1)) - 1
        stretches.append(((line + 1, column), (line + 1, column + 1)))
    return stretches


def _stretch(node: ast.AST, lines: list[str]) -> tuple[Position, Position]:
    """Where a node lies, with columns in characters, as parso counts them; ast counts bytes."""

    def column(line: int, offset: int) -> int:
        return len(lines[line - 1].encode()[:offset].decode())

    first, last = node.lineno, node.end_lineno  # pyright: ignore
    return (first, column(first, node.col_offset)), (last, column(last, node.end_col_offset))  # pyright: ignore
