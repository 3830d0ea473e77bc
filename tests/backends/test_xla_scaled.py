"""XLA's scaled dot: what it takes, and where; what it is handed, which runs anywhere."""

import dataclasses
import functools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import mx_jax
from mx_jax import formats, recipes
from mx_jax.backends import xla_scaled
from mx_jax.backends.calls import MatmulCall, RaggedCall
from mx_jax.backends.select import select
from mx_jax.backends.target import Target
from mx_jax.backends.xla_scaled import NATIVE, XLA_SCALED, Native, centred, row_of
from mx_jax.mxarray import MXArray
from mx_jax.packed import PackedMXArray
from mx_jax.testing.backend_suite import (
    EXTREME_CASES,
    ExtremeCase,
    check_extremes,
    check_matmul,
    check_ragged,
)
from mx_jax.testing.cases import RAGGED_CASES, MatmulCase, RaggedCase
from tests.quick import quick

B200 = Target(platform="cuda", compute_capability=(10, 0))
A100 = Target(platform="cuda", compute_capability=(8, 0))
E4M3, E5M2, MXFP4, NVFP4 = (
    formats.MXFP8_E4M3,
    formats.MXFP8_E5M2,
    formats.MXFP4,
    formats.NVFP4,
)
SQUARE = MatmulCase(lhs=E4M3, rhs=E4M3)
CASES = (
    SQUARE,
    MatmulCase(lhs=E5M2, rhs=E4M3, lhs_k_first=True, rhs_k_first=True),
    MatmulCase(lhs=MXFP4, rhs=MXFP4, batch=(2, 3), m=(2, 3), n=(4,), k=(3, 64)),
    MatmulCase(lhs=E4M3, rhs=MXFP4, rhs_k_first=True, out_dtype="bfloat16"),
    MatmulCase(lhs=NVFP4, rhs=NVFP4, batch=(2,), lhs_k_first=True, k=(48,)),
    MatmulCase(lhs=None, rhs=MXFP4, dtype="bfloat16", m=(1,), rhs_k_first=True),
    MatmulCase(lhs=None, rhs=NVFP4, dtype="bfloat16", batch=(3,), m=()),
    MatmulCase(lhs=E4M3, rhs=None, dtype="bfloat16", n=(2, 3), k=(32,), out_dtype="float16"),
)
EXTREMES = tuple(
    case
    for case in EXTREME_CASES
    if case.quantized_lhs
    and not isinstance(xla_scaled.kind_of(case.rhs), str)
    and any(xla_scaled.kind_of(case.rhs) in pair for row in NATIVE for pair in row.pairs)
)
run = jax.jit(XLA_SCALED.run, static_argnums=0)
from_0_12 = pytest.mark.skipif(
    jax.__version_info__ < (0, 12, 0), reason="XLA compiles FP4 from JAX 0.12 on"
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_products(case: MatmulCase):
    assert isinstance(row_of(case.call, B200, (0, 12, 0)), Native)
    check_matmul(XLA_SCALED, case)


@pytest.mark.parametrize("case", EXTREMES, ids=str)
def test_extremes(case: ExtremeCase):
    check_extremes(XLA_SCALED, case)


# Scales -------------------------------------------------------------------------------------------


def as_xla_decodes(codes: np.ndarray, scales: np.ndarray, element: Any) -> np.ndarray:
    """Bfloat16 elements times scales whose exponent bits are E8M0's, which makes 0 of 2^-127.

    So Triton decomposes a scaled dot under `fastMath`, which XLA asks for.
    """
    values = np.array([element.value(int(code)) for code in codes]).astype(jnp.bfloat16)
    factors = (scales.astype(np.uint16) << 7).view(jnp.bfloat16)
    with np.errstate(over="ignore", invalid="ignore"):
        values = values.astype(np.float64).reshape(-1, *(1,) * factors.ndim)
        product = values * factors.astype(np.float64)
        return product.astype(jnp.bfloat16).astype(np.float64)


@pytest.mark.parametrize("element", [formats.E4M3, formats.E5M2, formats.E2M1], ids=str)
def test_bfloat16_has_every_element_under_centred_scales(element: Any):
    """Beside every largest scale: never Inf; all digits, but for what lies far below it."""
    codes = np.arange(element.max_code + 1)
    values = np.array([element.value(int(code)) for code in codes])[:, None, None]
    up, most = int(1 - math.log2(element.smallest_subnormal)), 254 - element.emax
    tops = np.arange(255)
    scales = np.minimum(np.arange(255), tops[:, None]).astype(np.uint8)
    moved, exponents = jax.jit(jax.vmap(lambda s: centred(s, element)))(scales)
    decoded = as_xla_decodes(codes, np.asarray(moved), element)
    assert np.isfinite(decoded).all()
    exponent = np.asarray(exponents)
    exact = values * 2.0 ** (scales.astype(np.float64) - 127)
    error = np.abs(decoded * 2.0 ** -exponent.astype(np.float64)[:, None] - exact)
    small = tops <= 87 - up
    assert not error[:, small].any() and (exponent[small] == up).all()
    moved_up = decoded[:, small]
    assert moved_up[moved_up > 0].min() >= 2.0**-126
    # Elsewhere all under a scale that would be 2^-127 or less.
    lost = element.max * 2.0 ** (np.maximum(tops - most, 0) - 127.0)[:, None]
    assert (error <= lost).all() and not error[exact > lost].any()
    np.testing.assert_array_equal(exponent, np.minimum(most - tops, np.clip(87 - tops, 0, up)))


def test_scales_of_nan_stay():
    """They say nothing of where the others lie, and their codes make NaN of what XLA reads."""
    for scales, exponent in (([255, 3, 0], 10), ([255, 255], 10), ([255, 254, 20], -8)):
        moved, found = centred(jnp.array(scales, jnp.uint8), formats.E4M3)
        assert found == exponent
        others = [scale + exponent for scale in scales if scale != 255]
        assert [int(s) for s in moved if s != 255] == others
        assert (np.asarray(moved) == 255).sum() == scales.count(255)
    for element, written in ((formats.E4M3, formats.E4M3.nan_code), (formats.E2M1, 0)):
        assert written is not None
        array = mx_jax.quantize(
            jnp.full((1, 32), jnp.nan), "mxfp8_e4m3" if element is formats.E4M3 else "mxfp4"
        )
        assert (np.asarray(array.codes) == written).all() and (array.scales == 255).all()
        decoded = as_xla_decodes(np.array([written]), np.array([255], np.uint8), element)
        assert np.isnan(decoded).all()


@pytest.mark.parametrize("name", ["mxfp8_e4m3", "mxfp4"])
def test_sums_are_moved_back(name: str):
    """Powers of two from end to end of float32, each times its inverse."""
    for exponent in (-126, -60, 0, 60, 120):
        x = jnp.full((2, 32), 2.0**exponent)
        y = jnp.full((3, 32), 2.0 ** -max(exponent, -120))
        lhs, rhs = (mx_jax.quantize(a, name) for a in (x, y))
        case = MatmulCase(lhs=lhs.format, rhs=rhs.format, m=(2,), n=(3,), k=(32,))
        product = run(case.call, lhs, rhs)
        np.testing.assert_array_equal(product, 32 * 2.0 ** min(exponent + 120, 0))


# Where --------------------------------------------------------------------------------------------


def test_one_before_the_plain_way():
    choice = select(SQUARE.call, B200)
    assert choice.backend.name == "xla_scaled"
    assert choice.offer.how == "XLA's scaled dot, MXFP8 from JAX 0.10.2 on"
    for target in (A100, dataclasses.replace(B200, num_devices=4), Target(platform="tpu")):
        assert select(SQUARE.call, target).backend.name == "xla_bfloat16"


@pytest.mark.parametrize(
    ("case", "target", "version", "reason"),
    [
        (SQUARE, Target(platform="rocm"), None, "on platform=cuda, got platform=rocm"),
        (
            SQUARE,
            dataclasses.replace(B200, program_devices=4),
            None,
            "in programs of one device, got num_devices=4",
        ),
        (SQUARE, A100, (0, 12, 0), "not seen to compile .* for compute capability (8, 0)"),
        (SQUARE, Target(platform="cuda"), (0, 12, 0), "for compute capability None"),
        (CASES[2], B200, (0, 10, 2), "mxfp4 by mxfp4 from JAX 0.12.0 on, got 0.10.2"),
        (
            MatmulCase(lhs=formats.MXFP6_E2M3, rhs=E4M3),
            B200,
            (0, 12, 0),
            "no block-scaled product of mxfp6_e2m3 by mxfp8_e4m3",
        ),
        (MatmulCase(lhs=NVFP4, rhs=NVFP4), A100, (0, 12, 0), "not seen .* capability (8, 0)"),
        (MatmulCase(lhs=MXFP4, rhs=NVFP4), B200, (0, 12, 0), "no block-scaled product"),
        (
            MatmulCase(lhs=formats.MXFP4_2D, rhs=MXFP4),
            B200,
            (0, 12, 0),
            "blocks along the contracted axis alone, got mxfp4_2d",
        ),
        (MatmulCase(lhs=E4M3, rhs=E4M3, k=(90,)), B200, None, "whole blocks of 32 .*k=90"),
        (
            RaggedCase(lhs=E4M3, rhs=E4M3, sizes=(32, 32), rows=64, contracts_rows=True),
            B200,
            None,
            "by their group's matrix, got rows that are contracted",
        ),
        (
            RaggedCase(lhs=E4M3, rhs=E4M3, sizes=(32, 32), rows=64, k=90),
            B200,
            None,
            "whole blocks of 32 .*k=90",
        ),
        (
            RaggedCase(lhs=None, rhs=E4M3, sizes=(3,), rows=3),
            dataclasses.replace(B200, num_devices=4),
            None,
            "in programs of one device, got num_devices=4",
        ),
        (MatmulCase(lhs=E4M3, rhs=E4M3, m=(0,)), B200, None, "have elements, got lhs_shape"),
        (MatmulCase(lhs=None, rhs=E4M3), B200, None, "in bfloat16, got lhs_dtype=float32"),
    ],
)
def test_rejections(case: Any, target: Target, version: Any, reason: str):
    if version is None:
        found = XLA_SCALED.rejects(case.call, target)
    else:
        found = row_of(case.call, target, version)
    pattern = reason.replace("(", r"\(").replace(")", r"\)")
    assert isinstance(found, str) and re.search(pattern, found), found


@pytest.mark.parametrize(("lhs", "length"), [(E4M3, 160), (None, 256)], ids=str)
@pytest.mark.parametrize("k_first", [False, True])
def test_k_is_filled_up_by_bfloat16(lhs: Any, length: int, k_first: bool):
    """XLA crashes where 128 does not divide it: so the composite sees zeros behind it."""
    how = {"lhs_k_first": k_first, "rhs_k_first": k_first, "dtype": "bfloat16"}
    case = MatmulCase(lhs=lhs, rhs=E4M3, k=(160,), **how)
    assert XLA_SCALED.rejects(case.call, B200) is None
    check_matmul(XLA_SCALED, case)
    assert composite_shapes(run.lower(case.call, *case.operands(np.random.default_rng(0)))) == {
        tuple(sorted((rows, length))) for rows in (*case.m, *case.n)
    }
    for k in (96, 128):
        case = MatmulCase(lhs=None, rhs=E4M3, dtype="bfloat16", k=(k,))
        assert XLA_SCALED.rejects(case.call, B200) is None


def composite_shapes(lowered: Any) -> set[tuple[int, ...]]:
    """Of elements that a scaled dot reads, lengths in rising order."""
    (line,) = re.findall(r'composite "xla.scaled_dot".*\((.*?)\) ->', lowered.as_text())
    shapes = re.findall(r"tensor<([\dx]+)x", line)[:2]
    return {tuple(sorted(map(int, shape.split("x")))) for shape in shapes}


# Rows in groups -----------------------------------------------------------------------------------

GROUPS = {"k": 96, "out_dtype": "bfloat16"}
IN_GROUPS = (
    *(case for case in RAGGED_CASES if not case.contracts_rows),
    # All rows in one group, in several steps; rows of no group; most groups without rows.
    RaggedCase(lhs=None, rhs=MXFP4, sizes=(0, 150, 0, 3), rows=160, **GROUPS),
    RaggedCase(lhs=E4M3, rhs=MXFP4, sizes=(33, 0, 70, 32), rows=150, **GROUPS),
    RaggedCase(lhs=None, rhs=NVFP4, sizes=(*(0,) * 9, 2, 0, 1, *(0,) * 9), rows=4, k=160),
    RaggedCase(lhs=MXFP4, rhs=MXFP4, sizes=(*(0,) * 20, 5), rows=5, rhs_k_first=False),
)


@pytest.mark.parametrize("case", IN_GROUPS, ids=str)
def test_rows_in_groups(case: RaggedCase):
    assert isinstance(row_of(xla_scaled._at_a_time(case.call), B200, (0, 12, 0)), Native)
    check_ragged(XLA_SCALED, case)


@pytest.mark.parametrize(
    ("rows", "groups", "steps"),
    [(64, 8, (8, 32)), (4096, 8, (8, 1024)), (16, 8, (8, 16)), (4, 128, (4, 4)), (8, 16, (16, 8))],
)
def test_rows_at_a_time(rows: int, groups: int, steps: tuple[int, int]):
    """Not all rows by each matrix; and only matrices that have rows, where those are few."""
    case = RaggedCase(lhs=None, rhs=MXFP4, sizes=(0,) * groups, rows=rows)
    product = xla_scaled._at_a_time(case.call)
    assert product.lhs.shape == (*steps, case.k)
    assert product.rhs.shape[0] == steps[0]
    assert steps[0] * steps[1] <= max(4 * rows, rows * groups / 2, 32 * min(rows, groups))


def test_rows_in_groups_under_vmap():
    case = IN_GROUPS[-3]
    given = [case.operands(np.random.default_rng(seed)) for seed in range(2)]
    lhs, rhs, sizes = (
        jax.tree.map(lambda *x: jnp.stack(x), *own) for own in zip(*given, strict=True)
    )
    sizes = sizes.at[1].set(sizes[1][::-1])
    found = jax.jit(jax.vmap(functools.partial(run, case.call)))(lhs, rhs, sizes)
    for i in range(2):
        one = jax.tree.map(lambda leaf, i=i: leaf[i], (lhs, rhs, sizes))
        np.testing.assert_array_equal(found[i], run(case.call, *one))


@from_0_12
def test_experts_are_one_scaled_dot_of_packed_weights():
    w = weights(MXFP4, (8, 160, 64), 1)
    p = packed(w, contracting=1, num_batch=1)
    x = jnp.asarray(np.random.default_rng(1).standard_normal((64, 160)), jnp.bfloat16)
    recipe, sizes = recipes.weight_only("mxfp4"), jnp.array([8] * 7 + [5])

    def product(x: jax.Array, w: Any) -> jax.Array:
        return mx_jax.ragged_dot(x, w, sizes, recipe=recipe)

    text = lowered(product, x, p)
    assert text.count('stablehlo.composite "xla.scaled_dot"') == 1 and "while" in text
    assert "ragged_dot" not in text
    with mx_jax.testing.target("cuda", (10, 0)):
        said = mx_jax.inspect.explain_call(product, x, p)
    rows = "XLA's scaled dot, MXFP4 from JAX 0.12.0 on, 32 rows of each group at a time"
    assert f"-> xla_scaled ({rows})" in said
    case = RaggedCase(lhs=None, rhs=MXFP4, sizes=(0,) * 8, rows=64, k=160, n=64)
    call = by_packed(case.call, p)
    np.testing.assert_array_equal(run(call, x, p, sizes), run(case.call, x, w, sizes))


def test_a_format_of_other_facts_is_no_row():
    mine = dataclasses.replace(E4M3, element=dataclasses.replace(formats.E4M3, bias=6))
    found = row_of(MatmulCase(lhs=mine, rhs=E4M3).call, B200, (0, 12, 0))
    assert isinstance(found, str) and "of other facts" in found
    renamed = dataclasses.replace(E4M3, name="mine")
    assert isinstance(row_of(MatmulCase(lhs=renamed, rhs=E4M3).call, B200), Native)


def lowered(function: Any, *operands: Any, platform: str = "cuda") -> str:
    with mx_jax.testing.target("cuda", (10, 0)):
        return jax.jit(function).trace(*operands).lower(lowering_platforms=(platform,)).as_text()


def product(x: Any, w: Any) -> jax.Array:
    return mx_jax.matmul(x, w, recipe=recipes.mxfp8())


X, W = jnp.ones((32, 64)), jnp.ones((64, 96))


def test_on_hopper_only_groups_have_it():
    """XLA itself dequantizes other products there, as was seen on an H200."""
    hopper = dataclasses.replace(B200, compute_capability=(9, 0))
    case = MatmulCase(lhs=formats.MXFP8_E4M3, rhs=formats.MXFP8_E4M3, dtype="bfloat16")
    reason = XLA_SCALED.rejects(case.call, hopper)
    assert reason == "was measured slower than a dequantized product on compute capability 9.0"
    assert XLA_SCALED.rejects(case.call, B200) is None
    facts: Any = {"lhs": None, "rhs": formats.MXFP8_E4M3, "sizes": (8, 8), "rows": 16}
    groups = RaggedCase(k=64, n=32, out_dtype="bfloat16", **facts)
    assert XLA_SCALED.rejects(groups.call, hopper) is None


def test_codes_of_four_bits_are_masked_before_they_are_narrowed():
    """XLA 0.12 fails where a reshape of uint8 stands before the cast to uint4."""
    made = jax.make_jaxpr(lambda x: xla_scaled._elements(x, formats.E2M1))(jnp.ones(4, jnp.uint8))
    names = [eqn.primitive.name for eqn in made.eqns]
    assert names.index("and") < names.index("convert_element_type")


def test_a_training_step_is_three_scaled_dots_on_a_gpu_alone():
    def step(x: jax.Array, w: jax.Array) -> Any:
        y, pullback = jax.vjp(product, x, w)
        return pullback(y)

    text = lowered(step, X, W)
    assert text.count('stablehlo.composite "xla.scaled_dot"') == 3
    assert "scaled_dot" not in lowered(step, X, W, platform="cpu")


@pytest.mark.parametrize("manual", [False, True])
def test_programs_of_several_devices_have_none(manual: bool):
    """Left to the compiler or by shard_map; one device of a mesh is a program of one."""
    for size in (1, 2):
        mesh = jax.make_mesh((size,), ("x",), (jax.sharding.AxisType.Auto,))
        rows = PartitionSpec("x")
        whole = PartitionSpec()
        run = (
            jax.shard_map(product, mesh=mesh, in_specs=(rows, whole), out_specs=rows)
            if manual
            else product
        )
        with jax.set_mesh(mesh):
            x, w = (
                jax.device_put(a, jax.sharding.NamedSharding(mesh, s))
                for a, s in ((X, rows), (W, whole))
            )
            assert ("scaled_dot" in lowered(run, x, w)) == (size == 1)


@pytest.mark.parametrize("axes", [(0, None), (None, 0), (0, 0)], ids=str)
@pytest.mark.parametrize("case", CASES[1:3], ids=str)
def test_vmap(case: MatmulCase, axes: tuple[int | None, int | None]):
    """One composite with one batch axis at most, and the products one by one."""
    given = [case.operands(np.random.default_rng(seed)) for seed in range(4)]
    lhs, rhs = zip(*given, strict=True)

    def stacked(operands: Any, axis: int | None) -> Any:
        # Both halves of a batch of 2 x 2, for one vmap in the other.
        if axis is None:
            return operands[0]
        return jax.tree.map(
            lambda *leaves: jnp.stack(leaves).reshape(2, 2, *leaves[0].shape), *operands
        )

    x, y = stacked(lhs, axes[0]), stacked(rhs, axes[1])
    one = functools.partial(run, case.call)
    results = jax.jit(jax.vmap(jax.vmap(one, axes), axes))(x, y)
    for i in range(4):
        left, right = (v[0 if a is None else i] for v, a in zip((lhs, rhs), axes, strict=True))
        # Where many are one product, a machine may add up in another order.
        expected = np.asarray(one(left, right))
        atol = 1e-6 * np.abs(expected).max()
        np.testing.assert_allclose(results[i // 2, i % 2], expected, rtol=1e-6, atol=atol)


# Packed weights -----------------------------------------------------------------------------------


def packed(w: MXArray, target: Target = B200, **how: Any) -> PackedMXArray:
    with mx_jax.testing.target("cuda", target.compute_capability):
        found = quick(functools.partial(mx_jax.pack_weights, **how))(w)
    assert isinstance(found, PackedMXArray) and found.backend == "xla_scaled"
    return found


def weights(format: formats.BlockFormat, shape: tuple[int, ...], axis: int) -> MXArray:
    values = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    return mx_jax.quantize(jnp.asarray(values, jnp.bfloat16), format, axis=axis)


FEW_BITS = [E4M3, pytest.param(MXFP4, marks=from_0_12), pytest.param(NVFP4, marks=from_0_12)]


@pytest.mark.parametrize(
    ("shape", "axis", "length"), [((64, 96), 0, 64), ((64, 96), 1, 96), ((64, 160), 1, 256)]
)
@pytest.mark.parametrize("format", FEW_BITS, ids=str)
def test_packed_weights_are_the_weights(
    format: formats.BlockFormat, shape: tuple[int, int], axis: int, length: int
):
    """Filled up with zeros that nobody sees."""
    w = weights(format, shape, axis)
    p = packed(w)
    assert p.arrays.codes.nbytes == shape[1 - axis] * length * format.element.bits // 8
    unpacked = quick(lambda p: p.unpack())(p)
    for given, again in zip(jax.tree.leaves(w), jax.tree.leaves(unpacked), strict=True):
        np.testing.assert_array_equal(given, again)
    if axis == 1:
        rows = quick(lambda p: p.take(jnp.array([3, 60])).dequantize())(p)
        np.testing.assert_array_equal(rows, np.asarray(w.dequantize())[[3, 60]])


def by_packed(call: MatmulCall | RaggedCall, p: PackedMXArray) -> Any:
    """The same product, whose weights are packed."""
    rhs = dataclasses.replace(call.rhs, packed_by=p.backend)
    return dataclasses.replace(call, rhs=rhs)


@pytest.mark.parametrize("format", FEW_BITS, ids=str)
def test_products_of_packed_weights(format: formats.BlockFormat):
    """The same bits, in a stack too, of which scan takes one after the other; filled up or not."""
    long = MatmulCase(lhs=None, rhs=format, dtype="bfloat16", n=(8,), k=(160,))
    x, _ = long.operands(np.random.default_rng(1))
    w = weights(format, (8, 160), 1)
    p = packed(w)
    np.testing.assert_array_equal(run(by_packed(long.call, p), x, p), run(long.call, x, w))
    case = MatmulCase(lhs=None, rhs=format, dtype="bfloat16", n=(64,), k=(96,))
    x, _ = case.operands(np.random.default_rng(1))
    assert isinstance(x, jax.Array)
    w = weights(format, (64, 96), 1)
    p = packed(w)
    expected = run(case.call, x, w)
    call = by_packed(case.call, p)
    np.testing.assert_array_equal(run(call, x, p), expected)
    stack = packed(weights(format, (3, 64, 96), 2), contracting=2, num_batch=1)
    _, found = jax.lax.scan(lambda c, p: (c, run(call, x, p)), None, stack)
    for i in range(3):
        one = jax.tree.map(lambda a, i=i: a[i], stack)
        np.testing.assert_array_equal(found[i], run(call, x, one))
    whole = MatmulCase(lhs=None, rhs=format, dtype="bfloat16", batch=(3,), n=(64,), k=(96,))
    xs = jnp.broadcast_to(x, (3, *x.shape))
    np.testing.assert_allclose(run(whole.call, xs, stack), found, rtol=1e-6, atol=1e-5)


def test_packing_writes_codes_that_multiply_to_nan_and_zeros_that_count_as_zeros():
    w = weights(E4M3, (2, 96), 1)
    scales = jnp.array([[255, 254, 3], [120, 121, 122]], jnp.uint8)
    p = packed(dataclasses.replace(w, scales=scales))
    codes = np.asarray(p.arrays.codes).reshape(2, 3, 32)
    assert (codes[0, 0] == formats.E4M3.nan_code).all() and not codes[0, 2].any()
    assert p.arrays.exponent == -8
    values = np.asarray(p.dequantize())
    assert np.isnan(values[0, :32]).all() and not values[0, 64:].any()
    np.testing.assert_array_equal(values[1], dataclasses.replace(w, scales=scales).dequantize()[1])


@from_0_12
def test_weights_are_packed_for_what_meets_them():
    w = weights(MXFP4, (64, 16), 0)
    assert packed(w, recipe=recipes.mxfp4()).backend == "xla_scaled"
    with mx_jax.testing.target("cuda", (10, 0), num_devices=4):
        assert isinstance(mx_jax.pack_weights(w), MXArray)
    with mx_jax.testing.target("cuda", (10, 0)):
        # Its activations are float32, and its products the reference's.
        assert isinstance(mx_jax.pack_weights(dataclasses.replace(w, dtype=X.dtype)), MXArray)
    with mx_jax.testing.target("cuda", (10, 0)):
        x = jnp.ones((2, 64), jnp.bfloat16)
        weight_only = recipes.weight_only("mxfp4")
        text = mx_jax.inspect.explain_call(
            lambda x, w: mx_jax.matmul(x, w, recipe=weight_only), x, packed(w)
        )
    assert "-> xla_scaled (XLA's scaled dot, MXFP4 from JAX 0.12.0 on)" in text


def test_weights_on_several_devices_stay_as_they_are():
    """Their programs have several devices too, where nothing reads this layout."""
    mesh = jax.make_mesh((2,), ("x",), (jax.sharding.AxisType.Auto,))
    w = weights(E4M3, (64, 96), 0)
    for spec in (PartitionSpec(None, "x"), PartitionSpec()):
        lies = jax.device_put(w, jax.sharding.NamedSharding(mesh, spec))
        with mx_jax.testing.target("cuda", (10, 0)):
            assert mx_jax.pack_weights(lies) is lies
            assert isinstance(mx_jax.pack_weights(w), PackedMXArray)
