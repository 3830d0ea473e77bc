"""Programs with handlers: a batch is one call, and other platforms get plain JAX."""

import contextlib
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import mx_jax
from mx_jax import recipes
from mx_jax.backends.select import only_backend
from mx_jax.codecs import lowering
from mx_jax.ops.arguments import draw_bits
from mx_jax.ops.product import transformed
from mx_jax.recipes import Hadamard
from mx_jax.testing.compare import assert_bitwise_equal
from tests.needs import needs_library
from tests.quick import handlers, lowered
from tests.sharding.collectives import mesh_of

P = PartitionSpec
pytestmark = [needs_library, pytest.mark.usefixtures("insist", "kernels_alone")]


def draw(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(len(shape)).standard_normal(shape), jnp.float32)


def quantized(*shape: int, format: str = "mxfp4", axis: int = -2) -> mx_jax.MXArray:
    return mx_jax.quantize(draw(*shape), format, axis=axis)


def packed(*shape: int, format: str = "mxfp4", num_batch: int = 0) -> Any:
    return mx_jax.pack_weights(quantized(*shape, format=format), num_batch=num_batch)


def product(x: Any, w: Any) -> jax.Array:
    return mx_jax.einsum("...tk,...kn->...tn", x, w, recipe=recipes.weight_only(w.format.name))


def cast(format: str, axis: int = -1) -> Any:
    return functools.partial(mx_jax.quantize, format=format, axis=axis)


# Batches ------------------------------------------------------------------------------------------

STACK = 3
# A function, stacks of its operands, along which axes they are stacked, and what it calls.
BATCHES: dict[str, tuple[Any, Any, tuple[tuple[int | None, ...], ...], str]] = {
    "quantize": (cast("mxfp8_e4m3"), lambda: [draw(STACK, 3, 64)], ((0,), (1,)), "quantize"),
    "a tensor scale each": (
        cast("nvfp4"),
        lambda: [draw(STACK, 8, 48) * jnp.arange(1.0, 4.0)[:, None, None]],
        ((0,),),
        "quantize",
    ),
    "both": (
        lambda x: mx_jax.quantize_both(x, "nvfp4"),
        lambda: [draw(STACK, 40, 64)],
        ((0,),),
        "quantize_both",
    ),
    "dequantize": (mx_jax.dequantize, lambda: [quantized(STACK, 40, 64)], ((0,),), "dequantize"),
    "matmul": (
        lambda x, w: mx_jax.matmul(x, w, recipe="mxfp8"),
        lambda: [draw(STACK, 40, 64), draw(STACK, 64, 50)],
        ((0, None), (None, 0), (0, 0)),
        "matmul quantize quantize",
    ),
    "packed": (
        product,
        lambda: [draw(STACK, 3, 64), packed(STACK, 64, 40, num_batch=1)],
        ((0, None), (None, 0), (0, 0)),
        "matmul_packed",
    ),
    "random bits": (
        lambda key: draw_bits(key, (33,), 16),
        lambda: [jax.random.split(jax.random.key(7), STACK)],
        ((0,),),
        "random_bits",
    ),
    "transform": (
        lambda x, key: transformed(x, Hadamard(size=16, signs=None), key, 0),
        lambda: [draw(STACK, 40, 5), jax.random.split(jax.random.key(7), STACK)],
        ((0, 0), (0, None), (None, 0)),
        "transform",
    ),
}


@pytest.mark.parametrize("name", BATCHES)
def test_a_batch_is_one_call(name: str):
    run, make, ways, calls = BATCHES[name]
    for axes in ways:
        stacks = [
            jax.tree.map(lambda leaf: leaf[0], each) if axis is None else each
            for each, axis in zip(make(), axes, strict=True)
        ]
        mapped = jax.vmap(run, axes)
        assert handlers(mapped, *stacks) == calls.split(), axes
        assert "stablehlo.while" not in lowered(mapped, *stacks)
        warned = pytest.warns(UserWarning, match="packed weights are unpacked at every call")
        with warned if name == "packed" else contextlib.nullcontext():
            assert not handlers(mapped, *stacks, platform="cuda")
        together = jax.jit(mapped)(*stacks)
        for lane in range(STACK):
            operands = [
                each if axis is None else jax.tree.map(lambda a: jnp.take(a, lane, axis), each)  # noqa: B023
                for each, axis in zip(stacks, axes, strict=True)
            ]
            part = jax.tree.map(lambda leaf: leaf[lane], together)  # noqa: B023
            jax.tree.map(assert_bitwise_equal, part, jax.jit(run)(*operands))


