"""The walls of docs/architecture.md stand, and each of them can fall.

The contracts themselves are in pyproject.toml, under `tool.importlinter`.
"""

import graphlib
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).parents[2]
TOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
CONTRACTS = TOOLS["importlinter"]["contracts"]

# contract, module that gets the line (made where it is missing), line that breaks the contract
VIOLATIONS = [
    ("layers", "formats/planted.py", "from mx_jax import codecs"),
    ("layers", "ops/planted.py", "from mx_jax import recipes"),
    ("layers", "nn/planted.py", "from mx_jax import inspect"),
    ("layers", "planted.py", '"""A layer that nobody listed."""'),
    ("layers", "reference/planted.py", "def late():\n    from mx_jax import ops"),
    ("backends-are-independent", "backends/target.py", "from mx_jax.backends import select"),
    ("backends-are-independent", "backends/reference.py", "from mx_jax.backends import select"),
    ("backends-are-independent", "backends/planted.py", '"""A backend that nobody listed."""'),
    ("backends-behind-ops", "nn/planted.py", "from mx_jax.backends import select"),
    ("backends-behind-ops", "recipes/planted.py", "from mx_jax.backends import target"),
    ("formats-without-jax", "formats/planted.py", "import jax.numpy as jnp"),
    ("formats-without-jax", "formats/planted.py", "import flax"),
    ("flax-only-in-nn", "ops/planted.py", "import flax.linen as nn"),
    ("pytest-only-in-testing", "ops/planted.py", "import pytest"),
    ("nobody-imports-the-front-door", "codecs/planted.py", "import mx_jax"),
]


# An editable install answers for the package before any path is looked at.
PROGRAM = """
import sys
sys.meta_path = [f for f in sys.meta_path if type(f).__name__ != "ScikitBuildRedirectingFinder"]
from importlinter.cli import lint_imports_command as run
run()
"""


def lint_imports(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run import-linter on the package and the contracts that lie in `folder`."""
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, "--no-logo", "--no-cache", *options],
        cwd=folder,
        env=os.environ | {"COLUMNS": "200", "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A folder with a copy of the package and of its contracts."""
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "mx_jax", tmp_path / "mx_jax", ignore=ignore)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def test_contracts_hold():
    result = lint_imports(ROOT)
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"Contracts: {len(CONTRACTS)} kept, 0 broken." in result.stdout


@pytest.mark.parametrize(
    ("contract", "module", "line"),
    VIOLATIONS,
    ids=[f"{contract}-{n}" for n, (contract, _, _) in enumerate(VIOLATIONS)],
)
def test_planted_violation_fails(copy: Path, contract: str, module: str, line: str):
    path = copy / "mx_jax" / module
    before = path.read_text() if path.exists() else ""
    path.write_text(f"{before}\n{line}\n")
    result = lint_imports(copy, "--contract", contract)
    assert result.returncode == 1, result.stdout + result.stderr
    assert "Contracts: 0 kept, 1 broken." in result.stdout, result.stdout + result.stderr


def test_copy_without_violation_passes(copy: Path):
    assert lint_imports(copy).returncode == 0


def test_every_contract_has_a_violation():
    assert {contract["id"] for contract in CONTRACTS} == {contract for contract, _, _ in VIOLATIONS}


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
        imported="mx_jax.backends.pallas_gpu.architecture",
    )
    assert "mx_jax.backends.pallas_gpu.layouts" in circle(graph)
