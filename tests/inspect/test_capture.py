"""capture: one record an operand, with the layer's name, however the program runs.

Steps that do not count run the function as it is, and a bad one is the last.
"""

import dataclasses
import re
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.core import Tracer
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import mx_jax
from mx_jax import inspect, recipes
from mx_jax.jaxpr.read import walk
from mx_jax.ops.ragged_dot import ragged_dot
from mx_jax.sharding.movement import Gather
from mx_jax.testing.compare import assert_bitwise_equal
from tests.inspect.kit import W, X, both, by_layer, captured, layer, of
from tests.needs import needs_library
from tests.quick import quick

# What is recorded of a layer: the operands of its products.
LAYER = [
    *[("output", tensor) for tensor in ("input", "weight")],
    *[("grad_input", tensor) for tensor in ("gradient", "weight")],
    *[("grad_weight", tensor) for tensor in ("gradient", "input")],
]
STACK = np.stack([W, 2 * W, 4 * W])
LARGEST = np.abs(W).max()
DATA = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))


def each_once(records: inspect.Records, *names: str) -> bool:
    result = by_layer(records)
    return set(result) == set(names) and all(
        sorted(each) == sorted(LAYER) for each in result.values()
    )


def two_layers(x, w):
    return layer(layer(x, w, "first"), w, "second").sum()


def scanned(x, ws):
    return lax.scan(lambda x, w: (layer(x, w, "block"), None), x, ws)[0].sum()


def counted_down(x, w):
    """Two layers by a loop that has no gradient of its own, and one in a branch."""
    x = lax.while_loop(lambda s: s[0] < 2, lambda s: (s[0] + 1, layer(s[1], w, "loop")), (0, x))[1]
    return lax.cond(x[0, 0] < 9, lambda: layer(x, w, "branch"), lambda: x)


@pytest.mark.parametrize("recipe", ["nvfp4_pretraining", "mxfp4_stochastic", "float8_rowwise"])
@pytest.mark.parametrize("residuals", ["primal", "quantized"])
def test_operands_that_are_kept_transformed_and_drawn(recipe, residuals):
    """Each once: of what gradients multiply as it is there is no cast."""
    kept = dataclasses.replace(recipes.from_name(recipe), residuals=residuals)

    def loss(x, w):
        key = jax.random.key(0) if kept.is_stochastic else None
        return jnp.tanh(mx_jax.matmul(x, w, recipe=kept, key=key)).sum()

    result = by_layer(captured(both(loss), X, W, stats="amax"))["unnamed"]
    assert len(result) == len(set(result)) and set(result) <= set(LAYER)
    assert {x for x in LAYER if x[0] == "output" or x[1] == "gradient"} <= set(result)


def test_every_operand_forward_and_backward():
    records = captured(both(two_layers), X, W, stats="amax")
    assert each_once(records, "first", "second")
    (tag,) = (tag for tag in records if str(tag).startswith("first output lhs"))
    assert (tag.axis, tag.format, tag.rule) == (-1, "mxfp8_e4m3", "rceil")
    order = [record.path for record in records.all()]
    assert order == ["first"] * 2 + ["second"] * 6 + ["first"] * 4, "the order of the program"


