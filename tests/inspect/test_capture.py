"""capture: one record an operand and a product, with the layer's name, however the program runs."""

import functools
import re
import warnings
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import mx_jax
from mx_jax import convert, inspect, recipes
from mx_jax.inspect.statistics import STATISTICS
from mx_jax.ops import dense
from tests.needs import needs_library
from tests.quick import quick

W = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32) / 8
X = np.random.default_rng(1).normal(size=(32, 64)).astype(np.float32)
# What each product of a layer tells, and of which operands.
LAYER = [
    *[("output", tensor) for tensor in ("input", "weight", "product")],
    *[("grad_input", tensor) for tensor in ("gradient", "weight", "product")],
    *[("grad_weight", tensor) for tensor in ("gradient", "input", "product")],
]
amax = functools.partial(inspect.capture, stats="amax")


def layer(x: Any, w: Any, name: str = "layer", index: Any = None) -> jax.Array:
    with inspect.tag(name, index=index):
        return jnp.tanh(mx_jax.matmul(x, w, recipe="mxfp8"))


def told(records: inspect.Memory) -> dict[str, list[tuple[str, str]]]:
    """What was told of each layer, with its index and call."""
    found: dict[str, list[tuple[str, str]]] = {}
    for record in records.all():
        name = f"{record.path}#{record.tag.call}" if record.tag.call else record.path
        found.setdefault(name, []).append((record.tag.product, record.tag.tensor))
    return found


def each_once(records: inspect.Memory, *names: str) -> bool:
    found = told(records)
    return set(found) == set(names) and all(sorted(own) == sorted(LAYER) for own in found.values())


def two_layers(x, w):
    return layer(layer(x, w, "first"), w, "second").sum()


def both(function):
    return quick(jax.grad(function, argnums=(0, 1)))


def test_every_operand_and_product_forward_and_backward():
    step = both(two_layers)
    with inspect.capture(stats=("amax", "error")) as records:
        step(X, W)
    assert each_once(records, "first", "second")
    (tag,) = (tag for tag in records if str(tag).startswith("first output lhs"))
    assert (tag.axis, tag.format, tag.rule) == (-1, "mxfp8_e4m3", "rceil")
    order = [record.path for record in records.all()]
    assert order == ["first"] * 3 + ["second"] * 9 + ["first"] * 6, "the order of the program"


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


def test_off_it_is_the_same_program_and_equal_layers_share_a_trace(monkeypatch):
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

    calls = []
    prepare = dense.prepare_operands
    monkeypatch.setattr(dense, "prepare_operands", lambda *a: calls.append(a) or prepare(*a))
    jax.clear_caches()
    off = str(jax.make_jaxpr(jax.grad(tagged))(X, W))
    assert len(calls) == 3, "each of the three products once, for three layers"
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
    compiled = lowered.compile().as_text()
    assert "first" in compiled and "grad_input/rhs.mxfp8_e4m3.rceil.axis-1" in compiled


def test_scan_counts_layers_by_the_index_that_it_is_given():
    def body(carry, w):
        x, number = carry
        return (layer(x, w, "block", number), number + 1), None

    def loss(x, ws):
        return lax.scan(body, (x, 0), ws)[0][0].sum()

    with amax() as records:
        both(loss)(X, np.stack([W, 2 * W, 4 * W]))
    found = [record for record in records.all() if record.tag.tensor == "weight"]
    outputs = [record for record in found if record.tag.product == "output"]
    assert [record.index for record in outputs] == [(0,), (1,), (2,)]
    largest = np.abs(W).max()
    assert [record.stats["amax"] for record in outputs] == [largest, 2 * largest, 4 * largest]
    back = [record for record in found if record.tag.product == "grad_input"]
    assert [record.index for record in back] == [(2,), (1,), (0,)], "the order of the program"


@pytest.mark.parametrize(
    "policy",
    [None, pytest.param(mx_jax.save_quantized, marks=pytest.mark.slow)],
    ids=["all", "codes"],
)
def test_remat_tells_nothing_twice(policy):
    def loss(x, w):
        return jax.checkpoint(layer, policy=policy)(x, w).sum()

    with inspect.capture(stats=("amax", "error")) as records:
        both(loss)(X, W)
    assert each_once(records, "layer")


@pytest.mark.slow
def test_lanes_of_vmap_are_one_operand():
    def loss(x, w):
        return jax.vmap(layer, (0, None))(x, w).sum()

    xs = np.stack([X, 1e-3 * X, np.zeros_like(X)])
    with inspect.capture() as lanes:
        both(loss)(xs, W)
    with inspect.capture() as whole:
        quick(layer)(xs.reshape(-1, 64), W)
    assert each_once(lanes, "layer")
    same_input(lanes, whole)


