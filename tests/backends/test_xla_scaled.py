"""JAX's scaled dot: what it takes, and where; what it is handed, which runs anywhere."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import mx_jax
from mx_jax import formats, recipes
from mx_jax.backends import xla_scaled
from mx_jax.backends.select import select
from mx_jax.backends.target import Target
from mx_jax.backends.xla_scaled import NATIVE, XLA_SCALED, centred
from mx_jax.testing.backend_suite import EXTREME_CASES, ExtremeCase, check_extremes, check_matmul
from mx_jax.testing.cases import MatmulCase
from tests.quick import lowered, with_gradients
from tests.sharding.collectives import place

B200 = Target(platform="cuda", compute_capability=(10, 0))
A100 = Target(platform="cuda", compute_capability=(8, 0))
H200 = Target(platform="cuda", compute_capability=(9, 0))
E4M3, E5M2, MXFP4, NVFP4 = (formats.MXFP8_E4M3, formats.MXFP8_E5M2, formats.MXFP4, formats.NVFP4)
SQUARE = MatmulCase(lhs=E4M3, rhs=E4M3)
CASES = (
    SQUARE,
    MatmulCase(lhs=E5M2, rhs=E4M3, lhs_k_first=True, rhs_k_first=True),
    MatmulCase(lhs=MXFP4, rhs=MXFP4, batch=(2, 3), m=(2, 3), n=(4,), k=(3, 64)),
    MatmulCase(lhs=E4M3, rhs=MXFP4, rhs_k_first=True, out_dtype="bfloat16"),
    MatmulCase(lhs=NVFP4, rhs=NVFP4, batch=(2,), lhs_k_first=True, k=(48,)),
    MatmulCase(lhs=MXFP4, rhs=E5M2, dtype="bfloat16", m=(1,), rhs_k_first=True),
    MatmulCase(lhs=NVFP4, rhs=NVFP4, batch=(3,), m=()),
    MatmulCase(lhs=E4M3, rhs=E4M3, n=(2, 3), k=(32,), out_dtype="float16"),
)
EXTREMES = tuple(
    case
    for case in EXTREME_CASES
    if case.quantized_lhs and any(xla_scaled.kind_of(case.rhs) in pair for pair in NATIVE)
)
run = jax.jit(XLA_SCALED.run, static_argnums=0)


@pytest.fixture
def newest(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if this JAX compiled FP4."""
    monkeypatch.setattr(jax, "__version_info__", (0, 12, 0))


@pytest.mark.usefixtures("newest")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_products(case: MatmulCase):
    assert XLA_SCALED.rejects(case.call, B200) is None
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
        moved, shift = centred(jnp.array(scales, jnp.uint8), formats.E4M3)
        assert shift == exponent
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
    assert choice.label == "JAX's scaled dot"
    for target in (A100, H200, dataclasses.replace(B200, num_devices=4), Target(platform="tpu")):
        assert select(SQUARE.call, target).backend.name == "xla_bfloat16"


OLD, NEW = (0, 10, 2), (0, 12, 0)
ON = "on compute capability 10.0, 10.3, 11.0, 12.0, 12.1, got"


@pytest.mark.parametrize(
    ("case", "target", "version", "reason"),
    [
        (SQUARE, Target(platform="rocm"), NEW, "on platform=cuda, got platform=rocm"),
        (
            SQUARE,
            dataclasses.replace(B200, program_devices=4),
            NEW,
            "in programs of one device, got num_devices=4",
        ),
        (SQUARE, A100, NEW, f"{ON} 8.0"),
        (SQUARE, H200, NEW, f"{ON} 9.0"),
        (SQUARE, Target(platform="cuda"), NEW, f"{ON} none"),
        (CASES[2], B200, OLD, "mxfp4 by mxfp4 from JAX 0.12.0 on, got 0.10.2"),
        (
            MatmulCase(lhs=formats.MXFP6_E2M3, rhs=E4M3),
            B200,
            NEW,
            "no block-scaled product of mxfp6_e2m3 by mxfp8_e4m3",
        ),
        (MatmulCase(lhs=MXFP4, rhs=NVFP4), B200, NEW, "no block-scaled product"),
        (
            MatmulCase(lhs=formats.MXFP4_2D, rhs=MXFP4),
            B200,
            NEW,
            "blocks along the contracted axis alone, got mxfp4_2d",
        ),
        (MatmulCase(lhs=E4M3, rhs=E4M3, k=(90,)), B200, OLD, "whole blocks of 32 along k, got k=9"),
        (MatmulCase(lhs=E4M3, rhs=E4M3, m=(0,)), B200, OLD, "have elements, got lhs_shape"),
        (MatmulCase(lhs=None, rhs=E4M3), B200, OLD, "two quantized operands, got one in high"),
        (MatmulCase(lhs=E4M3, rhs=None), B200, OLD, "two quantized operands, got one in high"),
    ],
)
def test_rejections(
    case: MatmulCase, target: Target, version: Any, reason: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(jax, "__version_info__", version)
    assert reason in str(XLA_SCALED.rejects(case.call, target))


def num_scaled_dots(run: Any, *operands: Any, platform: str = "cuda") -> int:
    with mx_jax.testing.target("cuda", (10, 0)):
        text = lowered(run, *operands, platform=platform)
    return text.count('stablehlo.composite "xla.scaled_dot"')


def product(x: Any, w: Any) -> jax.Array:
    return mx_jax.matmul(x, w, recipe=recipes.mxfp8())


X, W = jnp.ones((32, 64)), jnp.ones((64, 96))


def test_codes_of_four_bits_are_masked_before_they_are_narrowed():
    """XLA 0.12 fails where a reshape of uint8 stands before the cast to uint4."""
    made = jax.make_jaxpr(lambda x: xla_scaled._elements(x, formats.E2M1))(jnp.ones(4, jnp.uint8))
    names = [eqn.primitive.name for eqn in made.eqns]
    assert names.index("and") < names.index("convert_element_type")


def test_a_training_step_is_three_scaled_dots_on_a_gpu_alone():
    step = with_gradients(product)
    assert num_scaled_dots(step, X, W, X @ W) == 3
    assert num_scaled_dots(step, X, W, X @ W, platform="cpu") == 0


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
            operands = place(mesh, (X, W), (rows, whole))
            assert num_scaled_dots(run, *operands) == (size == 1)


@pytest.mark.parametrize("axes", [(0, None), (None, 0), (0, 0)], ids=str)
@pytest.mark.parametrize("case", CASES[1:3], ids=str)
def test_vmap(case: MatmulCase, axes: tuple[int | None, int | None]):
    """One composite with one batch axis at most, and the products one by one."""
    pairs = [case.operands(np.random.default_rng(seed)) for seed in range(4)]
    lhs, rhs = zip(*pairs, strict=True)

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
