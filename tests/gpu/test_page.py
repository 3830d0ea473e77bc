"""The step that docs/sharding.md compiles for devices that are not there, for four H200s."""

import json
from pathlib import Path

from tests.gpu.tools import NEEDS_COMPILER, run

pytestmark = NEEDS_COMPILER


def test_the_step_of_the_docs(tmp_path: Path):
    """Weights are gathered as codes and scales, their gradient is scattered in bfloat16."""
    peak, flops, moved = json.loads(run("compile_page.py", tmp_path, "mxfp8"))
    assert peak > 0 and flops is None
    arrays = {key: number for key, number in moved.items() if "all-reduce" not in key}
    assert arrays == {
        "all-gather u8[512,1024]": 1,
        "all-gather u8[16,1024]": 1,
        "reduce-scatter bf16[128,1024]": 1,
    }
