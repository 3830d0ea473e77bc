"""Gradients of experts' matrices, as the command checks and times them."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mx_jax
from mx_jax.backends import evidence
from mx_jax.backends.calls import RaggedCall
from mx_jax.backends.pallas_gpu import PALLAS_GPU, backend_for
from mx_jax.backends.pallas_gpu.architecture import SM90
from mx_jax.backends.primitive import choose
from mx_jax.backends.reference import REFERENCE
from mx_jax.backends.target import Backend, Target, use_target
from mx_jax.measure import worker
from mx_jax.measure.cases import Case, Wanted, cases, copy_bits
from mx_jax.measure.timing import copies_beyond_cache
from mx_jax.measure.worker import QUICK, Effort
from mx_jax.ops import ragged_dot as ops
from tests.backends.altered import altered
from tests.backends.mosaic import interpreter, needs_newer_mosaic

PLANTED = dataclasses.replace(REFERENCE, name="planted", source=lambda: (Path(__file__),))
EVERY = dataclasses.replace(QUICK, checks=None)
H200 = Target(platform="cuda", compute_capability=(9, 0), device_kind="NVIDIA H200")


def sums(format: str = "mxfp4", **changes: Any) -> Case:
    facts: dict[str, Any] = {"backend": "planted", "shape": (24, 64, 64), "groups": 3}
    return Case(kind="ragged sums", formats=(format, format), **{**facts, **changes})


def found(case: Case, backend: Backend, effort: Effort = EVERY) -> dict[str, Any]:
    """What is said last."""
    said: list[dict[str, Any]] = []
    with evidence.use(()):
        worker.measure(case, backend, said.append, effort)
    json.dumps(said, allow_nan=False)
    return said[-1]


def _right(lhs: Any, rhs: Any, sizes: jax.Array, call: RaggedCall) -> jax.Array:
    return REFERENCE.run(call, lhs, rhs, sizes)


@pytest.mark.parametrize(
    "run",
    [
        lambda lhs, rhs, sizes, call: _right(lhs, rhs, jnp.roll(sizes, 1), call),
        # Rows of a group's last block are left out.
        lambda lhs, rhs, sizes, call: _right(lhs, rhs, sizes.at[0].add(-32), call),
        lambda lhs, rhs, sizes, call: _right(lhs, rhs, sizes, call) + (sizes[-1] == 32),
        # Memory that nobody wrote, where a group has no rows.
        lambda lhs, rhs, sizes, call: _right(lhs, rhs, sizes, call) + (sizes.sum() == 0),
        lambda lhs, rhs, sizes, call: _right(lhs, rhs, sizes, call) + (lhs.shape[1] % 64 != 0),
    ],
    ids=["another group", "a block too few", "one group", "no group", "odd columns"],
)
def test_wrong_sums_are_caught_and_not_timed(run: Any):
    answer = found(sums(), altered(PLANTED, RaggedCall, run))
    assert answer["error"] > 1 and "microseconds" not in answer and "over_plain" not in answer


@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp4", "nvfp4"])
def test_a_case_is_what_a_training_step_asks(recipe: str, monkeypatch: pytest.MonkeyPatch):
    asked: list[RaggedCall] = []
    monkeypatch.setattr(ops, "choose", lambda call: asked.append(call) or choose(call))
    x, w = jnp.zeros((100, 64), jnp.bfloat16), jnp.zeros((3, 64, 128), jnp.bfloat16)

    def loss(w: jax.Array) -> jax.Array:
        return mx_jax.ragged_dot(x, w, np.array([7, 0, 60]), recipe=recipe).sum()

    jax.eval_shape(jax.grad(loss), w)
    (call,) = [call for call in asked if call.contracts_rows]
    assert call.lhs.format is not None
    case = sums(call.lhs.format.name, backend="pallas_gpu", shape=(100, 128, 64))
    assert case.call == dataclasses.replace(call, precision=None)
    assert case.work == evidence.Work.of(call, "pallas_gpu")


@needs_newer_mosaic
def test_they_are_measured_on_hopper_alone():
    of_hopper = [case for case in cases([PALLAS_GPU], H200) if case.kind == "ragged sums"]
    assert {case.formats[0] for case in of_hopper} == set(Wanted().formats)
    # What comes out of each copy is in memory twice while bits are compared.
    for case in of_hopper:
        *_, n, k = case.shape
        assert 4 * copies_beyond_cache(copy_bits(case)) * case.groups * n * k <= 8 << 30
    b200 = dataclasses.replace(H200, compute_capability=(10, 0))
    assert not [case for case in cases([PALLAS_GPU], b200) if case.kind == "ragged sums"]


@pytest.mark.slow
@needs_newer_mosaic
def test_interpreted():
    """The interpreted kernel is right and timed; with another group's rows it is caught."""
    own = backend_for(SM90, interpret=interpreter())
    case = sums(backend="pallas_gpu", shape=(8, 64, 64), groups=2)

    def shifted(lhs: Any, rhs: Any, sizes: jax.Array, call: RaggedCall) -> jax.Array:
        return own.offers[RaggedCall].run(lhs, rhs, jnp.roll(sizes, 1), call)

    with use_target(H200):
        answer = found(case, own, QUICK)
        wrong = found(case, altered(own, RaggedCall, shifted), QUICK)
    assert 0 < answer["error"] <= 1 and answer["over_plain"] > 0 and answer["kernel"] == "wgmma"
    assert wrong["error"] > 1 and "over_plain" not in wrong
