"""Packed weights on several devices: each multiplies its own tiles, and no weight is gathered."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import mx_jax
from mx_jax import convert
from mx_jax.packed import PackedMXArray
from mx_jax.sharding import device_put
from mx_jax.testing.compare import assert_bitwise_equal
from mx_jax.testing.draw import draw_few_octaves
from tests.needs import needs_library
from tests.quick import OPTIONS, quick
from tests.sharding.collectives import Exchange, collectives, mesh_of

pytestmark = needs_library

P = PartitionSpec
K, N, ROWS = 256, 128, 4
MXFP4 = mx_jax.recipes.mxfp4()
NVFP4 = mx_jax.recipes.weight_only("nvfp4")
RECIPES = {"mxfp4": MXFP4, "nvfp4": NVFP4, "mxfp6_e3m2": mx_jax.recipes.mxfp6()}

AXES = {"data": 2, "model": 4}

X = draw_few_octaves(np.random.default_rng(0), (ROWS, K))


def weights(format: str, axis: int) -> mx_jax.MXArray:
    w = draw_few_octaves(np.random.default_rng(1), (K, N))
    return mx_jax.quantize(jnp.asarray(w if axis == 0 else w.T), format, axis=axis)


def product(axis: int, recipe: Any) -> Any:
    numbers = (((1,), (axis,)), ((), ()))
    return lambda x, w: mx_jax.dot_general(x, w, numbers, recipe=recipe)


def program(run: Any, *operands: Any) -> tuple[Any, Any]:
    """What a function gives, and its program."""
    compiled = jax.jit(run).lower(*operands).compile(compiler_options=OPTIONS)
    return compiled(*operands), compiled.as_text()


def all_reduce(number: int) -> list[Exchange]:
    return [Exchange("all-reduce", "f32", 1, number * 4)]


def check(run: Any, operands: Any, exchanged: list[Exchange], expected: jax.Array) -> None:
    """Each device runs the kernel, no weight is gathered, and what moves are sums."""
    result, text = program(run, *operands)
    assert collectives(text) == exchanged
    assert "mx_jax_cpu_matmul" in text and "f32[256,128]" not in text
    if not exchanged:
        assert_bitwise_equal(result, expected)
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-4)


CASES = {
    "columns": ("mxfp4", 0, (None, "model"), P("data"), []),
    "columns of the other order": ("nvfp4", 1, (None, "model"), P(), []),
    "rows": ("nvfp4", 0, ("model", None), P(None, "model"), all_reduce(ROWS * N)),
    "both": ("mxfp4", 1, ("data", "model"), P(None, "data"), all_reduce(ROWS * N // 4)),
    "six bits": ("mxfp6_e3m2", 0, ("data", "model"), P(None, "data"), all_reduce(ROWS * N // 4)),
}


@pytest.mark.parametrize("case", CASES)
def test_each_device_multiplies_its_tiles(case: str, mesh: Mesh):
    """Column and row parallel, with a mesh in context and without."""
    format, axis, spec, lies, exchanged = CASES[case]
    run = product(axis, RECIPES[format])
    packed = mx_jax.pack_weights(weights(format, axis))
    place = NamedSharding(mesh, P(*spec if axis == 0 else spec[::-1]))
    placed = device_put(packed, place)
    assert_bitwise_equal(placed.dequantize(), packed.dequantize())
    assert max(each.nbytes for each in shards(placed)) <= packed.nbytes * 0.27
    operands = jax.device_put(X, NamedSharding(mesh, lies)), placed
    expected = quick(run)(X, packed)
    check(run, operands, exchanged, expected)
    with jax.set_mesh(mesh):
        check(run, operands, exchanged, expected)


def shards(packed: Any) -> list[Any]:
    """What each device has of the panels."""
    return [shard.data for shard in jax.tree.leaves(packed)[0].addressable_shards]


def test_activations_in_more_parts_than_weights(mesh: Mesh):
    """Along k a device has whole parts of the weights, whatever the activations are split into."""
    packed = mx_jax.pack_weights(weights("mxfp4", 0))
    placed = device_put(packed, NamedSharding(mesh, P("data", None)))
    split = jax.device_put(X, NamedSharding(mesh, P(None, ("data", "model"))))
    result, text = program(product(0, MXFP4), split, placed)
    assert "mx_jax_cpu_matmul" in text
    expected = quick(product(0, MXFP4))(X, packed)
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-4)


def test_weights_are_packed_where_they_lie(mesh: Mesh):
    """A stack of layers with heads: each device gets its heads of each layer."""
    w = jnp.asarray(draw_few_octaves(np.random.default_rng(2), (3, 64, 8, 16)))
    stacked = mx_jax.quantize(w, "nvfp4", axis=1)
    placed = device_put(stacked, NamedSharding(mesh, P(None, None, "model", None)))
    packed = mx_jax.pack_weights(placed, contracting=1, num_batch=1)
    assert isinstance(packed, PackedMXArray)
    assert [leaf.sharding.spec for leaf in jax.tree.leaves(packed)] == [
        P(None, "model", None),
        P(None),
    ]
    assert_bitwise_equal(packed.dequantize(), stacked.dequantize())

    def layers(x: jax.Array, w: Any) -> Any:
        def layer(x, w):
            heads = mx_jax.einsum("mk,khd->mhd", x, w, recipe=NVFP4)
            return x + heads.sum((1, 2))[:, None], heads

        return jax.lax.scan(layer, x, w)[1]

    x = jnp.asarray(draw_few_octaves(np.random.default_rng(3), (4, 64)))
    whole = mx_jax.pack_weights(stacked, contracting=1, num_batch=1)
    result, text = program(layers, x, packed)
    assert {exchange.kind for exchange in collectives(text)} == {"all-reduce"}
    np.testing.assert_allclose(result, quick(layers)(x, whole), rtol=1e-4)


@pytest.mark.parametrize("width", [32, 64], ids=["one tile", "tiles"])
def test_experts_lie_on_their_devices(width: int, mesh: Mesh):
    """A stack of experts in parts: none is on two devices, and none moves for its product."""
    w = jnp.asarray(draw_few_octaves(np.random.default_rng(5), (8, 64, width)))
    x = jnp.asarray(draw_few_octaves(np.random.default_rng(6), (8, ROWS, 64)))
    packed = mx_jax.pack_weights(mx_jax.quantize(w, "mxfp4", axis=1), contracting=1, num_batch=1)
    place = NamedSharding(mesh, P("model"))
    placed = device_put(packed, place)
    codes = jax.tree.leaves(placed)[0]
    assert codes.sharding.spec[0] == "model"
    assert {each.nbytes for each in shards(placed)} == {codes.nbytes // 4}

    def run(x: jax.Array, w: Any) -> jax.Array:
        return mx_jax.einsum("emk,ekn->emn", x, w, recipe=MXFP4)

    result, text = program(run, jax.device_put(x, place), placed)
    assert collectives(text) == [] and result.sharding.spec[0] == "model"
    assert_bitwise_equal(result, quick(run)(x, packed))


def test_a_converted_model_in_tensor_parallel(mesh: Mesh):
    """Columns, then rows: one sum between devices for both layers."""
    model = nn.Sequential([nn.Dense(128), nn.relu, nn.Dense(64)])
    rules = convert.Rule(".*", "mxfp4")
    x = jnp.asarray(draw_few_octaves(np.random.default_rng(4), (ROWS, 64)))
    params = jax.tree.map(np.asarray, quick(model.init)(jax.random.key(0), x))
    served = convert.weights(params, rules)
    kernels = {"layers_0": P(None, "model"), "layers_2": P("model", None)}
    for layer, spec in kernels.items():
        kernel = params["params"][layer]
        kernel["kernel"] = jax.device_put(kernel["kernel"], NamedSharding(mesh, spec))
    shared = convert.weights(params, rules)
    assert isinstance(shared["params"]["layers_2"]["kernel"], PackedMXArray)
    converted = convert.linen(model, rules)
    with jax.set_mesh(mesh):
        result, text = program(converted.apply, shared, x)
    assert collectives(text) == all_reduce(ROWS * 64)
    np.testing.assert_allclose(result, quick(converted.apply)(served, x), rtol=1e-4, atol=1e-5)


def test_weights_whose_tiles_cannot_be_shared(mesh: Mesh):
    narrow = mx_jax.quantize(jnp.ones((96, 96)), "mxfp4", axis=0)
    packed = mx_jax.pack_weights(narrow)
    columns, rows = (NamedSharding(mesh, spec) for spec in (P(None, "model"), P("model")))
    message = (
        r"every shard needs whole tiles of packed weights along axis=1, got shard size=24 "
        r"\(96 rows over 4 devices, mesh axes=\('model',\)\) with tiles of 32 rows.*3 tiles "
        "divide by, or the"
    )
    with pytest.raises(ValueError, match=f"device_put: {message}"):
        device_put(packed, columns)
    with pytest.raises(ValueError, match=f"pack_weights: {message}"):
        mx_jax.pack_weights(device_put(narrow, columns))
    with pytest.raises(ValueError, match=r"whole blocks along axis=0, got shard size=24.*block=32"):
        device_put(packed, rows)
    heads = mx_jax.pack_weights(mx_jax.quantize(jnp.ones((64, 4, 32)), "mxfp4", axis=0))
    with pytest.raises(ValueError, match="cannot be cut along axis=2, got PackedMXArray"):
        device_put(heads, NamedSharding(mesh, P(None, None, "model")))
    kernel = jax.device_put(jnp.ones((96, 96)), columns)
    with pytest.warns(UserWarning, match=r"convert\.weights: stored as MXArray: every shard needs"):
        stored = convert.weights({"up": {"kernel": kernel}}, convert.Rule(".*", "mxfp4"))
    assert isinstance(stored["up"]["kernel"], mx_jax.MXArray)


# Format, axis, and where weights, activations and their product lie.
MANUAL = {
    "columns": ("mxfp4", 0, P(None, "model"), P(), P(None, "model"), []),
    "rows": ("nvfp4", 0, P("model"), P(None, "model"), P(), all_reduce(ROWS * N)),
    "both": (
        *("mxfp4", 1, P("data", "model"), P(None, "model"), P(None, "data")),
        all_reduce(ROWS * N // 2),
    ),
}


@pytest.mark.parametrize("case", MANUAL)
def test_inside_shard_map(case: str, mesh: Mesh):
    """Each device's arrays tell what part they are; sums of parts are the caller's."""
    format, axis, spec, lies, out, exchanged = MANUAL[case]
    local = product(axis, RECIPES[format])
    packed = mx_jax.pack_weights(weights(format, axis))
    placed = device_put(packed, NamedSharding(mesh, spec))
    # As shard_map takes it.
    layout = jax.tree.map(lambda leaf: leaf.sharding.spec, placed)

    def run(x: jax.Array, w: Any) -> jax.Array:
        assert x.shape == (ROWS, K // 4 if exchanged else K)
        return jax.lax.psum(local(x, w), "model" if exchanged else ())

    mapped = jax.shard_map(run, mesh=mesh, in_specs=(lies, layout), out_specs=out)
    check(mapped, (X, placed), exchanged, quick(local)(X, packed))


REFUSED = {
    # Rows that do not fill the last tile: which device has it is not told.
    "parts of tiles": ("mxfp4", 112, "whole tiles of .* got PackedMXArray.* of 32 rows on a de"),
    # Its scales lie beside the panels.
    "another layout": ("float8_rowwise_e4m3", 128, "of this layout are not cut, got PackedMXArray"),
}


@pytest.mark.parametrize(("format", "columns", "message"), REFUSED.values(), ids=REFUSED)
def test_what_shard_map_refuses(format: str, columns: int, message: str, mesh: Mesh):
    packed = mx_jax.pack_weights(mx_jax.quantize(jnp.ones((64, columns)), format, axis=0))
    assert isinstance(packed, PackedMXArray)
    run = jax.shard_map(
        product(0, MXFP4), mesh=mesh, in_specs=(P(), P("model")), out_specs=P(None, "model")
    )
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(run, jnp.ones((ROWS, 64)), packed)


@pytest.mark.parametrize("case", ["columns", "rows"])
@pytest.mark.parametrize("named", [True, False])
def test_on_explicit_axes(case: str, named: bool):
    """Types of packed arrays say where weights lie; a kernel's product lies as both say."""
    mesh = mesh_of(AxisType.Explicit, data=2, model=4)
    format, axis, spec, lies, out, exchanged = MANUAL[case]
    run = product(axis, RECIPES[format])
    packed = mx_jax.pack_weights(weights(format, axis))
    options = {"out_sharding": out} if named else {}

    def typed(x: jax.Array, w: Any) -> jax.Array:
        numbers = ((1,), (axis,)), ((), ())
        y = mx_jax.dot_general(x, w, numbers, recipe=RECIPES[format], **options)
        assert tuple(jax.typeof(y).sharding.spec) == (*out, None, None)[:2], jax.typeof(y)
        return y

    expected = quick(run)(X, packed)
    with jax.set_mesh(mesh):
        placed = device_put(packed, NamedSharding(mesh, spec))
        check(typed, (jax.device_put(X, NamedSharding(mesh, lies)), placed), exchanged, expected)


