"""at_step: around the call of a compiled function, a step that nobody looks at costs nothing."""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import mx_jax
from mx_jax import inspect
from mx_jax.ops.moments import watching
from tests.quick import quick

W = (np.random.default_rng(0).normal(size=(64, 64)) / 8).astype(np.float32)
X = np.random.default_rng(1).normal(size=(32, 64)).astype(np.float32)


def counted(function=lambda x: mx_jax.matmul(x, W, recipe="mxfp8")):
    """A compiled function, and who watched whenever it was traced."""
    traces: list[int] = []

    @quick
    def run(x):
        traces.append(len(watching.value))
        inspect.scalar("norm", (x * x).sum())
        return function(x)

    return run, traces


def test_steps_that_do_not_count_run_the_program_that_nobody_watches():
    run, traces = counted()
    run(X)
    with inspect.capture(stats="amax", every=3) as records:
        for step in range(7):
            with inspect.at_step(step):
                run(X)
    run(X)
    assert traces == [0, 1], "one program unwatched, one watched, whatever the step"
    assert [record.step for record in records.all()[::2]] == [0, 3, 6]
    assert [number.step for number in records.scalars["norm"]] == [0, 3, 6]


def test_each_capture_gets_its_own_steps():
    run, traces = counted()
    with (
        pytest.warns(UserWarning, match="filter='no' and paths 'unnamed'"),
        inspect.capture(stats="amax", every=2) as twos,
        inspect.capture("no", every=3) as threes,
    ):
        for step in np.arange(7):
            with inspect.at_step(step):
                run(X)
    steps = [[number.step for number in own.scalars["norm"]] for own in (twos, threes)]
    assert steps == [[0, 2, 4, 6], [0, 3, 6]]
    assert traces == [2, 0, 1, 1], "both, none, the first, the second"


def test_without_jit_and_with_a_step_that_is_traced_inside_too():
    @quick
    def inside(x, step):
        with inspect.at_step(step):
            return mx_jax.matmul(x, W, recipe="mxfp8")

    with inspect.capture(stats="amax", every=4) as records:
        for step in range(6):
            with inspect.at_step(step), inspect.tag("eager"):
                inspect.scalar("loss", X.sum())
                inside(X, step)
    assert {record.step for record in records.all()} == {0, 4}
    assert [number.step for number in records.scalars["loss"]] == [0, 4]


def test_a_step_given_to_capture():
    run, traces = counted()
    sink = inspect.Memory()
    for step in range(4):
        with inspect.capture(stats="amax", every=2, step=step, sink=sink):
            run(X)
    assert [number.step for number in sink.scalars["norm"]] == [0, 2]
    assert 0 in traces


def test_guard_names_the_step():
    run, _ = counted()
    message = "at step=2, in the input of output"
    with pytest.raises(inspect.NonFiniteError, match=message), inspect.guard():
        for step in range(9):
            with inspect.at_step(step):
                run(X if step < 2 else X * np.inf)


def test_layers_of_flax_are_not_looked_at_either():
    layer = mx_jax.nn.linen.Dense(64, recipe="mxfp8")
    variables = quick(layer.init)(jax.random.key(0), X)
    run, traces = counted(lambda x: layer.apply(variables, x))
    with inspect.capture(stats="amax", every=2) as records:
        for step in (1, 2):
            with inspect.at_step(step), inspect.tag("model"):
                run(X)
    assert traces == [0, 1] and {record.step for record in records.all()} == {2}


def test_a_step_that_is_looked_at_is_waited_for(monkeypatch):
    """What tells it may run after the call has returned: not on CPUs, where nothing would show."""
    watch, waits = inspect.capture(every=3), []
    monkeypatch.setattr(jax, "effects_barrier", lambda: waits.append(watch._host_step))
    with watch:
        for step in range(5):
            with inspect.at_step(step):
                pass
    assert waits == [0, 3, None], "before the step is over, and at the end"


def test_a_number_below_shard_map_is_told_once():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))

    def loss(x):
        value = jax.lax.psum(x.sum(), "data")
        inspect.scalar("loss", value)
        return value

    run = quick(jax.shard_map(loss, mesh=mesh, in_specs=P("data"), out_specs=P()))
    with inspect.capture() as records:
        for factor in (1, 2):
            run(factor * np.arange(8.0, dtype=np.float32))
    assert [(own.step, own.value) for own in records.scalars["loss"]] == [(0, 28.0), (1, 56.0)]
