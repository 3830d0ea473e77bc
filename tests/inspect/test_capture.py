"""capture: one record an operand and a product, with the layer's name, however the program runs.

at_step and guard: a step that does not count costs nothing, and a bad one is the last.
"""

import functools
import re
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import mx_jax
from mx_jax import inspect
from mx_jax.ops.tags import watching
from tests.inspect.kit import W, X, both, by_layer, captured, layer, of
from tests.needs import needs_library
from tests.quick import quick

# What is recorded of a layer: its products, and their operands.
LAYER = [
    *[("output", tensor) for tensor in ("input", "weight", "product")],
    *[("grad_input", tensor) for tensor in ("gradient", "weight", "product")],
    *[("grad_weight", tensor) for tensor in ("gradient", "input", "product")],
]
ERRORS = ("amax", "error")
amax = functools.partial(inspect.capture, stats="amax")


def each_once(records: inspect.Memory, *names: str) -> bool:
    found = by_layer(records)
    return set(found) == set(names) and all(sorted(own) == sorted(LAYER) for own in found.values())


def two_layers(x, w):
    return layer(layer(x, w, "first"), w, "second").sum()


def test_every_operand_and_product_forward_and_backward():
    records = captured(both(two_layers), X, W, stats=ERRORS)
    assert each_once(records, "first", "second")
    (tag,) = (tag for tag in records if str(tag).startswith("first output lhs"))
    assert (tag.axis, tag.format, tag.rule) == (-1, "mxfp8_e4m3", "rceil")
    order = [record.path for record in records.all()]
    assert order == ["first"] * 3 + ["second"] * 9 + ["first"] * 6, "the order of the program"


@needs_library
def test_a_gradient_that_nobody_asks_for_is_not_computed():
    """By the kernel alone: two products of three, in the program and in what is recorded."""
    step = jax.jit(jax.grad(lambda w: layer(jnp.asarray(X), w).sum()))
    with inspect.capture(stats=ERRORS) as records:
        assert step.lower(W).as_text().count("@mx_jax_cpu_matmul") == 2
        step(W)
    wanted = sorted(own for own in LAYER if own[0] != "grad_input")
    assert sorted(by_layer(records)["layer"]) == wanted


def test_a_cached_jit_does_not_miss_it_and_is_not_recompiled():
    traces = []

    @quick
    def step(x, w):
        traces.append(None)
        return layer(x, w).sum()

    step(X, W)
    watch = amax()
    for _ in range(2):
        with watch as records:
            step(X, W)
    step(X, W)
    assert len(traces) == 2
    assert {record.step for record in records.all()} == {0, 1}, "every call counts"


def test_off_it_is_the_same_program():
    def plain(x, w):
        for _ in range(3):
            x = mx_jax.matmul(x, w, recipe="mxfp8")
        return x.sum()

    def tagged(x, w):
        with inspect.at_step(3):
            for number in range(3):
                with inspect.tag(f"layer_{number}", index=number):
                    x = mx_jax.matmul(x, w, recipe="mxfp8")
            loss = x.sum()
            inspect.scalar("loss", loss)
            return loss

    off = str(jax.make_jaxpr(jax.grad(tagged))(X, W))
    assert off == str(jax.make_jaxpr(jax.grad(plain))(X, W))
    with inspect.capture():
        on = str(jax.make_jaxpr(jax.grad(tagged))(X, W))
    assert on.count("debug_callback") > 9 > off.count("debug_callback") == 0


def test_tags_are_names_of_the_program():
    lowered = jax.jit(jax.grad(two_layers)).lower(X, W)
    text = lowered.as_text(debug_info=True)
    for name in ("first", "output", "grad_input", "lhs.mxfp8_e4m3.rceil.axis-1"):
        assert re.search(rf"[/(\"]{re.escape(name)}[)/\"]", text), name
    # Equal layers share their functions, whose names XLA puts below their callers'.
    compiled = str(lowered.compile().as_text())
    assert "first" in compiled and "grad_input/rhs.mxfp8_e4m3.rceil.axis-1" in compiled


