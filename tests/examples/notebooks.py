"""Runs notebooks as Jupyter does: `python -m tests.examples.notebooks` writes their outputs anew.

nbclient with a kernel would bring 28 packages; these notebooks are plain Python, without magics.
"""

import ast
import base64
import contextlib
import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import matplotlib

EXAMPLES = Path(__file__).parents[2] / "examples"
NAMES = ("quickstart", "quantize_model", "choose_recipe")
# nbval's name for cells whose output depends on the machine, as times do.
VARIES = "nbval-ignore-output"
NUMBER = re.compile(r"\d+(?:\.(\d+))?(?:e([+-]\d+))?")


def read(name: str) -> dict[str, Any]:
    return json.loads((EXAMPLES / f"{name}.ipynb").read_text(encoding="utf-8"))


def code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def executed(notebook: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """The outputs of each code cell, run in order in one namespace.

    Raises:
      Exception: what a cell raises, with the number of the cell in its traceback.
    """
    matplotlib.use("Agg")
    namespace: dict[str, Any] = {"__name__": "__main__"}
    return [
        _run("".join(cell["source"]), number, namespace)
        for number, cell in enumerate(code_cells(notebook), start=1)
    ]


def _run(source: str, number: int, namespace: dict[str, Any]) -> list[dict[str, Any]]:
    tree = ast.parse(source)
    shown = None
    if isinstance(last := tree.body[-1], ast.Expr) and not source.rstrip().endswith(";"):
        shown = ast.Expression(last.value)
        tree.body.pop()
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(tree, f"<cell {number}>", "exec"), namespace)
        value = eval(compile(shown, f"<cell {number}>", "eval"), namespace) if shown else None
    outputs: list[dict[str, Any]] = []
    if text := printed.getvalue():
        outputs.append({"output_type": "stream", "name": "stdout", "text": _lines(text)})
    if value is not None:
        kind = {"output_type": "execute_result", "execution_count": number, "metadata": {}}
        outputs.append({**kind, "data": {"text/plain": _lines(repr(value))}})
    return [*outputs, *_figures()]


def _figures() -> list[dict[str, Any]]:
    """Open figures, which Jupyter shows below the cell that made them."""
    plt = sys.modules.get("matplotlib.pyplot")
    outputs = []
    for number in plt.get_fignums() if plt else ():
        file = io.BytesIO()
        plt.figure(number).savefig(file, format="png", dpi=100, metadata={"Software": None})
        plt.close(number)
        png = base64.b64encode(file.getvalue()).decode() + "\n"
        data = {"image/png": png, "text/plain": ["<Figure>"]}
        outputs.append({"output_type": "display_data", "data": data, "metadata": {}})
    return outputs


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def difference(old: dict[str, Any], new: dict[str, Any]) -> str | None:
    """Where the texts of two outputs differ; numbers may by one in the last digit, or by 2 %."""
    for name in ("text", "text/plain"):
        one, other = ("".join({**x, **x.get("data", {})}.get(name, "")) for x in (old, new))
        if NUMBER.sub("0", _spaced(one)) != NUMBER.sub("0", _spaced(other)):
            return f"{one!r} is now {other!r}"
        for a, b in zip(NUMBER.finditer(one), NUMBER.finditer(other), strict=True):
            last = 10.0 ** (int(a[2] or 0) - len(a[1] or ""))
            if abs(float(a[0]) - float(b[0])) > max(1.01 * last, 0.02 * float(a[0])):
                return f"{a[0]} is now {b[0]}, in {one!r}"
    return None


def _spaced(text: str) -> str:
    """Columns of a table are as wide as their widest number."""
    return re.sub(r"[ -]+", " ", text)


def main() -> None:
    for name in sys.argv[1:] or NAMES:
        notebook = read(name)
        for number, (cell, outputs) in enumerate(
            zip(code_cells(notebook), executed(notebook), strict=True), start=1
        ):
            cell |= {"execution_count": number, "outputs": outputs}
        text = json.dumps(notebook, indent=1, ensure_ascii=False)
        (EXAMPLES / f"{name}.ipynb").write_text(text + "\n", encoding="utf-8")
        print(EXAMPLES / f"{name}.ipynb")


if __name__ == "__main__":
    main()
