"""Hosts with several GPUs: lowering decides whether a kernel runs, as for handlers on CPUs."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import mx_jax
from mx_jax import formats
from mx_jax.backends.calls import MatmulCall
from mx_jax.backends.pallas_gpu.architecture import MIN_JAX
from mx_jax.backends.select import select, with_backends
from mx_jax.backends.target import Backend, Offer
from mx_jax.inspect import explain_call
from mx_jax.testing.cases import MatmulCase
from tests.backends.test_select import H200
from tests.quick import quick

P = PartitionSpec
NEW_ENOUGH = jax.__version_info__ >= MIN_JAX
HOST = functools.partial(mx_jax.testing.target, "cuda", (9, 0), num_devices=8, counted=False)


def product(x: Any, w: Any) -> jax.Array:
    return mx_jax.matmul(x, w, recipe=mx_jax.recipes.weight_only("mxfp4"))


def operands(*places: Any) -> list[Any]:
    """Activations and weights, or their shapes where they lie somewhere."""
    x, w = jnp.ones((64, 256), jnp.bfloat16), jnp.ones((256, 128), jnp.bfloat16)
    return [lying(a, place) for a, place in zip((x, w), places, strict=True)] if places else [x, w]


def lying(tree: Any, place: Any) -> Any:
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place), tree)


def lowered(run: Any, *given: Any) -> str:
    """The program for CUDA."""
    return jax.jit(run).trace(*given).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.skipif(not NEW_ENOUGH, reason="this JAX does not lower the kernels")
def test_unsharded_programs_run_the_kernel():
    """And sharded ones what no kernel computes: `jit` would gather for it."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    with HOST(), mx_jax.prefer_backends("pallas_gpu"):
        alone = lowered(product, *operands())
        split = lowered(
            product, *operands(NamedSharding(mesh, P("data")), NamedSharding(mesh, P()))
        )
        batch = lowered(jax.vmap(product, (0, None)), *batched(operands()))
        packed = mx_jax.pack_weights(mx_jax.quantize(operands()[1], "mxfp4", axis=0))
        assert isinstance(packed, mx_jax.PackedMXArray)
        stored = lowered(product, operands()[0], packed)
        explained = str(explain_call(product, *operands()))
    assert "mosaic_gpu" in alone and "dot_general" not in alone
    assert "mosaic_gpu" not in split and "CustomSPMDPartitioning" in split
    assert "mosaic_gpu" in batch and "mosaic_gpu" in stored
    assert "-> pallas_gpu (by xla_bfloat16 where the program has several devices)" in explained


def batched(given: list[Any]) -> list[Any]:
    return [jnp.stack([given[0]] * 2), given[1]]


BLOCKWISE = mx_jax.recipes.deepseek_v3()


def test_blocks_under_float32_scales():
    """On one device as on a host with one: bfloat16 products of blocks; else in float32."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    run = lambda x, w: mx_jax.matmul(x, w, recipe=BLOCKWISE)  # noqa: E731
    x, w = jnp.ones((64, 256), jnp.bfloat16), jnp.ones((256, 128), jnp.bfloat16)
    sharded = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, P("data")))
    with mx_jax.testing.target("cuda", (9, 0)):
        expected = lowered(run, x, w)
    with HOST():
        alone, split = lowered(run, x, w), lowered(run, sharded, w)
    with mx_jax.testing.target("cuda", (9, 0), num_devices=8):
        plain = lowered(run, sharded, w)
    assert dots(alone) == dots(expected) != dots(plain) == dots(split)


def dots(program: str) -> list[str]:
    """Dtypes of what is multiplied."""
    lines = [line for line in program.splitlines() if "stablehlo.dot_general" in line]
    return [line[line.rindex(" : ") :] for line in lines]


def ones(x: Any, w: Any, call: MatmulCall) -> jax.Array:
    """A kernel that marks where it ran."""
    del x, w
    shape = [size for _, own in call.sides for size in map(own.shape.__getitem__, own.axes.kept)]
    return jnp.ones(shape, call.out_dtype)


MARKS = Backend(
    name="marks",
    epsilon_bound=0.0,
    table=(
        Offer(
            call=MatmulCall,
            rejects=lambda call, target: "one" if target.num_devices > 1 else None,
            run=ones,
        ),
    ),
)


def test_where_arrays_lie_decides():
    """In jit and outside, under gradients, with a backend of one's own; devices that share a
    product compute their parts by it."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    x, w = jnp.full((8, 32), 2.0), mx_jax.quantize(jnp.ones((32, 8)), "mxfp4", axis=0)
    sharded = jax.device_put(x, NamedSharding(mesh, P("data")))
    there = jax.device_put(x, jax.devices()[3])
    step = jax.grad(lambda x, w: (mx_jax.matmul(x, w, recipe="mxfp4") ** 2).sum() / 2)
    with mx_jax.testing.target("cpu", num_devices=8, counted=False), with_backends(MARKS):
        for run in (product, quick(product)):
            assert (run(x, w) == 1).all() and (run(sharded, w) == 1).all()
        assert (product(there, jax.device_put(w, jax.devices()[3])) == 1).all()
        w = jnp.ones((32, 8))
        assert (quick(step)(x, w) == 1).all() and (quick(step)(sharded, w) == 1).all()


def test_one_that_serves_any_number_is_taken_as_it_is():
    case = MatmulCase(lhs=formats.MXFP4, rhs=formats.MXFP4, m=(64,), n=(64,), k=(64,))
    host = dataclasses.replace(H200, num_devices=8, counted=False)
    assert select(case.call, host).offer == select(case.call, H200).offer
