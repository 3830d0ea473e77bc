"""The way from a call to its equation stays short."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import mx_jax
from tests.contracts import walk
from tests.needs import needs_library

pytestmark = needs_library

ROOT = Path(__file__).parents[2]
# Frames are counted too, but each small function is one.
LIMITS = {
    "dense_forward": {"depth": 9, "way files": 7, "files": 39, "changes": 105},
    "dense_backward": {"depth": 9, "way files": 7, "files": 46, "changes": 324},
    "packed_product": {"depth": 8, "way files": 5, "files": 30, "changes": 110},
    "pallas_product": {"depth": 10, "way files": 7, "files": 45, "changes": 290},
}


def longer(measured: dict[str, dict[str, int]]) -> list[str]:
    """What exceeds its limit."""
    return [
        f"{name}: {what}={counts[what]}, limit {limit}"
        for name, counts in measured.items()
        for what, limit in LIMITS[name].items()
        if counts[what] > limit
    ]


def test_no_walk_exceeds_its_limits():
    # A process of its own: what other tests import and patch leaves no trace there.
    run = subprocess.run(
        [sys.executable, "-W", "error", "-m", "tests.contracts.walk", "--json"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    measured = json.loads(run.stdout)
    assert set(measured) == set(walk.names())
    assert longer(measured) == []


def test_a_longer_walk_is_noticed():
    assert longer(LIMITS) == []
    for what, limit in LIMITS["dense_forward"].items():
        counts = LIMITS["dense_forward"] | {what: limit + 1}
        assert longer({"dense_forward": counts}) == [
            f"dense_forward: {what}={limit + 1}, limit {limit}"
        ]


@pytest.mark.slow
def test_a_walk_is_the_same_each_time():
    def cast() -> None:
        with mx_jax.testing.target("cpu"):
            jax.jit(lambda x: mx_jax.quantize(x, "mxfp4")).trace(jnp.ones((2, 32)))

    first, second = walk.record(cast), walk.record(cast)
    assert first == second
    assert first.way[0] == ("ops/quantize.py", "quantize")
    assert first.way[-1] == ("backends/primitive.py", "Bound.__call__")
    counts = first.counts()
    assert counts["depth"] == len(first.way) < counts["frames"]
    assert counts["way files"] < counts["files"] < counts["changes"] < counts["frames"]


def test_without_a_call_there_is_no_walk():
    with pytest.raises(RuntimeError, match="no call was bound"):
        walk.record(lambda: jax.jit(lambda x: x + 1).trace(jnp.ones(32)))


def test_counts_and_drawing():
    way = (("ops/a.py", "call"), ("ops/a.py", "inner"), ("backends/b.py", "run"))
    entered = ("ops/a.py", "formats/c.py", "ops/a.py", "ops/a.py", "backends/b.py")
    found = walk.Walk(way=way, entered=entered)
    assert found.counts() == {"depth": 3, "way files": 2, "frames": 5, "files": 3, "changes": 3}
    assert walk.draw(found).splitlines() == [
        " 1 ops/a.py: call",
        " 2             inner",
        " 3     backends/b.py: run",
    ]