def test_lanes_with_an_index_are_layers():
    with amax() as records:
        quick(jax.vmap(lambda w, number: layer(X, w, "expert", number)))(
            np.stack([W, 3 * W]), np.arange(2)
        )
    weights = {r.path: r.stats["amax"] for r in records.all() if r.tag.tensor == "weight"}
    assert weights == {"expert[0]": np.abs(W).max(), "expert[1]": 3 * np.abs(W).max()}


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_sharded_inputs_tell_what_whole_ones_do(kind):
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind, kind))
    with inspect.capture(every=2) as whole:
        quick(_grads)(X, W, 2)
    with jax.set_mesh(mesh), inspect.capture(every=2) as parts:
        x = jax.device_put(X, NamedSharding(mesh, P("data", None)))
        quick(_grads)(x, jax.device_put(W, NamedSharding(mesh, P(None, None))), 2)
    same_statistics(parts, whole)


def _grads(x, w, step):
    with inspect.at_step(step):
        return jax.grad(lambda x, w: layer(x, w).sum(), argnums=(0, 1))(x, w)


def same_statistics(actual: inspect.Memory, expected: inspect.Memory) -> None:
    assert set(actual) == set(expected)
    for tag, records in expected.items():
        (own,), (other,) = actual[tag], records
        same_numbers(own, other)


def same_numbers(own: inspect.Record, other: inspect.Record) -> None:
    for name in own.stats:
        if name in ("scales", "channels", "blocks", "nonfinite_blocks"):
            assert own.stats[name] == other.stats[name], (own.tag, name)
        else:
            assert own.stats[name] == pytest.approx(other.stats[name], rel=1e-4), (own.tag, name)


@pytest.mark.slow
@pytest.mark.parametrize(
    "check", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["vma", "no vma"]
)
def test_shards_of_shard_map_are_one_operand(check):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))

    def loss(x, w):
        return lax.psum(layer(x, w).sum(), "data")

    sharded = jax.shard_map(
        loss, mesh=mesh, in_specs=(P("data"), P()), out_specs=P(), check_vma=check
    )
    with inspect.capture() as parts:
        quick(sharded)(X, W)
    with inspect.capture() as whole:
        quick(layer)(X, W)
    same_input(parts, whole)


def same_input(actual: inspect.Memory, expected: inspect.Memory) -> None:
    (own,), (other,) = (
        [r for r in found.all() if (r.tag.product, r.tag.tensor) == ("output", "input")]
        for found in (actual, expected)
    )
    same_numbers(own, other)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = mx_jax.nn.linen.Dense(64, recipe="mxfp8", name="up")(x)
        return nn.Dense(64, dot_general=recipes.mxfp8().dot_general, name="down")(x)


class Shared(nn.Module):
    def setup(self):
        self.block = nn.remat(Block)()

    def __call__(self, x):
        return self.block(self.block(x))


def test_linen_names_its_layers_and_shared_modules_count_their_calls():
    model = Shared()
    variables = quick(model.init)(jax.random.key(0), X)
    with amax() as records, inspect.tag("student"):
        quick(jax.grad(lambda v: model.apply(v, X).sum()))(variables)
    # A gradient of the first input is not wanted.
    assert set(told(records)) == {
        "student/block/up",
        "student/block/down",
        "student/block/up#1",
        "student/block/down#1",
    }
    assert len(told(records)["student/block/up#1"]) == 6


@pytest.mark.slow
def test_converted_models_name_their_layers():
    model = nn.Sequential([nn.Dense(64), nn.relu, nn.Dense(10)])
    variables = quick(model.init)(jax.random.key(0), X)
    with amax() as records:
        convert.linen(model, convert.Rule(".*", recipes.mxfp8())).apply(variables, X)
    assert {tag.path for tag in records} == {"layers_0", "layers_2"}


def nnx_model() -> nnx.Module:
    rngs = nnx.Rngs(0)
    options: Any = {"recipe": "mxfp8", "rngs": rngs}
    own = mx_jax.nn.nnx.Linear(64, 64, **options)
    attention = nnx.MultiHeadAttention(2, 64, decode=False, rngs=rngs)
    model = nnx.Sequential(own, nnx.Linear(64, 64, rngs=rngs), attention)
    rules = convert.Rule(".*", recipes.mxfp8(), types=(nnx.Linear, nnx.MultiHeadAttention))
    return convert.nnx(mx_jax.nn.nnx.name_layers(model), rules)


