"""Statistics of a capture equal NumPy's over the arrays that it captured."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mx_jax
from mx_jax import inspect, recipes
from mx_jax.formats import E8M0
from mx_jax.inspect.records import pack, unpack
from mx_jax.inspect.statistics import numbers, shortened
from mx_jax.reference import statistics
from tests.quick import quick

RECIPES = [
    recipes.mxfp4(),
    *(
        pytest.param(recipe, marks=pytest.mark.slow)
        for recipe in (
            recipes.mxfp8(),
            recipes.nvfp4_pretraining(),
            recipes.float8_tensorwise(),
            recipes.weight_only("mxfp4"),
        )
    ),
]


def drawn(shape: tuple[int, ...], seed: int, scale: float = 1.0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    values = rng.normal(size=shape) * 2.0 ** rng.integers(-12, 3, shape)
    return (values * scale).astype(np.float32)


def captured(recipe, x, w, stats=("arrays", *inspect.STATISTICS)) -> inspect.Memory:
    key = jax.random.key(0) if recipe.is_stochastic else None

    def loss(x, w):
        product = mx_jax.matmul(x, w, recipe=recipe, key=key)
        return (product * jnp.linspace(-1e-3, 1, product.size).reshape(product.shape)).sum()

    with inspect.capture(stats=stats) as records:
        quick(jax.grad(loss, argnums=(0, 1)))(x, w)
    return records


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_numbers_are_numpys_over_what_was_captured(recipe):
    records = captured(recipe, drawn((32, 64), 0), drawn((64, 32), 1)).all()
    assert {record.tag.product for record in records} >= {"output"}
    for record in records:
        assert record.before is not None and record.after is not None
        before, after = record.before.astype(np.float64), record.after.astype(np.float64)
        expected = product_of(before, after) if record.tag.side is None else cast_of(before, after)
        for name, value in expected.items():
            assert record.stats[name] == pytest.approx(value, rel=2e-4, abs=1e-12), (name, record)


def cast_of(before: np.ndarray, after: np.ndarray) -> dict[str, float]:
    noise = np.square(before - after).sum()
    return {
        "amax": np.abs(before).max(),
        "underflow": np.mean((before != 0) & (after == 0)),
        "nonfinite_blocks": 0,
        "sqnr_db": 10 * math.log10(np.square(before).sum() / noise),
    }


def product_of(exact: np.ndarray, actual: np.ndarray) -> dict[str, float]:
    norms = np.linalg.norm(exact), np.linalg.norm(actual)
    return {
        "amax": max(np.abs(exact).max(), np.abs(actual).max()),
        "error": np.linalg.norm(exact - actual) / norms[0],
        "cosine": float(np.sum(exact * actual) / (norms[0] * norms[1])),
    }


@pytest.mark.slow
def test_the_exact_product_is_that_of_the_operands():
    x, w = drawn((32, 64), 0), drawn((64, 32), 1)
    recipe = recipes.mxfp4()
    (record,) = (
        r for r in captured(recipe, x, w).all() if str(r.tag).startswith("unnamed output mx")
    )
    wide = x.astype(np.float64) @ w.astype(np.float64)
    assert record.before is not None
    np.testing.assert_allclose(record.before, wide, rtol=1e-5, atol=1e-5 * np.abs(wide).max())
    np.testing.assert_array_equal(
        record.after, quick(mx_jax.matmul, static_argnames="recipe")(x, w, recipe=recipe)
    )


def test_scales_saturation_and_blocks_are_those_of_the_array():
    x = drawn((32, 64), 0)
    x[3, 40] = np.inf
    x[5, 0] = 7.9
    x[5, 1:32] = 1.0
    with inspect.capture(stats=("scales", "saturation", "nonfinite")) as records:
        quick(lambda x, w: mx_jax.matmul(x, w, recipe=recipes.mxfp4()))(x, np.ones((64, 8), "f4"))
    stats = next(own for own in records.all() if own.tag.side == "lhs").stats
    spec = recipes.mxfp4().fwd.lhs
    assert spec is not None
    quantize = quick(lambda x: mx_jax.quantize(x, spec.format, scale_rule=spec.scale_rule))
    array = quantize(x)
    exponents = np.asarray(array.scales, np.int32) - (E8M0.bias or 0)
    values, counts = np.unique(exponents, return_counts=True)
    assert stats["scales"] == dict(zip(values.tolist(), counts.tolist(), strict=True))
    assert (stats["nonfinite_blocks"], stats["blocks"]) == (1, 64)
    finite = np.where(np.isfinite(x), x, 0)
    expected = inspect.saturated_fraction(finite, quantize(finite))
    assert stats["saturation"] == pytest.approx(expected, abs=1.5 / x.size) and expected > 0


@pytest.mark.slow
def test_tiny_gradients_have_an_sqnr_too():
    """Squares of 1e-25 are zero in float32."""
    plain, tiny = (
        captured(recipes.mxfp4(), drawn((32, 64), 0, scale), drawn((64, 32), 1), "sqnr").all()[0]
        for scale in (1.0, 2.0**-83)
    )
    assert plain.stats["sqnr_db"] == pytest.approx(tiny.stats["sqnr_db"], abs=0.2)


def test_a_planted_outlier_channel_ranks_first():
    x, w = drawn((32, 64), 0), np.random.default_rng(3).normal(size=(64, 64)).astype(np.float32)
    gains = np.ones(64, np.float32)
    gains[37] = 300.0

    @quick
    def model(x):
        for number in range(3):
            with inspect.tag(f"layer_{number}"):
                x = mx_jax.matmul(x, w, recipe="mxfp8")
                x = jnp.tanh(x) * (gains if number == 1 else 1)
        return x

    with inspect.capture(stats="channels") as records:
        model(x)
    worst = max(records.all(), key=lambda record: record.stats["outlier_ratio"])
    assert (worst.path, worst.tag.tensor) == ("layer_2", "input")
    assert worst.stats["channels"][0][0] == 37
    assert worst.stats["channels"][0][1] > 100 * worst.stats["channels"][1][1]


def test_what_keeps_codes_tells_its_casts_once():
    recipe = dataclasses.replace(recipes.mxfp8(), residuals=recipes.Residuals.QUANTIZED)
    records = captured(recipe, drawn((32, 64), 0), drawn((64, 32), 1), ("amax", "error"))
    assert all(len(own) == 1 for own in records.values()) and len(records) == 9


def test_counts_are_exact_where_float32_counts_no_further(monkeypatch):
    array = mx_jax.quantize(drawn((4, 64), 0), "mxfp4", axis=-1)

    def counts(x):
        return statistics.of_cast(x, array, -1, {"scales", "underflow"})

    x = jnp.ones((4, 64))
    whole = counts(x)
    monkeypatch.setattr(statistics, "_EXACT", 4)
    rows = counts(x)
    assert int(rows["exponents"].sum()) == 8
    for name in ("exponents", "underflow"):
        np.testing.assert_array_equal(rows[name], whole[name])
    assert "([0], [0])" in str(jax.make_jaxpr(counts)(x)), "each row by itself"


def test_a_message_is_one_array():
    content = ([{"counts": jnp.arange(3, dtype=jnp.uint32), "count": jnp.uint32(2**32 - 1)}], -7)
    words, layout = pack(jax.tree.map(jnp.asarray, content))
    assert words.shape == (5,)
    ((raw,), step) = unpack(words, layout)
    assert (raw["count"], step, raw["counts"].tolist()) == (2**32 - 1, -7, [0, 1, 2])


@pytest.mark.parametrize(
    "recipe",
    [recipes.mxfp4(), pytest.param(recipes.weight_only("mxfp4"), marks=pytest.mark.slow)],
    ids=lambda recipe: recipe.name,
)
def test_what_came_quantized_tells_what_it_is_and_not_what_it_lost(recipe):
    x, w = drawn((8, 64), 0), drawn((64, 32), 1)
    w[5] = 0
    stored = mx_jax.quantize(w, "mxfp4", axis=0)
    with inspect.capture(stats=("arrays", *inspect.STATISTICS)) as records:
        mx_jax.matmul(x, stored, recipe=recipe)
    (record,) = (record for record in records.all() if record.tag.rule == "stored")
    assert (record.tag.tensor, record.tag.format, record.tag.axis) == ("weight", "mxfp4", -2)
    after = np.asarray(mx_jax.dequantize(stored))
    np.testing.assert_array_equal(record.after, after)
    assert record.before is None and not {"underflow", "saturation", "sqnr_db"} & set(record.stats)
    assert record.stats["amax"] == np.abs(after).max() and record.stats["blocks"] == 64
    assert sum(record.stats["scales"].values()) == 64
    (product,) = (record for record in records.all() if record.tag.side is None)
    np.testing.assert_allclose(product.before, x @ after, rtol=1e-5, atol=1e-3)


def test_what_came_quantized_is_told_once_below_a_gradient_and_guarded():
    stored = mx_jax.quantize(drawn((64, 32), 1), "mxfp4", axis=0)
    broken = dataclasses.replace(stored, scales=stored.scales.at[1, 3].set(255))
    with inspect.capture(stats="amax") as records:
        jax.grad(lambda x: mx_jax.matmul(x, stored, recipe="mxfp4").sum())(jnp.ones((8, 64)))
    found = [record.tag.product for record in records.all() if record.tag.rule == "stored"]
    assert found == ["output"]
    message = r"nonfinite_blocks=1 of blocks=64.*stored"
    with pytest.raises(inspect.NonFiniteError, match=message), inspect.guard():
        mx_jax.matmul(jnp.ones((8, 64)), broken, recipe="mxfp4")


@pytest.mark.parametrize("size", [7, 8, 300, 2**13 + 3])
def test_the_largest_channels_are_those_that_numpy_finds(size):
    amaxes = np.abs(np.random.default_rng(size).normal(size=size)).astype(np.float32)
    amaxes[-1] = amaxes[2]
    raw = shortened({"channel_amax": jnp.asarray(amaxes)})
    size_of_all = {"size": np.uint32(size), "amax": amaxes.max()}
    found = numbers({name: np.asarray(x) for name, x in raw.items()} | size_of_all, ("channels",))
    order = np.argsort(-amaxes, kind="stable")[:8]
    assert found["channels"] == [[int(i), float(amaxes[i])] for i in order]
    assert found["outlier_ratio"] == pytest.approx(amaxes.max() / np.median(amaxes))
    assert (len(raw) == 1) == (size <= 2**13)