SHARDED = NamedSharding(DATA, P("data"))
PROGRAMS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "plain": (two_layers, (X, W)),
    "gradient": (both(two_layers), (X, W)),
    "jit in jit": (both(jax.jit(lambda x, w: jax.jit(two_layers)(x, w))), (X, W)),
    "remat": (both(jax.checkpoint(two_layers)), (X, W)),
    "scan of remat": (both(jax.checkpoint(scanned, policy=mx_jax.save_quantized)), (X, STACK)),
    "while and cond": (counted_down, (X, W)),
    "drawn": (
        lambda x, w: mx_jax.matmul(x, w, recipe="nvfp4_pretraining", key=jax.random.key(1)),
        (X, W),
    ),
    "eight devices": (both(two_layers), (jax.device_put(X, SHARDED), W)),
    "shard_map": (
        jax.shard_map(
            lambda x, w: jax.grad(two_layers, 1)(x, w),
            mesh=DATA,
            in_specs=(P("data"), P()),
            out_specs=P(),
        ),
        (X, W),
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_results_are_the_bits_of_the_function(name):
    function, operands = PROGRAMS[name]
    step = inspect.capture(function, stats="amax")
    jax.tree.map(assert_bitwise_equal, quick(step)(*operands), quick(function)(*operands))
    assert len(step.records) > 1


def test_loops_count_and_branches_do_not():
    result = by_layer(captured(counted_down, X, W, stats="amax"))
    assert set(result) == {"loop[0]", "loop[1]", "branch"}
    records = captured(both(scanned), X, STACK, stats="amax")
    outputs, back = of(records, "weight"), of(records, "weight", "grad_input")
    assert [record.path for record in outputs] == ["block[0]", "block[1]", "block[2]"]
    assert [record.stats["amax"] for record in outputs] == [LARGEST, 2 * LARGEST, 4 * LARGEST]
    assert [record.index for record in back] == [(2,), (1,), (0,)], "the order of the program"


def test_a_gradient_that_nobody_asks_for_is_not_computed():
    step = jax.value_and_grad(lambda w: layer(jnp.asarray(X), w).sum())
    wanted = sorted(each for each in LAYER if each[0] != "grad_input")
    assert sorted(by_layer(captured(step, W, stats="amax"))["layer"]) == wanted


def test_what_is_used_several_times_counts_its_calls():
    result = by_layer(captured(both(lambda x, w: layer(layer(x, w), w).sum()), X, W, stats="amax"))
    assert {name: len(each) for name, each in result.items()} == {"layer": 6, "layer#1": 6}
    # Gradients have the numbers of what they are of.
    step = jax.value_and_grad(lambda w: layer(layer(jnp.asarray(X), w), 2 * w).sum())
    records = captured(step, W, stats="amax")
    (weight,) = of(records, "weight", "grad_input")
    assert (weight.tag.call, weight.stats["amax"]) == (1, 2 * LARGEST)


def test_names_of_the_program_say_what_is_recorded():
    program = jax.make_jaxpr(both(two_layers))(X, W)
    assert "callback" not in str(program)
    scopes = [site.scope for site in walk(program)]
    assert any(
        re.search(r"first\)*/output/lhs\.mxfp8_e4m3\.rceil\.axis-1$", each) for each in scopes
    )
    compiled = str(jax.jit(both(two_layers)).lower(X, W).compile().as_text())
    # Equal layers share their functions, whose names XLA puts below their callers'.
    assert "first" in compiled and "grad_input/rhs.mxfp8_e4m3.rceil.axis-1" in compiled


@pytest.mark.parametrize("policy", [None, mx_jax.save_quantized, mx_jax.save_products])
def test_remat_records_everything_once(policy):
    loss = jax.checkpoint(lambda x, w: layer(x, w).sum(), policy=policy)
    assert each_once(captured(both(loss), X, W, stats="amax"), "layer")


def test_what_checkpoint_alone_computes_is_recorded():
    """The value is not used: the forward product is computed for its gradient, and only there."""
    loss = jax.checkpoint(lambda w: layer(jnp.asarray(X), w).sum())
    result = by_layer(captured(jax.grad(loss), W, stats="amax"))["layer"]
    assert ("output", "weight") in result and len(result) == 4


def test_captures_of_captures_record_independently():
    inner = inspect.capture(layer, stats="sqnr", filter=lambda tag: tag.side == "rhs")
    outer = inspect.capture(inner, stats="amax")
    outer(X, W)
    assert [tag.tensor for tag in outer.records] == ["input", "weight"]
    assert [tag.tensor for tag in inner.records] == ["weight"]
    assert set(inner.records.all()[0].stats) == {"sqnr_db"}


@pytest.mark.parametrize(
    "recipe",
    [recipes.float8_rowwise(), recipes.mxfp4().with_(activations="mxfp4_2d"), recipes.mxfp8()],
    ids=["whole groups", "tiles", "rows"],
)
def test_rows_in_groups_whose_codes_are_made_in_plain_jax(recipe):
    experts, sizes = np.stack([W, -W, 2 * W]), jnp.array([10, 0, 22])

    def loss(x, w):
        return jnp.tanh(ragged_dot(x, w, sizes, recipe=recipe)).sum()

    with mx_jax.only_backend("reference"):
        records = captured(both(loss), X, experts, stats=("sqnr", "amax"))
    assert sorted(by_layer(records)["unnamed"]) == sorted(LAYER)
    for record in records.all():
        tag, least = record.tag, 12 if "4" in record.tag.format else 20
        assert record.stats["sqnr_db"] > least, tag


def test_casts_whose_codes_are_gathered():
    recipe = dataclasses.replace(recipes.mxfp8(), gather=Gather("data", rhs=P(None, "data")))
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    specs: Any = {"in_specs": (P(), P(None, "data")), "out_specs": P()}
    run = jax.shard_map(
        lambda x, w: mx_jax.matmul(x, w, recipe=recipe), mesh=mesh, check_vma=False, **specs
    )
    result = by_layer(captured(run, X, W, stats="amax"))
    assert sorted(result["unnamed"]) == sorted(each for each in LAYER if each[0] == "output")


def test_a_filter_that_matches_nothing_warns():
    text = r"the filter matched none of 1 paths, .* got filter={} and paths 'layer'{}$"
    said = text.format("'other'", "; a regular expression must match a whole path")
    with pytest.warns(UserWarning, match=said):
        captured(layer, X, W, stats="amax", filter="other")
    # Of a function, what regular expressions match is no remedy.
    nothing = text.format("<function .*<lambda> at .*>", "")
    with pytest.warns(UserWarning, match=nothing):
        captured(layer, X, W, stats="amax", filter=lambda tag: False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        captured(layer, X, W, stats="amax", filter="lay.*")
        captured(jnp.dot, X, W, stats="amax", filter="other")  # Nothing was there to match.


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"stats": "norm"}, ValueError, r"stats must be some of amax, .*, got stats=\['norm'\]"),
        ({"every": 0}, ValueError, "every must be an integer of at least 1, got every=0"),
        ({"filter": 3}, TypeError, "filter must be a regular expression"),
        ({"filter": "("}, ValueError, r"must be a regular expression .* got filter='\('"),
        ({"filter": "(a{99999999999999999999})"}, ValueError, r"regular expression .* got filter="),
    ],
)
def test_captures_that_cannot_be(options: Any, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        inspect.capture(layer, **options)


def test_calls_that_cannot_be():
    with pytest.raises(TypeError, match="capture: needs a function, got 3"):
        inspect.capture(3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="every=10 needs the step where calls are traced"):
        jax.jit(inspect.capture(layer, every=10))(X, W)
    with pytest.raises(TypeError, match="must give an integer scalar, got step of dtype=float"):
        inspect.capture(layer, step=lambda x, w: 1.5)(X, W)
    step = inspect.capture(lambda x: layer(x, W).sum())
    with pytest.raises(ValueError, match=r"by an array of shape=\(32, 64\).*capture\(jax.grad"):
        jax.grad(step)(X)


@needs_library
@pytest.mark.parametrize(("backend", "way"), [("cpu_ffi", both), ("reference", lambda f: f)])
def test_where_nothing_is_promoted(backend: str, way: Any):
    """Under JAX's settings that refuse operands of different dtypes or ranks."""
    with (
        jax.numpy_dtype_promotion("strict"),
        jax.numpy_rank_promotion("raise"),
        mx_jax.only_backend(backend),
    ):
        records = captured(way(lambda x, w: layer(x, w).sum()), X, W)
    assert {tag.tensor for tag in records} >= {"input", "weight"}


# Steps, and the guard ---------------------------------------------------------------------------


def product(x):
    return mx_jax.matmul(x, W, recipe="mxfp8")


def test_steps_that_do_not_count_run_the_function_as_it_is():
    runs = []

    def run(x):
        runs.append(isinstance(x, Tracer))
        return product(x)

    step = inspect.capture(run, stats="amax", every=3)
    for _ in range(7):
        step(X)
    assert runs == [True, False, False, False, False], "traced once, for the steps that count"
    assert [record.step for record in step.records.all()[::2]] == [0, 3, 6]


@pytest.mark.parametrize("below", ["jit", "scan", "shard_map"])
def test_a_step_that_is_traced_is_a_condition(below):
    step = inspect.capture(
        lambda x, number: jax.grad(lambda x: layer(x, W).sum())(x),
        stats=("arrays", "amax"),
        every=2,
        step=lambda x, number: number,
    )
    run: Any = step
    if below == "scan":
        lax.scan(lambda x, number: (run(x, number), None), jnp.asarray(X), jnp.arange(3))
    else:
        if below == "shard_map":
            run = jax.shard_map(run, mesh=DATA, in_specs=(P("data"), P()), out_specs=P("data"))
        run = quick(run)
        for number in range(3):
            run(X, number)
    each = 8 if below == "shard_map" else 1
    assert [record.step for record in of(step.records, "input")] == [0] * each + [2] * each


ONES = np.ones((32, 64), np.float32)


def train_step(w, step):
    def forward(w):
        x = ONES
        for number in range(3):
            with jax.named_scope(f"layer_{number}"):
                x = jnp.tanh(mx_jax.matmul(x, w, recipe="mxfp8"))
                # Planted between two layers.
                x = x + jnp.where((number == 0) & (step == 3), jnp.inf, 0)
        return x.sum()

    return w - 1e-3 * jax.grad(forward)(w)


@pytest.mark.parametrize("known", [True, False])
def test_guard_names_the_layer_and_the_step_which_is_the_last(known, caplog):
    guarded = inspect.guard(train_step, step=(lambda w, step: step) if known else None)
    w, steps = W, []
    with pytest.raises(inspect.NonFiniteError) as caught:
        for step in range(50):
            steps.append(step)
            w = guarded(w, step + 0 * np.int32(step))
    record = caught.value.record
    assert (record.step, record.path, record.tag.product) == (3, "layer_1", "output")
    assert "at step=3, in the input of output, path='layer_1'" in str(caught.value)
    assert steps == [0, 1, 2, 3] and not caplog.records, "no callback fails"


def test_after_an_error_a_guarded_step_goes_on():
    guarded = inspect.guard(jax.jit(train_step))
    with pytest.raises(inspect.NonFiniteError, match="at step=0"):
        guarded(W, np.int32(3))
    guarded(W, np.int32(0))
    with pytest.raises(inspect.NonFiniteError, match="at step=2"):
        guarded(W, np.int32(3))


def test_an_empty_batch_has_no_record():
    captured = inspect.capture(lambda x, w: mx_jax.matmul(x, w, recipe="mxfp8"))
    assert captured(jnp.ones((0, 64)), jnp.ones((64, 8))).shape == (0, 8)
    assert [tag.tensor for tag in captured.records] == ["weight"]


def test_a_guarded_step_in_a_compiled_loop_stops_the_next():
    guarded, steps = inspect.guard(train_step, step=lambda w, step: step), []
    run, w = quick(guarded), W
    with pytest.raises(Exception, match="at step=3, in the input of output, path='layer_1'"):
        for step in range(50):
            w = jax.block_until_ready(run(w, step))
            steps.append(step)
    assert max(steps) < 10, "not after the whole loop"


def test_what_is_finite_passes_and_errors_stay_what_they_are():
    inspect.guard(product)(X)

    def fails(x):
        raise KeyError("own")

    with pytest.raises(KeyError, match="own"):
        inspect.guard(fails)(X)
