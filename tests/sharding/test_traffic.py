"""Bytes that devices receive, beside plain JAX's in the dtype of the operands, in every way.

The programs are those of `python -m benchmarks.collectives`, whose table docs/benchmarks.md shows.
"""

import dataclasses
import functools
import json
import math
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import mx_jax
from benchmarks import report
from benchmarks.collectives import (
    DTYPES,
    EXPERTS,
    FEATURES,
    LAYOUTS,
    MODEL,
    OTHERS,
    PLAIN,
    RECIPES,
    SQUARES,
    TOKENS,
    TPUS,
    UNITS,
    WAYS,
    Case,
    cases,
    cases_of_tpus,
    counted,
    named,
    step,
)
from mx_jax import recipes
from mx_jax.backends.reference import REFERENCE
from mx_jax.inspect import explain
from mx_jax.testing.compare import assert_bitwise_equal
from mx_jax.testing.draw import draw_few_octaves
from tests.needs import slow
from tests.quick import quick, with_gradients
from tests.sharding.collectives import mesh_of, partitioned, place, received

P = PartitionSpec
# Two orientations of eight bits and their scales, beside bfloat16 once; maxima that rows agree on.
SCALES = {"mxfp8": (1.0, 1.016), "mxfp4": (1.0, 1.0), "float8_rowwise": (1.004, 1.015)}
SCALES |= zip(SQUARES, (SCALES["mxfp8"], SCALES["mxfp4"]), strict=True)

# The programs that are compiled: every layout in every way, recipes and dtypes taking turns, so
# that any two of the four meet. Of the others the committed figures are held alone.
COMPILED = [
    Case(layout, way, RECIPES[(row + column) % 3], DTYPES[(row + column) % 2])
    for row, layout in enumerate(LAYOUTS)
    for column, way in enumerate(WAYS)
]
COMPILED += [Case(layout, "shard_map", "mxfp4", "bfloat16") for layout in EXPERTS]
COMPILED += [Case(MODEL, "no mesh", "mxfp8", "bfloat16")]
COMPILED += [Case("FSDP, tensor row", "explicit", PLAIN, "bfloat16")]


@functools.cache
def committed(device: str = "cpu") -> dict[Case, Counter[tuple[str, str]]]:
    """What the benchmark counted: bytes of each case, by kind of collective and dtype."""
    rows = json.loads((report.RESULTS / "collectives.json").read_text())["rows"]
    rows = [row for row in rows if row["device"] == device]
    return {
        Case(*(row[field] for field in Case._fields)): Counter(
            {tuple(key.split()): size for key, size in row["bytes"].items()}
        )
        for row in rows
    }


def test_the_committed_table_has_no_more_bytes_than_plain_jax():
    counts = committed()
    for recipe in RECIPES:
        for case in cases(recipe):
            ratio = counts[case].total() / counts[case._replace(recipe=PLAIN)].total()
            assert ratio <= SCALES[recipe][case.dtype == "bfloat16"], case
            assert case.layout not in OTHERS or ratio <= 0.91, case


@pytest.mark.parametrize("name", RECIPES)
def test_fsdp_in_bfloat16_moves_what_the_docs_count(name: str):
    """Two gathers of codes, or one of square blocks, and a gradient; of values one gather, or one
    in each pass."""
    counts, weights = committed(), named(name).output.rhs
    assert weights is not None
    for layout in ("FSDP by k", "FSDP by n", "FSDP, scanned"):
        for way in WAYS:
            case = Case(layout, way, name, "bfloat16")
            ratio = counts[case].total() / counts[case._replace(recipe=PLAIN)].total()
            both_passes = layout == "FSDP, scanned" and way != "shard_map"
            once = name in SQUARES and layout != "FSDP, scanned"
            once &= weights.format.element.bits == 8 or way == "shard_map"
            bits = (1 if once else 2) * weights.format.bits_per_element + 16
            # Rows agree on their maxima besides.
            assert ratio == pytest.approx(bits / (48 if both_passes else 32), abs=0.016), case


