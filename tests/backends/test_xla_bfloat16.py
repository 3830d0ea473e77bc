"""XLA's bfloat16 dot: what it takes, where, and its arithmetic, which runs anywhere."""

import dataclasses
import functools
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mx_jax
from mx_jax import formats, recipes
from mx_jax.backends.reference import REFERENCE
from mx_jax.backends.select import select
from mx_jax.backends.target import Target
from mx_jax.backends.xla import XLA_BFLOAT16, XLA_ROUNDED, bfloat16_holds
from mx_jax.formats import BLOCK_FORMATS, MX_FORMATS
from mx_jax.mxarray import MXArray
from mx_jax.testing.backend_suite import (
    EXTREME_CASES,
    ExtremeCase,
    check_extremes,
    check_matmul,
    check_stagnating_sum,
)
from mx_jax.testing.cases import MATMUL_CASES, MatmulCase
from tests.quick import lowered

TPU = Target(platform="tpu")
# Of GPUs one for which XLA has no block-scaled product.
TURING = Target(platform="cuda", compute_capability=(7, 5))
ACCELERATORS = (TPU, Target(platform="rocm"), TURING)
ACCEPTED = tuple(case for case in MATMUL_CASES if XLA_BFLOAT16.rejects(case.call, TPU) is None)
EXTREMES = tuple(case for case in EXTREME_CASES if case.quantized_lhs)

WIDE = formats.BlockFormat(
    name="wide",
    element=formats.ElementFormat(name="e2m5", exponent_bits=2, mantissa_bits=5, bias=1),
    scale=formats.E4M3_SCALE,
    block=(1, 16),
)
SQUARE = MatmulCase(lhs=formats.MXFP8_E4M3, rhs=formats.MXFP8_E4M3, k=(64,))

run = jax.jit(XLA_BFLOAT16.run, static_argnums=0)


def test_accepted_cases():
    """Every format but those of blocks under float32 scales; high precision only in bfloat16."""
    assert all(map(bfloat16_holds, BLOCK_FORMATS))
    formats = {case.lhs for case in ACCEPTED} | {case.rhs for case in ACCEPTED}
    assert set(BLOCK_FORMATS) - formats == {BLOCKWISE, BLOCKWISE_2D}
    assert {case.dtype for case in ACCEPTED if None in (case.lhs, case.rhs)} == {"bfloat16"}


@pytest.mark.parametrize("format", MX_FORMATS, ids=str)
def test_every_code_is_a_bfloat16(format: formats.BlockFormat):
    """The digits claimed are enough for each of them, and the largest needs them all."""
    element = format.element
    values = np.array([element.value(code) for code in range(1 << element.bits)])
    values = values[np.isfinite(values)]
    digits = [int(m * 2**20) for m in np.abs(np.frexp(values)[0])]
    needed = max(21 - ((x & -x).bit_length() - 1) - 1 for x in digits if x)
    assert needed == format.significand_bits
    np.testing.assert_array_equal(values.astype(jnp.bfloat16).astype(np.float64), values)


@pytest.mark.slow(
    but="mxfp8_e4m3-mxfp8|mxfp4-mxfp4-|nvfp4-nvfp4-|mxint8-mxint8|bfloat16|k_first|rowwise_e5m2-float8_t|blockwise"
)
@pytest.mark.parametrize("case", ACCEPTED, ids=str)
def test_products(case: MatmulCase):
    check_matmul(XLA_BFLOAT16, case)


def test_stagnating_sum():
    check_stagnating_sum(XLA_BFLOAT16)


@pytest.mark.slow(but="mxfp8|mxfp6_e2m3-ceil-2.128")
@pytest.mark.parametrize("case", EXTREMES, ids=str)
def test_extremes(case: ExtremeCase):
    check_extremes(XLA_BFLOAT16, case)


@pytest.mark.parametrize(
    ("lhs_scale", "rhs_scale"),
    [
        (2.0**-140, 2.0**100),
        (2.0**120, 2.0**-130),
        (2.0**-149, 2.0**127),
        (1.5 * 2.0**-100, 1.25),
        (0.0, 2.0),
        (np.inf, 2.0),
        (np.nan, 2.0),
    ],
)
def test_tensor_scales_that_meet(lhs_scale: float, rhs_scale: float):
    """Scales far apart meet on the sums, in whichever order: neither over- nor underflows."""
    expected = 16 * np.float64(lhs_scale) * np.float64(rhs_scale)
    case = MatmulCase(lhs=formats.NVFP4, rhs=formats.NVFP4, m=(2,), n=(3,), k=(16,))
    operands = case.operands(np.random.default_rng(0))
    for scales in ((lhs_scale, rhs_scale), (rhs_scale, lhs_scale)):
        ones = [
            dataclasses.replace(
                x,
                codes=jnp.full(x.shape, 2, jnp.uint8),
                scales=jnp.full(x.scales.shape, 0x38, jnp.uint8),
                tensor_scale=jnp.full((1, 1), scale, jnp.float32),
            )
            for x, scale in zip(operands, scales, strict=True)
            if isinstance(x, MXArray)
        ]
        np.testing.assert_array_equal(run(case.call, *ones), np.full((2, 3), expected))


