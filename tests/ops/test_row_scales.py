"""A tensor scale for each row: the numbers of a token depend on no other token of its batch."""

import contextlib
import dataclasses
import functools

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import mx_jax
from mx_jax import recipes
from mx_jax.ops.quantize import why_not_stored
from mx_jax.ops.ragged_dot import ragged_dot
from tests.quick import quick, with_gradients
from tests.sharding.collectives import draw_all, mesh_of

ROW = {"tensor_scale": "row"}
TOKENS = recipes.nvfp4().with_(activations=ROW)
ALL = TOKENS.with_(weights=ROW, gradients=ROW, name="all")
KEPT = dataclasses.replace(ALL, residuals="quantized")
# docs/recipes.md names them.
_NVFP4 = ("nvfp4", "nvfp4_pretraining", "nvfp4_unbiased", "nvfp4_four_over_six")
DEPENDENT = ("float8_tensorwise", *_NVFP4)
NAMES = dict.fromkeys(recipes.from_name(name).name for name in recipes.names())


@pytest.fixture
def arrays(rng) -> tuple[np.ndarray, ...]:
    x, w, g = (rng.standard_normal(s, np.float32) for s in ((8, 96), (96, 48), (8, 48)))
    return np.ldexp(x, np.arange(-20, 20, 5)[:, None]), w, g


@pytest.fixture(params=["fastest", "reference"])
def backend(request) -> contextlib.AbstractContextManager[None]:
    fastest = request.param == "fastest"
    return contextlib.nullcontext() if fastest else mx_jax.only_backend("reference")


def cast(x: np.ndarray, whole: np.ndarray | None = None) -> np.ndarray:
    """Rows in blocks of 16, each under amax / 2688, or under that of a whole row; in NumPy."""
    of_row = np.abs(x if whole is None else whole).max(-1).astype(np.float32) / np.float32(2688)
    x = np.pad(x, ((0, 0), (0, -x.shape[1] % 16)))
    blocks = x.reshape(len(x), -1, 16) / of_row.astype(np.float64)[:, None, None]
    # At least the smallest normal scale.
    scales = np.maximum(np.abs(blocks).max(-1, keepdims=True) / 6, 2.0**-6)
    scales = scales.astype(ml_dtypes.float8_e4m3fn)
    codes = (blocks / scales.astype(np.float64)).astype(ml_dtypes.float4_e2m1fn)
    values = codes.astype(np.float64) * scales.astype(np.float64) * of_row[:, None, None]
    return values.reshape(x.shape)


def products(x, w, g, saved=lambda x: x):
    """All three by NumPy; of what the output quantized, `saved` is multiplied in gradients."""
    n = g.shape[0]
    return (
        cast(x) @ cast(w.T).T,
        cast(g) @ cast(saved(w.T).T).T,
        cast(saved(x)[:n].T) @ cast(g.T).T,
    )


def assert_near(actual, expected):
    for a, b in zip(actual, expected, strict=True):
        # Sums of so many products, each row of its own size.
        assert (np.abs(a - b) <= 1e-6 * np.abs(b).max(-1, keepdims=True)).all()


@pytest.mark.parametrize(
    ("recipe", "saved"), [(ALL, lambda x: x), (KEPT, cast)], ids=["operands", "codes"]
)
def test_the_three_products(arrays, backend, recipe, saved):
    with backend:
        actual = quick(with_gradients(functools.partial(mx_jax.matmul, recipe=recipe)))(*arrays)
    assert_near(actual, products(*arrays, saved))


@pytest.mark.slow(but="fastest|nvfp4|tensorwise|^row-")
@pytest.mark.parametrize("name", [*NAMES, "row"])
def test_a_row_alone_and_in_batches(rng, name, backend):
    x, w = rng.standard_normal((8, 96), np.float32), rng.standard_normal((96, 40), np.float32)
    x[0] *= np.float32(0.3)  # the batch has a larger value
    recipe = TOKENS if name == "row" else recipes.from_name(name)
    run = functools.partial(mx_jax.matmul, recipe=recipe, key=jax.random.key(0))
    with backend:
        batches = x[:1], x, x * np.float32([[1], *[[1000]] * 7])
        alone, *others = (run(batch, w)[0] for batch in batches)
    assert [bool((alone == other).all()) for other in others] == [name not in DEPENDENT] * 2


