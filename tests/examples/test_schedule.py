"""Recipes by step: values, and one compilation for each phase."""

import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mx_jax
from examples.recipes.schedule import Schedule, heal
from mx_jax import recipes
from tests.quick import quick

HIGH = recipes.high_precision()


def test_each_phase_lasts_to_the_next():
    schedule = Schedule([(0, "mxfp8"), (3, recipes.mxfp4()), (5, "high-precision")])
    names = [schedule.at(step).name for step in range(7)]
    assert names == ["mxfp8"] * 3 + ["mxfp4"] * 2 + ["high_precision"] * 2
    assert schedule.at(np.int64(4)) == schedule.at(jnp.int32(3)) == recipes.mxfp4()


@pytest.mark.parametrize(
    ("steps", "last", "starts"),
    [
        (1000, 0.1, [0, 900]),
        (100, 0.07, [0, 93]),
        (5, 0.1, [0, 4]),
        (800, 0.0, [0]),
        (800, 1.0, [0]),
        (1, 0.1, [0]),
    ],
)
def test_heal_has_whole_steps(steps: int, last: float, starts: list[int]):
    schedule = heal("mxfp4", steps, last=last)
    assert [start for start, _ in schedule.phases] == starts
    assert schedule.at(steps - 1) == (HIGH if last else recipes.mxfp4())
    if len(starts) == 2:
        assert schedule.at(starts[1] - 1) == recipes.mxfp4()
    assert heal("mxfp4", 10, by="mxfp8").at(9) == recipes.mxfp8()


def test_one_program_for_each_phase():
    """And the gradients are those of the phase's recipe."""
    traced: list[str] = []

    def step(w, x, recipe):
        traced.append(recipe.name)
        return w - 0.1 * jax.grad(lambda w: mx_jax.matmul(x, w, recipe=recipe).sum())(w)

    compiled = quick(step, static_argnames="recipe")
    schedule = heal("mxfp4", 6, last=0.5)
    w, x = np.ones((32, 4), np.float32), np.linspace(-1, 1, 64, dtype=np.float32).reshape(2, 32)
    changes = []
    for i in range(6):
        before, w = w, compiled(w, x, recipe=schedule.at(i))
        changes.append(np.asarray(before - w))
    assert traced == ["mxfp4", "high_precision"]
    np.testing.assert_allclose(
        changes[5], 0.1 * np.broadcast_to(x.sum(0)[:, None], (32, 4)), atol=1e-6
    )
    assert np.abs(changes[0] - changes[5]).max() > 1e-3


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Schedule([]), "Schedule: phases must start at step 0 and ascend, got "),
        (lambda: Schedule([(1, "mxfp4")]), "got first steps [1]; e.g. [(0, 'mxfp4')"),
        (lambda: Schedule([(0, "mxfp4"), (5, "mxfp8"), (5, "mxfp6")]), "first steps [0, 5, 5]"),
        (lambda: Schedule([(0, "mxfp9")]), "unknown recipe name='mxfp9'"),
        (lambda: heal("mxfp4", 10).at(-1), "Schedule.at: steps count from 0, got step=-1"),
        (lambda: heal("mxfp4", 10, last=10), "got steps=10, last=10; last is a part"),
    ],
)
def test_errors_teach(make: Callable[[], object], message: str):
    with pytest.raises(ValueError, match=re.escape(message)):
        make()


def test_a_traced_step_is_refused():
    with pytest.raises(jax.errors.TracerIntegerConversionError):
        jax.eval_shape(lambda step: jnp.ones(heal("mxfp4", 10).at(step).output.lhs.format.block), 3)