@pytest.mark.parametrize("target", ACCELERATORS, ids=str)
@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (SQUARE, None),
        (dataclasses.replace(SQUARE, lhs=None, dtype="bfloat16"), None),
        (
            dataclasses.replace(SQUARE, rhs=None),
            "needs operands that bfloat16 holds, got rhs_dtype=float32, whose product keeps the "
            "caller's precision",
        ),
        (
            dataclasses.replace(SQUARE, lhs=None, dtype="float16"),
            "needs operands that bfloat16 holds, got lhs_dtype=float16, whose product keeps the "
            "caller's precision",
        ),
        (
            dataclasses.replace(SQUARE, rhs=WIDE),
            "needs element times block scale in 8 binary digits, got rhs=wide, significand_bits=10",
        ),
    ],
    ids=str,
)
def test_reasons(case: MatmulCase, reason: str | None, target: Target):
    assert XLA_BFLOAT16.rejects(case.call, target) == reason


def test_other_machines():
    reason = "for accelerators, whose units multiply bfloat16, got platform=cpu"
    assert XLA_BFLOAT16.rejects(SQUARE.call, Target(platform="cpu")) == reason
    assert XLA_BFLOAT16.rejects(SQUARE.call, dataclasses.replace(TPU, num_devices=8)) is None


BLOCKWISE, BLOCKWISE_2D = formats.FLOAT8_BLOCKWISE_E4M3, formats.FLOAT8_BLOCKWISE_2D_E4M3
BLOCKWISE_CASES = (
    # As DeepSeek's models multiply.
    MatmulCase(lhs=BLOCKWISE, rhs=BLOCKWISE_2D, m=(3,), n=(130,), k=(1000,)),
    MatmulCase(lhs=BLOCKWISE, rhs=BLOCKWISE_2D, m=(150,), n=(130,), k=(500,), rhs_k_first=True),
    MatmulCase(lhs=None, rhs=BLOCKWISE_2D, dtype="bfloat16", n=(130,), k=(300,)),
    MatmulCase(lhs=formats.NVFP4, rhs=BLOCKWISE, batch=(2,), m=(2, 3), k=(300,)),
    MatmulCase(lhs=BLOCKWISE, rhs=formats.FLOAT8_ROWWISE_E4M3, k=(300,), lhs_k_first=True),
)


def default(case: MatmulCase) -> Any:
    return dataclasses.replace(case.call, precision=None)


@pytest.mark.parametrize("case", BLOCKWISE_CASES, ids=str)
def test_blocks_under_float32_scales(case: MatmulCase):
    """Rounded to bfloat16, on several devices too; not by precision="highest"."""
    reason = "rounds values to bfloat16, got precision='highest'"
    assert XLA_ROUNDED.rejects(case.call, TPU) == reason
    assert XLA_ROUNDED.rejects(default(case), dataclasses.replace(TPU, num_devices=8)) is None
    check_matmul(XLA_ROUNDED, case)
    with pytest.raises(AssertionError):  # the bound is of the rounding, and no wider
        check_matmul(dataclasses.replace(XLA_ROUNDED, value_error=2.0**-16), case)


def test_who_takes_blocks_under_float32_scales():
    """By precision="highest" the reference: in float32."""
    call = BLOCKWISE_CASES[0].call
    reason = "needs blocks' scales of few digits, not of float32, got lhs=float8_blockwise_e4m3"
    assert XLA_BFLOAT16.rejects(call, TPU) == reason
    assert select(call, TPU).backend == REFERENCE
    assert select(default(BLOCKWISE_CASES[0]), TPU).backend == XLA_ROUNDED
    assert XLA_ROUNDED.rejects(SQUARE.call, TPU) == (
        "rounds values of blocks under float32 scales, got lhs=mxfp8_e4m3, rhs=mxfp8_e4m3"
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_deepseek_v3_is_one_dot(dtype: str):
    """Also of float32 operands, since both are quantized; near the largest and smallest numbers."""
    step = training_step("deepseek_v3")
    types = dots(step, array(1024, 2048, dtype=dtype), array(512, 1024, dtype=dtype), target=TPU)
    assert len(types) == 3 and {x.rsplit("x", 1)[1] for x in types[0][:2]} == {"bf16"}
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((4, 256), (256, 8)))
    for scale in (3e38 / 4, 1.0, 2.0**-110):
        with mx_jax.testing.target("tpu"):
            near = jax.jit(functools.partial(mx_jax.matmul, recipe="deepseek_v3"))(
                x * scale, w / 64
            )
        exact = mx_jax.matmul(x * scale, w / 64, recipe="deepseek_v3")
        np.testing.assert_allclose(near, exact, atol=2**-7 * scale / 4, rtol=2**-6)


