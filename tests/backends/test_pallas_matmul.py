"""Numbers of products by GPU kernels, in Mosaic's interpreter on the CPU, its race detector on."""

import dataclasses
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mx_jax
from mx_jax import formats
from mx_jax.backends.pallas_gpu import products
from mx_jax.backends.pallas_gpu.layouts import PackedWeights, slots_of, words_of
from mx_jax.backends.pallas_gpu.tiles import Tiles
from mx_jax.formats import MXFP4, MXFP8_E4M3, MXFP8_E5M2, MXINT8, NVFP4, BlockFormat
from mx_jax.mxarray import MXArray
from mx_jax.reference.matmul import scaled_matmul
from mx_jax.testing.backend_suite import check_matmul
from mx_jax.testing.cases import MatmulCase
from mx_jax.testing.compare import assert_bitwise_equal
from tests.backends.mosaic import (
    has_race,
    interpreter,
    needs_mosaic,
    packed,
    packing_backend,
    whole_numbers,
)
from tests.needs import slow

WEIGHTS = (*formats.MX_FORMATS, NVFP4)

pytestmark = needs_mosaic


def case_of(rhs: BlockFormat, dtype: str = "bfloat16", **facts: Any) -> MatmulCase:
    return MatmulCase(lhs=None, rhs=rhs, dtype=dtype, **facts)


def two(lhs: BlockFormat, rhs: BlockFormat, **facts: Any) -> MatmulCase:
    return MatmulCase(lhs=lhs, rhs=rhs, **facts)


# Edges: one row, a partial block, several tiles, batches, several axes, a k that the table splits,
# each order, each dtype.
PRODUCTS = [
    case_of(MXFP4, m=(1,), n=(1,), k=(33,)),
    case_of(MXFP4, m=(9,), n=(130,), k=(160,), out_dtype="bfloat16"),
    case_of(MXFP8_E4M3, batch=(2,), m=(3,), k=(64,), lhs_k_first=True, out_dtype="float16"),
    case_of(MXFP8_E5M2, m=(2, 3), n=(4, 2), k=(2, 512), rhs_k_first=True),
    case_of(formats.MXFP6_E2M3, n=(70,), k=(150,)),
    case_of(MXINT8, k=(64,)),
    case_of(NVFP4, n=(130,), k=(40,)),
    two(MXFP4, MXFP8_E4M3, batch=(2,), m=(3,), n=(70,), k=(100,), rhs_k_first=True),
    slow(case_of(MXFP4.with_block(64), k=(200,))),
    # A tensor scale for each matrix of the batch.
    slow(case_of(NVFP4, batch=(2,), m=(3,), n=(70,), k=(96,))),
]


@pytest.mark.parametrize("case", PRODUCTS, ids=str)
def test_is_the_reference_after_rounding(case: MatmulCase, rng: np.random.Generator):
    lhs, rhs = whole_numbers(rng, case)
    interpret = interpreter()

    def run(lhs: Any, rhs: Any) -> jax.Array:
        return products.scaled_matmul(lhs, packed(case.call, rhs), case.call, interpret)

    expected = scaled_matmul(lhs, rhs, case.call.dimension_numbers, case.call.out_dtype)
    assert_bitwise_equal(jax.jit(run)(lhs, rhs), expected, what="product")


def test_is_near_float64():
    check_matmul(packing_backend(), two(MXFP8_E5M2, MXINT8, k=(40,), out_dtype="bfloat16"))


def test_packed_weights_of_many_rows_are_unpacked_and_dequantized_apart():
    """XLA would fuse both into its product, and copy out of the layout again in each tile."""
    weights = jax.eval_shape(PackedWeights.of, mx_jax.quantize(jnp.ones((1, 128, 128)), "mxfp4"))
    x = jax.ShapeDtypeStruct((1, 1024, 128), jnp.bfloat16)
    out = jnp.dtype(jnp.bfloat16)
    made = jax.make_jaxpr(lambda x, w: products.by_weights(x, w, out))(x, weights)
    names = [eqn.primitive.name for eqn in made.eqns]
    assert names.count("optimization_barrier") == 2


def test_many_rows_are_left_to_xla(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch):
    class Kernel:
        def multiply(self, *_: Any) -> Any:
            raise AssertionError("asked for a kernel")

    monkeypatch.setattr(products, "_wgmma", Kernel())
    case = case_of(NVFP4, m=(1024,), n=(5,), k=(64,), out_dtype="bfloat16")
    x, w = whole_numbers(rng, case)
    expected = scaled_matmul(x, w, case.call.dimension_numbers, "bfloat16")

    def product(x: jax.Array, w: MXArray) -> jax.Array:
        return products.scaled_matmul(x, packed(case.call, w), case.call)

    assert_bitwise_equal(jax.jit(product)(x, w), expected, what="product")
    with pytest.raises(AssertionError, match="asked for a kernel"):
        jax.eval_shape(product, x[1:], w)


def test_under_vmap(rng: np.random.Generator):
    case = case_of(MXFP4, m=(3,), n=(5,), k=(64,))
    x, w = whole_numbers(rng, case)
    xs, interpret = jnp.stack([x, 2 * x]), interpreter()

    def product(x: jax.Array) -> jax.Array:
        return products.scaled_matmul(x, packed(case.call, w), case.call, interpret)

    expected = jnp.stack([scaled_matmul(x, w, case.call.dimension_numbers, "float32") for x in xs])
    assert_bitwise_equal(jax.jit(jax.vmap(product))(xs), expected, what="product")


