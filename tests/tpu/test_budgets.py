"""What programs may cost on TPUs, by libtpu's schedule: no plain form comes back unseen."""

import importlib.util
import json
from pathlib import Path

import pytest

from tests.processes import printed

pytestmark = [
    pytest.mark.tpu,
    pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu"),
]

# Thousands of bundles, and MiB to and from memory: 3 % above benchmarks/results/tpu/.
BUDGETS = {
    "v6e": {
        "product": (279, 99),
        "copy": (92, 528),
        "cast-1": (89, 50),
        "cast0": (59, 50),
        "cast-both": (146, 67),
        "step-mxfp8": (379, 82),
        "step-int8_rowwise": (228, 107),
        "packed-mxfp4-1": (43, 35),
        "packed-mxfp8-1": (64, 68),
        "packed-nvfp4-1": (45, 37),
        "packed-mxfp4-16": (65, 36),
        "packed-mxfp8-16": (87, 69),
        "weights-mxfp4-1": (272, 68),
    },
    "tpu7x": {
        "step-float8_tensorwise": (207, 124),
        "packed-mxfp8-1": (33, 68),
    },
}


@pytest.mark.parametrize("device", BUDGETS)
def test_budgets(device: str, tmp_path: Path):
    """Of a v6e more is known: 262,144 multiply-adds a cycle, and a copy's bytes."""
    options = ["--devices", device, "--programs", *BUDGETS[device], "--out", tmp_path / "of.json"]
    shown = printed("-m", "benchmarks.tpu", *options)
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
    if device == "v6e":
        product, copy = (row for row in rows if row["program"] in ("product", "copy"))
        assert 1 <= product["bundles"] / (4096**3 / 262_144) < 1.1 and product["unit"] == "MATMUL"
        assert copy["read"] == copy["written"] == 2**28 and copy["unit"] == "HBM"
        assert not product["doubt"] + copy["doubt"] and "bfloat16 product 4096^3" in shown