def test_tensor_scales_along_the_contracted_axis():
    call = dataclasses.replace(SQUARE, lhs=formats.NVFP4, k=(32,)).call
    along_k = dataclasses.replace(call, lhs=dataclasses.replace(call.lhs, scale_axes=(1,)))
    along_m = dataclasses.replace(call, lhs=dataclasses.replace(call.lhs, scale_axes=(0,)))
    assert XLA_BFLOAT16.rejects(along_m, TPU) is None
    reason = "needs one tensor scale along the contracted axes, got lhs with one for each position"
    assert str(XLA_BFLOAT16.rejects(along_k, TPU)).startswith(reason)


DOT = re.compile(r"stablehlo\.dot_general .* : \(tensor<(\S+)>, tensor<(\S+)>\) -> tensor<(\S+)>")


def dots(
    function: Any, *shapes: Any, target: Target, has_kernels: bool = False
) -> list[tuple[str, ...]]:
    """Types of operands and results of what a function multiplies, lowered for a machine."""
    kind = target.device_kind
    with mx_jax.testing.target(target.platform, target.compute_capability, device_kind=kind):
        text = lowered(function, *shapes, platform=target.platform)
    assert ("custom_call" in text) == has_kernels
    products = DOT.findall(text)
    assert len(products) == text.count("stablehlo.dot")
    # By `[blocks, 32 blocks]` zeros and ones TPUs spread scales.
    spread = re.compile(r"(\d+)x(\d+)xbf16")
    sizes = [
        match.groups() if (match := spread.fullmatch(rhs)) else (1, 1) for _, rhs, _ in products
    ]
    return [types for types, (b, n) in zip(products, sizes, strict=True) if int(n) != 32 * int(b)]


def array(*shape: int, dtype: str = "bfloat16") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


# By device kind, as docs/gpu.md and docs/tpu.md say.
KINDS = [("tpu", kind) for kind in ("TPU v4", "TPU v5", "TPU v6 lite", "TPU7x")]
KINDS += [("rocm", "gfx942"), ("rocm", "gfx950")]
FLOAT8 = {"TPU7x": "f8E4M3FN", "gfx942": "f8E4M3FNUZ", "gfx950": "f8E4M3FN"}


@pytest.mark.parametrize(("platform", "kind"), KINDS, ids=str)
def test_accelerators_that_are_no_nvidia_gpu(platform: str, kind: str):
    """Block-scaled products are bfloat16's; whole-axis float8 is what an AMD GPU has."""
    target = Target(platform=platform, device_kind=kind)
    for recipe, dtype in (("mxfp8", "bf16"), ("float8_rowwise", FLOAT8.get(kind, "bf16"))):
        product = functools.partial(mx_jax.matmul, recipe=recipe)
        products = dots(product, array(8, 64), array(64, 32), target=target)
        assert [[x.rsplit("x", 1)[1] for x in types] for types in products] == [
            [dtype, dtype, "f32"]
        ]


def test_the_pages_have_every_kind():
    docs = Path(__file__).parents[2] / "docs"
    pages = "".join((docs / name).read_text().lower() for name in ("gpu.md", "tpu.md"))
    for _, kind in KINDS:
        assert kind.lower().removeprefix("tpu ").removesuffix(" lite") in pages


def training_step(recipe: Any) -> Any:
    """A product and both of its gradients."""

    def loss(w: jax.Array, x: jax.Array, key: Any = None) -> jax.Array:
        return mx_jax.matmul(x, w, recipe=recipe, key=key).astype(jnp.float32).sum()

    return jax.value_and_grad(loss, (0, 1))


@pytest.mark.parametrize(
    ("name", "target"),
    [
        *(("mxfp8", target) for target in ACCELERATORS),
        ("mxfp4", TURING),
        *((name, TPU) for name in ("nvfp4", "float8_rowwise", "deepseek_v3")),
    ],
    ids=str,
)
def test_a_training_step_multiplies_bfloat16(name: str, target: Target):
    """Three products, as a bfloat16 model has them; on TPUs kernels make MX formats' values."""
    shapes, step = (array(2048, 4096), array(2048, 2048)), training_step(name)
    products = dots(step, *shapes, target=target, has_kernels=(name, target) == ("mxfp8", TPU))
    # NVFP4's scales of saved operands are spread over their blocks by a product.
    spreads = [product for product in products if product[1].startswith(("128x", "256x"))]
    assert len(spreads) == 2 * (name == "nvfp4")
    assert sorted(product for product in products if product not in spreads) == [
        ("2048x2048xbf16", "2048x4096xbf16", "2048x4096xf32"),
        ("2048x2048xbf16", "2048x4096xbf16", "2048x4096xf32"),
        ("2048x4096xbf16", "2048x4096xbf16", "2048x2048xf32"),
    ]


