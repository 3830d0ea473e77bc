"""Packed weights are one device's: weights on several stay as they are, whose codes are shared."""

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
ROWS = 4
AXES = {"data": 2, "model": 4}
MXFP4 = mx_jax.recipes.mxfp4()


def program(run: Any, *operands: Any) -> tuple[Any, Any]:
    """What a function gives, and its program."""
    compiled = jax.jit(run).lower(*operands).compile(compiler_options=OPTIONS)
    return compiled(*operands), compiled.as_text()


def few(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(draw_few_octaves(np.random.default_rng(seed), shape))


@pytest.mark.parametrize("spec", [P(None, "model"), P("model"), P()], ids=str)
def test_weights_on_several_devices_stay_as_they_are(spec: PartitionSpec, mesh: Mesh):
    w = device_put(mx_jax.quantize(few(1, 256, 128), "mxfp4", axis=0), NamedSharding(mesh, spec))
    assert mx_jax.pack_weights(w) is w
    with pytest.raises(TypeError, match="device_put: packed weights are one device's, got Pa"):
        alone = mx_jax.pack_weights(mx_jax.quantize(few(1, 256, 128), "mxfp4", axis=0))
        put: Any = device_put
        put(alone, NamedSharding(mesh, spec))


def test_a_converted_model_in_tensor_parallel(mesh: Mesh):
    """Columns, then rows: one sum between devices for both layers, and no weight moves."""
    model = nn.Sequential([nn.Dense(128), nn.relu, nn.Dense(64)])
    rules = convert.Rule(".*", "mxfp4")
    x = few(4, ROWS, 64)
    params = jax.tree.map(np.asarray, quick(model.init)(jax.random.key(0), x))
    served = convert.weights(params, rules)
    kernels = {"layers_0": P(None, "model"), "layers_2": P("model", None)}
    for layer, spec in kernels.items():
        kernel = params["params"][layer]
        kernel["kernel"] = jax.device_put(kernel["kernel"], NamedSharding(mesh, spec))
    shared = convert.weights(params, rules)
    assert isinstance(shared["params"]["layers_2"]["kernel"], mx_jax.MXArray)
    converted = convert.linen(model, rules)
    with jax.set_mesh(mesh):
        result, text = program(converted.apply, shared, x)
    assert collectives(text) == [Exchange("all-reduce", "f32", 1, ROWS * 64 * 4)]
    np.testing.assert_allclose(result, quick(converted.apply)(served, x), rtol=1e-4, atol=1e-5)


def test_experts_lie_on_their_devices(mesh: Mesh):
    """Of a stack shard_map gives each device its experts."""
    w, x = few(5, 8, 64, 32), few(6, 8, ROWS, 64)
    packed = mx_jax.pack_weights(mx_jax.quantize(w, "mxfp4", axis=1), contracting=1, num_batch=1)

    def run(x: jax.Array, w: Any) -> jax.Array:
        assert isinstance(w, PackedMXArray) and w.shape == (len(x), 64, 32)
        return mx_jax.einsum("emk,ekn->emn", x, w, recipe=MXFP4)

    spec = P("model")
    mapped = jax.shard_map(run, mesh=mesh, in_specs=(spec, spec), out_specs=spec)
    result, text = program(mapped, x, packed)
    assert collectives(text) == [] and "mx_jax_cpu_matmul_packed" in text
    assert_bitwise_equal(result, quick(run)(x, packed))


def test_whole_on_all_devices_of_shard_map(mesh: Mesh):
    w, x = mx_jax.quantize(few(1, 256, 128), "mxfp4", axis=0), few(0, 8, 256)
    run = lambda x, w: mx_jax.matmul(x, w, recipe=MXFP4)  # noqa: E731
    packed = jax.device_put(mx_jax.pack_weights(w), NamedSharding(mesh, P()))
    mapped = jax.shard_map(run, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data"))
    result, text = program(mapped, x, packed)
    assert collectives(text) == [] and "mx_jax_cpu_matmul_packed" in text
    assert_bitwise_equal(result, quick(run)(x, w))


@pytest.mark.parametrize("format", ["mxfp4", "float8_rowwise_e4m3"])
def test_what_shard_map_refuses(format: str, mesh: Mesh):
    packed = mx_jax.pack_weights(mx_jax.quantize(jnp.ones((64, 128)), format, axis=0))
    assert isinstance(packed, PackedMXArray)
    for each in (lambda x, w: mx_jax.matmul(x, w, recipe=MXFP4), lambda x, w: w.dequantize()):
        run = jax.shard_map(each, mesh=mesh, in_specs=(P(), P("model")), out_specs=P(None, "model"))
        with pytest.raises(ValueError, match=r"weights are not cut, got PackedMXArray.* 1 tiles"):
            jax.eval_shape(run, jnp.ones((ROWS, 64)), packed)


def test_gradients_on_explicit_axes():
    """Of activations, by weights that are unpacked where they lie."""
    mesh = mesh_of(AxisType.Explicit, data=2, model=4)
    packed = mx_jax.pack_weights(mx_jax.quantize(few(1, 256, 128), "mxfp4", axis=0))
    step = jax.grad(lambda x, w: (mx_jax.matmul(x, w, recipe=MXFP4) ** 2).sum())
    expected = quick(step)(few(0, ROWS, 256), packed)
    with jax.set_mesh(mesh), pytest.warns(UserWarning, match="devices cannot share its layout"):
        x = jax.device_put(few(0, ROWS, 256), NamedSharding(mesh, P("data")))
        result = quick(step)(x, jax.device_put(packed, NamedSharding(mesh, P())))
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-2)


@pytest.mark.parametrize("name", ["mxfp4", "float8_rowwise_e4m3"])
def test_packed_weights_in_programs_of_several_devices_are_unpacked(name: str):
    """With a warning, with a mesh in context and without; right in any case."""
    mesh = mesh_of(data=8)
    x = np.random.default_rng(0).normal(size=(16, 64)).astype(np.float32)
    w = mx_jax.quantize(
        np.random.default_rng(1).normal(size=(64, 32)).astype(np.float32), name, axis=0
    )
    packed = mx_jax.pack_weights(w)
    assert isinstance(packed, mx_jax.PackedMXArray)
    run = jax.jit(lambda x, w: mx_jax.matmul(x, w, recipe=mx_jax.recipes.weight_only(name)))
    sharded = jax.device_put(x, NamedSharding(mesh, P("data")))
    expected = run(x, w)
    text = "devices cannot share its layout"
    with pytest.warns(UserWarning, match=text):
        np.testing.assert_allclose(run(sharded, packed), expected, rtol=1e-5, atol=1e-5)
    with jax.set_mesh(mesh), pytest.warns(UserWarning, match=text):
        np.testing.assert_allclose(run(sharded, packed), expected, rtol=1e-5, atol=1e-5)
        report = mx_jax.inspect.explain(run, sharded, packed)
    assert "weights packed for cpu_ffi are unpacked at every call" in str(report)
