"""The machine that a call is for: named, that of arrays, of a mesh, the default, JAX's own."""

import dataclasses
import itertools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import mx_jax
from mx_jax.backends.select import current_target
from mx_jax.backends.target import Target, of_platform
from mx_jax.testing import target
from tests.quick import lowered

CPU = jax.devices("cpu")
H200 = Target(platform="cuda", compute_capability=(9, 0), device_kind="NVIDIA H200")


class Gpu:
    """The attributes of a GPU's device that the library reads."""

    platform, device_kind, id = "gpu", "NVIDIA H200", 0
    compute_capability = "9.0"
    client = type("Client", (), {"platform_version": "PJRT C API\ncuda 13000"})


@pytest.fixture
def on_gpu_host(monkeypatch: pytest.MonkeyPatch):
    """A host with eight GPUs, which JAX prefers, and one CPU."""
    devices: dict[Any, list[Any]] = {None: [Gpu()] * 8, "gpu": [Gpu()] * 8, "cpu": CPU[:1]}
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda platform=None: devices[platform])
    monkeypatch.setattr(jax, "device_count", lambda platform=None: len(devices[platform]))


@pytest.fixture(name="seen")
def _seen(monkeypatch: pytest.MonkeyPatch):
    """Targets of the calls that were traced from now on."""
    targets: list[Target] = []

    def watched():
        targets.append(current_target())
        return targets[-1]

    monkeypatch.setattr("mx_jax.backends.target.current_target", watched)
    return targets


def trace(*_: Any) -> Target:
    """The target while something is traced."""
    targets: list[Target] = []
    jax.jit(lambda x: targets.append(current_target()) or x).trace(1.0)
    return targets[0]


@pytest.mark.usefixtures("on_gpu_host")
def test_a_gpu_host():
    eight = dataclasses.replace(H200, num_devices=8, counted=False)
    assert current_target() == trace() == eight
    with mx_jax.only_backend("xla"):
        assert current_target() == H200


# Sizes of a mesh, axes that are shard_map's, and how many devices are left to jit.
MESHES = {
    "below shard_map": ((2, 4), ("x", "y"), 1),
    "below shard_map of one axis": ((2, 4), ("x",), 4),
    "a mesh": ((2, 4), (), 8),
    "a mesh of one device": ((1, 1), (), 1),
}


@pytest.mark.usefixtures("on_gpu_host")
@pytest.mark.parametrize(("sizes", "manual", "number"), MESHES.values(), ids=MESHES)
def test_the_mesh_decides(sizes: tuple[int, ...], manual: tuple[str, ...], number: int):
    """jit splits along the axes that are its own."""
    mesh = jax.make_mesh(sizes, ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    targets: list[Target] = []

    def local(x: jax.Array) -> jax.Array:
        targets.append(current_target())
        return x

    split = local
    if manual:
        spec = P(manual)
        split = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, axis_names={*manual})
    with jax.set_mesh(mesh):
        jax.eval_shape(split, jnp.ones((64, 32)))
    assert targets == [Target(platform="cpu", num_devices=number, program_devices=math.prod(sizes))]


@pytest.mark.usefixtures("on_gpu_host")
@pytest.mark.parametrize("device", [CPU[0], "cpu"])
def test_the_default_device_decides(device: Any):
    with jax.default_device(device):
        assert current_target() == trace() == Target(platform="cpu", num_devices=1)


def test_a_mesh_of_a_machine_that_is_not_there_decides_nothing():
    with jax.set_mesh(jax.make_mesh((1,), ("data",))):
        described: Any = jax.sharding.get_abstract_mesh().abstract_device
    absent = type(described)(device_kind="TPU v6", num_cores=1, platform="tpu")
    mesh = jax.sharding.AbstractMesh((1,), ("data",), abstract_device=absent)
    with jax.sharding.use_abstract_mesh(mesh):
        assert current_target().platform == "cpu"
        # But what is lowered for its platform is for its kind.
        assert of_platform("tpu").device_kind == "TPU v6"
    assert of_platform("tpu").device_kind is None