@pytest.mark.parametrize("device", TPUS)
def test_tpus_move_codes_where_gathers_are_named(device: str):
    """As other devices do; without a mesh values of each orientation, plain JAX's once or twice."""
    counts = committed(device)
    for case in (case for recipe in RECIPES for case in cases_of_tpus(recipe)):
        ratio = counts[case].total() / counts[case._replace(recipe=PLAIN)].total()
        once = case.recipe in SQUARES or case.layout == "FSDP, scanned"
        most = 1.018 if case.way != "no mesh" else 1.0 if once else 1.5
        # Maxima of whole rows are much beside so small weights.
        assert ratio <= most + 0.08 * (case.recipe == "float8_rowwise"), case
        if case.recipe in SQUARES and case.layout == "FSDP by k" and case.way != "no mesh":
            assert ratio <= (0.755 if "mxfp8" in case.recipe else 0.63), case


@pytest.mark.filterwarnings("ignore:.*context manager has been deprecated:DeprecationWarning")
@pytest.mark.slow(
    but="FSDP by k-(no mesh|shard_map)|scanned-explicit|tensor, row-set_mesh|no capacity|-jax"
)
@pytest.mark.parametrize("case", COMPILED, ids=lambda case: "-".join(case[:3]))
def test_programs_move_what_is_committed(case: Case):
    assert +counted(case) == committed()[case]


@pytest.mark.filterwarnings("ignore:.*context manager has been deprecated:DeprecationWarning")
@pytest.mark.slow(but="set_mesh-FSDP by k|explicit-tensor, row")
@pytest.mark.parametrize(
    ("way", "layout"),
    [
        ("set_mesh", "FSDP by k"),
        ("no mesh", "data"),
        ("with mesh", "tensor, column"),
        ("explicit", "tensor, row"),
        ("shard_map", "FSDP by k"),
    ],
)
def test_sums_in_float32_by_a_recipe(way: str, layout: str):
    """Twice the bytes of bfloat16's sums; shard_map's caller adds up products himself."""
    narrow = committed()[Case(layout, way, "mxfp8", "bfloat16")]
    wide = counted(Case(layout, way, "mxfp8", "bfloat16", widened=True))
    sums = {key: size for key, size in narrow.items() if key[1] == "bf16"}
    assert sums and {key: wide[key[0], "f32"] for key in sums} == {
        key: 2 * size for key, size in sums.items()
    }
    assert not [key for key in wide if key[1] == "bf16"]


@pytest.mark.parametrize("wide", [False, True])
def test_sums_of_shards_are_within_their_bound(wide: bool, rng: np.random.Generator):
    """docs/sharding.md: d parts rounded to bfloat16, and d - 1 sums of them, or one rounding."""
    x, w = rng.normal(size=(32, 512)), rng.normal(size=(512, 32))
    x, w = (jnp.asarray(a, jnp.bfloat16) for a in (x, w))
    recipe = dataclasses.replace(recipes.mxfp8(), reduce_dtype=jnp.float32 if wide else None)
    with jax.set_mesh(mesh := mesh_of(d=8)):
        operands = place(mesh, (x, w), (P(None, "d"), P("d")))
        product = jax.jit(lambda x, w: mx_jax.matmul(x, w, recipe=recipe))(*operands)
    spec = recipe.output.lhs
    assert spec is not None
    left, right = (
        np.asarray(
            mx_jax.quantize(a, spec.format, axis=axis, scale_rule=spec.scale_rule).dequantize(
                jnp.float32
            ),
            np.float64,
        )
        for a, axis in ((x, 1), (w, 0))
    )
    exact, magnitude = left @ right, abs(left) @ abs(right)
    unit, error = 2.0**-8, abs(np.asarray(product, np.float64) - exact)
    once = unit * abs(exact) + 1e-5 * magnitude
    assert (error <= (once if wide else 8 * unit * magnitude)).all()
    # A bound that nothing comes near to would tell nothing.
    assert wide or (error > once).any()