def test_nnx_names_its_layers():
    with amax() as records:
        nnx.jit(lambda model, x: model(x))(nnx_model(), X[None])
    paths = {tag.path for tag in records}
    assert {"layers/0", "layers/1", "layers/2/qk", "layers/2/av"} <= paths


@pytest.mark.slow
def test_names_of_nnx_layers_part_them_only_while_somebody_watches():
    first, second = (
        mx_jax.nn.nnx.Linear(64, 64, recipe="mxfp8", rngs=nnx.Rngs(0)) for _ in range(2)
    )
    mx_jax.nn.nnx.name_layers(nnx.Sequential(first, second))
    traces = []

    @nnx.jit
    def unwatched(layer, x):
        traces.append(None)
        return layer(x)

    @nnx.jit
    def watched(layer, x):
        return layer(x)

    with amax() as records:
        watched(second, watched(first, X))
    assert {tag.path for tag in records} == {"layers/0", "layers/1"}
    unwatched(second, unwatched(first, X))
    assert len(traces) == 1


def test_a_step_that_is_traced_and_those_that_count():
    step = quick(lambda x, w, number: _grads(x, w, number))
    with amax(every=3) as records:
        for number in range(7):
            step(X, W, number)
    assert sorted({record.step for record in records.all()}) == [0, 3, 6]
    assert all(len(own) == 3 for own in records.values())


def test_capture_inside_the_compiled_function():
    records = inspect.Memory()

    @quick
    def step(x, w, number):
        with amax(step=number, every=2, sink=records):
            return layer(x, w)

    for number in range(3):
        step(X, W, number)
    jax.effects_barrier()
    assert {record.step for record in records.all()} == {0, 2}


def test_nested_captures_tell_each_its_own():
    with amax() as outer, inspect.capture(stats="sqnr", filter=lambda t: t.side == "rhs") as inner:
        quick(layer)(X, W)
    assert [tag.tensor for tag in outer] == ["input", "weight"]
    assert [tag.tensor for tag in inner] == ["weight"]
    assert set(inner.all()[0].stats) == {"sqnr_db"} and set(outer.all()[0].stats) == {"amax"}


def test_a_filter_that_matches_nothing_is_told():
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


def test_what_is_asked_for_wrongly():
    with pytest.raises(ValueError, match=r"stats must be some of amax, .*, got stats=\['norm'\]"):
        inspect.capture(stats="norm")
    with pytest.raises(ValueError, match="every must be an integer of at least 1, got every=0"):
        inspect.capture(every=0)
    with pytest.raises(ValueError, match="every=10 needs the step"), inspect.capture(every=10):
        layer(X, W)
    with pytest.raises(TypeError, match="filter must be a regular expression"):
        inspect.capture(filter=3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"must be a regular expression .* got filter='\('"):
        inspect.capture(filter="(")
    for sink in ("run.jsonl", [], 3):
        with pytest.raises(TypeError, match=r"sink must be a sink or several, .*inspect\.Jsonl"):
            inspect.capture(sink=sink)  # pyright: ignore[reportArgumentType]
    message = "step must be an integer scalar, got step of dtype=float"
    with pytest.raises(TypeError, match=message), inspect.at_step(1.5):
        pass
    with pytest.raises(TypeError, match="tag: needs a name, got name=''"), inspect.tag(""):
        pass
    with pytest.raises(ValueError, match=r"'loss' must be a scalar, got shape=\(3,\)"):
        inspect.scalar("loss", jnp.ones(3))
    assert "error" in STATISTICS


@needs_library
@pytest.mark.parametrize("backend", ["cpu_ffi", "reference"])
def test_where_nothing_is_promoted(backend: str):
    """Under JAX's settings that refuse operands of different dtypes or ranks."""
    layer = mx_jax.nn.linen.Dense(16, recipe="mxfp8")
    x = jnp.ones((4, 64))
    params = layer.init(jax.random.key(0), x)
    with (
        jax.numpy_dtype_promotion("strict"),
        jax.numpy_rank_promotion("raise"),
        mx_jax.only_backend(backend),
        mx_jax.inspect.capture() as seen,
    ):
        jax.jit(jax.grad(lambda params: layer.apply(params, x).sum()))(params)
        jax.effects_barrier()
    assert {tag.tensor for tag in seen} >= {"input", "weight", "gradient"}
