"""Programs of four TPUs compile, by libtpu on a machine without one.

libtpu has no `custom_partitioning`: a program that binds it anywhere is an error there. Small
shapes: this is about that they compile, and what moves.
"""

import contextlib
import dataclasses
import functools
import importlib.util
import os
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import mx_jax
from benchmarks import collectives
from benchmarks.tpu_cost import ENVIRONMENT
from mx_jax import recipes
from mx_jax.sharding import Gather
from tests.contracts.test_docs import section
from tests.processes import ROOT
from tests.quick import compilation_cache_off, with_gradients
from tests.sharding.collectives import received

pytestmark = [
    pytest.mark.tpu,
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None,
        reason="needs libtpu: pip install '.[tpu-compile]', and JAX_PLATFORMS=cpu",
    ),
]

P = PartitionSpec
TOKENS, FEATURES, UNITS = 256, 128, 256
DTYPE = jnp.bfloat16
CODES = dataclasses.replace(recipes.mxfp8(), gather=Gather("fsdp", rhs=P("fsdp")))


@pytest.fixture(scope="module")
def devices() -> Iterator[list[Any]]:
    with pytest.MonkeyPatch.context() as patch, compilation_cache_off():
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, os.environ.get(name, value))
        for name in ("TOKENS", "FEATURES", "UNITS"):
            patch.setattr(collectives, name, globals()[name])
        yield topologies.get_topology_desc(platform="tpu", topology_name="v6e:2x2").devices


@pytest.fixture(scope="module")
def mesh(devices: list[Any]) -> Mesh:
    return jax.make_mesh(
        (2, 2), ("fsdp", "model"), axis_types=(AxisType.Auto,) * 2, devices=devices
    )


Exchanged = Callable[[str, str, str], Counter[tuple[str, str]]]


@pytest.fixture(scope="module")
def exchanged(devices: list[Any]) -> Exchanged:
    """Bytes that a device receives, of a layout, a way and a recipe; each compiled once."""

    @functools.cache
    def count(layout: str, way: str, recipe: str) -> Counter[tuple[str, str]]:
        case = collectives.Case(layout, way, recipe, "bfloat16")
        return received(collectives.lowered(case, devices).compile().as_text(), len(devices))

    return count


def lying(mesh: Mesh, spec: PartitionSpec, *shape: int, dtype: Any = DTYPE) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))


def compiled(run: Callable[..., Any], *operands: Any, out: Any = None) -> str:
    """The program, none of which asks how it is split."""
    lowered = jax.jit(run, out_shardings=out).lower(*operands)
    assert "CustomSPMDPartitioning" not in lowered.as_text()
    return str(lowered.compile().as_text())


PRODUCTS = ("data", "FSDP by k", "FSDP, scanned", "tensor, column", "tensor, row")


# What moves nothing is compiled by types and without a mesh.
@pytest.mark.slow(but="FSDP|explicit|no mesh")
@pytest.mark.parametrize("way", ("gather", "set_mesh", "no mesh", "explicit", "shard_map"))
@pytest.mark.parametrize("layout", [*PRODUCTS, "FSDP, tensor column"])
def test_layouts(layout: str, way: str, exchanged: Exchanged):
    """A product and its gradients: codes move where types or recipes say what does, else values;
    sums in the operands' dtype."""
    moved, summed = set[str](), set[str]()
    for (kind, dtype), size in exchanged(layout, way, "mxfp4").items():
        if size:
            (moved if kind == "all-gather" else summed).add(dtype)
    is_said = way in ("gather", "explicit", "shard_map")
    assert moved == ({"u8" if is_said else "bf16"} if layout.startswith("FSDP") else set())
    assert summed <= {"bf16"}


@pytest.mark.parametrize(
    ("name", "ratio"),
    [*zip(collectives.SQUARES, (0.75, 0.63), strict=True), ("mxfp8", 1.016), ("mxfp4", 0.77)],
)
def test_square_blocks_are_gathered_once(name: str, ratio: float, exchanged: Exchanged):
    """8 or 4 bits, and a gradient of 16, where plain JAX gathers 16; rows are gathered twice."""
    for way in ("gather", "explicit", "shard_map", "no mesh"):
        ours, plain = (
            exchanged("FSDP by n", way, recipe).total() for recipe in (name, collectives.PLAIN)
        )
        # Values of both orientations are equal.
        wanted = ratio if way != "no mesh" else 1.0 if name in collectives.SQUARES else 1.5
        assert ours / plain == pytest.approx(wanted, abs=0.007), way


