"""The error of large products comes from a fixed sample of their entries."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import mx_jax
from mx_jax import recipes
from mx_jax.formats import E4M3, E5M2
from mx_jax.ops import tags
from mx_jax.ops.delayed import DelayedState, DelayedStates, Elements, delayed_dot_general
from mx_jax.ops.ragged_dot import ragged_dot
from mx_jax.reference.hadamard import Hadamard
from tests.inspect.kit import both, captured, of
from tests.quick import quick

RNG = np.random.default_rng(0)
X = RNG.normal(size=(48, 64)).astype(np.float32)
W = RNG.normal(size=(64, 40)).astype(np.float32)


@pytest.mark.parametrize(
    "sizes", [[1], [128], [129], [1024], [4096], [50257], [512, 128], [64, 3, 96]]
)
def test_positions_are_few_at_odd_distances_and_reach_the_end(sizes):
    found = tags.strides(sizes)
    counts = [len(range(0, size, step)) for size, step in zip(sizes, found, strict=True)]
    assert math.prod(counts) <= tags.POSITIONS and all(step % 2 for step in found)
    assert math.prod(sizes) > tags.POSITIONS or found == [1] * len(sizes)
    if len(sizes) == 1:
        assert counts[0] >= min(sizes[0], tags.POSITIONS) // 3


def products(function: Any, *operands: Any, stats: Any = "error") -> dict[str, Any]:
    """Records of the three products."""
    step = both(lambda *own: (function(*own) ** 2).sum())
    records = captured(step, *operands, stats=stats)
    return {record.tag.product: record for record in records.all() if record.tag.side is None}


def matmul(x, w):
    return mx_jax.matmul(x, w, recipe="mxfp4")


def test_the_error_is_that_of_the_sampled_entries(monkeypatch):
    whole = products(matmul, X, W, stats=("arrays", "error"))
    monkeypatch.setattr(tags, "POSITIONS", 16)
    part = products(matmul, X, W)
    # Rows of one operand and columns of the other: 48, 40 and 64 positions at these distances.
    steps = {"output": (3, 3), "grad_input": (3, 5), "grad_weight": (5, 3)}
    for name, (rows, columns) in steps.items():
        exact, actual = (x[::rows, ::columns] for x in (whole[name].before, whole[name].after))
        stats = part[name].stats
        expected = np.linalg.norm(exact - actual) / np.linalg.norm(exact)
        assert stats["error"] == pytest.approx(expected, rel=1e-4)
        assert (stats["compared"], stats["entries"]) == (exact.size, whole[name].before.size)
        assert whole[name].stats["compared"] == whole[name].stats["entries"]
        assert stats["error"] == pytest.approx(whole[name].stats["error"], rel=0.2)


@pytest.mark.parametrize(
    ("axes", "left", "right"),
    [
        ("bmk,bkn->bmn", (2, 32, 64), (2, 64, 40)),
        pytest.param("bmk,kn->bmn", (3, 32, 64), (64, 40), marks=pytest.mark.slow),
        pytest.param("km,nk->mn", (64, 48), (40, 64), marks=pytest.mark.slow),
    ],
)
def test_any_order_of_axes(axes, left, right, monkeypatch):
    check(monkeypatch, lambda x, w: mx_jax.einsum(axes, x, w, recipe="mxfp4"), left, right)


def check(monkeypatch, function, left, right):
    """Sampled errors are near the whole ones; noise of other entries would not be."""
    x, w = (RNG.normal(size=shape).astype(np.float32) for shape in (left, right))
    whole = products(function, x, w)
    monkeypatch.setattr(tags, "POSITIONS", 16)
    part = products(function, x, w)
    for name, record in part.items():
        assert record.stats["compared"] < record.stats["entries"]
        assert record.stats["error"] == pytest.approx(whole[name].stats["error"], rel=0.3)


def test_columns_of_a_ragged_product(monkeypatch):
    sizes = jnp.array([10, 0, 30])
    check(monkeypatch, lambda x, w: ragged_dot(x, w, sizes, recipe="mxfp4"), (48, 64), (3, 64, 40))


@pytest.mark.slow
def test_operands_that_were_turned_and_kept(monkeypatch):
    turned = recipes.mxfp4().with_(fwd={"transform": Hadamard(size=32, signs=(1,) * 32)})
    recipe = dataclasses.replace(turned, residuals=recipes.Residuals.QUANTIZED)
    check(monkeypatch, lambda x, w: mx_jax.matmul(x, w, recipe=recipe), (48, 64), (64, 40))


def on_explicit_axes(function: Any, *operands: Any) -> Any:
    """What a function returns of operands whose first axis has a type that says it is sharded."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        x, w = (jax.device_put(x, NamedSharding(mesh, P(*p))) for x, p in operands)
        return function(x, w)


@pytest.mark.slow
def test_products_on_explicit_axes_have_the_same_sample(monkeypatch):
    """They are computed on automatic axes, along which anything can be sliced."""
    monkeypatch.setattr(tags, "POSITIONS", 16)
    expected = products(matmul, X, W)
    found = on_explicit_axes(lambda x, w: products(matmul, x, w), (X, ("data", None)), (W, ()))
    assert found["output"].stats["compared"] == len(range(0, 48, 3)) * len(range(0, 40, 3))
    for name, record in found.items():
        assert record.stats == pytest.approx(expected[name].stats, rel=1e-3)


def test_axes_that_are_sharded_by_their_type_count_whole(monkeypatch):
    """Of products with delayed scales, which stay on explicit axes: JAX slices no sharded axis."""
    monkeypatch.setattr(tags, "POSITIONS", 16)
    states = DelayedStates(*(DelayedState(jnp.float32(1 / 64), jnp.zeros(2)) for _ in range(3)))
    elements = Elements(E4M3, E4M3, E5M2)

    def delayed(x, w):
        dimensions = (((1,), (0,)), ((), ()))
        return delayed_dot_general(x, w, dimensions, states, elements, jnp.float32)

    def run(x, w):
        return of(captured(quick(delayed), x, w, stats="error"), "product")

    (record,) = on_explicit_axes(run, (X, ("data", None)), (W, ()))
    assert record.stats["compared"] == 48 * len(range(0, 40, 3))
