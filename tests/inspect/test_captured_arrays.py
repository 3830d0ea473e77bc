"""capture(stats="arrays"): the arrays themselves, on one device, on several, in lanes."""

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import mx_jax
from mx_jax import inspect
from tests.quick import quick

W = (np.random.default_rng(0).normal(size=(64, 32)) / 8).astype(np.float32)
X = np.random.default_rng(1).normal(size=(32, 64)).astype(np.float32)


def product(x, w):
    return mx_jax.matmul(x, w, recipe="mxfp4")


def told(run: Any, *operands: Any) -> dict[str, list[Any]]:
    """Records of the forward product by tensor, of one device after the other."""
    with inspect.capture(stats=("arrays", "sqnr")) as records:
        run(*operands)
    found: dict[str, list[Any]] = {}
    for record in records.all():
        if record.tag.product == "output":
            found.setdefault(record.tag.tensor, []).append(record)
    return {name: sorted(own, key=lambda r: [*r.shard.values()]) for name, own in found.items()}


@pytest.fixture(scope="module")
def whole():
    found = told(quick(product), X, W)
    assert all(len(own) == 1 and own[0].shard == {} for own in found.values())
    return {name: own[0] for name, own in found.items()}


def test_sharded_operands_come_whole(whole):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    x = jax.device_put(X, NamedSharding(mesh, P("data", None)))
    found = told(quick(product), x, jax.device_put(W, NamedSharding(mesh, P())))
    for name, (record,) in found.items():
        np.testing.assert_allclose(record.before, whole[name].before, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(record.after, whole[name].after, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "check", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["vma", "no vma"]
)
def test_below_shard_map_each_device_gives_its_part(whole, check, tmp_path):
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    specs: dict[str, Any] = {
        "in_specs": (P("data"), P(None, "model")),
        "out_specs": P("data", "model"),
    }
    run = quick(jax.shard_map(product, mesh=mesh, check_vma=check, **specs))
    lines = inspect.Jsonl(tmp_path / "run.jsonl")
    with inspect.capture(stats=("arrays", "sqnr"), sink=lines):
        run(X, W)
    found = told(run, X, W)
    for name, parts in found.items():
        assert [part.shard for part in parts] == [
            {"data": i, "model": j} for i in range(2) for j in range(2)
        ]
        assert {part.step for part in parts} == {0}, "one call"
        rows, columns = {"input": (2, 1), "weight": (1, 2), "product": (2, 2)}[name]
        for part in parts:
            i, j = (part.shard[axis] for axis in ("data", "model"))
            for own, other in ((part.before, whole[name].before), (part.after, whole[name].after)):
                part_of = np.split(np.split(other, rows)[i % rows], columns, axis=1)[j % columns]
                np.testing.assert_allclose(own, part_of, rtol=1e-5, atol=1e-5)
    sqnr = {part.stats["sqnr_db"] for part in found["input"]}
    assert len(sqnr) == 1, "statistics are of all devices"
    assert sqnr.pop() == pytest.approx(whole["input"].stats["sqnr_db"], rel=1e-5)
    written = (tmp_path / "run.jsonl").read_text().splitlines()
    assert len(written) == len(found), "numbers are written once"


def test_lanes_of_vmap_lie_along_an_axis_in_front(whole):
    xs = np.stack([X, 2 * X, 3 * X])
    found = told(quick(jax.vmap(product, (0, None))), xs, W)
    ((weight,), (given,), (result,)) = (found[name] for name in ("weight", "input", "product"))
    np.testing.assert_array_equal(given.before, xs)
    np.testing.assert_array_equal(weight.after, whole["weight"].after)
    np.testing.assert_array_equal(given.after[0], whole["input"].after)
    assert result.before.shape == result.after.shape == (3, 32, 32)
    np.testing.assert_allclose(result.before[1], 2 * whole["product"].before, rtol=1e-4, atol=1e-4)
