"""What the house weighs: walks, lines and types of geometry, kept in benchmarks/results/structure.

`python -m tests.contracts.structure after` measures the sources as they are, enters them under that
label and writes the page anew. `test_walk.py` holds the walks to the entry made last.
"""

import argparse
import ast
import json
import re
import subprocess
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax

from benchmarks.report import RESULTS, Sheet
from tests.contracts import walk

ROOT = Path(__file__).parents[2]
# Counted by readers before, by the exercises now: each says in its docstring what it touches.
PLACES = (
    ("an element format", "12", "1", "tests/extending/test_element_format.py"),
    ("a scale rule", "8 to 9", "1", "tests/extending/test_scale_rule.py"),
    ("a backend", "6", "1", "tests/extending/test_backend.py"),
    ("a layer, for convert", "5 to 6", "1", "tests/convert/test_registered.py"),
    ("a GPU with kernels of others", "20", "1", "tests/backends/test_pallas_architecture.py"),
    ("a GPU kernel", "20", "2", "tests/backends/test_pallas_architecture.py"),
)
RECORD = RESULTS / "structure.json"
PAGE = RESULTS / "structure.md"

# What says which axes of an operand are batch, kept and contracted, where blocks lie along them and
# in which order they come: class, and the fields or properties that do. One of them alone does not.
GEOMETRY = (
    ("Axes", ""),
    ("ProductAxes", ""),
    ("OperandType", "shape axes"),
    ("Axis", "name block"),
    ("Array", "batch groups axes"),
    ("Geometry", ""),
    ("CastAxes", ""),
    ("Cast", "operands results"),
    ("Entry", "per blocks"),
    ("Groups", ""),
    ("Place", ""),
    ("Side", "shape k_first"),
    ("Static", "num_batch num_k alpha_shape block lhs_k_first columns"),
    ("MatmulCall", "lhs_shape rhs_shape num_batch num_contracting lhs_k_first rhs_k_first"),
    ("PackCall", "shape blocks num_batch contracting kept k_first"),
    ("PackedMXArray", "kept k k_first"),
    ("GpuWeights", "kept k k_first"),
    ("PackedWeights", "kept k k_first shape"),
)


def measure() -> dict[str, Any]:
    """All the numbers, of the sources as they are."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short=12", "HEAD"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return {
        "commit": commit.stdout.strip(),
        "jax": jax.__version__,
        "walks": {name: walk.take(name).counts() for name in walk.names()},
        "lines": lines(),
        "geometry": geometry(),
        "k_first": _mentions("k_first"),
    }


def lines() -> dict[str, int]:
    """Lines of Python and C++ by folder, those of files beside the folders under the parent."""
    found: Counter[str] = Counter()
    for path in _sources("mx_jax", ("*.py",)):
        found[str(path.relative_to(ROOT).parent)] += _num_lines(path)
    for path in _sources(
        "custom_calls", ("*.cc", "*.h", "*.inc", "*.py", "CMakeLists.txt", "*.cmake")
    ):
        inside = path.relative_to(ROOT).parts
        found["/".join(inside[:2]) if len(inside) > 2 else inside[0]] += _num_lines(path)
    return dict(sorted(found.items()))


def geometry() -> list[str]:
    """The types of `GEOMETRY` that stand in mx_jax: file, class and what of it is geometry."""
    found = []
    for path in _sources("mx_jax", ("*.py",)):
        for node in ast.walk(ast.parse(path.read_text())):
            for name, fields in GEOMETRY if isinstance(node, ast.ClassDef) else ():
                if node.name == name:
                    here = _names(node) if not fields else _names(node) & set(fields.split())
                    place = path.relative_to(ROOT / "mx_jax")
                    if len(here) > 1 or not fields:
                        found.append(f"`{name}` ({place}): {', '.join(sorted(here))}")
    return sorted(found)


def _names(node: ast.ClassDef) -> set[str]:
    """Fields, properties and what methods set."""
    found = set()
    for part in ast.walk(node):
        in_body = part in node.body
        if in_body and isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
            found.add(part.target.id)
        elif isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store):
            found.add(part.attr)
        elif isinstance(part, ast.FunctionDef) and any(
            ast.unparse(decorator).endswith("property") for decorator in part.decorator_list
        ):
            found.add(part.name)
    return found


def _mentions(word: str) -> dict[str, int]:
    texts = [path.read_text() for path in _sources("mx_jax", ("*.py",))]
    counts = [sum(bool(re.search(word, line)) for line in text.splitlines()) for text in texts]
    return {"lines": sum(counts), "files": sum(count > 0 for count in counts)}


def _sources(folder: str, patterns: Iterable[str]) -> list[Path]:
    found = (path for pattern in patterns for path in (ROOT / folder).rglob(pattern))
    return sorted(path for path in found if "__pycache__" not in path.parts)


def _num_lines(path: Path) -> int:
    return len(path.read_text().splitlines())


def committed() -> dict[str, Any]:
    """Every entry, by its label."""
    return json.loads(RECORD.read_text()) if RECORD.exists() else {}


def sheets(record: dict[str, Any]) -> list[Sheet]:
    """The page's tables; what stands for two entries reads `first -> second`."""
    entries = list(record.values())

    def row(name: str, *path: str) -> str:
        values = []
        for entry in entries:
            value: Any = entry
            for key in (*path, name):
                value = value.get(key, "-") if isinstance(value, dict) else "-"
            values.append(str(value))
        return " -> ".join(values)

    walks = Sheet("From a call to the kernel", ["walk", *walk.COLUMNS], notes=[_definitions()])
    for name in dict.fromkeys(name for entry in entries for name in entry["walks"]):
        walks.rows.append([name, *(row(column, "walks", name) for column in walk.COLUMNS)])
    folders = Sheet("Lines by folder", ["folder", "lines"])
    for folder in sorted({folder for entry in entries for folder in entry["lines"]}):
        folders.rows.append([folder, row(folder, "lines")])
    sums = [
        [sum(v for k, v in e["lines"].items() if k.startswith(top)) for e in entries]
        for top in _TOPS
    ]
    folders.rows += [
        [f"all of {top}", " -> ".join(map(str, s))] for top, s in zip(_TOPS, sums, strict=True)
    ]
    places = Sheet("Places to touch for something new", ["new", "before", "now", "exercise"])
    places.rows += PLACES
    words = Sheet("`k_first` in mx_jax", ["", "number"])
    words.rows += [[what, row(what, "k_first")] for what in ("lines", "files")]
    return [walks, folders, places, words]


_TOPS = ("mx_jax", "custom_calls")


def _definitions() -> str:
    return str(walk.__doc__).partition("\n\n")[2].strip()


def page(record: dict[str, Any]) -> str:
    """The page, from every entry."""
    made = "; ".join(
        f"{label}: commit {e['commit']}, jax {e['jax']}" for label, e in record.items()
    )
    parts = ["# tests.contracts.structure", "", f"{made}.", ""]
    parts += [sheet.markdown() for sheet in sheets(record)]
    parts += ["## Types that describe the geometry of an operand", ""]
    for label, entry in record.items():
        parts += [
            f"{label}, {len(entry['geometry'])}:",
            "",
            *(f"- {t}" for t in entry["geometry"]),
            "",
        ]
    return "\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.contracts.structure", description=str(__doc__)
    )
    parser.add_argument("label", help="of the entry that is made or replaced, e.g. before or after")
    record = committed() | {parser.parse_args().label: measure()}
    RECORD.write_text(json.dumps(record, indent=1) + "\n")
    PAGE.write_text(page(record))
    print(page(record))


if __name__ == "__main__":
    main()
