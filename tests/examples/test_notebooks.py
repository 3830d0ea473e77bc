"""Notebooks run from the first cell to the last, and show what is committed; scripts run too."""

import importlib.util
import re
import subprocess
import sys
import types
from typing import Any

import numpy as np
import pytest

from tests.contracts.test_docs import broken_links
from tests.examples import notebooks
from tests.processes import ROOT, printed

for package in ("optax", "sklearn", "tqdm"):
    pytest.importorskip(package)


@pytest.mark.slow
@pytest.mark.parametrize("name", notebooks.NAMES)
def test_outputs_are_the_committed_ones(name: str):
    cells = notebooks.code_cells(notebooks.read(name))
    results = notebooks.executed(notebooks.read(name))
    compared = 0
    for cell, outputs in zip(cells, results, strict=True):
        assert len(outputs) == len(cell["outputs"]), cell["source"]
        if notebooks.VARIES in cell["metadata"].get("tags", ()):
            continue
        for old, new in zip(cell["outputs"], outputs, strict=True):
            assert notebooks.difference(old, new) is None, "python -m tests.examples.notebooks"
            compared += 1
    assert compared >= 1


@pytest.mark.parametrize("name", notebooks.NAMES)
def test_each_is_short_linked_and_has_been_run(name: str):
    notebook = notebooks.read(name)
    text = "".join("".join(cell["source"]) for cell in notebook["cells"])
    assert "docs/" in text and not broken_links(ROOT / "examples" / f"{name}.ipynb", text)
    assert 8 <= len(notebook["cells"]) <= 14
    counts = [cell["execution_count"] for cell in notebooks.code_cells(notebook)]
    assert counts == list(range(1, len(counts) + 1))
    for page in ("README.md", "docs/index.md"):
        assert f"{name}.ipynb" in (ROOT / page).read_text(encoding="utf-8")


@pytest.mark.parametrize("plugins", [(), ("jax_cuda12_plugin",), ("jax_cuda13_plugin",)])
def test_the_install_cell(plugins: tuple[str, ...], monkeypatch: pytest.MonkeyPatch):
    """Of a machine without mx_jax: the clone, and JAX's plugin for GPUs if one is there.

    A clone in a folder on the path, as Colab's, is a namespace package of that name.
    """
    sources = {
        "".join(notebooks.code_cells(notebooks.read(name))[0]["source"]) for name in notebooks.NAMES
    }
    (source,) = sources
    commands: list[Any] = []
    monkeypatch.chdir(ROOT / "examples")
    monkeypatch.setattr(subprocess, "run", lambda command, check: commands.append(command))
    exec(source, {})
    assert not commands, "mx_jax is there"
    specs = dict.fromkeys(plugins, "there") | {"mx_jax": types.SimpleNamespace(origin=None)}
    monkeypatch.setattr(importlib.util, "find_spec", specs.get)
    exec(source, {})
    extras = [name.replace("jax_", "jax[").replace("_plugin", "]") for name in plugins]
    pip = [sys.executable, "-m", "pip", "install", "-q"]
    assert commands == [[*pip, f"{ROOT}[examples]", *extras]]
    monkeypatch.setattr(np, "__version__", "1.0")
    with pytest.raises(RuntimeError, match="numpy was updated: restart the session"):
        exec(source, {})
    monkeypatch.chdir("/")
    with pytest.raises(AssertionError, match="no clone of mx_jax in /"):
        exec(source, {})


# A script: FSDP on virtual devices.


@pytest.mark.slow
def test_codes_travel_and_the_loss_falls():
    text = printed("examples/train_sharded.py", *"--processes 2 --steps 6 --recipe mxfp4".split())
    whole, share = map(float, re.findall(r"\(([\d.]+) of plain JAX's\)", text))
    assert whole == 1 and share <= 0.4
    assert re.search(r"mxfp4 .* as u8", text) and not re.search(r"float32 .* as u8", text)
    before, after = map(float, re.findall(r"step +\d+  loss ([\d.]+)", text))
    assert after < before - 0.2
