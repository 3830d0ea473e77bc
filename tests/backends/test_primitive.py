"""Calls as equations: lowering picks what computes them, by the platform and the devices."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import mx_jax
from mx_jax.backends.calls import AttendCall
from mx_jax.backends.primitive import Implementations
from mx_jax.inspect import explain_call
from mx_jax.testing.compare import assert_bitwise_equal
from mx_jax.testing.draw import draw_few_octaves
from tests.backends.test_cpu_ffi import needs_library
from tests.quick import quick

pytestmark = needs_library

P = PartitionSpec
MXFP4 = mx_jax.recipes.mxfp4()


@pytest.fixture(name="x")
def _x() -> jax.Array:
    return jnp.asarray(draw_few_octaves(np.random.default_rng(0), (8, 64)))


@pytest.fixture(name="w")
def _w() -> jax.Array:
    return jnp.asarray(draw_few_octaves(np.random.default_rng(1), (64, 32)))


def product(x: Any, w: Any) -> jax.Array:
    return mx_jax.matmul(x, w, recipe=MXFP4)


def step(x: Any, w: Any) -> Any:
    """A product's gradients."""
    return jax.grad(lambda x, w: product(x, w).sum(), (0, 1))(x, w)


def batched(x: Any, w: Any) -> jax.Array:
    return jax.vmap(product, (0, None))(x[:, None], w)


RUNS = {"product": product, "gradients": step, "batch": batched}


def handlers(run: Any, *operands: Any) -> list[str]:
    """The compiled handlers that a lowered program calls."""
    return sorted(re.findall(r"@(mx_jax_cpu_\w+)", jax.jit(run).lower(*operands).as_text()))


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_unsharded_programs_call_handlers(run: Any, x: jax.Array, w: jax.Array):
    with mx_jax.only_backend("cpu_ffi"):
        expected = handlers(run, x, w)
    assert expected
    assert handlers(run, x, w) == expected
    assert handlers(run, *jax.device_put((x, w), jax.devices()[3])) == expected
    assert handlers(run, *map(jax.typeof, (x, w))) == expected


def test_sharded_programs_are_plain_jax(x: jax.Array, w: jax.Array):
    """No handler is called, and nothing stays of the other way."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    operands = jax.device_put((x, w), (NamedSharding(mesh, P("data")), NamedSharding(mesh, P())))
    assert handlers(product, *operands) == []
    with mx_jax.only_backend("reference"):
        expected = jax.jit(product).lower(*operands)
    lowered = jax.jit(product).lower(*operands)
    assert operations(lowered) == operations(expected)
    assert_bitwise_equal(jax.jit(product)(*operands), product(x, w), what="sharded")


def test_one_read_for_both_casts_is_two_casts_on_several(x: jax.Array):
    """Where the reference makes no call of them, devices that share an array make two."""

    def both(x: Any) -> Any:
        return mx_jax.quantize_both(x, "mxfp4")

    assert handlers(both, x) == ["mx_jax_cpu_quantize_both"]
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    sharded = jax.device_put(x, NamedSharding(mesh, P("data")))
    assert handlers(both, sharded) == []
    for found, expected in zip(jax.jit(both)(sharded), both(x), strict=True):
        assert_bitwise_equal(found.codes, expected.codes, what="codes")
        assert_bitwise_equal(found.scales, expected.scales, what="scales")
    text = str(explain_call(both, x))
    assert "-> cpu_ffi (by reference where the program has several devices)" in text


def operations(lowered: Any) -> list[str]:
    """What a program computes, in order."""
    return re.findall(r"stablehlo\.\w+", lowered.as_text())


IDS = ["plain", "vmap", "jit", "jit of vmap"]


# Of a call whose results no arithmetic tells: they are those of the plain implementation.
ANY_CALL = AttendCall(queries=(), keys=(), dtypes=(), tokens=1)


def bound(own: Any, other: Any, x: jax.Array) -> jax.Array:
    """By `own` on one CPU, by `other` anywhere else."""
    return Implementations(own, other, "cpu", True)(x, ANY_CALL)


def way(x: jax.Array) -> jax.Array:
    """1 where the handler is taken, -1 elsewhere."""
    return bound(*(lambda x, call, n=n: jnp.full_like(x, n) for n in (1, -1)), x)


@pytest.mark.parametrize("run", [way, jax.vmap(way), quick(way), quick(jax.vmap(way))], ids=IDS)
def test_where_arrays_lie_decides(run: Any):
    """Inside jit and outside."""
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    x = jnp.zeros((8, 1))
    assert (run(x) == 1).all() and (run(np.zeros((8, 1))) == 1).all()
    assert (run(jax.device_put(x, jax.devices()[5])) == 1).all()
    for spec in (P(), P("data")):
        assert (run(jax.device_put(x, NamedSharding(mesh, spec))) == -1).all()


def test_nested_vmaps():
    """Each along an axis of its own: the outer one the last, the inner one the first."""
    sums = lambda x, call: jnp.cumsum(x)  # noqa: E731
    x = jnp.arange(24.0).reshape(2, 3, 4)
    found = jax.vmap(jax.vmap(lambda x: bound(sums, sums, x)), 2)(x)
    np.testing.assert_array_equal(found, np.moveaxis(np.cumsum(x, axis=1), 2, 0))


def test_on_each_device_by_itself():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    each = jax.shard_map(way, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    assert (quick(each)(jnp.zeros(8)) == 1).all()
    assert (jax.pmap(way)(jnp.zeros((8, 1))) == 1).all()


def test_derivatives_are_those_of_plain_jax():
    def square(x: jax.Array) -> jax.Array:
        return bound(*(lambda x, call, f=f: f(x) for f in (jnp.zeros_like, jnp.square)), x)

    for run in (lambda x: x, quick):
        assert run(jax.grad(square))(jnp.float32(3)) == 6 and square(jnp.float32(3)) == 0


def test_explained(x: jax.Array, w: jax.Array):
    text = str(explain_call(product, x, w))
    assert "-> cpu_ffi (by reference where the program has several devices)" in text