@pytest.mark.parametrize("target", ACCELERATORS, ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_few_bit_weights_multiply_activations(dtype: str, target: Target):
    """Those of a bfloat16 model in bfloat16; those of a float32 model as they are."""
    recipe, w = recipes.weight_only("mxfp4"), array(512, 256)
    w = jax.eval_shape(lambda w: mx_jax.quantize(w, "mxfp4", axis=0), w)
    for precision, shown in ((None, ""), ("highest", "precision = [HIGHEST, HIGHEST]")):

        def product(x: jax.Array, w: Any, precision: Any = precision) -> jax.Array:
            return mx_jax.matmul(x, w, recipe=recipe, precision=precision)

        (types,) = dots(product, array(16, 512, dtype=dtype), w, target=target)
        kind = "bf16" if dtype == "bfloat16" else "f32"
        assert types == (f"16x512x{kind}", f"512x256x{kind}", "16x256xf32")
        with mx_jax.testing.target(target.platform, target.compute_capability):
            text = lowered(product, array(16, 512, dtype=dtype), w, platform=target.platform)
        assert dtype == "bfloat16" or shown in text


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_transform_of_bfloat16_is_a_bfloat16_dot(dtype: str):
    """Of NVFP4's pre-training recipe, whose operands are turned before the last product."""
    step = training_step(recipes.nvfp4_pretraining())
    key = jax.eval_shape(lambda: jax.random.key(0))
    shapes = (array(128, 64, dtype=dtype), array(32, 128, dtype=dtype), key)
    products = dots(step, *shapes, target=TPU)
    shown = {"bf16"} if dtype == "bfloat16" else {"bf16", "f32"}
    assert {side.rsplit("x", 1)[1] for types in products for side in types[:2]} == shown
    with mx_jax.testing.target("tpu"):
        lines = str(mx_jax.inspect.explain(step, *shapes)).splitlines()
    (line,) = {line for line in lines if "Hadamard" in line and "[32, 128]" in line}
    assert f"Hadamard transform of {dtype} [32, 128]" in line
    assert line.endswith("-> reference")


@pytest.mark.parametrize("recipe", ["mxfp8", "float8_rowwise", "float8_tensorwise"])
def test_experts_multiply_bfloat16(recipe: str):
    """Every product of `ragged_dot` and its gradients."""

    def loss(w: jax.Array, x: jax.Array, sizes: jax.Array) -> jax.Array:
        return mx_jax.ragged_dot(x, w, sizes, recipe=recipe).astype(jnp.float32).sum()

    step = jax.value_and_grad(loss, (0, 1))
    shapes = array(2, 64, 32), array(16, 64), array(2, dtype="int32")
    with mx_jax.testing.target("tpu"):
        text = lowered(step, *shapes, platform="tpu")
        lines = str(mx_jax.inspect.explain(step, *shapes)).splitlines()
    of = r"tensor<[\dx]*x(\w+)>"
    products = re.findall(rf'"chlo.ragged_dot".*: \({of}, {of}, {of}\) -> {of}', text)
    assert products == [("bf16", "bf16", "i32", "f32")] * 3
    labels = [line for line in lines if line.startswith("1 x ragged product")]
    assert len(labels) == 3 and all(
        line.endswith("(XLA bfloat16 dot, float32 sums)") for line in labels
    )


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4", "float8_rowwise", "float8_tensorwise"])
def test_products_of_experts(recipe: str):
    """As in float32, which a CPU takes, to the order of the sums; a row of no group is NaN."""
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.normal(size=s).astype(jnp.bfloat16)) for s in ((9, 64), (3, 64, 8)))
    x, sizes = x.at[8].set(jnp.nan), jnp.array([2, 0, 5])

    def step(w: jax.Array, x: jax.Array) -> Any:
        y, pullback = jax.vjp(
            lambda w, x: mx_jax.ragged_dot(
                x, w, sizes, recipe=recipe, preferred_element_type=jnp.float32
            ),
            w,
            x,
        )
        return y, *pullback(y)

    expected = jax.jit(step)(w, x)
    with mx_jax.testing.target("tpu"):
        results = jax.jit(step)(w, x)
    for got, want in zip(results, expected, strict=True):
        largest = np.abs(np.asarray(want, np.float64)).max()
        difference = np.abs(np.asarray(got, np.float64) - np.asarray(want, np.float64))
        # The cotangents are bfloat16, of sums that differ in their last bits.
        assert difference.max() <= largest * (2.0**-8 if want.dtype == jnp.bfloat16 else 2.0**-20)
