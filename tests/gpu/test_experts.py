"""What four H200s exchange for experts, read from a module compiled ahead of time: needs no GPU.

Layouts of products are counted by tests/sharding/test_traffic.py, as the compiler splits them.
"""

import json
from pathlib import Path

import pytest

from tests.gpu.tools import NEEDS_COMPILER, run

# What compile_experts.py multiplies by.
TOKENS, FEATURES, UNITS = 256, 512, 1024

pytestmark = [*NEEDS_COMPILER, pytest.mark.slow]


def test_rows_go_to_their_experts_as_codes(tmp_path: Path):
    """As many rows as there are: what is padded is room on the receiver's side, not on the wire."""
    found = json.loads(run("compile_experts.py", tmp_path, "sm_90a"))
    moved = {(kind, dtype): nbytes for kind, dtype, _, nbytes in found if "all-to-all" in kind}
    room, rows = TOKENS, TOKENS // 4
    assert moved == {
        ("ragged-all-to-all", "u8"): room * FEATURES * 17 // 32,
        # y, its cotangent and dx.
        ("ragged-all-to-all", "bf16"): 2 * (rows * UNITS + room * UNITS + rows * FEATURES),
    }
