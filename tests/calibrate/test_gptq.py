"""GPTQ against its definition, and against plain rounding on inputs that depend on each other."""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import mx_jax
from mx_jax import calibrate, convert, recipes
from mx_jax.formats import MXFP4, NVFP4, BlockFormat
from tests.calibrate.test_scales import values_under
from tests.quick import quick

# One size for most tests: each other one is compiled anew.
K, N = 96, 8


def inputs(rng: np.random.Generator, k: int = K, rows: int = 400) -> np.ndarray:
    mixed = rng.standard_normal((rows, k)) @ rng.standard_normal((k, k))
    return (mixed * rng.lognormal(0.0, 1.0, k)).astype(np.float32)


def in_blocks(activity: np.ndarray, size: int) -> list[np.ndarray]:
    """Features of each block, by their activity, and the blocks by theirs; of rows of blocks."""
    width = activity.shape[-1]
    rows = np.arange(activity.size).reshape(-1, width)
    blocks = [row[at : at + size] for row in rows for at in range(0, width, size)]
    flat = activity.ravel()
    blocks.sort(key=lambda block: -flat[block].sum())
    return [block[np.argsort(-flat[block], kind="stable")] for block in blocks]


def by_definition(
    w: np.ndarray, h: np.ndarray, values: np.ndarray, order: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """What GPTQ chooses of `values_under` its scales, and what each feature loses, in float64.

    Each feature becomes its nearest value, and what is left is minimized over all later features.
    """
    now, result, lost = w.astype(np.float64), np.zeros(w.shape), np.zeros(w.shape)
    for place, i in enumerate(order):
        nearest = np.abs(values[:, i] - now[i]).argmin(0)
        result[i] = np.take_along_axis(values[:, i], nearest[None], 0)[0]
        left = order[place + 1 :]
        pull = np.linalg.solve(h[np.ix_(left, left)], h[left, i])
        lost[i] = (h[i, i] - h[i, left] @ pull) * (now[i] - result[i]) ** 2
        now[left] += pull[:, None] * (now[i] - result[i])
    return result, lost


@pytest.mark.slow(but="mxfp4")
@pytest.mark.parametrize("format", [MXFP4, NVFP4], ids=lambda format: format.name)
def test_it_is_the_textbook_s(format: BlockFormat, rng):
    """Minimizing over what is left is what the Cholesky factor does; and the scales fit best."""
    w, x = rng.standard_normal((K, N)).astype(np.float32), inputs(rng)
    moment = x.T @ x
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        result = calibrate.gptq(w, format, moment, damping=0.02)
    h = np.array(moment, np.float64) / np.diag(moment).mean() + 0.02 * np.eye(K)
    blocks = in_blocks(np.diag(h), format.block[1])
    want, lost = by_definition(w, h, values_under(result), np.concatenate(blocks))
    got = np.asarray(result.dequantize(), np.float64)
    # A tie may fall to the other side in float32 and send the rest of its column elsewhere.
    same = (np.abs(got - want) < 1e-5).all(0)
    assert same.sum() >= N - 1, np.abs(got - want).max(0)
    # With a scale one step up or down in one block, that block loses more.
    for block in (blocks[0], blocks[-1]):
        for step in (-1, 1):
            place = block[0] // format.block[1]
            scales = result.scales.at[place].add(np.uint8(step % 256))
            other = dataclasses.replace(result, scales=scales)
            _, more = by_definition(w, h, values_under(other), np.concatenate(blocks))
            assert (more[block].sum(0) >= lost[block].sum(0) * (1 - 1e-5))[same].all()


def test_several_axes(rng):
    """Errors go from one head to the others; blocks end with a head's features."""
    w, x = rng.standard_normal((4, 2, 40)).astype(np.float32), inputs(rng, 80)
    moment = x.T @ x
    result = calibrate.gptq(w, "mxfp4", moment, axis=(1, -1), damping=0.02)
    assert result.scales.shape == (4, 2, 2)
    h = np.array(moment, np.float64) / np.diag(moment).mean() + 0.02 * np.eye(80)
    order = np.concatenate(in_blocks(np.diag(h).reshape(2, 40), 32))
    values = np.moveaxis(values_under(result).reshape(-1, 4, 80), 1, 2)
    want, _ = by_definition(w.reshape(4, 80).T, h, values, order)
    got = np.asarray(result.dequantize(), np.float64).reshape(4, 80).T
    assert (np.abs(got - want) < 1e-5).all(0).sum() >= 3
    searched = calibrate.search_scales(w, "mxfp4", axis=(1, 2))
    before, after = (calibrate.output_error(w, q, moment, axis=(1, 2)) for q in (searched, result))
    assert after < 0.5 * before


@pytest.mark.slow(but="mxfp4")
@pytest.mark.parametrize("format", [MXFP4, NVFP4], ids=lambda format: format.name)
def test_products_lose_less(format: BlockFormat, rng):
    w, x = rng.standard_normal((K, N)).astype(np.float32), inputs(rng)
    moment = x.T @ x
    ways = [
        mx_jax.quantize(w, format, axis=0),
        calibrate.search_scales(w, format),
        calibrate.gptq(w, format, moment, damping=0.01),
    ]
    plain, searched, best = (calibrate.output_error(w, q, moment) for q in ways)
    assert searched < plain and best < 0.5 * searched
    # What output_error says is what a product loses.
    lost = np.square(x @ (np.asarray(ways[-1].dequantize()) - w)).sum() / np.square(x @ w).sum()
    assert best == pytest.approx(lost, rel=1e-3)


@pytest.mark.slow
def test_any_axis_and_features_that_were_never_there(rng):
    w, x = rng.standard_normal((2, K, N // 2)).astype(np.float32), inputs(rng)
    x[:, 10] = 0
    result = calibrate.gptq(w, "nvfp4", x.T @ x, axis=1)
    assert result.shape == w.shape and np.isfinite(np.asarray(result.dequantize())).all()
    front = np.moveaxis(w, 1, 0).reshape(K, N)
    flat = calibrate.gptq(front, "nvfp4", x.T @ x)
    codes = np.moveaxis(np.asarray(result.codes), 1, 0).reshape(K, N)
    np.testing.assert_array_equal(codes, flat.codes)


@pytest.mark.parametrize(
    ("moment", "damping", "complaint"),
    [
        (np.eye(5), 0.01, r"moment.shape=\(5, 5\) for an axis of length=32"),
        (np.full((32, 32), np.nan), 0.01, r"moment.shape=\(32, 32\), finite=False"),
        (-np.eye(32), 0.01, r"positive semidefinite.*got -1.0 on its diagonal"),
        (np.eye(32), 0.0, r"damping must be above 0, got damping=0.0"),
        (np.ones((32, 32)) - 0.9 * np.eye(32), 0.01, "moment must be positive semidefinite.*raise"),
    ],
)
def test_wrong_calls(moment: Any, damping: float, complaint: str):
    with pytest.raises(ValueError, match=f"gptq: .*{complaint}"):
        calibrate.gptq(jnp.ones((32, 4)), "mxfp4", moment, damping=damping)
    with pytest.raises(ValueError, match=r"gptq: .*format=mxfp4_2d with block=\(32, 32\)"):
        calibrate.gptq(jnp.ones((32, 32)), "mxfp4_2d", np.eye(32))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_weight_that_is_no_number_harms_its_block_alone(bad: float, rng):
    w, x = rng.standard_normal((K, N)).astype(np.float32), rng.standard_normal((128, K))
    w[5, 1] = bad
    result = np.asarray(calibrate.gptq(w, "mxfp4", x.T @ x).dequantize())
    lost = np.isnan(result)
    assert lost[:32, 1].all() and lost.sum() == 32
    w[:32, 1] = 0
    expected = np.asarray(calibrate.gptq(w, "mxfp4", x.T @ x).dequantize())
    np.testing.assert_array_equal(np.delete(result, 1, 1), np.delete(expected, 1, 1))
    assert np.count_nonzero(result[32:, 1]) > 20


@pytest.mark.parametrize("exponent", [-120, -70, 0, 60, 120])
def test_the_error_of_weights_of_any_size(exponent: int, rng):
    w, x = rng.standard_normal((64, 8)).astype(np.float32), rng.standard_normal((128, 64))
    expected = calibrate.output_error(w, mx_jax.quantize(w, "mxfp4", axis=0), x.T @ x)
    assert 0.005 < expected < 0.05
    scaled = np.ldexp(w, exponent)
    result = calibrate.output_error(scaled, mx_jax.quantize(scaled, "mxfp4", axis=0), x.T @ x)
    assert result == pytest.approx(expected, rel=1e-6)
    zeros = np.zeros_like(w)
    assert calibrate.output_error(zeros, mx_jax.quantize(zeros, "mxfp4", axis=0), np.eye(64)) == 0
    ones = mx_jax.quantize(np.ones_like(w), "mxfp4", axis=0)
    assert calibrate.output_error(zeros, ones, np.eye(64)) == np.inf
    one_way = np.eye(64) - 0.5  # Its diagonal is positive, and the square of a sum is not.
    with pytest.raises(ValueError, match=r"semidefinite.* an output whose square is -"):
        calibrate.output_error(np.ones_like(w), ones, one_way)
    with pytest.raises(ValueError, match="output_error: moment must be positive semidefinite"):
        calibrate.output_error(w, mx_jax.quantize(w, "mxfp4", axis=0), -np.eye(64))


class Linen(nn.Module):
    recipe: Any = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        dense = nn.Dense if self.recipe is None else mx_jax.nn.linen.Dense
        options = {} if self.recipe is None else {"recipe": self.recipe}
        y = jnp.tanh(dense(6, name="up", **options)(x))
        heads = nn.DenseGeneral((2, 3), axis=-1, name="heads")(y)
        # Flax sorts the axes: features count as if axis were (-2, -1).
        y = nn.DenseGeneral(4, axis=(-1, -2), name="out")(heads)
        return nn.Embed(7, 4, name="table").attend(y)


class Nnx(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.up = nnx.Linear(8, 6, rngs=rngs)
        self.heads = nnx.LinearGeneral(6, (2, 3), rngs=rngs)
        self.out = nnx.LinearGeneral((2, 3), 4, axis=(-2, -1), rngs=rngs)
        self.table = nnx.Embed(7, 4, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.table.attend(self.out(self.heads(jnp.tanh(self.up(x)))))


def expected(x: np.ndarray, layers: Any) -> dict[str, np.ndarray]:
    """Of `Linen` and `Nnx`, from the layers' parameters."""

    def after(name: str, rows: np.ndarray) -> np.ndarray:
        kernel, bias = (np.asarray(layers[name][part]) for part in ("kernel", "bias"))
        return rows @ kernel.reshape(rows.shape[1], -1) + bias.reshape(-1)

    rows = x.reshape(-1, 8)
    y = np.tanh(after("up", rows))
    heads = after("heads", y)
    out = after("out", heads)
    inputs = {"up": rows, "heads": y, "out": heads, "table": out}
    return {name: each.T @ each for name, each in inputs.items()}


@pytest.mark.parametrize("recipe", [None, recipes.weight_only("mxfp8_e4m3")])
def test_moments_of_a_linen_model(recipe: Any, rng):
    model, x = Linen(recipe), rng.standard_normal((2, 5, 8)).astype(np.float32)
    variables = quick(Linen().init)(jax.random.key(0), x)
    result = calibrate.moments(model, [x[:1], (x[1:],)], variables=variables)
    want = expected(x, variables["params"])
    assert result.keys() == want.keys()
    for name in want if recipe is None else ["up"]:
        np.testing.assert_allclose(result[name], want[name], rtol=1e-4, atol=1e-4)


class Shared(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        layer = nn.Dense(8, name="shared")
        return layer(layer(x))


def test_moments_of_a_shared_layer(rng):
    x = rng.standard_normal((5, 8)).astype(np.float32)
    variables = quick(Shared().init)(jax.random.key(0), x)
    result = calibrate.moments(Shared(), [x], variables=variables)
    layer = variables["params"]["shared"]
    y = x @ layer["kernel"] + layer["bias"]
    np.testing.assert_allclose(result["shared"], x.T @ x + y.T @ y, rtol=1e-4, atol=1e-4)


def test_moments_of_an_nnx_model(rng):
    model, x = Nnx(nnx.Rngs(0)), rng.standard_normal((2, 5, 8)).astype(np.float32)
    result = calibrate.moments(model, [x])
    want = expected(x, nnx.to_pure_dict(nnx.state(model)))
    assert result.keys() == want.keys()
    for name, moment in want.items():
        np.testing.assert_allclose(result[name], moment, rtol=1e-4, atol=1e-4)
    # The model itself is as it was.
    assert model.up.dot_general is Nnx(nnx.Rngs(0)).up.dot_general
    assert "attend" not in vars(model.table)


def test_moments_of_what_is_none(rng):
    x = jnp.ones((2, 8))
    variables = quick(Linen().init)(jax.random.key(0), x[None])
    with pytest.raises(TypeError, match="linen module needs variables=, got variables=NoneType"):
        calibrate.moments(Linen(), [x])
    with pytest.raises(TypeError, match="nnx model has its own; drop variables="):
        calibrate.moments(Nnx(nnx.Rngs(0)), [x], variables=variables)
    with pytest.raises(TypeError, match=r"needs a flax.linen module or .*got\n? ?model=function"):
        calibrate.moments(lambda x: x, [x])  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="needs at least one batch, got none"):
        calibrate.moments(Linen(), [], variables=variables)
    with pytest.raises(ValueError, match=r"got none in LayerNorm; .* convert\.original\(model\)"):
        calibrate.moments(nn.LayerNorm(), [x], variables=nn.LayerNorm().init(jax.random.key(0), x))


class InTransforms(nn.Module):
    """A layer in remat, one in a loop, and one in neither."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.remat(nn.Dense)(8, name="again")(x)
        x = nn.RNN(nn.SimpleCell(8), name="loop")(x[None])[0]
        return nn.jit(nn.Dense)(4, name="last")(x)


class InTransformsOfNnx(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.again, self.last = (nnx.Linear(8, 8, rngs=rngs) for _ in range(2))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.last(nnx.remat(lambda layer, x: layer(x))(self.again, x))


def test_moments_of_layers_in_transforms(rng):
    x = rng.standard_normal((5, 8)).astype(np.float32)
    variables = quick(InTransforms().init)(jax.random.key(0), x)
    result = calibrate.moments(InTransforms(), [x], variables=variables)
    assert result.keys() == {"again", "last"}, "variables of a loop are its own"
    np.testing.assert_allclose(result["again"], x.T @ x, rtol=1e-4, atol=1e-4)
    assert calibrate.moments(InTransformsOfNnx(nnx.Rngs(0)), [x]).keys() == {"last"}


@pytest.mark.parametrize("shape", [(0, 64), (64, 0)])
def test_a_matrix_without_elements(shape: tuple[int, int]):
    q = calibrate.gptq(jnp.zeros(shape), "mxfp4", np.eye(shape[0]))
    assert (q.shape, q.blocks) == (shape, ((-2, 32),))


def test_weights_of_heads_and_of_layers_that_contract_two_axes(rng):
    """With their own moments: a table's is that of `attend`; one that only looks up has none."""
    model, x = Linen(), rng.standard_normal((20, 8)).astype(np.float32)
    variables = quick(model.init)(jax.random.key(0), x)
    moments = calibrate.moments(model, [x], variables=variables)
    rules = [
        convert.Rule("table", recipes.weight_only("mxfp4"), types=nn.Embed),
        convert.Rule("out", recipes.weight_only("mxfp4")),
    ]
    options = {"model": model, "args": (x,), "pack": False}
    stored = convert.weights(variables, rules, by=calibrate.Gptq(moments), **options)["params"]
    for layer, name, axis in (("out", "kernel", (0, 1)), ("table", "embedding", 1)):
        w = variables["params"][layer][name]
        want = calibrate.gptq(w, "mxfp4", moments[layer], axis=axis)
        assert (want.codes != calibrate.search_scales(w, "mxfp4", axis=axis).codes).any()
        np.testing.assert_array_equal(stored[layer][name].codes, want.codes)
    with pytest.warns(calibrate.UncalibratedWarning, match="no moment for 'out'") as warned:
        alone = convert.weights(variables, rules, by=calibrate.Gptq({}), **options)["params"]
    assert len(warned) == 1
    table = calibrate.search_scales(variables["params"]["table"]["embedding"], "mxfp4", axis=1)
    np.testing.assert_array_equal(alone["table"]["embedding"].codes, table.codes)


@pytest.mark.slow
def test_weights_of_a_stack(rng):
    class Stack(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            layers = nn.scan(
                lambda layer, x, _: (layer(x), None),
                variable_axes={"params": 0},
                split_rngs={"params": True},
                length=3,
            )
            return layers(nn.Dense(32, name="up"), x, None)[0]

    x = rng.standard_normal((2, 32)).astype(np.float32)
    params = quick(Stack().init)(jax.random.key(0), x)["params"]
    assert params["up"]["kernel"].shape == (3, 32, 32)
    options = {"model": Stack(), "args": (x,), "pack": False}
    rules = convert.Rule(".*", recipes.weight_only("nvfp4"))
    result = convert.weights(params, rules, by=calibrate.SearchedScales(), **options)
    alone = [calibrate.search_scales(each, "nvfp4") for each in params["up"]["kernel"]]
    kernel = result["up"]["kernel"]
    np.testing.assert_array_equal(kernel.codes, np.stack([q.codes for q in alone]))
    assert kernel.tensor_scale.shape == (3, 1, 1)
    with pytest.warns(calibrate.UncalibratedWarning, match="no moment for 'up'; its scales are"):
        convert.weights(params, rules, by=calibrate.Gptq({}), **options)
    square = convert.Rule(".*", recipes.weight_only("mxfp4_2d"))
    with pytest.raises(ValueError, match="needs blocks along one axis, but the recipe of 'up' has"):
        convert.weights(params, square, by=calibrate.SearchedScales(), **options)


def test_scales_are_chosen_at_any_magnitude(rng: np.random.Generator):
    """Squares of errors stay in range: powers of two change scales alone."""
    w, h = rng.standard_normal((K, N)).astype(np.float32), moment_of(rng)
    expected = calibrate.gptq(w, "mxfp4", h)
    for exponent in (-90, 90):
        moved = calibrate.gptq(np.ldexp(w, exponent), "mxfp4", h)
        np.testing.assert_array_equal(moved.codes, expected.codes)
        np.testing.assert_array_equal(moved.scales - expected.scales, np.uint8(exponent % 256))


def moment_of(rng: np.random.Generator) -> np.ndarray:
    x = inputs(rng)
    return x.T @ x
