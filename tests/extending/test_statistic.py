"""A statistic of captures from outside: one row, and sinks, joins, findings and plots follow.

Places to touch: one, the row (before: 12 to 14).
"""

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mx_jax
from mx_jax import inspect
from mx_jax.inspect import statistics
from mx_jax.inspect.statistics import Column, Plot, Statistic
from tests.quick import quick

X = np.random.default_rng(0).normal(size=(3, 8, 64)).astype(np.float32)
CHANGED = Statistic(
    name="changed",
    arrays=lambda before, after, axis: {
        "changed": jnp.sum(before != after.dequantize(), dtype=jnp.uint32)
    },
    joins={"changed": "sum"},
    of=lambda raw: {"changed": int(raw["changed"]) / int(raw["size"])},
    columns=(Column("changed", "changed"),),
    finding=lambda stats, first: (
        stats["changed"] > 0.5 and f"changes {stats['changed']:.0%} of its values"
    ),
    plot=Plot("Changed values by layer", "changed", "share", -1),
    needs_before=True,
)


def matmul(x: Any, w: Any) -> jax.Array:
    return mx_jax.matmul(x, w, recipe="mxfp4")


@pytest.mark.parametrize("backend", ["cpu_ffi", "reference"])
def test_a_row_is_all(backend: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any):
    """Beside a kernel's statistics and without one; of all lanes of a vmap."""
    monkeypatch.setattr(statistics, "TABLE", (*statistics.TABLE, CHANGED))
    memory, file = inspect.Memory(), inspect.Jsonl(tmp_path / "run.jsonl")
    w = np.ones((64, 4), np.float32)
    run = jax.vmap(matmul, (0, None))
    step = inspect.capture(run, stats=("changed", "amax"), sink=[memory, file])
    with mx_jax.prefer_backends(backend):
        quick(step)(X, w)
    step.close()
    assert step.records == (memory, file)
    changed = {record.tag.tensor: record.stats.get("changed") for record in memory.all()}
    expected = np.mean(np.asarray(mx_jax.cast(X, "mxfp4", scale_rule="even")) != X)
    assert changed == {"input": pytest.approx(expected), "weight": 0}
    rows = map(json.loads, file.path.read_text().splitlines())
    assert {row["changed"] for row in rows} == {changed["input"], 0}
    inspect.report(memory, tmp_path / "run.html")
    page = (tmp_path / "run.html").read_text()
    assert f"the input of output (mxfp4) changes {expected:.0%} of its values" in page
    assert "<h2>Changed values by layer</h2>" in page
    with pytest.raises(ValueError, match=r"must be some of .*, changed, arrays, got stats="):
        inspect.capture(matmul, stats="unknown")
