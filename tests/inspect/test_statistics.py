"""Arrays of a capture are those of the program, and statistics equal NumPy's over them."""

import dataclasses
import json
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import mx_jax
from mx_jax import inspect, recipes
from mx_jax.formats import E8M0
from mx_jax.inspect import sqnr_db
from mx_jax.inspect.statistics import numbers
from mx_jax.reference import statistics
from tests.inspect.kit import W, X, both, captured, of, same_numbers
from tests.quick import quick

EVERYTHING = ("arrays", *inspect.STATISTICS)
RECIPES = [
    recipes.mxfp4(),
    *(
        pytest.param(recipe, marks=pytest.mark.slow)
        for recipe in (
            recipes.nvfp4_pretraining(),
            recipes.float8_tensorwise(),
            recipes.weight_only("mxfp4"),
        )
    ),
]


def matmul(x, w):
    return mx_jax.matmul(x, w, recipe="mxfp4")


def drawn(shape: tuple[int, ...], seed: int, scale: float = 1.0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    values = rng.normal(size=shape) * 2.0 ** rng.integers(-12, 3, shape)
    return (values * scale).astype(np.float32)


def step_of(recipe, stats=EVERYTHING, scale=1.0) -> inspect.Records:
    """Records of a product and its gradients."""
    key = jax.random.key(0) if recipe.is_stochastic else None

    def loss(x, w):
        product = mx_jax.matmul(x, w, recipe=recipe, key=key)
        return (product * jnp.linspace(-1e-3, 1, product.size).reshape(product.shape)).sum()

    return captured(both(loss), drawn((32, 64), 0, scale), drawn((64, 32), 1), stats=stats)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_numbers_are_numpys_over_what_was_captured(recipe):
    records = step_of(recipe)
    for record in records.all():
        assert record.before is not None and record.after is not None
        before, after = record.before.astype(np.float64), record.after.astype(np.float64)
        for name, value in cast_of(before, after, record.tag.axis).items():
            result = record.stats[name][0] if name == "channels" else record.stats[name]
            assert result == pytest.approx(value, rel=2e-4, abs=1e-12), (name, record)


def cast_of(before: np.ndarray, after: np.ndarray, axis: int) -> dict[str, Any]:
    noise = np.square(before - after).sum()
    channels = np.abs(np.moveaxis(before, axis, 0)).reshape(before.shape[axis], -1).max(1)
    return {
        "amax": np.abs(before).max(),
        "underflow": np.mean((before != 0) & (after == 0)),
        "nonfinite_blocks": 0,
        "sqnr_db": 10 * math.log10(np.square(before).sum() / noise),
        "channels": [channels.argmax(), channels.max()],
    }


def test_scales_saturation_and_blocks_are_those_of_the_array():
    x = drawn((32, 64), 0)
    x[3, 40] = np.inf
    x[5, 0] = 7.9
    x[5, 1:32] = 1.0
    names = ("scales", "saturation", "nonfinite")
    (record,) = of(captured(matmul, x, np.ones((64, 8), "f4"), stats=names), "input")
    stats = record.stats
    spec = recipes.mxfp4().output.lhs
    assert spec is not None
    quantize = quick(lambda x: mx_jax.quantize(x, spec.format, scale_rule=spec.scale_rule))
    array = quantize(x)
    exponents = np.asarray(array.scales, np.int32) - (E8M0.bias or 0)
    values, counts = np.unique(exponents, return_counts=True)
    assert stats["scales"] == dict(zip(values.tolist(), counts.tolist(), strict=True))
    assert (stats["nonfinite_blocks"], stats["blocks"]) == (1, 64)
    # 6 is the largest code; a block with Inf has the scale NaN, and no values.
    clipped = np.isfinite(x) & (np.abs(x) > 6 * 2.0 ** np.repeat(exponents, 32, axis=1))
    assert clipped.any() and stats["saturation"] == pytest.approx(clipped.sum() / x.size)


@pytest.mark.slow
def test_tiny_gradients_have_an_sqnr_too():
    """Squares of 1e-25 are zero in float32."""
    plain, tiny = (step_of(recipes.mxfp4(), "sqnr", scale).all()[0] for scale in (1.0, 2.0**-83))
    assert plain.stats["sqnr_db"] == pytest.approx(tiny.stats["sqnr_db"], abs=0.2)


def test_counts_are_exact_where_float32_counts_no_further(monkeypatch):
    array = mx_jax.quantize(drawn((4, 64), 0), "mxfp4", axis=-1)

    def counts():
        return lambda x: statistics.of_cast(x, array, -1)

    x = jnp.ones((4, 64))
    whole = quick(counts())(x)
    monkeypatch.setattr(statistics, "_EXACT", 4)
    rows = quick(counts())(x)
    assert int(rows["exponents"].sum()) == 8
    for name in ("exponents", "underflow"):
        np.testing.assert_array_equal(rows[name], whole[name])
    assert "([0], [0])" in str(jax.make_jaxpr(counts())(x)), "each row by itself"


@pytest.mark.parametrize("size", [7, 8, 300, 2**13 + 3])
def test_the_largest_channels_are_those_that_numpy_finds(size):
    amaxes = np.abs(np.random.default_rng(size).normal(size=size)).astype(np.float32)
    amaxes[-1] = amaxes[2]
    raw = {"channel_amax": amaxes, "size": np.uint32(size), "amax": amaxes.max()}
    result = numbers(raw, ("channels",))
    order = np.argsort(-amaxes, kind="stable")[:8]
    assert result["channels"] == [[int(i), float(amaxes[i])] for i in order]
    assert result["outlier_ratio"] == pytest.approx(amaxes.max() / np.median(amaxes))


def by_tensor(run: Any, *operands: Any) -> dict[str, list[Any]]:
    """Records of the forward product, of one device after the other."""
    result = captured(run, *operands, stats=EVERYTHING)
    return {
        name: sorted(of(result, name), key=lambda record: [*record.shard.values()])
        for name in ("input", "weight")
    }


@pytest.fixture(scope="module")
def whole():
    result = by_tensor(matmul, X, W)
    assert all(len(each) == 1 and each[0].shard == {} for each in result.values())
    return {name: each[0] for name, each in result.items()}


@pytest.mark.parametrize(
    "kind", [AxisType.Auto, pytest.param(AxisType.Explicit, marks=pytest.mark.slow)], ids=str
)
def test_sharded_operands_are_recorded_as_whole_ones_are(kind, whole):
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind, kind))
    with jax.set_mesh(mesh):
        x = jax.device_put(X, NamedSharding(mesh, P("data", None)))
        w = jax.device_put(W, NamedSharding(mesh, P(None, None)))
        result = by_tensor(matmul, x, w)
    for name, (each,) in result.items():
        same_numbers(each, whole[name])
        np.testing.assert_allclose(each.before, whole[name].before, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(each.after, whole[name].after, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "check", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["vma", "no vma"]
)
def test_below_shard_map_each_device_gives_its_part(whole, check):
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    specs: dict[str, Any] = {
        "in_specs": (P("data"), P(None, "model")),
        "out_specs": P("data", "model"),
    }
    run = jax.shard_map(matmul, mesh=mesh, check_vma=check, **specs)
    result = by_tensor(run, X, W)
    for name, parts in result.items():
        assert [part.shard for part in parts] == [
            {"data": i, "model": j} for i in range(2) for j in range(2)
        ]
        assert {part.step for part in parts} == {0}, "one call"
        rows, columns = {"input": (2, 1), "weight": (1, 2)}[name]
        for part in parts:
            i, j = (part.shard[axis] for axis in ("data", "model"))
            for each, other in ((part.before, whole[name].before), (part.after, whole[name].after)):
                part_of = np.split(np.split(other, rows)[i % rows], columns, axis=1)[j % columns]
                np.testing.assert_allclose(each, part_of, rtol=1e-5, atol=1e-5)
            # Statistics are of all devices; without types nothing says what is a replica.
            if check:
                same_numbers(part, whole[name])


def test_lanes_of_vmap_are_one_operand_along_an_axis_in_front(whole):
    xs = np.stack([X, 2 * X, np.zeros_like(X)])
    records = captured(jax.vmap(matmul, (0, None)), xs, W, stats=EVERYTHING)
    assert len(records) == len(records.all()) == 2
    ((weight,), (source,)) = (of(records, x) for x in ("weight", "input"))
    same_numbers(source, *of(captured(matmul, xs.reshape(-1, 64), W), "input"))
    np.testing.assert_array_equal(source.before, xs)
    np.testing.assert_array_equal(weight.after, whole["weight"].after)
    np.testing.assert_array_equal(source.after[0], whole["input"].after)


TAG = inspect.Tag(path="up", product="output", side="lhs", axis=-1, format="mxfp4", rule="even")


def test_records_print_the_worst_of_each_operand_and_are_lines_of_json():
    records = inspect.Records()
    assert repr(records) == "<Records: 0 of 0 tags>"
    numbers = [(0, {"amax": 1.5, "sqnr_db": 20.0}), (1, {"amax": 3.0, "sqnr_db": 12.0})]
    records[TAG] = [inspect.Record(tag=TAG, step=step, stats=each) for step, each in numbers]
    down = dataclasses.replace(TAG, path="down", side="rhs", call=1)
    bad = {"nonfinite_blocks": 2, "sqnr_db": math.inf, "scales": {-3: 7}}
    records[down] = [inspect.Record(tag=down, step=1, index=(4,), stats=bad)]
    assert repr(records) == "<Records: 3 of 2 tags, steps 0 to 1>"
    assert [line.split() for line in str(records).splitlines()] == [
        ["operand", "format", "step", "amax", "nonfinite_blocks", "sqnr_db"],
        ["down[4]", "output", "weight", "call", "1", "mxfp4", "1", "nan", "2", "inf"],
        ["up", "output", "input", "mxfp4", "1", "3", "nan", "12"],
    ]
    line = json.loads(json.dumps(records[down][0].as_json(), allow_nan=False))
    assert line["scales"] == {"-3": 7} and line["sqnr_db"] == "inf" and line["index"] == [4]


@pytest.mark.parametrize("size", [4.0, 2.0**100, 2.0**-100], ids=["1", "large", "small"])
@pytest.mark.parametrize(("factor", "decibels"), [(0.9, 20.0), (0.99, 40.0), (1.5, 6.0206)])
def test_sqnr_of_known_noise(factor: float, decibels: float, size: float):
    """Near the ends of float32's range too, where squares leave it: the ratio is what counts."""
    x = np.full(100, size, np.float32)
    assert sqnr_db(x, x * np.float32(factor)) == pytest.approx(decibels, abs=1e-2)


def test_sqnr_of_equal_arrays_is_infinite():
    assert sqnr_db(np.ones(3), np.ones(3)) == sqnr_db(np.zeros(3), np.zeros(3)) == math.inf
    assert math.isnan(sqnr_db(np.full(3, np.nan), np.full(3, np.nan)))


def test_sqnr_takes_any_float_and_mxarrays_of_one_shape(rng: np.random.Generator):
    x = rng.standard_normal((4, 64)).astype(np.float32)
    quantized = mx_jax.quantize(x, "mxfp8_e4m3")
    expected = sqnr_db(x, quantized.dequantize())
    assert isinstance(expected, float) and sqnr_db(x, quantized) == expected
    assert 25 < sqnr_db(jnp.asarray(x, jnp.bfloat16), quantized) < expected + 1
    message = "sqnr_db: shapes must agree, got exact.shape=(3,), approximate.shape=(1, 3)"
    with pytest.raises(ValueError, match=re.escape(message)):
        sqnr_db(np.ones(3), np.ones((1, 3)))