@pytest.mark.slow(but="operands-.*Auto|codes-.*Explicit")
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("recipe", [ALL, KEPT], ids=["operands", "codes"])
def test_on_eight_devices(kind, recipe):
    arrays, mesh = draw_all((16, 128), (128, 64), (16, 64)), mesh_of(kind)
    run = with_gradients(functools.partial(mx_jax.matmul, recipe=recipe))
    expected = quick(run)(*arrays)
    with jax.set_mesh(mesh):
        specs = P("fsdp"), P(None, "model"), P("fsdp", "model")
        placed = [
            jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(arrays, specs, strict=True)
        ]
        jax.tree.map(np.testing.assert_array_equal, quick(run)(*placed), expected)


@pytest.mark.parametrize("rows", [8, 32])
def test_weights_gathered_inside_shard_map(rows):
    """Also where a device has one row of them, whose scale could be taken for that of all."""
    x, w = draw_all((16, 32), (rows, 32))
    recipe = dataclasses.replace(ALL, gather=mx_jax.sharding.Gather("d", rhs=P("d")))
    product = functools.partial(
        mx_jax.dot_general, dimension_numbers=(((1,), (1,)), ((), ())), recipe=recipe
    )
    mesh = mesh_of(d=8)
    expected = product(x, w)
    run = jax.shard_map(product, mesh=mesh, in_specs=(P("d"), P("d")), out_specs=P("d"))
    np.testing.assert_array_equal(quick(run)(x, w), expected)


def test_transformations(arrays):
    x, w, _ = arrays
    run = functools.partial(mx_jax.matmul, recipe=ALL)
    each = quick(jax.vmap(lambda row: run(row[None], w)[0]))(x)
    scanned = quick(lambda x: jax.lax.scan(lambda _, row: (_, run(row[None], w)[0]), 0, x)[1])(x)
    gradients = [
        quick(jax.grad(lambda x, f=f: f(x, w).sum()))(x) for f in (run, jax.checkpoint(run))
    ]
    for actual, expected in ((each, run(x, w)), (scanned, run(x, w)), gradients):
        np.testing.assert_array_equal(actual, expected)


def test_rows_in_groups(arrays):
    x, w, g = arrays
    experts, sizes = np.stack([w, 2 * w[::-1], w]), np.array([3, 0, 5])
    run = quick(with_gradients(functools.partial(ragged_dot, group_sizes=sizes, recipe=ALL)))
    y, dx, dw = run(x, experts, g)
    for at, matrix in ((slice(3), w), (slice(3, 8), w)):
        expected = products(x[at], matrix, g[at])
        assert_near((y[at], dx[at]), expected[:2])
        # Channels have one scale for all groups, whose blocks are each group's own.
        expected = cast(x[at].T, x.T) @ cast(g[at].T, g.T).T
        assert_near([dw[0 if at.start is None else 2]], [expected])


def test_words_and_refusals():
    spec = recipes.operand("nvfp4", tensor_scale="row")
    assert TOKENS.output.lhs == TOKENS.grad_weight.rhs == spec
    assert repr(spec) == "operand('nvfp4', scale_rule='amax', tensor_scale='row')"
    assert str(spec) == "nvfp4 (amax, nearest, tensor scale by row)"
    assert TOKENS.with_(activations={"rounding": "away"}).output.lhs.tensor_scale == "row"
    assert TOKENS.with_(activations="mxfp8_e4m3", weights="mxfp8_e4m3", backward="high_precision")
    assert "each row of weights a tensor scale" in str(why_not_stored(ALL))
    for form, block in (("mxfp4", r"\(1, 32\)"), ("nvfp4_2d", r"\(16, 16\)")):
        with pytest.raises(
            ValueError, match=rf"tensor_scale='row' with format={form}, block={block}; use 'nvfp4'"
        ):
            recipes.operand(form, tensor_scale="row")
    with pytest.raises(ValueError, match="one of tensor, row, got tensor_scale='token'"):
        recipes.operand("nvfp4", tensor_scale="token")
