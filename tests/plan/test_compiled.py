"""What a plan says moves is what programs for H200s move, compiled on a machine without one."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu import test_compile
from tests.plan.test_traffic import SETUPS

SCRIPT = Path(__file__).with_name("compile_for_gpus.py")
pytestmark = [*test_compile.pytestmark, pytest.mark.slow]


def test_plans_are_what_programs_for_h200s_move(tmp_path: Path):
    """As on CPUs: shards that cut blocks exchange their maxima, and move no value."""
    own = test_compile.environment(tmp_path)
    run = subprocess.run(
        [sys.executable, str(SCRIPT)], env=own, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert len(run.stdout.splitlines()) == 3 * len(SETUPS)