# The interpreter multiplies with NumPy, which warns.
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_what_is_not_finite_reaches_its_row_alone():
    case = case_of(MXFP8_E5M2, m=(2,), n=(5,), k=(64,))
    rhs: Any = case.operands(np.random.default_rng(0))[1]
    codes, scales = np.full((5, 64), 0x3C, np.uint8), np.full((5, 2), 127, np.uint8)
    codes[1, 5], scales[2, 1], codes[4, 5] = 0x7F, 255, 0x7C
    rhs = dataclasses.replace(rhs, codes=jnp.asarray(codes), scales=jnp.asarray(scales))
    lhs, interpret = jnp.ones((2, 64), jnp.bfloat16).at[1, 3].set(jnp.inf), interpreter()
    run = jax.jit(
        lambda x, w: products.scaled_matmul(x, packed(case.call, w), case.call, interpret)
    )
    nan, inf = np.nan, np.inf
    np.testing.assert_array_equal(
        run(lhs, rhs), [[64, nan, nan, 64, inf], [inf, nan, nan, inf, inf]]
    )


def test_no_rows():
    case = case_of(MXFP4, m=(0,), n=(3,), k=(32,))
    lhs, rhs = case.operands(np.random.default_rng(0))
    out = products.scaled_matmul(lhs, packed(case.call, rhs), case.call)
    assert out.shape == (0, 3) and out.dtype == np.float32


@pytest.mark.parametrize("format", WEIGHTS, ids=lambda format: format.name)
def test_every_code_under_every_scale(format: BlockFormat):
    """In NumPy, whose bfloat16 keeps subnormals as a GPU's does: exact, bit for bit."""
    from mx_jax.backends.pallas_gpu.decode import Decoder, place

    element, decoder = format.element, Decoder(format=format)
    codes = np.arange(1 << element.bits).astype(np.uint16)
    exact = np.array([element.value(code) for code in range(1 << element.bits)])
    scales = np.array([format.scale.value(byte) for byte in range(256)])
    sides = np.stack([codes, np.roll(codes, 1)], axis=-1)
    slots = slots_of(element)
    # All slots of a word at once, each with codes of its own, so that none disturbs another.
    rolled = [np.roll(sides, 5 * i, axis=0) for i in range(len(slots))]
    words = words_of([jnp.asarray(of_slot) for of_slot in rolled], element)
    for i, slot in enumerate(slots):
        bits, head = (
            None if x is None else np.roll(np.asarray(x), -5 * i).view(jnp.bfloat16)
            for x in place(words, slot, element)
        )
        with np.errstate(over="ignore", invalid="ignore"):
            values = decoder.lift(bits) if head is None else bits - head
            values = np.asarray(values)[0::2]
            decoded = values * scales[:, None].astype(jnp.bfloat16)
            expected = np.outer(scales, exact).astype(jnp.bfloat16)
        finite = ~np.isnan(exact)
        assert decoded.dtype == jnp.bfloat16
        decoded, expected = (x.astype(np.float32)[:, finite] for x in (decoded, expected))
        np.testing.assert_array_equal(decoded, expected)


FOUR = MXFP4, Tiles(m=8, n=256, k=128, stages=3), "bfloat16"
# Shares that differ by a step, one of them beyond k; more steps than stages.
SHARED = MXFP4, Tiles(m=8, n=128, k=128, stages=2, splits=3), "bfloat16"


def hopper_product(format: BlockFormat, tiles: Tiles, out_dtype: str) -> tuple[Any, Any]:
    """The kernel's, as a function to be called, and the reference's."""
    case = case_of(format, m=(3,), n=(200,), k=(1000,), out_dtype=out_dtype)
    x, w = whole_numbers(np.random.default_rng(0), case)
    weights = jax.jit(PackedWeights.of)(jax.tree.map(lambda a: a[None], w))
    expected = scaled_matmul(x, w, case.call.dimension_numbers, out_dtype)
    return lambda: products.multiply(x[None], weights, out_dtype, interpreter(), tiles)[0], expected


@pytest.mark.parametrize(
    "what",
    [
        FOUR,
        SHARED,
        slow((MXFP8_E4M3, Tiles(m=16, n=128, k=256, stages=2, splits=3), "float32")),
        slow((NVFP4, Tiles(m=8, n=192, k=256, stages=3, splits=2), "float16")),
    ],
    ids=str,
)
def test_hopper_is_the_reference_with_any_tiles(what: tuple[BlockFormat, Tiles, str]):
    run, expected = hopper_product(*what)
    assert_bitwise_equal(run(), expected, what="product")


@pytest.mark.parametrize("caller", ["<lambda>", "step"])
def test_each_missing_wait_is_a_race(caller: str, monkeypatch: pytest.MonkeyPatch):
    """Of copies for a stage's readers, and of these for its copies."""
    from mx_jax.backends.pallas_gpu import wgmma

    real, missing = wgmma.plgpu, []

    def wait(barrier: Any) -> None:
        if sys._getframe(1).f_code.co_name == caller:
            missing.append(barrier)
        else:
            real.barrier_wait(barrier)

    class Waitless:
        """Mosaic GPU, with one kind of wait left out."""

        barrier_wait = staticmethod(wait)
        __getattr__ = real.__getattribute__

    monkeypatch.setattr(wgmma, "plgpu", Waitless())
    run, _ = hopper_product(*SHARED)
    assert has_race(run) and missing
