"""Calls as equations: lowering picks what computes them, by the platform and the devices."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import mx_jax
from mx_jax.backends.calls import DequantizeCall, MatmulCall
from mx_jax.backends.pallas_gpu.tiles import MIN_JAX
from mx_jax.backends.primitive import bind
from mx_jax.backends.select import select, with_backends
from mx_jax.backends.target import Backend, Offer, Target
from mx_jax.inspect import explain
from mx_jax.testing.cases import MatmulCase
from mx_jax.testing.draw import draw_few_octaves
from tests.needs import needs_library
from tests.quick import handlers, lowered, quick
from tests.sharding.collectives import mesh_of

P = PartitionSpec
MXFP4 = mx_jax.formats.MXFP4

X, W = (
    jnp.asarray(draw_few_octaves(np.random.default_rng(seed), shape))
    for seed, shape in enumerate(((8, 64), (64, 32)))
)


def product(x: Any, w: Any) -> jax.Array:
    return mx_jax.matmul(x, w, recipe="mxfp4")


def step(x: Any, w: Any) -> Any:
    """A product's gradients."""
    return jax.grad(lambda x, w: product(x, w).sum(), (0, 1))(x, w)


def batched(x: Any, w: Any) -> jax.Array:
    return jax.vmap(product, (0, None))(x[:, None], w)


RUNS = {"product": product, "gradients": step, "batch": batched}


@needs_library
@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_unsharded_programs_call_handlers(run: Any):
    with mx_jax.only_backend("cpu_ffi"):
        expected = handlers(run, X, W)
    assert expected
    assert handlers(run, X, W) == expected
    assert handlers(run, *jax.device_put((X, W), jax.devices()[3])) == expected
    assert handlers(run, *map(jax.typeof, (X, W))) == expected


def answering(name: str, kind: type, run: Any, several: bool) -> Backend:
    """A backend that computes one kind of call, on one device alone or on any number."""

    def rejects(call: Any, target: Target) -> str | None:
        return None if several or target.num_devices == 1 else "one device"

    offer = Offer(call=kind, rejects=rejects, run=run)
    return Backend(name=name, epsilon_bound=0.0, table=(offer,))


# 1 where a program has one device, -1 where it has several.
ONE = answering("one", DequantizeCall, lambda x, call: jnp.ones_like(x), False)
SEVERAL = answering("several", DequantizeCall, lambda x, call: -jnp.ones_like(x), True)


def way(x: jax.Array) -> jax.Array:
    """1 or -1, by the backend that computes a call."""
    call = DequantizeCall(
        shape=x.shape, dtype=np.dtype(np.float32), format=mx_jax.formats.MXFP4, blocks=((-1, 32),)
    )
    with with_backends(ONE, SEVERAL):
        return bind(call, x)


@pytest.mark.parametrize(
    "run",
    [way, jax.vmap(way), quick(way), quick(jax.vmap(way))],
    ids=["plain", "vmap", "jit", "jit of vmap"],
)
def test_where_arrays_lie_decides(run: Any):
    """Inside jit and outside, whatever is asked where the program is lowered."""
    mesh = mesh_of(data=2, model=4)
    x = jnp.zeros((8, 1))
    assert (run(x) == 1).all() and (run(np.zeros((8, 1))) == 1).all()
    assert (run(jax.device_put(x, jax.devices()[5])) == 1).all()
    for spec in (P(), P("data")):
        assert (run(jax.device_put(x, NamedSharding(mesh, spec))) == -1).all()