@pytest.mark.usefixtures("on_gpu_host")
def test_arrays_on_a_cpu_decide_outside_jit(seen: list[Target]):
    """And jit's cache tells both apart: what was traced for a GPU is not taken for them."""
    there, here = jnp.ones((2, 96)), jax.device_put(jnp.ones((2, 96)), CPU[0])
    w = jax.device_put(jnp.ones((96, 3)), CPU[0])
    recipe, weight_only = mx_jax.recipes.mxfp4(), mx_jax.recipes.weight_only("mxfp4")

    def calls(x, w):
        mx_jax.quantize_both(x, "mxfp4", block_size=2)
        mx_jax.dequantize(mx_jax.quantize(x, "mxfp4"))
        mx_jax.matmul(x, w, recipe=recipe)
        packed = mx_jax.pack_weights(mx_jax.quantize(w, "mxfp4", axis=0))
        mx_jax.matmul(x, packed, recipe=weight_only)

    for x, factor, platform in ((there, there.T, "cuda"), (here, w, "cpu")):
        jax.clear_caches()
        seen.clear()
        calls(x, factor)
        assert {target.platform for target in seen} == {platform}
        # Of both casts, dequantize, matmul, pack_weights and the product.
        assert len(seen) > 6
    # Traced, nobody knows where they will be.
    seen.clear()
    jax.jit(lambda x: mx_jax.quantize(x, "mxfp6_e2m3").codes)(here)
    assert {target.platform for target in seen} == {"cuda"}


@pytest.mark.usefixtures("on_gpu_host")
def test_what_was_traced_for_a_gpu_is_lowered_for_a_cpu():
    """A traced function does not know its devices: XLA's float8 product is a GPU's."""
    jax.clear_caches()
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.integers(-3, 4, shape), jnp.float32) for shape in ((4, 64), (64, 8)))
    x, w = jax.device_put((x, w), CPU[0])
    recipe = mx_jax.recipes.float8_rowwise()
    product = jax.jit(lambda x, w: mx_jax.matmul(x, w, recipe=recipe))
    native = "f8E4M3FN>) -> tensor<4x8xf32>"
    assert native not in product.lower(x, w).as_text()
    assert native in lowered(product, x, w, platform="cuda")
    with mx_jax.only_backend("reference"):
        expected = product(x, w)
    np.testing.assert_array_equal(product(x, w), expected)


@pytest.mark.usefixtures("on_gpu_host")
def test_a_device_that_is_only_compiled_for(monkeypatch: pytest.MonkeyPatch):
    """As the default device may be one of `jax.experimental.topologies`."""

    def none_here(platform=None):
        raise RuntimeError(f"Unknown backend: '{platform}' requested")

    monkeypatch.setattr(jax, "device_count", none_here)
    assert current_target() == H200


def test_a_named_target_goes_first_and_enters_the_cache_key(seen: list[Target]):
    here = jax.device_put(jnp.ones((3, 32)), CPU[0])
    quantize = jax.jit(lambda x: mx_jax.quantize(x, "mxfp4").codes)
    for _ in range(2):
        with target("cuda", (9, 0), device_kind="NVIDIA H200"), jax.default_device(CPU[0]):
            assert current_target() == trace() == H200
            quantize.trace(here)
            with mx_jax.only_backend("reference"):
                assert current_target() == H200
        with target("tpu", num_devices=4):
            assert current_target() == Target(platform="tpu", num_devices=4)
            quantize.trace(here)
        quantize.trace(here)
    # One trace may ask more than once.
    platforms = itertools.groupby(target.platform for target in seen)
    assert [platform for platform, _ in platforms] == ["cuda", "tpu", "cpu"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("gpu",), "needs one of the platforms cpu, cuda, rocm, tpu, got platform='gpu'"),
        (("cuda",), "needs the compute capability, as in (\"cuda\", (9, 0)), got platform='cuda'"),
        (("cuda", (9,)), "a compute capability is two numbers, (9, 0), got platform='cuda', comp"),
        (("cuda", 9.0), "a compute capability is two numbers, (9, 0), got platform='cuda', compu"),
        (("cpu", (9, 0)), "only CUDA GPUs have a compute capability, got platform='cpu', comput"),
    ],
)
def test_targets_that_are_none(arguments: Any, message: str):
    with pytest.raises(ValueError, match=re.escape(f"target: {message}")):
        target(*arguments)
    with pytest.raises(ValueError, match=re.escape("target: needs a device, got num_devices=0")):
        target("cpu", num_devices=0)
