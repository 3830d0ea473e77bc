"""at_step and guard: a step that does not count costs nothing, and a bad one is the last."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import mx_jax
from mx_jax import inspect
from mx_jax.ops.tags import watching
from tests.inspect.kit import W, X
from tests.quick import quick


def product(x):
    return mx_jax.matmul(x, W, recipe="mxfp8")


def counted(function=product):
    """A compiled function, and how many captures ran whenever it was traced."""
    traces: list[int] = []

    @quick
    def run(x):
        traces.append(len(watching.value))
        inspect.scalar("norm", (x * x).sum())
        return function(x)

    return run, traces


def steps(records: inspect.Memory, name: str = "norm") -> list[int]:
    return [number.step for number in records.scalars[name]]


def test_steps_that_do_not_count_run_the_program_without_a_capture():
    run, traces = counted()
    run(X)
    with inspect.capture(stats="amax", every=3) as records:
        for step in range(7):
            with inspect.at_step(step):
                run(X)
    run(X)
    assert traces == [0, 1], "one program without and one with it, whatever the step"
    assert [record.step for record in records.all()[::2]] == steps(records) == [0, 3, 6]


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
    assert (steps(twos), steps(threes)) == ([0, 2, 4, 6], [0, 3, 6])
    assert traces == [2, 0, 1, 1], "both, none, the first, the second"


def test_without_jit_and_with_a_step_that_is_traced_inside_too():
    @quick
    def inside(x, step):
        with inspect.at_step(step):
            return product(x)

    with inspect.capture(stats="amax", every=4) as records:
        for step in range(6):
            with inspect.at_step(step), inspect.tag("eager"):
                inspect.scalar("loss", X.sum())
                inside(X, step)
    assert {record.step for record in records.all()} == {0, 4}
    assert steps(records, "loss") == [0, 4]


def test_layers_of_flax_do_not_count_either():
    layer = mx_jax.nn.linen.Dense(64, recipe="mxfp8")
    variables = quick(layer.init)(jax.random.key(0), X)
    run, traces = counted(lambda x: layer.apply(variables, x))
    with inspect.capture(stats="amax", every=2) as records:
        for step in (1, 2):
            with inspect.at_step(step), inspect.tag("model"):
                run(X)
    assert traces == [0, 1] and {record.step for record in records.all()} == {2}


def test_a_step_that_counts_is_waited_for(monkeypatch):
    """Callbacks may run after the call has returned: not on CPUs, where nothing would show."""
    capture, waits = inspect.capture(every=3), []
    monkeypatch.setattr(jax, "effects_barrier", lambda: waits.append(capture._host_step))
    with capture:
        for step in range(5):
            with inspect.at_step(step):
                pass
    assert waits == [0, 3, None], "before the step is over, and at the end"


def test_a_number_below_shard_map_is_recorded_once():
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


ONES = np.ones((32, 64), np.float32)


@quick
def train_step(w, step):
    def forward(w):
        x = ONES
        for number in range(3):
            with inspect.tag(f"layer_{number}"):
                x = jnp.tanh(mx_jax.matmul(x, w, recipe="mxfp8"))
                # Planted between two layers.
                x = x + jnp.where((number == 0) & (step == 3), jnp.inf, 0)
        return x.sum()

    with inspect.at_step(step):
        return w - 1e-3 * jax.grad(forward)(w)


def test_guard_names_the_layer_and_the_step_and_stops_the_next():
    w, steps = W, []
    with pytest.raises(inspect.NonFiniteError) as caught, inspect.guard():
        for step in range(50):
            w = jax.block_until_ready(train_step(w, step))
            steps.append(step)
    record = caught.value.record
    assert (record.step, record.path, record.tag.product) == (3, "layer_1", "output")
    assert "at step=3, in the input of output, path='layer_1'" in str(caught.value)
    assert max(steps) < 10, "not after the whole loop"


def test_a_step_around_which_at_step_is_is_the_last(caplog):
    step, steps = quick(product), []
    with pytest.raises(inspect.NonFiniteError, match="at step=2, in the input"), inspect.guard():
        for number in range(5):
            steps.append(number)
            with inspect.at_step(number):
                step(ONES * (np.inf if number == 2 else 1))
    assert steps == [0, 1, 2]
    assert not caplog.records, "no callback fails"


def test_calls_count_without_a_step_and_the_end_raises():
    step = quick(product)
    message = r"at step=1, .* path='unnamed'"
    with pytest.raises(inspect.NonFiniteError, match=message), inspect.guard():
        for x in (X, X * np.inf):
            step(x)


def test_what_is_finite_passes_and_errors_stay_what_they_are():
    step = quick(product)
    with inspect.guard():
        step(X)
    with pytest.raises(KeyError, match="own"), inspect.guard():
        raise KeyError("own")