def test_on_each_device_by_itself():
    mesh = mesh_of(data=8)
    each = jax.shard_map(way, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    assert (quick(each)(jnp.zeros(8)) == 1).all()
    assert (jax.pmap(way)(jnp.zeros((8, 1))) == 1).all()


def test_derivatives_are_those_of_plain_jax():
    """A kernel has none: here one that gives zeros."""
    zeros = answering("zeros", MatmulCall, lambda x, w, call: jnp.zeros((8, 32)), True)
    stored = mx_jax.quantize(W, "mxfp4", axis=0)
    case = MatmulCase(lhs=None, rhs=MXFP4, m=(8,), n=(32,), k=(64,), rhs_k_first=True)

    def multiply(x: jax.Array) -> jax.Array:
        with with_backends(zeros):
            return bind(case.call, x, stored)

    for run in (lambda x: x, quick):
        assert (run(multiply)(X) == 0).all()
        slope = run(jax.grad(lambda x: multiply(x).sum()))(X)
        expected = np.broadcast_to(np.asarray(stored.dequantize()).sum(1), X.shape)
        np.testing.assert_allclose(slope, expected, rtol=1e-6)


@needs_library
def test_debug_nans_names_the_call():
    """JAX runs a program with a NaN once more, equation by equation: not without end."""
    nan = jnp.full_like(X, jnp.inf)
    with jax.debug_nans(True):
        assert bool(jnp.isfinite(mx_jax.cast(X, "mxfp4")).all())
        for run in (mx_jax.cast, jax.jit(mx_jax.cast, static_argnums=1)):
            with pytest.raises(FloatingPointError, match=r"nan.* encountered in mx_call"):
                run(nan, "mxfp4")


# Hosts with several GPUs --------------------------------------------------------------------------

HOST = functools.partial(mx_jax.testing.target, "cuda", (9, 0), num_devices=8, counted=False)
ROWS, WEIGHTS = (np.ones(shape, jnp.bfloat16) for shape in ((64, 256), (256, 128)))
weight_only = functools.partial(mx_jax.matmul, recipe=mx_jax.recipes.weight_only("mxfp4"))

for_cuda = functools.partial(lowered, platform="cuda")


def lying(x: Any, mesh: Any, *axes: str) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, P(*axes)))


@pytest.mark.skipif(jax.__version_info__ < MIN_JAX, reason="this JAX does not lower the kernels")
def test_unsharded_programs_run_the_kernel():
    """And sharded ones what no kernel computes: `jit` would gather for it."""
    mesh = mesh_of(data=8)
    with HOST(), mx_jax.prefer_backends("pallas_gpu"):
        packed = mx_jax.pack_weights(mx_jax.quantize(WEIGHTS, "mxfp4", axis=0))
        assert isinstance(packed, mx_jax.PackedMXArray)
        alone = for_cuda(weight_only, ROWS, packed)
        cut = lying(ROWS, mesh, "data")
        with pytest.warns(UserWarning, match="unpacked at every call"):
            split = for_cuda(weight_only, cut, packed)
        batch = for_cuda(jax.vmap(weight_only, (0, None)), jnp.stack([ROWS] * 2), packed)
        explained = explain(weight_only, ROWS, packed), explain(weight_only, cut, packed)
    assert "mosaic_gpu" in alone and "dot_general" not in alone
    assert "mosaic_gpu" not in split and "CustomSPMDPartitioning" in split
    assert "mosaic_gpu" in batch
    assert [each.rows[-1].backend for each in explained] == ["pallas_gpu", "xla_bfloat16"]


def test_parts_of_a_product_are_computed_by_what_takes_one_device():
    """In jit and outside, under gradients, with a backend of one's own, which gives ones."""

    def ones(x: Any, w: Any, call: MatmulCall) -> jax.Array:
        shape = [side.shape[axis] for _, side in call.sides for axis in side.axes.kept]
        return jnp.ones(shape, call.out_dtype)

    mesh = mesh_of(data=8)
    x, w = jnp.full((8, 32), 2.0), mx_jax.quantize(jnp.ones((32, 8)), "mxfp4", axis=0)
    sharded = jax.device_put(x, NamedSharding(mesh, P("data")))
    there = jax.device_put((x, w), jax.devices()[3])
    step = jax.grad(lambda x, w: (product(x, w) ** 2).sum() / 2)
    marks = answering("marks", MatmulCall, ones, several=False)
    with mx_jax.testing.target("cpu", num_devices=8, counted=False), with_backends(marks):
        for run in (weight_only, quick(weight_only)):
            assert (run(x, w) == 1).all() and (run(sharded, w) == 1).all()
        assert (weight_only(*there) == 1).all()
        w = jnp.ones((32, 8))
        assert (quick(step)(x, w) == 1).all() and (quick(step)(sharded, w) == 1).all()


def test_a_backend_for_any_number_of_devices_is_chosen_once():
    call = MatmulCase(lhs=MXFP4, rhs=MXFP4, m=(64,), n=(64,), k=(64,)).call
    host = Target(platform="cuda", compute_capability=(9, 0), num_devices=8, counted=False)
    one = Target(platform="cuda", compute_capability=(9, 0))
    assert select(call, host).offer == select(call, one).offer