def test_rows_go_to_experts(devices: list[Any]):
    case = collectives.Case("experts, no capacity", "shard_map", "mxfp4", "bfloat16")
    assert "ragged-all-to-all" in collectives.lowered(case, devices).compile().as_text()


# One of each kind of casts; mxfp8 and mxfp4 are in other programs too.
@pytest.mark.slow(
    but="v3$|wise$|hadamard|stochastic|mxfp6$|mxfp8$|mxint8|four_over_six|pretraining"
)
@pytest.mark.parametrize("name", sorted({recipes.from_name(name).name for name in recipes.names()}))
def test_recipes(name: str, mesh: Mesh):
    """Forward and gradients, FSDP and tensor parallel at once."""
    recipe = recipes.from_name(name)

    def step(x: jax.Array, w: jax.Array, g: jax.Array, key: jax.Array) -> Any:
        drawn = key if recipe.is_stochastic else None
        multiply = functools.partial(mx_jax.matmul, recipe=recipe, key=drawn)
        return with_gradients(multiply)(x, w, g)

    x, w, g = P("fsdp"), P("fsdp", "model"), P("fsdp", "model")
    key = jax.eval_shape(lambda: jax.random.key(0))
    compiled(
        step,
        lying(mesh, x, TOKENS, FEATURES),
        lying(mesh, w, FEATURES, UNITS),
        lying(mesh, g, TOKENS, UNITS),
        lying(mesh, P(), dtype=key.dtype),
        out=tuple(NamedSharding(mesh, spec) for spec in (g, x, w)),
    )


