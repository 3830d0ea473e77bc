"""What programs may cost on TPUs, by libtpu's schedule: no plain form comes back unseen."""

import importlib.util
import json
import os
from pathlib import Path

import pytest

from tests.processes import ROOT, printed

pytestmark = [
    pytest.mark.tpu,
    pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu"),
]

# Thousands of bundles, and MiB to and from memory: 3 % above benchmarks/results/tpu/.
BUDGETS = {
    "v6e": {
        "product": (278.7, 96.1),
    },
}


@pytest.mark.parametrize("device", BUDGETS)
def test_budgets(device: str, tmp_path: Path):
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    options = ["--devices", device, "--programs", *BUDGETS[device], "--out", tmp_path / "of.json"]
    printed("-m", "benchmarks.tpu", *options, PYTHONPATH=paths)
    rows = json.loads((tmp_path / "of.json").read_text())["rows"]
    costs = {
        row["program"]: (row["bundles"] / 1e3, (row["read"] + row["written"]) / 2**20)
        for row in rows
    }
    over = {
        name: (cost, BUDGETS[device][name])
        for name, cost in costs.items()
        if any(x > most for x, most in zip(cost, BUDGETS[device][name], strict=True))
    }
    assert set(costs) == set(BUDGETS[device]) and not over
