"""Experts of ragged products on several devices: the bits of one device, and what moves."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import mx_jax
from mx_jax import recipes
from mx_jax.sharding import Gather
from tests.needs import slow
from tests.quick import OPTIONS, quick, with_gradients
from tests.sharding.collectives import check, collectives, compiled, draw_all, gathered, mesh_of

P = PartitionSpec
EXPERTS, ROWS, FEATURES, UNITS = 4, 128, 128, 128
WEIGHTS = EXPERTS * FEATURES * UNITS
SIZES = np.array([40, 0, 70, 10], np.int32)
MXFP4 = recipes.mxfp4()

ARRAYS = draw_all((ROWS, FEATURES), (EXPERTS, FEATURES, UNITS), (ROWS, UNITS))


def step(recipe: Any) -> Any:
    return with_gradients(functools.partial(mx_jax.ragged_dot, recipe=recipe))


# Codes and scales beside bfloat16's bytes.
RATIOS = {"mxfp6": 0.391, "mxfp4": 0.266}
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit


@pytest.mark.parametrize(
    ("name", "kind", "spec"),
    [("mxfp4", AUTO, P(None, "fsdp", "model")), ("mxfp6", EXPLICIT, P("fsdp", "model", None))],
)
@pytest.mark.slow
def test_under_jit(name: str, kind: AxisType, spec: PartitionSpec):
    """Rows and experts lie along the same axis; "model" stays where it is."""
    recipe, is_explicit = recipes.from_name(name), kind is EXPLICIT
    gathering = dataclasses.replace(
        recipe, gather=Gather("fsdp", rhs=None if is_explicit else spec)
    )
    x_spec = P("fsdp", "model" if spec[1] == "model" else None)
    y_spec = P("fsdp", spec[2])
    operands, specs = (*ARRAYS, SIZES), (x_spec, spec, y_spec, P())
    results = None if is_explicit else (y_spec, x_spec, spec)
    text, actual = compiled(step(gathering), mesh_of(kind), operands, specs, results)
    check(actual, quick(step(recipe))(*operands))
    assert [a.sharding.spec for a in actual] == [y_spec, x_spec, spec]
    # Half of them lies along "model", and both orientations move.
    assert gathered(text, "u8") / (2 * WEIGHTS) == pytest.approx(RATIOS[name], abs=0.002)
    assert not gathered(text, "f32")


def test_inside_shard_map():
    """Each device has rows and groups of its own, and parts of all experts."""
    x, w, g = ARRAYS
    sizes = np.array([[10, 0, 12, 10], [0, 32, 0, 0], [1, 2, 3, 4], [8, 8, 8, 8]], np.int32)
    spec, rows = P(None, "fsdp"), P("fsdp")
    gathering = dataclasses.replace(MXFP4, gather=Gather("fsdp", rhs=spec))
    sharded = jax.shard_map(
        step(gathering),
        mesh=mesh_of(fsdp=4),
        in_specs=(rows, spec, rows, rows),
        out_specs=(rows, rows, spec),
    )
    program = quick(sharded).lower(x, w, g, sizes.reshape(-1)).compile()

    def alone(x, g, sizes):
        return jax.lax.map(lambda group: step(MXFP4)(group[0], w, *group[1:]), (x, g, sizes))

    parts = x.reshape(4, -1, FEATURES), g.reshape(4, -1, UNITS), sizes
    y, dx, dw = quick(alone)(*parts)
    expected = y.reshape(ROWS, UNITS), dx.reshape(ROWS, FEATURES), dw.sum(0)
    check(program(x, w, g, sizes.reshape(-1)), expected)
    text = str(program.as_text())
    assert gathered(text) == gathered(text, "u8") == 2 * (WEIGHTS // 2 + WEIGHTS // 32)
    sums = [exchange for exchange in collectives(text) if exchange.kind == "reduce-scatter"]
    assert [(exchange.dtype, exchange.nbytes) for exchange in sums] == [("f32", WEIGHTS)]


@pytest.mark.parametrize(
    ("how", "spec"),
    [slow("shard_map", P(None, None, "fsdp")), ("auto", P("fsdp")), ("explicit", P("fsdp"))],
)
def test_stored_experts(how: str, spec: PartitionSpec):
    """MXArrays move as the codes that they are."""
    x, w, _ = ARRAYS
    is_explicit = how == "explicit"
    stored = mx_jax.quantize(w, "mxfp4", axis=1)
    recipe = dataclasses.replace(
        recipes.weight_only("mxfp4"), gather=Gather("fsdp", rhs=None if is_explicit else spec)
    )
    mesh = mesh_of(EXPLICIT if is_explicit else AUTO)
    run: Any = lambda x, w, sizes: mx_jax.ragged_dot(x, w, sizes, recipe=recipe)  # noqa: E731
    if how == "shard_map":
        run = jax.shard_map(
            run, mesh=mesh, in_specs=(P(), spec, P()), out_specs=P(), check_vma=False
        )
    with jax.set_mesh(mesh):
        experts = mx_jax.sharding.device_put(stored, NamedSharding(mesh, spec))
        program = jax.jit(run, compiler_options=OPTIONS).lower(x, experts, SIZES).compile()
        actual = program(x, experts, SIZES)
    text = str(program.as_text())
    assert gathered(text, "u8") == WEIGHTS // 2 + WEIGHTS // 32
    assert not gathered(text, "f32")
    expected = mx_jax.ragged_dot(x, stored, SIZES, recipe=recipes.weight_only("mxfp4"))
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-4)


def test_rows_are_not_gathered():
    x, w, _ = ARRAYS
    recipe = dataclasses.replace(MXFP4, gather=Gather("fsdp", lhs=P("fsdp"), rhs=P("fsdp")))
    with (
        jax.set_mesh(mesh_of(AUTO)),
        pytest.raises(ValueError, match=r"not rows together.*got lhs=P.*'fsdp'.*lhs.shape=\(128,"),
    ):
        mx_jax.ragged_dot(x, w, SIZES, recipe=recipe)


def test_an_explicit_mesh_that_is_not_in_context():
    """Types say where rows are: JAX's own product asks for `out_sharding` there."""
    x, w, _ = ARRAYS
    mesh = mesh_of(EXPLICIT)
    rows, whole = NamedSharding(mesh, P("fsdp", None)), NamedSharding(mesh, P(None, None, None))
    product = jax.jit(lambda x, w: mx_jax.ragged_dot(x, w, SIZES, recipe=MXFP4))
    actual = product(jax.device_put(x, rows), jax.device_put(w, whole))
    assert actual.sharding.is_equivalent_to(rows, 2)
    check([actual], [quick(product)(x, w)])