def test_scan_counts_layers_by_the_index_that_it_is_given():
    def body(carry, w):
        x, number = carry
        return (layer(x, w, "block", number), number + 1), None

    def loss(x, ws):
        return lax.scan(body, (x, 0), ws)[0][0].sum()

    records = captured(both(loss), X, np.stack([W, 2 * W, 4 * W]), stats="amax")
    outputs = of(records, "weight")
    assert [record.index for record in outputs] == [(0,), (1,), (2,)]
    largest = np.abs(W).max()
    assert [record.stats["amax"] for record in outputs] == [largest, 2 * largest, 4 * largest]
    back = of(records, "weight", "grad_input")
    assert [record.index for record in back] == [(2,), (1,), (0,)], "the order of the program"


def test_remat_records_nothing_twice():
    def loss(x, w):
        return jax.checkpoint(layer, policy=mx_jax.save_quantized)(x, w).sum()

    assert each_once(captured(both(loss), X, W, stats=ERRORS), "layer")


def test_lanes_with_an_index_are_layers():
    lanes = quick(jax.vmap(lambda w, number: layer(X, w, "expert", number)))
    found = of(captured(lanes, np.stack([W, 3 * W]), np.arange(2), stats="amax"), "weight")
    largest = np.abs(W).max()
    weights = {record.path: record.stats["amax"] for record in found}
    assert weights == {"expert[0]": largest, "expert[1]": 3 * largest}


def test_nested_captures_record_each_its_own():
    with amax() as outer, inspect.capture(stats="sqnr", filter=lambda t: t.side == "rhs") as inner:
        quick(layer)(X, W)
    assert [tag.tensor for tag in outer] == ["input", "weight"]
    assert [tag.tensor for tag in inner] == ["weight"]
    assert set(inner.all()[0].stats) == {"sqnr_db"} and set(outer.all()[0].stats) == {"amax"}


def test_a_filter_that_matches_nothing_warns():
    text = r"the filter matched none of 1 paths, .* got filter={} and paths 'layer'{}$"
    said = text.format("'other'", "; a regular expression must match a whole path")
    with pytest.warns(UserWarning, match=said), inspect.capture(stats="amax", filter="other"):
        quick(layer)(X, W)
    # Of a function, what regular expressions match is no remedy.
    nothing = text.format("<function .*<lambda> at .*>", "")
    with (
        pytest.warns(UserWarning, match=nothing),
        inspect.capture(stats="amax", filter=lambda tag: False),
    ):
        quick(layer)(X, W)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        own = inspect.capture(stats="amax", filter="lay.*")
        for _ in range(2):  # The second time nothing is traced.
            with own:
                quick(layer)(X, W)
        with inspect.capture(stats="amax", filter="other"):
            pass  # Nothing was there to match.


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"stats": "norm"}, ValueError, r"stats must be some of amax, .*, got stats=\['norm'\]"),
        ({"every": 0}, ValueError, "every must be an integer of at least 1, got every=0"),
        ({"filter": 3}, TypeError, "filter must be a regular expression"),
        ({"filter": "("}, ValueError, r"must be a regular expression .* got filter='\('"),
        ({"filter": "(a{99999999999999999999})"}, ValueError, r"regular expression .* got filter="),
        *(
            ({"sink": sink}, TypeError, r"sink must be a sink or several, .*inspect\.Jsonl")
            for sink in ("run.jsonl", [], 3)
        ),
    ],
)
def test_captures_that_cannot_be(options: Any, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        inspect.capture(**options)


def test_what_is_asked_for_wrongly_inside():
    with pytest.raises(ValueError, match="every=10 needs the step"), inspect.capture(every=10):
        layer(X, W)
    message = "step must be an integer scalar, got step of dtype=float"
    with pytest.raises(TypeError, match=message), inspect.at_step(1.5):
        pass
    with pytest.raises(TypeError, match="tag: needs a name, got name=''"), inspect.tag(""):
        pass
    with pytest.raises(ValueError, match=r"'loss' must be a scalar, got shape=\(3,\)"):
        inspect.scalar("loss", jnp.ones(3))


@needs_library
@pytest.mark.parametrize(("backend", "way"), [("cpu_ffi", both), ("reference", quick)])
def test_where_nothing_is_promoted(backend: str, way: Any):
    """Under JAX's settings that refuse operands of different dtypes or ranks."""
    with (
        jax.numpy_dtype_promotion("strict"),
        jax.numpy_rank_promotion("raise"),
        mx_jax.only_backend(backend),
    ):
        records = captured(way(lambda x, w: layer(x, w).sum()), X, W)
    assert {tag.tensor for tag in records} >= {"input", "weight", "product"}


# Steps, and the guard ---------------------------------------------------------------------------


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