NVFP4 = recipes.nvfp4()
# Terms of a sum, devices, and half a unit in the last place.
TERMS, DEVICES, HALF_ULP = 512, 8, 2.0**-24


def bound(devices: int) -> float:
    """Of the sum of magnitudes: docs/sharding.md derives it."""
    return (REFERENCE.epsilon_bound * math.sqrt(TERMS / devices) + devices - 1) * HALF_ULP


@pytest.mark.parametrize("is_split", [True, False])
def test_codes_of_nvfp4_are_those_of_one_device_and_sums_are_near(
    is_split: bool, rng: np.random.Generator
):
    """Parts have tensor scales of their own, 64 times as large on one device."""

    def run(x: Any, w: Any) -> Any:
        left = mx_jax.quantize(x, "nvfp4", scale_rule=NVFP4.output.lhs.scale_rule)
        right = mx_jax.quantize(w, "nvfp4", axis=0, scale_rule=NVFP4.output.rhs.scale_rule)
        return left, right, mx_jax.matmul(x, w, recipe=NVFP4)

    x, w = (rng.standard_normal(shape, np.float32) for shape in ((16, TERMS), (TERMS, 64)))
    x[:, : TERMS // DEVICES] *= 64
    with jax.set_mesh(mesh := mesh_of(d=DEVICES)):
        specs = (P(None, "d"), P("d")) if is_split else (P("d"), P(None, "d"))
        *parts, product = jax.jit(run)(*place(mesh, (x, w), specs))
    *expected, alone = jax.jit(run)(x, w)
    values = []
    for one, other in zip(parts, expected, strict=True):
        for name in ("codes", "scales", "tensor_scale"):
            assert_bitwise_equal(getattr(one, name), getattr(other, name), what=name)
        # Exact in float64: an element, its block's scale and the tensor's have 2, 4 and 24 digits.
        exact = one.dequantize(jnp.float32) / np.asarray(one.tensor_scale)
        digits = np.round(np.asarray(exact, np.float64) * 2.0**12) / 2.0**12
        values.append(digits * np.asarray(one.tensor_scale, np.float64))
    exact, magnitude = values[0] @ values[1], abs(values[0]) @ abs(values[1])
    # Each operand's values are rounded once where its tensor scale is multiplied in.
    rounded = 2 * HALF_ULP * magnitude
    devices = DEVICES if is_split else 1
    assert (abs(product - exact) <= bound(devices) * magnitude + rounded).all()
    assert (abs(alone - exact) <= bound(1) * magnitude + rounded).all()
    # The bound is no more than twice what is seen of a sum whose terms are not random.
    assert abs(product - exact).max() > 0


def test_recipes_say_how_devices_add_up():
    wide = dataclasses.replace(recipes.mxfp8(), reduce_dtype="float32")
    assert (
        wide != recipes.mxfp8()
        and dataclasses.replace(wide, reduce_dtype=None, name="mxfp8") == recipes.mxfp8()
    )
    assert "devices add up in float32" in str(wide)
    assert "reduce_dtype='float32'" in repr(wide)
    with pytest.raises(ValueError, match="got reduce_dtype='bfloat16'"):
        dataclasses.replace(recipes.mxfp8(), reduce_dtype="bfloat16")
    with pytest.raises(ValueError, match="preferred_element_type='float32' where you multiply"):
        dataclasses.replace(recipes.high_precision(), reduce_dtype="float32")
    for recipe, added in ((recipes.mxfp8(), False), (wide, True)):
        text = str(explain(recipe, 64, 64, 64, dtype="bfloat16"))
        assert ("to bfloat16, added up in float32 -> " in text) == added


@pytest.mark.parametrize("name", ["mxfp4_stochastic", "nvfp4_pretraining", "mxfp4"])
def test_square_blocks_keep_the_sharding_of_types(name: str):
    """Sixteen columns a device, blocks of 32 by 32: each device multiplies its columns."""
    recipe, key = recipes.from_name(name), jax.random.key(0)
    mesh = mesh_of(AxisType.Explicit, d=8)
    run = with_gradients(functools.partial(mx_jax.matmul, recipe=recipe, key=key))
    arrays = [jnp.ones(shape, jnp.bfloat16) for shape in ((64, 64), (64, 128), (64, 128))]
    with jax.set_mesh(mesh):
        operands = place(mesh, arrays, (P(), P(None, "d"), P(None, "d")))
        y, dx, dw = jax.eval_shape(run, *operands)
        program = partitioned(jax.jit(run).lower(*operands))
    assert y.sharding.spec == dw.sharding.spec == P(None, "d") and dx.sharding.spec == P(None, None)
    nbytes = received(program, 8)
    assert 0 < nbytes["all-reduce", "bf16"] <= 2 * 64 * 64 * 2 * 7 // 8
    # Of what moves, values are those sums alone: devices that share a block share its codes.
    assert not [key for key in nbytes if key[1] in ("bf16", "f32") and key[0] != "all-reduce"]
    assert nbytes["all-gather", "u8"] < 3 * 64 * 128


def test_shards_that_cut_blocks_agree_on_maxima(rng: np.random.Generator):
    """Eight rows a device, four devices a block: maxima are exchanged, and codes are gathered."""
    x, w = draw_few_octaves(rng, (64, 64)), draw_few_octaves(rng, (64, 128))
    run = lambda x, w: mx_jax.matmul(x, w, recipe="mxfp4")  # noqa: E731
    with jax.set_mesh(mesh := mesh_of(d=8)):
        operands = place(mesh, (x, w), (P("d"), P("d")))
        jitted = jax.jit(run, out_shardings=NamedSharding(mesh, P("d")))
        nbytes, actual = received(partitioned(jitted.lower(*operands)), 8), jitted(*operands)
    assert {key for key, size in nbytes.items() if size} == {
        ("all-reduce", "s32"),
        ("all-gather", "u8"),
    }
    # Two of four devices have the same scale.
    assert nbytes["all-gather", "u8"] == 64 * 128 // 2 * 7 // 8 + 2 * 128 // 2
    assert nbytes["all-reduce", "s32"] == 2 * 3 * 128 * 4 // 4
    assert_bitwise_equal(np.asarray(actual) + 0.0, np.asarray(quick(run)(x, w)) + 0.0)


@pytest.mark.parametrize("w_spec", [P("d"), P(None, "d")], ids=str)
@pytest.mark.parametrize("name", ["float8_rowwise", "float8_tensorwise"])
def test_parts_inside_shard_map_agree_on_scales(name: str, w_spec: Any, rng: np.random.Generator):
    """Codes of rows and tensors are gathered, and are those of one device."""
    x, w = draw_few_octaves(rng, (64, 64)), draw_few_octaves(rng, (64, 64))
    w *= np.exp2(np.arange(64) % 7)[:, None]
    recipe = recipes.from_name(name)

    def run(x: Any, w: Any, gather: Any = None) -> Any:
        gathering = dataclasses.replace(recipe, gather=gather)
        y, pullback = jax.vjp(lambda x, w: mx_jax.matmul(x, w, recipe=gathering), x, w)
        return y, *pullback(y)

    gather = mx_jax.sharding.Gather("d", rhs=w_spec)
    sharded = jax.shard_map(
        functools.partial(run, gather=gather),
        mesh=mesh_of(d=8),
        in_specs=(P(), w_spec),
        out_specs=(P(), P(), w_spec),
        check_vma=False,
    )
    y, dx, _ = jax.jit(sharded)(x, w)
    nbytes = received(partitioned(jax.jit(sharded).lower(x, w)), 8)
    assert not [
        key
        for key in nbytes
        if key[0] == "all-gather" and key[1] == "f32" and nbytes[key] > 64 * 4 * 2
    ]
    expected = quick(run)(x, w)
    np.testing.assert_allclose(y, expected[0], rtol=1e-5, atol=1e-5 * abs(expected[0]).max())
    np.testing.assert_allclose(dx, expected[1], rtol=1e-5, atol=1e-5 * abs(expected[1]).max())


def test_tokens_along_two_axes_are_not_permuted():
    """Weights lie along the second of them: the sum over tokens takes both as they lie."""
    mesh = mesh_of(data=2, fsdp=4)
    both = P(("data", "fsdp"))

    def run(x: Any, w: Any, g: Any) -> Any:
        return jax.vjp(lambda x, w: mx_jax.matmul(x, w, recipe="mxfp8"), x, w)[1](g)

    specs = (both, P("fsdp"), both)
    with jax.set_mesh(mesh):
        places = [NamedSharding(mesh, spec) for spec in specs]
        operands = [jax.ShapeDtypeStruct((256, 256), "bfloat16", sharding=s) for s in places]
        lowered = jax.jit(run, out_shardings=tuple(places[:2])).lower(*operands)
    kinds = {kind for kind, _ in received(partitioned(lowered), 8)}
    assert kinds == {"all-gather", "reduce-scatter", "all-reduce"}


@pytest.mark.parametrize("layout", ["FSDP by k", "tensor, row"])
def test_the_older_partitioner(layout: str):
    """GSPMD asks where a product comes to lie, and moves the same bytes."""
    case = Case(layout, "no mesh", "mxfp4", "bfloat16")
    jax.config.update("jax_use_shardy_partitioner", False)
    try:
        assert +counted(case) == committed()[case]
    finally:
        jax.config.update("jax_use_shardy_partitioner", True)


def test_mixed_axis_types():
    """One axis explicit, one automatic: a column parallel product of FSDP's weights."""
    mesh = jax.make_mesh((4, 2), ("fsdp", "model"), axis_types=(AxisType.Explicit, AxisType.Auto))
    run = lambda x, w: mx_jax.matmul(x, w, recipe="mxfp4")  # noqa: E731
    x = draw_few_octaves(np.random.default_rng(0), (64, 128))
    with jax.set_mesh(mesh):
        operands = place(mesh, (x, x.T), (P("fsdp"), P(None, "model")))
        actual = jax.jit(run)(*operands)
    assert actual.sharding.spec[0] == "fsdp"
    assert_bitwise_equal(np.asarray(actual) + 0.0, np.asarray(quick(run)(x, x.T)) + 0.0)


@pytest.mark.parametrize("axis", ["data", slow("model")])
def test_mixed_axis_types_move_what_two_explicit_axes_do(axis: str):
    """Forward and gradients; of the product's sharding types know what is along one axis."""
    case = Case("FSDP, tensor column", "explicit", "mxfp4", "bfloat16")
    layout, axes = LAYOUTS[case.layout], ("data", "model")
    kinds = tuple(AxisType.Explicit if name == axis else AxisType.Auto for name in axes)
    mesh = jax.make_mesh((4, 2), axes, axis_types=kinds)
    typed = layout._replace(y=P(*(part if part == axis else None for part in layout.y)))
    places = [NamedSharding(mesh, spec) for spec in (layout.x, layout.w, layout.y)]
    shapes = (TOKENS, FEATURES), (FEATURES, UNITS), (TOKENS, UNITS)
    with jax.set_mesh(mesh):
        operands = [
            jax.ShapeDtypeStruct(shape, case.dtype, sharding=place)
            for shape, place in zip(shapes, places, strict=True)
        ]
        run = jax.jit(step(case, typed), out_shardings=(places[2], *places[:2]))
        assert +received(partitioned(run.lower(*operands)), 8) == committed()[case]
