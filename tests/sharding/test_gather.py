"""Operands gathered as codes: the bits of one device, and nothing but bytes on the wire."""

import contextlib
import dataclasses
import re
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

import mx_jax
from mx_jax import recipes
from mx_jax.sharding import Gather
from tests.quick import quick, with_gradients
from tests.sharding.collectives import (
    check,
    compiled,
    draw_all,
    gathered,
    mesh_of,
)

P = PartitionSpec
DIMENSIONS = (((1,), (0,)), ((), ()))
X, W, G = (128, 128), (128, 128), (128, 128)
MXFP4 = recipes.mxfp4()

ARRAYS = draw_all(X, W, G)


def step(recipe: Any, **options: Any) -> Any:
    return with_gradients(
        lambda x, w: mx_jax.dot_general(x, w, DIMENSIONS, recipe=recipe, **options)
    )


@pytest.mark.slow(but=r"Auto-P\('fsdp|types-P\('model")
@pytest.mark.parametrize("w_spec", [P("fsdp", "model"), P("model", "fsdp")], ids=str)
@pytest.mark.parametrize("way", ["Auto", "Explicit", "types"])
def test_one_of_two_mesh_axes(way: str, w_spec: PartitionSpec):
    """Tensor parallel along "model" beside FSDP: only "fsdp" is gathered; on TPUs by types."""
    column = w_spec[1] == "model"
    specs = P("fsdp", None if column else "model"), w_spec, P("fsdp", "model" if column else None)
    kind = AxisType.Auto if way == "Auto" else AxisType.Explicit
    gather = Gather("fsdp", rhs=w_spec if way == "Auto" else None)
    recipe = MXFP4 if way == "types" else dataclasses.replace(MXFP4, gather=gather)
    run = step(recipe, out_sharding=None if way == "Auto" else specs[2])
    expected = quick(step(MXFP4))(*ARRAYS)
    tpu = mx_jax.testing.target("tpu") if way == "types" else contextlib.nullcontext()
    with tpu:
        text, actual = compiled(run, mesh_of(kind), ARRAYS, specs)
    check(actual, expected)
    assert actual[2].sharding.spec == w_spec
    # Half of the codes and scales, in both orientations.
    share = W[0] * W[1] // 2
    assert gathered(text, "u8") == gathered(text) == 2 * (share // 2 + share // 32)


@pytest.mark.slow(but=r"None\)-True|\(None, 'fsdp'\)-False")
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("w_spec", [P("fsdp", None), P(None, "fsdp")], ids=str)
def test_inside_shard_map(w_spec: PartitionSpec, check_vma: bool):
    """Data parallel along the axis that the kernel is stored along: its gradient is summed."""
    gathering = dataclasses.replace(MXFP4, gather=Gather("fsdp", rhs=w_spec))
    specs = (P("fsdp"), w_spec, P("fsdp"))
    run = jax.shard_map(
        step(gathering),
        mesh=mesh_of(fsdp=4),
        in_specs=specs,
        out_specs=specs[:1] + specs[:2],
        check_vma=check_vma,
    )
    # Four shares of 32 tokens, one block each: so dw is the same sum of the same casts.
    check(quick(run)(*ARRAYS), quick(step(MXFP4))(*ARRAYS))


def test_inside_shard_map_over_a_part():
    """Rows lie along one mesh axis of shard_map's; the compiler has the other, and gathers."""
    recipe = dataclasses.replace(MXFP4, gather=Gather("fsdp", rhs=P("fsdp")))
    run: Any = lambda x, w: mx_jax.matmul(x, w, recipe=recipe)  # noqa: E731
    specs: Any = dict(in_specs=(P("model"), P()), out_specs=P("model"), axis_names={"model"})
    expected = [quick(run)(*ARRAYS[:2])]
    for each in (run, jax.shard_map(run, mesh=mesh_of(AxisType.Auto), **specs)):
        text, actual = compiled(each, mesh_of(AxisType.Auto), ARRAYS[:2], (P("model"), P("fsdp")))
        check([actual], expected)
        assert gathered(text) == gathered(text, "u8") == W[0] * W[1] // 2 + W[0] * W[1] // 32


def on_shards(recipe: Any, w_spec: PartitionSpec, x: Any, w: Any, **options: Any) -> Any:
    """y of a kernel in four parts inside shard_map, with all of the tokens everywhere."""
    gathering = dataclasses.replace(recipe, gather=Gather("fsdp", rhs=w_spec))
    run = jax.shard_map(
        lambda x, w: mx_jax.matmul(x, w, recipe=gathering, **options),
        mesh=mesh_of(fsdp=4),
        in_specs=(P(), w_spec),
        out_specs=P(),
        check_vma=False,
    )
    return jax.jit(run)(x, w)


def test_one_tensor_scale_inside_shard_map():
    """Parts of a kernel share the scale of all of it, though each device sees only its own."""
    x, w, _ = ARRAYS
    w = w * np.array([1.0] * 96 + [64.0] * 32, np.float32)[:, None]
    recipe = dataclasses.replace(recipes.weight_only("nvfp4"), residuals="primal")
    actual = on_shards(recipe, P("fsdp", None), x, w)
    np.testing.assert_allclose(actual, mx_jax.matmul(x, w, recipe=recipe), rtol=2e-5, atol=2e-3)


def test_parts_of_a_kernel_draw_different_bits():
    weights = {"scale_rule": "rceil", "rounding": "stochastic"}
    recipe = recipes.weight_only("mxfp4").with_(weights=weights)
    w = np.full((128, 128), 0.3, np.float32)
    y = on_shards(recipe, P(None, "fsdp"), np.eye(128, dtype=np.float32), w, key=jax.random.key(0))
    parts = np.split(np.asarray(y), 4, axis=1)
    assert not any(np.array_equal(parts[0], part) for part in parts[1:])


def test_blocks_between_devices():
    """Sixteen rows a device, blocks of 32: values are gathered, stored codes as codes, but inside
    shard_map."""
    x, w = ARRAYS[0][:, :64], ARRAYS[1][:64]
    expected = mx_jax.matmul(x, w, recipe=MXFP4)
    recipe = dataclasses.replace(MXFP4, gather=Gather("fsdp", rhs=P("fsdp")))
    run = lambda x, w: mx_jax.matmul(x, w, recipe=recipe)  # noqa: E731
    text, actual = compiled(run, mesh_of(AxisType.Auto), (x, w), (P(), P("fsdp")))
    assert gathered(text) == gathered(text, "f32") == 4 * w.size
    check([actual], [expected])
    np.testing.assert_allclose(on_shards(MXFP4, P("fsdp"), x, w), expected, rtol=1e-6)
    stored = mx_jax.quantize(w, "mxfp4", axis=0)
    of_codes: Any = lambda x, codes: run(x, dataclasses.replace(stored, codes=codes))  # noqa: E731
    text, actual = compiled(of_codes, mesh_of(AxisType.Auto), (x, stored.codes), (P(), P("fsdp")))
    assert gathered(text) == gathered(text, "u8") == w.size // 2
    check([actual], [quick(run)(x, stored)])
    part = dataclasses.replace(stored, codes=stored.codes[:16], scales=stored.scales[:1])
    local = jax.shard_map(
        lambda x: mx_jax.matmul(x, part, recipe=recipe),
        mesh=mesh_of(AxisType.Auto),
        in_specs=P(),
        out_specs=P(),
    )
    message = "along axis=0, got shard size=16 with block=32 of mxfp4 along mesh axes=['fsdp']; pas"
    with pytest.raises(ValueError, match=re.escape(message)):
        jax.eval_shape(local, x)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_stored_codes_are_gathered_as_codes(kind: AxisType):
    x, w, _ = ARRAYS
    kernel = mx_jax.quantize(w, "mxfp4", axis=0)
    is_explicit = kind is AxisType.Explicit
    recipe = recipes.weight_only("mxfp4")
    if not is_explicit:
        recipe = dataclasses.replace(recipe, gather=Gather("fsdp", rhs=P("fsdp", None)))
    y_spec = P("fsdp", None)
    options: dict[str, Any] = {"out_sharding": y_spec} if is_explicit else {}
    run = lambda x, w: mx_jax.dot_general(x, w, DIMENSIONS, recipe=recipe, **options)  # noqa: E731
    text, actual = compiled(run, mesh_of(kind), (x, kernel), (y_spec, y_spec))
    assert gathered(text) == gathered(text, "u8") == w.size // 2 + w.size // 32
    np.testing.assert_allclose(actual, x @ kernel.dequantize(), rtol=1e-5, atol=1e-4)


FSDP = P("fsdp", None), P("fsdp", None), P("fsdp", None)
HIGH = recipes.high_precision()


@pytest.mark.slow(but="Explicit-True-mxfp4|Auto-False-mxfp8")
@pytest.mark.parametrize("weights", ["mxfp8_e4m3_2d", "mxfp4_2d"])
@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_square_blocks_are_gathered_once(kind: AxisType, named: bool, weights: str):
    """Kept, they serve both orientations: their bits, and a scale for each 1024 elements."""
    recipe = recipes.from_name(weights.partition("_")[0]).with_(weights=weights)
    gather = Gather("fsdp", rhs=P("fsdp", None)) if named else None
    explicit = {"out_sharding": FSDP[0]} if kind is AxisType.Explicit else {}
    run = step(dataclasses.replace(recipe, gather=gather), **explicit)
    text, actual = compiled(run, mesh_of(kind), ARRAYS, FSDP)
    check(actual, quick(step(recipe))(*ARRAYS))
    # Unless it is told, the compiler gathers codes of four bits for each product.
    assert gathered(text, "u8") == W[0] * W[1] // (2 if named and weights == "mxfp4_2d" else 1) + 16
    assert gathered(text) == gathered(text, "u8")


@pytest.mark.parametrize(
    ("gather", "message"),
    [
        (Gather("fsdp"), "nobody says where rhs lies along mesh axes=['fsdp']"),
        (Gather("expert", rhs=P("expert")), "the mesh in context has no axis 'expert'"),
        (Gather("fsdp", rhs=P(None, None, "fsdp")), "a spec has at most one entry for each axis"),
    ],
)
def test_what_cannot_be_gathered(gather: Gather, message: str):
    recipe = dataclasses.replace(MXFP4, gather=gather)
    mx_jax.matmul(*ARRAYS[:2], recipe=recipe)
    mesh = mesh_of(AxisType.Auto)
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=re.escape(message)):
        mx_jax.matmul(*ARRAYS[:2], recipe=recipe)


def test_packed_weights_and_other_kinds_are_refused():
    x, w, _ = ARRAYS
    with mx_jax.testing.target("cpu"):
        packed = mx_jax.pack_weights(mx_jax.quantize(w, "mxfp4", axis=0))
    recipe = dataclasses.replace(MXFP4, gather=Gather("fsdp", rhs=P("fsdp")))
    mesh = mesh_of(AxisType.Auto)
    if isinstance(packed, mx_jax.PackedMXArray):
        with jax.set_mesh(mesh), pytest.raises(ValueError, match="packed weights are not gathered"):
            mx_jax.matmul(x, packed, recipe=recipe)
    with pytest.raises(TypeError, match="axes must be names of mesh axes, got axes=3"):
        dataclasses.replace(MXFP4, gather=3)
    assert dataclasses.replace(MXFP4, gather="fsdp").gather == Gather(("fsdp",))
