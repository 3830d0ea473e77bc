"""What a plan says moves is what programs for H200s move, compiled on a machine without one."""

from pathlib import Path

import pytest

from tests.gpu.tools import NEEDS_COMPILER, run
from tests.plan.test_traffic import SETUPS

SCRIPT = Path(__file__).with_name("compile_for_gpus.py")
pytestmark = [*NEEDS_COMPILER, pytest.mark.slow]


def test_plans_are_what_programs_for_h200s_move(tmp_path: Path):
    """As on CPUs: shards that cut blocks exchange their maxima, and move no value."""
    assert len(run(SCRIPT, tmp_path).splitlines()) == 3 * len(SETUPS)
