"""The way from a call to the kernel gets no longer than it is recorded."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import mx_jax
from tests.contracts import structure, walk
from tests.needs import needs_library

pytestmark = needs_library


ROOT = Path(__file__).parents[2]
# Frames are counted too, but each small function is one.
HELD = ("depth", "way files", "files", "changes")


def longer(measured: dict[str, dict[str, int]], recorded: dict[str, dict[str, int]]) -> list[str]:
    """What exceeds the record."""
    return [
        f"{name}: {what}={counts[what]}, recorded {recorded[name][what]}"
        for name, counts in measured.items()
        for what in HELD
        if counts[what] > recorded[name][what]
    ]


def test_no_walk_is_longer_than_recorded():
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
    *_, last = structure.committed().values()
    assert set(measured) == set(walk.names())
    assert longer(measured, last["walks"]) == [], (
        "shorten the way, or record why it pays: python -m tests.contracts.structure LABEL"
    )


def test_a_longer_walk_is_noticed():
    *_, last = structure.committed().values()
    walks = last["walks"]
    assert longer(walks, walks) == []
    for what in HELD:
        counts = walks["dense_forward"] | {what: walks["dense_forward"][what] + 1}
        (complaint,) = longer(walks | {"dense_forward": counts}, walks)
        assert complaint.startswith(f"dense_forward: {what}={counts[what]}")


@pytest.mark.slow
def test_a_walk_is_the_same_each_time():
    def cast() -> None:
        with mx_jax.testing.target("cpu"):
            jax.jit(lambda x: mx_jax.quantize(x, "mxfp4")).trace(jnp.ones((2, 32)))

    first, second = walk.record(cast), walk.record(cast)
    assert first == second
    assert first.way[0] == ("ops/quantize.py", "quantize")
    assert first.way[-1][0].startswith("backends/cpu_ffi/")
    counts = first.counts()
    assert counts["depth"] == len(first.way) < counts["frames"]
    assert counts["way files"] < counts["files"] < counts["changes"] < counts["frames"]


def test_without_a_kernel_there_is_no_walk():
    with (
        mx_jax.only_backend("reference"),
        pytest.raises(RuntimeError, match="no kernel was called"),
    ):
        walk.record(lambda: jax.jit(lambda x: mx_jax.quantize(x, "mxfp4")).trace(jnp.ones(32)))


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


def test_the_page_is_what_was_recorded():
    assert structure.PAGE.read_text() == structure.page(structure.committed())
