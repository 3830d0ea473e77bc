"""Casts find the reference's tensor scale, and a program computes nothing else for it."""

import collections
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import mx_jax
from mx_jax.backends.calls import QuantizeCall
from mx_jax.backends.cpu_ffi import casts, library
from mx_jax.backends.target import on_one_device
from mx_jax.formats import NVFP4, NVFP4_2D, BlockFormat
from mx_jax.reference.quantize import quantize
from mx_jax.testing.cases import QuantizeCase
from mx_jax.testing.compare import assert_bitwise_equal
from tests.needs import needs_library

LOADED = library.load()

pytestmark = needs_library


def found(x: jax.Array, call: QuantizeCall) -> jax.Array:
    """The tensor scale that the handler finds."""
    with on_one_device(True):
        scale = casts.quantize(x, None, None, call).tensor_scale
    assert scale is not None
    return scale


@pytest.mark.sweep(reason="compares a C++ library with what tests/reference checks")
@pytest.mark.parametrize(
    ("shape", "axis", "dtype", "format"),
    [
        ((64, 96), -1, "float32", NVFP4),
        ((64, 96), 0, "bfloat16", NVFP4),
        ((3, 40, 50), 1, "float16", NVFP4),
        ((3, 40, 50), 0, "float32", NVFP4),
        ((40, 1), 0, "bfloat16", NVFP4),
        ((41,), 0, "float32", NVFP4),
        ((2, 40, 50), -1, "float32", NVFP4_2D),
        ((33, 1), -1, "bfloat16", NVFP4_2D),
    ],
)
def test_the_reference_s_scale(shape: tuple[int, ...], axis: int, dtype: str, format: BlockFormat):
    call = QuantizeCase(format=format, shape=shape, axis=axis, dtype=dtype).call

    @jax.jit
    def both(x):
        scale = quantize(x, call.format, call.blocks, call.scale_rule).tensor_scale
        return found(x, call), scale

    rng = np.random.default_rng(0)
    x = rng.standard_normal(shape).astype(np.float32)
    for special in (0.0, np.inf, np.nan, -np.inf):
        # The largest value shares its block with what leaves the block out.
        x.flat[[3, 17 % x.size]] = 1e4, special
        for values in (x, np.full(shape, special, np.float32)):
            assert_bitwise_equal(*both(jnp.asarray(values, dtype)))


@pytest.mark.parametrize("shape", [(0, 32), (3, 0)])
@pytest.mark.parametrize("axis", [0, 1])
def test_an_empty_tensor_has_scale_one(shape: tuple[int, ...], axis: int):
    call = QuantizeCase(format=NVFP4, shape=shape, axis=axis).call
    assert found(jnp.zeros(shape), call).tolist() == [[1.0]]


def test_batches_have_a_scale_each():
    call = QuantizeCase(format=NVFP4, shape=(8, 48)).call
    x = jax.random.normal(jax.random.key(0), (3, 8, 48)) * jnp.arange(1.0, 4.0)[:, None, None]
    many = jax.jit(jax.vmap(lambda x: found(x, call)))
    assert many.lower(x).as_text().count("@mx_jax_cpu_quantize") == 1
    each = jnp.stack([found(matrix, call) for matrix in x])
    assert_bitwise_equal(many(x), each)


@pytest.mark.parametrize(
    ("shape", "changed", "message"),
    [
        ((8, 2), {}, r"last axes, .* reduced to 1, got tensor_scale.shape=\(8, 2\) for x.shape"),
        ((1, 32), {}, "reduced to 1"),
        ((1,), {}, "reduced to 1"),
        ((8, 1), {"blocks": np.array([-2, 16])}, "all blocked ones among them, reduced to 1"),
        (None, {}, "needs 1 results after scales: a tensor scale where .*, got 0"),
        ((1, 1), {"largest_value": np.float32(0)}, "needs 0 results after scales"),
        ((1, 1), {"largest_value": np.float32(-1)}, "largest_value must be above 0"),
        (
            (1, 1),
            {"has_tensor_scale": True},
            "largest_value must be above 0 .*, has_tensor_scale=1",
        ),
    ],
)
def test_wrong_calls(shape: tuple[int, ...] | None, changed: dict[str, object], message: str):
    call = QuantizeCase(format=NVFP4, shape=(8, 32)).call
    rows, byte = (1, 32) if "blocks" in changed else (8, 2), np.dtype("uint8")
    results = [jax.ShapeDtypeStruct((8, 32), byte), jax.ShapeDtypeStruct(rows, byte)]
    if shape is not None:
        results.append(jax.ShapeDtypeStruct(shape, "float32"))
    attributes = casts.quantize_attributes(call, False) | changed
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"mx_jax quantize: .*{message}"):
        jax.block_until_ready(
            jax.ffi.ffi_call(casts.QUANTIZE, results)(jnp.ones((8, 32)), **attributes)
        )


