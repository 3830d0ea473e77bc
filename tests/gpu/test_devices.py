"""What four H200s exchange; layouts of products are counted by tests/sharding/test_traffic.py."""

import json
from pathlib import Path

import pytest

from benchmarks.collectives import FEATURES, TOKENS, UNITS
from tests.gpu.tools import NEEDS_COMPILER, run

pytestmark = NEEDS_COMPILER


def test_the_step_of_the_docs(tmp_path: Path):
    """Weights are gathered as codes and scales, their gradient is scattered in bfloat16."""
    peak, flops, moved = json.loads(run("compile_devices.py", tmp_path, "mxfp8"))
    assert peak > 0 and flops is None
    arrays = {key: number for key, number in moved.items() if "all-reduce" not in key}
    assert arrays == {
        "all-gather u8[512,1024]": 1,
        "all-gather u8[16,1024]": 1,
        "reduce-scatter bf16[128,1024]": 1,
    }


@pytest.mark.slow
def test_rows_go_to_their_experts_as_codes(tmp_path: Path):
    """As many rows as there are: what is padded is room on the receiver's side, not on the wire."""
    found = json.loads(run("compile_devices.py", tmp_path, "experts"))
    moved = {(kind, dtype): nbytes for kind, dtype, _, nbytes in found if "all-to-all" in kind}
    rows = TOKENS // 4
    assert moved == {
        ("ragged-all-to-all", "u8"): rows * FEATURES * 17 // 32,
        # y, its cotangent and dx.
        ("ragged-all-to-all", "bf16"): 2 * rows * (2 * UNITS + FEATURES),
    }
