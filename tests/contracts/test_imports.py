"""The walls of docs/architecture.md stand, and each of them can fall.

The contracts themselves are in pyproject.toml, under `tool.importlinter`.
"""

import graphlib
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import grimp

from tests.processes import ROOT, run_python

TOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
CONTRACTS = TOOLS["importlinter"]["contracts"]

# For each contract: modules that get a line (made where they are missing), which breaks it.
VIOLATIONS = {
    "layers": {
        "formats/planted.py": "from mx_jax import codecs",
        "ops/planted.py": "from mx_jax import recipes",
        "nn/planted.py": "from mx_jax import inspect",
        "planted.py": '"""A layer that nobody listed."""',
        "reference/planted.py": "def late():\n    from mx_jax import ops",
    },
    "backends-are-independent": {
        "backends/target.py": "from mx_jax.backends import select",
        "backends/reference.py": "from mx_jax.backends import select",
        "backends/planted.py": '"""A backend that nobody listed."""',
    },
    "backends-behind-ops": {
        "nn/eager.py": "from mx_jax.backends import select",
        "recipes/planted.py": "from mx_jax.backends import target",
    },
    "formats-without-jax": {
        "formats/traced.py": "import jax.numpy as jnp",
        "formats/layers.py": "import flax",
    },
    "flax-only-in-nn": {"ops/layers.py": "import flax.linen as nn"},
    "no-pytest": {"ops/tested.py": "import pytest"},
    "nobody-imports-the-front-door": {"codecs/planted.py": "import mx_jax"},
}


# An editable install answers for the package before any path is looked at.
PROGRAM = """
import sys
sys.meta_path = [f for f in sys.meta_path if type(f).__name__ != "ScikitBuildRedirectingFinder"]
from importlinter.cli import lint_imports_command as run
run()
"""


def lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    """Run import-linter on the package and the contracts that lie in `folder`."""
    return run_python("-c", PROGRAM, "--no-logo", "--no-cache", cwd=folder, COLUMNS="200")


def test_contracts_hold():
    result = lint_imports(ROOT)
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"Contracts: {len(CONTRACTS)} kept, 0 broken." in result.stdout


def test_planted_violations_are_reported(tmp_path: Path):
    """Each by its contract, in a copy of the package."""
    shutil.copytree(
        ROOT / "mx_jax", tmp_path / "mx_jax", ignore=shutil.ignore_patterns("__pycache__")
    )
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for module, line in (pair for planted in VIOLATIONS.values() for pair in planted.items()):
        with (tmp_path / "mx_jax" / module).open("a") as file:
            file.write(f"\n{line}\n")
    text = lint_imports(tmp_path).stdout
    assert f"Contracts: 0 kept, {len(CONTRACTS)} broken." in text
    reports = text.partition("Broken contracts\n")[2]
    for contract in CONTRACTS:
        rest = reports.partition(f"\n{contract['name']}\n")[2]
        report = re.split(r"^-{10,}$", rest, flags=re.MULTILINE)[1]
        for module in VIOLATIONS[contract["id"]]:
            name = module.removesuffix(".py").replace("/", ".")
            violation = rf"^- +mx_jax\.{name}( ->.*)?$"
            assert re.search(violation, report, re.MULTILINE), f"{contract['id']}, {name}: {text}"


def circle(graph: grimp.ImportGraph) -> list[str]:
    """Modules that import each other in turn, late imports included; none if there are none."""
    imported = {m: graph.find_modules_directly_imported_by(m) for m in graph.modules}
    try:
        graphlib.TopologicalSorter(imported).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return []


def test_no_imports_go_in_a_circle():
    graph = grimp.build_graph("mx_jax", cache_dir=None)
    assert circle(graph) == []
    # Two modules of one layer, where no contract says which is the lower.
    graph.add_import(
        importer="mx_jax.backends.pallas_gpu.layouts",
        imported="mx_jax.backends.pallas_gpu.tiles",
    )
    assert "mx_jax.backends.pallas_gpu.layouts" in circle(graph)