# Devices ------------------------------------------------------------------------------------------


def outlier() -> jax.Array:
    """The largest values lie on one device; on another, larger ones in blocks with a NaN."""
    x = np.random.default_rng(3).standard_normal((128, 128)).astype(np.float32)
    x[100, 120], x[3, 6], x[3, 5], x[4, 6] = 1e4, 1e9, np.nan, np.nan
    return jnp.asarray(x)


def test_devices_that_share_a_call_each_compute_it():
    """`only_backend` gives the handlers' bits, of operands that are gathered."""

    def run(x: Any, w: Any) -> Any:
        return mx_jax.matmul(x, w, recipe="mxfp4"), cast("nvfp4")(x), mx_jax.pack_weights(w)

    x, w = outlier(), quantized(128, 96)
    specs = P(None, "a"), P("a", "b")
    places = [NamedSharding(mesh_of(a=4, b=2), spec) for spec in specs]
    operands = jax.device_put(x, places[0]), mx_jax.sharding.device_put(w, places[1])
    program = jax.jit(run).lower(*operands).compile()
    assert "mx_jax_cpu" in str(program.as_text())
    jax.tree.map(assert_bitwise_equal, program(*operands), jax.jit(run)(x, w))


@pytest.mark.parametrize("check_vma", [False, True])
def test_below_shard_map(check_vma: bool):
    """Operands may vary differently, and each shard has its tensor scale."""
    mesh = mesh_of(a=4, b=2)

    def sharded(local: Any, specs: Any, out: Any, *operands: Any) -> Any:
        run = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=out, check_vma=check_vma)
        return jax.jit(run)(*operands)

    for pack in (lambda w: w, mx_jax.pack_weights):

        def local(x: jax.Array, w: jax.Array, pack: Any = pack) -> jax.Array:
            return product(x, pack(mx_jax.quantize(w, "mxfp4", axis=0)))

        x, w = draw(16, 64), draw(64, 64)
        result = sharded(local, (P("a"), P(None, "b")), P("a", "b"), x, w)
        assert_bitwise_equal(result, jax.jit(local)(x, w), what="product")
    leaves = lambda x: jax.tree.leaves(cast("nvfp4")(x))  # noqa: E731
    with only_backend("reference"):
        parts = zip(*map(leaves, jnp.split(outlier(), 4)), strict=True)
        expected = [jnp.concatenate(part) for part in parts]
    jax.tree.map(assert_bitwise_equal, sharded(leaves, P("a"), P("a"), outlier()), expected)


def test_eager_calls_are_compiled_once_and_without_jit_too():
    w = draw(64, 8)
    pack = lambda: mx_jax.pack_weights(mx_jax.quantize(w, "mxfp4", axis=0))  # noqa: E731
    expected = pack()
    with jax.disable_jit():
        pack()
        compiled = lowering._jitted.cache_info().misses
        jax.tree.map(np.testing.assert_array_equal, pack(), expected)
    assert compiled and lowering._jitted.cache_info().misses == compiled


def test_programs_of_equal_shapes_and_other_formats_differ():
    """JAX keeps programs in a folder by their text, and codes of these formats are alike."""
    x, w = draw(4, 64), draw(64, 32)

    def texts(format: str) -> list[str]:
        codes = quantized(64, 32, format=format)
        multiply = functools.partial(mx_jax.matmul, recipe="high_precision")
        runs = (
            (cast(format), w),
            (mx_jax.pack_weights, codes),
            (multiply, x, packed(64, 32, format=format)),
        )
        return [lowered(run, *operands) for run, *operands in runs]

    pairs = zip(texts("mxfp8_e4m3"), texts("mxint8"), strict=True)
    assert all("mx_jax_cpu" in one and one != other for one, other in pairs)