class Net(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = mx_jax.nn.linen.Dense(UNITS, recipe="mxfp8", dtype=DTYPE)(x)
        return mx_jax.nn.linen.Dense(FEATURES, recipe="mxfp8", dtype=DTYPE)(nn.relu(x))


# Where the kernels of both layers lie.
KERNELS = {
    "data": (P(), P()),
    "FSDP": (P("fsdp"), P("fsdp")),
    "tensor": (P(None, "model"), P("model")),
}


@pytest.mark.parametrize("known", [False, True], ids=["no mesh", "mesh"])
@pytest.mark.parametrize("layout", KERNELS)
def test_a_train_step(layout: str, known: bool, mesh: Mesh):
    """Of Dense layers: value, gradients and SGD."""
    optimizer, kernels = optax.sgd(0.1), iter(KERNELS[layout])

    def place(x: Any) -> Any:
        return lying(mesh, next(kernels) if x.ndim == 2 else P(), *x.shape, dtype=x.dtype)

    x = lying(mesh, P("fsdp"), TOKENS, FEATURES)
    params = jax.eval_shape(Net().init, jax.random.key(0), x)
    params = jax.tree.map(place, params)

    def step(params: Any, x: jax.Array) -> Any:
        loss = lambda params: (jnp.asarray(Net().apply(params, x), jnp.float32) ** 2).mean()  # noqa: E731
        value, grads = jax.value_and_grad(loss)(params)
        updates, _ = optimizer.update(grads, optimizer.init(params))
        return value, optax.apply_updates(params, updates)

    with jax.set_mesh(mesh) if known else contextlib.nullcontext():
        places = NamedSharding(mesh, P()), jax.tree.map(lambda x: x.sharding, params)
        compiled(step, params, x, out=places)


def _casts(x: jax.Array, w: jax.Array) -> Any:
    return mx_jax.quantize(x, "mxfp8"), mx_jax.quantize(w, "nvfp4", axis=0)


def _both(x: jax.Array, w: jax.Array) -> Any:
    return mx_jax.quantize_both(x, "mxfp8"), mx_jax.cast(w, "mxfp4", axis=0)


def _batched(x: jax.Array, w: jax.Array) -> jax.Array:
    multiply = functools.partial(mx_jax.matmul, recipe="mxfp4")
    return jax.vmap(multiply, (0, None))(x.reshape(4, -1, FEATURES), w)


def _stored(x: jax.Array, w: jax.Array) -> jax.Array:
    packed = mx_jax.pack_weights(mx_jax.quantize(w, "mxfp4", axis=0))
    return mx_jax.matmul(x, packed, recipe=recipes.weight_only("mxfp4"))


def test_kernels_under_x64(devices: list[Any]):
    """A cast and a packed product; Mosaic has no indices of 64 bits."""
    one = jax.make_mesh((1,), ("x",), axis_types=(AxisType.Auto,), devices=devices[:1])
    x, w = lying(one, P(), 8, 256), lying(one, P(), 256, 256)
    with jax.default_device(devices[0]), jax.enable_x64(True):
        text = compiled(lambda x, w: (mx_jax.quantize(w, "mxfp8"), _stored(x, w)), x, w)
    assert text.count('custom_call_target="tpu_custom_call"') >= 2


def _rematerialized(x: jax.Array, w: jax.Array) -> Any:
    layer = lambda x, w: jax.nn.relu(mx_jax.matmul(x, w, recipe="mxfp8"))  # noqa: E731
    saved = jax.checkpoint(layer, policy=mx_jax.save_quantized)
    return jax.grad(lambda x, w: saved(x, w).astype(jnp.float32).sum(), (0, 1))(x, w)


def _scanned(x: jax.Array, w: jax.Array) -> Any:
    def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        return mx_jax.matmul(mx_jax.matmul(x, w, recipe="mxfp8"), w.T, recipe="mxfp4"), None

    return jax.grad(lambda w: jax.lax.scan(layer, x, w)[0].astype(jnp.float32).sum())(
        jnp.stack([w, w])
    )


def _attention(x: jax.Array, w: jax.Array) -> jax.Array:
    q, k, v = (x.reshape(2, -1, 4, FEATURES // 4) for _ in range(3))
    scores = mx_jax.einsum("bqhd,bkhd->bhqk", q, k, recipe="mxfp8")
    return mx_jax.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v, recipe="mxfp8")


def _groups(x: jax.Array, w: jax.Array) -> jax.Array:
    sizes, experts = jnp.array([TOKENS // 4, 3 * TOKENS // 4]), jnp.stack([w, 2 * w])
    return mx_jax.ragged_dot(x, experts, sizes, recipe="mxfp4")


def _moments(x: jax.Array, w: jax.Array) -> Any:
    optimizer = mx_jax.quantize_state(optax.adam(1e-3))
    return optimizer.update(w, optimizer.init(w))


def _part_of_a_mesh(x: jax.Array, w: jax.Array) -> jax.Array:
    run = functools.partial(mx_jax.matmul, recipe="mxfp8")
    specs: Any = dict(in_specs=(P("fsdp"), P()), out_specs=P("fsdp"), axis_names={"fsdp"})
    return jax.shard_map(run, **specs)(x, w)


def _converted(x: jax.Array, w: jax.Array) -> jax.Array:
    layer = nnx.Linear(FEATURES, UNITS, use_bias=False, rngs=nnx.Rngs(0))
    layer.kernel.set_value(w)
    return mx_jax.convert.nnx(layer, mx_jax.convert.Rule(".*", "mxfp8"))(x)


PROGRAMS = {
    function.__name__.strip("_").replace("_", " "): function
    for function in (
        *(_casts, _both, _batched, _stored, _rematerialized, _groups, _moments, _part_of_a_mesh),
        *(_converted, _scanned, _attention),
    )
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_others(name: str, mesh: Mesh):
    """Traced for the TPU too."""
    x = lying(mesh, P("fsdp"), TOKENS, FEATURES)
    w = lying(mesh, P("fsdp", "model"), FEATURES, UNITS)
    with jax.default_device(mesh.devices.flat[0]), jax.set_mesh(mesh):
        compiled(PROGRAMS[name], x, w)


def test_exported():
    """From a CPU, for a TPU, without a mesh."""
    x, w = (jax.ShapeDtypeStruct(s, DTYPE) for s in ((TOKENS, FEATURES), (FEATURES, UNITS)))
    step = jax.jit(with_gradients(functools.partial(mx_jax.matmul, recipe="mxfp8")))
    g = jax.ShapeDtypeStruct((TOKENS, UNITS), DTYPE)
    exported = jax.export.export(step, platforms=["tpu"])(x, w, g)
    assert jax.export.deserialize(exported.serialize()).platforms == ("tpu",)


def test_the_step_of_the_docs(devices: list[Any]):
    page = section(ROOT / "docs" / "sharding.md", "A step for devices that are not there")
    for recipe, dtype in {"high_precision": "bf16", CODES: "u8"}.items():
        peak, flops, moved = page["summary"](page["compiled_for"](devices, recipe))
        assert peak > 0 and flops == pytest.approx(4 * 512**2 * 1024, rel=0.2)
        gathers = [key.split()[1] for key in moved if key.startswith("all-gather")]
        assert {key.partition("[")[0] for key in gathers} == {dtype}