# Programs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [(), (3,)])
def test_a_program_has_calls_alone(batch: tuple[int, ...]):
    """What XLA compiled around each of them took ten times as long as all else."""

    def product(x, w):
        return mx_jax.matmul(x, w, recipe="nvfp4")

    for _ in batch:
        product = jax.vmap(product)
    with mx_jax.only_backend("cpu_ffi"):
        lowered = jax.jit(product).lower(jnp.ones((*batch, 8, 64)), jnp.ones((*batch, 64, 32)))
    text = lowered.as_text("hlo")
    kinds = collections.Counter(re.findall(r"^ .* = .*?[\])}] ([a-z-]+)\(", text, re.MULTILINE))
    assert kinds.pop("custom-call") == 2 + 1
    assert not set(kinds) - {"parameter", "constant", "call", "tuple", "get-tuple-element"}


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)


def outlier() -> jax.Array:
    """The largest values lie on one device; on another, larger ones in blocks with a NaN."""
    x = np.random.default_rng(3).standard_normal((128, 128)).astype(np.float32)
    x[100, 120], x[3, 6], x[3, 5], x[4, 6] = 1e4, 1e9, np.nan, np.nan
    return jnp.asarray(x)


@pytest.mark.by_default("quantize-0|both-1")
@pytest.mark.parametrize("spec", [P("a", "b"), P(("a", "b")), P(None, "a")], ids=str)
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("cast", [mx_jax.quantize, mx_jax.quantize_both])
def test_shards_have_one_scale(mesh: Mesh, spec: P, axis: int, cast):
    x = outlier()
    how = {} if cast is mx_jax.quantize_both else {"axis": axis}
    run = jax.jit(lambda x: jax.tree.leaves(cast(x, "nvfp4", **how)))
    with mx_jax.only_backend("reference"):
        expected = jax.tree.leaves(cast(x, "nvfp4", **how))
    with mx_jax.only_backend("cpu_ffi"):
        for got, want in zip(
            run(jax.device_put(x, NamedSharding(mesh, spec))), expected, strict=True
        ):
            assert_bitwise_equal(got, want)


def test_shards_of_a_batch_have_scales_each(mesh: Mesh):
    x = jnp.stack([outlier() * (1 + i) for i in range(8)])
    run = jax.jit(jax.vmap(lambda x: jax.tree.leaves(mx_jax.quantize(x, "nvfp4"))))
    with mx_jax.only_backend("cpu_ffi"):
        sharded = jax.device_put(x, NamedSharding(mesh, P("a", "b")))
        for got, want in zip(run(sharded), run(x), strict=True):
            assert_bitwise_equal(got, want)


@pytest.mark.parametrize("check_vma", [False, True])
def test_below_shard_map_each_shard_has_its_own(mesh: Mesh, check_vma: bool):
    x = outlier()

    def local(x):
        q = mx_jax.quantize(x, "nvfp4")
        return q.codes, q.scales, q.tensor_scale

    run = jax.shard_map(
        local, mesh=mesh, in_specs=P("a"), out_specs=(P("a"),) * 3, check_vma=check_vma
    )
    with mx_jax.only_backend("cpu_ffi"):
        found = jax.jit(run)(x)
    with mx_jax.only_backend("reference"):
        parts = [local(part) for part in jnp.split(x, 4)]
    for got, want in zip(found, zip(*parts, strict=True), strict=True):
        assert_bitwise_equal(got, jnp.concatenate(want))
