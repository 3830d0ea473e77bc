"""A statistic of captures from outside: one row, and joins and tables follow.

Places to touch: one, the row (before: 12 to 14).
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mx_jax
from mx_jax import inspect
from mx_jax.inspect import statistics
from mx_jax.inspect.statistics import Statistic
from tests.quick import quick

X = np.random.default_rng(0).normal(size=(3, 8, 64)).astype(np.float32)
CHANGED = Statistic(
    name="changed",
    arrays=lambda before, after, axis: {
        "changed": jnp.sum(before != after.dequantize(), dtype=jnp.uint32)
    },
    joins={"changed": "sum"},
    of=lambda raw: {"changed": int(raw["changed"]) / int(raw["size"])},
    shown="changed",
)


def matmul(x: Any, w: Any) -> jax.Array:
    return mx_jax.matmul(x, w, recipe="mxfp4")


@pytest.mark.parametrize("backend", ["cpu_ffi", "reference"])
def test_a_row_is_all(backend: str, monkeypatch: pytest.MonkeyPatch):
    """Beside a kernel's statistics and without one; of all lanes of a vmap."""
    monkeypatch.setattr(statistics, "TABLE", (*statistics.TABLE, CHANGED))
    w = np.ones((64, 4), np.float32)
    run = jax.vmap(matmul, (0, None))
    step = inspect.capture(run, stats=("changed", "amax"))
    with mx_jax.prefer_backends(backend):
        quick(step)(X, w)
    changed = {record.tag.tensor: record.stats.get("changed") for record in step.records.all()}
    expected = np.mean(np.asarray(mx_jax.cast(X, "mxfp4", scale_rule="even")) != X)
    assert changed == {"input": pytest.approx(expected), "weight": 0}
    heads, *rows = str(step.records).splitlines()
    assert heads.split()[-1] == "changed" and f"{expected:.3g}" in {row.split()[-1] for row in rows}
    with pytest.raises(ValueError, match=r"must be some of .*, changed, arrays, got stats="):
        inspect.capture(matmul, stats="unknown")