def test_gradients_on_explicit_axes():
    """Of activations, by weights that are unpacked where they lie."""
    mesh = mesh_of(AxisType.Explicit, data=2, model=4)
    packed, run = mx_jax.pack_weights(weights("mxfp4", 0)), product(0, MXFP4)
    step = jax.grad(lambda x, w: (run(x, w) ** 2).sum())
    with jax.set_mesh(mesh):
        placed = device_put(packed, NamedSharding(mesh, P(None, "model")))
        result = quick(step)(jax.device_put(X, NamedSharding(mesh, P())), placed)
        unpacked = placed.unpack()
    assert (
        jax.typeof(unpacked.codes).sharding.spec
        == jax.typeof(unpacked.scales).sharding.spec
        == P(None, "model")
    )
    np.testing.assert_allclose(result, quick(step)(X, packed), rtol=1e-5, atol=1e-2)


def test_a_layout_that_devices_cannot_share_is_unpacked():
    """With a warning, with a mesh in context and without; right in any case."""
    name = "float8_rowwise_e4m3"
    mesh = mesh_of(data=8)
    x = np.random.default_rng(0).normal(size=(16, 64)).astype(np.float32)
    w = mx_jax.quantize(
        np.random.default_rng(1).normal(size=(64, 32)).astype(np.float32), name, axis=0
    )
    packed = mx_jax.pack_weights(w)
    assert isinstance(packed, mx_jax.PackedMXArray) and packed.layout.cut is None
    run = jax.jit(lambda x, w: mx_jax.matmul(x, w, recipe=mx_jax.recipes.weight_only(name)))
    sharded = jax.device_put(x, NamedSharding(mesh, P("data")))
    expected = run(x, w)
    text = "devices cannot share its layout"
    with pytest.warns(UserWarning, match=text):
        np.testing.assert_allclose(run(sharded, packed), expected, rtol=1e-5, atol=1e-5)
    with jax.set_mesh(mesh), pytest.warns(UserWarning, match=text):
        np.testing.assert_allclose(run(sharded, packed), expected, rtol=1e-5, atol=1e-5)
