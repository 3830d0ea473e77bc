"""Numbers of products by GPU kernels, in Mosaic's interpreter on the CPU, its race detector on."""

import dataclasses
import functools
import importlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mx_jax
from mx_jax import formats
from mx_jax.backends.calls import MatmulCall, PackCall
from mx_jax.backends.pallas_gpu import backend_for, products
from mx_jax.backends.pallas_gpu.architecture import SM80, SM90, SM100, Architecture, Kernel, Tiles
from mx_jax.backends.pallas_gpu.layouts import PackedWeights, ScaledOperand, slots_of, words_of
from mx_jax.backends.select import with_backends
from mx_jax.formats import MXFP4, MXFP8_E4M3, MXFP8_E5M2, MXINT8, NVFP4, BlockFormat
from mx_jax.reference.matmul import scaled_matmul
from mx_jax.testing.backend_suite import check_matmul
from mx_jax.testing.cases import MatmulCase
from mx_jax.testing.compare import assert_bitwise_equal
from tests.backends.altered import altered
from tests.backends.mosaic import (
    for_gpu,
    has_race,
    interpreter,
    mostly_slow,
    needs_mosaic,
    whole_numbers,
)
from tests.quick import with_gradients

WEIGHTS = (*formats.MX_FORMATS, NVFP4)

pytestmark = needs_mosaic


def how(architecture: Architecture = SM90, **more: Any) -> dict[str, Any]:
    return {"architecture": architecture, "interpret": interpreter(), **more}


def case_of(rhs: BlockFormat, dtype: str = "bfloat16", **facts: Any) -> MatmulCase:
    return MatmulCase(lhs=None, rhs=rhs, dtype=dtype, **facts)


def two(lhs: BlockFormat, rhs: BlockFormat, **facts: Any) -> MatmulCase:
    return MatmulCase(lhs=lhs, rhs=rhs, **facts)


# Edges: one row, a partial block, several tiles, batches, several axes, a k that the table splits,
# each order, each dtype; weights as they come, or packed: those of many rows are laid out
# anew where tensor cores take both operands as they are.
PRODUCTS = [
    (SM90, case_of(MXFP4, m=(1,), n=(1,), k=(33,)), False),
    (SM90, case_of(MXFP4, m=(9,), n=(130,), k=(160,), out_dtype="bfloat16"), False),
    (
        SM90,
        case_of(MXFP8_E4M3, batch=(2,), m=(3,), k=(64,), lhs_k_first=True, out_dtype="float16"),
        False,
    ),
    (SM90, case_of(MXFP8_E5M2, m=(2, 3), n=(4, 2), k=(2, 512), rhs_k_first=True), False),
    (SM90, case_of(MXFP4, "float16", out_dtype="float16"), False),
    (SM90, case_of(formats.MXFP6_E2M3, n=(70,), k=(150,)), False),
    (SM90, case_of(MXINT8, k=(64,)), False),
    (SM90, case_of(NVFP4, n=(130,), k=(40,)), False),
    (SM90, case_of(MXFP4, batch=(2,), m=(3,), n=(70,), k=(100,), rhs_k_first=True), True),
    (SM80, case_of(MXFP4, batch=(2,), m=(9,), n=(70,), k=(1100,), out_dtype="bfloat16"), False),
    (SM100, two(MXFP8_E4M3, MXFP8_E5M2, m=(1,), n=(130,), k=(300,)), False),
    (SM100, two(MXFP4, MXFP4, batch=(2,), m=(3,), k=(2, 256), out_dtype="bfloat16"), False),
    (SM100, two(NVFP4, NVFP4, m=(130,), k=(40,), rhs_k_first=True, out_dtype="float16"), False),
]
SLOW_PRODUCTS = [
    (SM90, case_of(MXFP4.with_block(64), k=(200,)), False),
    (SM80, case_of(MXFP8_E4M3, "float16", m=(1,), n=(130,), k=(70,)), False),
    (SM80, case_of(NVFP4, m=(20,), k=(200,)), False),
    (SM100, two(MXFP4.with_block(16), MXFP4.with_block(16), k=(2048,)), False),
    (SM100, two(MXFP4, MXFP4, m=(257,), n=(70,), k=(100,), rhs_k_first=True), True),
    # A tensor scale for each matrix of the batch.
    (SM90, case_of(NVFP4, batch=(2,), m=(3,), n=(70,), k=(96,)), True),
    (SM100, two(NVFP4, NVFP4, batch=(2,), m=(3,), n=(70,), k=(96,)), True),
]


@pytest.mark.parametrize("what", mostly_slow([*PRODUCTS, *SLOW_PRODUCTS], *PRODUCTS), ids=str)
def test_is_the_reference_after_rounding(
    what: tuple[Architecture, MatmulCase, bool], rng: np.random.Generator
):
    architecture, case, packed = what
    lhs, rhs = whole_numbers(rng, case)

    def run(lhs: Any, rhs: Any) -> jax.Array:
        if packed:
            packing = PackCall(weights=case.call.rhs, blocks=rhs.blocks, lhs_format=case.lhs)
            rhs = products.pack_weights(rhs, packing)
        return products.scaled_matmul(lhs, rhs, case.call, **how(architecture))

    expected = scaled_matmul(lhs, rhs, case.call.dimension_numbers, case.call.out_dtype)
    assert_bitwise_equal(jax.jit(run)(lhs, rhs), expected, what="product")


@pytest.mark.parametrize(
    "what",
    mostly_slow(
        NEAR := [
            (SM90, two(MXFP8_E5M2, MXINT8, k=(40,), out_dtype="bfloat16")),
            (SM100, two(NVFP4, NVFP4, k=(90,))),
            # Blackwell decodes what it cannot take as it is.
            (SM100, MatmulCase(lhs=MXFP4, rhs=None, dtype="float16", m=(70,), n=(3,), k=(200,))),
        ],
        NEAR[0],
    ),
    ids=str,
)
def test_is_near_float64(what: tuple[Architecture, MatmulCase]):
    check_matmul(backend_for(what[0], interpreter()), what[1])


def test_packed_weights_of_many_rows_are_unpacked_and_dequantized_apart():
    """XLA would fuse both into its product, and copy out of the layout again in each tile."""
    weights = jax.eval_shape(PackedWeights.of, mx_jax.quantize(jnp.ones((1, 128, 128)), "mxfp4"))
    x = jax.ShapeDtypeStruct((1, 1024, 128), jnp.bfloat16)
    out = jnp.dtype(jnp.bfloat16)
    made = jax.make_jaxpr(lambda x, w: products.by_weights(x, w, out, SM90))(x, weights)
    names = [eqn.primitive.name for eqn in made.eqns]
    assert names.count("optimization_barrier") == 2


@pytest.mark.parametrize(
    ("dtype", "format", "out_dtype"),
    [
        ("bfloat16", NVFP4, "bfloat16"),
        pytest.param("float16", MXFP4, "float32", marks=pytest.mark.slow),
    ],
)
def test_many_rows_are_left_to_xla(
    dtype: str,
    format: BlockFormat,
    out_dtype: str,
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
):
    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("asked for a kernel")

    monkeypatch.setattr(Kernel, "load", refuse)
    case = case_of(format, dtype, m=(1024,), n=(5,), k=(64,), out_dtype=out_dtype)
    x, w = whole_numbers(rng, case)
    expected = scaled_matmul(x, w, case.call.dimension_numbers, out_dtype)

    def product(x: jax.Array, w: Any, packs: bool) -> jax.Array:
        if packs:
            w = products.pack_weights(w, PackCall(weights=case.call.rhs, blocks=w.blocks))
        return products.scaled_matmul(x, w, case.call, architecture=SM90)

    for packs in (False, True):
        run = functools.partial(product, packs=packs)
        assert_bitwise_equal(jax.jit(run)(x, w), expected, what="product")
        with pytest.raises(AssertionError, match="asked for a kernel"):
            jax.eval_shape(run, x[1:], w)


def test_under_vmap(rng: np.random.Generator):
    case = case_of(MXFP4, m=(3,), n=(5,), k=(64,))
    x, w = whole_numbers(rng, case)
    xs = jnp.stack([x, 2 * x])

    def product(x):
        return products.scaled_matmul(x, w, case.call, **how())

    expected = jnp.stack([scaled_matmul(x, w, case.call.dimension_numbers, "float32") for x in xs])
    assert_bitwise_equal(jax.jit(jax.vmap(product))(xs), expected, what="product")


# The interpreter multiplies with NumPy, which warns.
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_what_is_not_finite_reaches_its_row_alone():
    case = case_of(MXFP8_E4M3, "float16", m=(2,), n=(4,), k=(64,))
    rhs: Any = case.operands(np.random.default_rng(0))[1]
    codes, scales = np.full((4, 64), 0x38, np.uint8), np.full((4, 2), 127, np.uint8)
    codes[1, 5], scales[2, 1] = 0x7F, 255
    rhs = dataclasses.replace(rhs, codes=jnp.asarray(codes), scales=jnp.asarray(scales))
    lhs = jnp.ones((2, 64), jnp.float16).at[1, 3].set(jnp.inf)
    run = jax.jit(lambda lhs, rhs: products.scaled_matmul(lhs, rhs, case.call, **how()))
    out = run(lhs, rhs)
    nan, inf = np.nan, np.inf
    np.testing.assert_array_equal(out, [[64, nan, nan, 64], [inf, nan, nan, inf]])


# NumPy, as above.
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("architecture", [SM90, SM80], ids=str)
def test_float16_by_infinite_weights(architecture: Architecture):
    """Neither of a float16's two parts makes NaN of an infinite product, whatever it rounds to."""
    case = case_of(MXFP8_E5M2, "float16", m=(7,), n=(3,), k=(64,))
    rhs: Any = case.operands(np.random.default_rng(0))[1]
    codes = np.full((3, 64), 0x3C, np.uint8)
    codes[1, 5], codes[2, 5] = 0x7C, 0xFC
    scales = jnp.full((3, 2), 127, np.uint8)
    rhs = dataclasses.replace(rhs, codes=jnp.asarray(codes), scales=scales)
    # Of one bit, rounded up and down to bfloat16, the smallest, and what is not finite either.
    met = np.array([1, 1 + 3 * 2.0**-9, -1 - 2.0**-9, 2.0**-24, 0, np.inf, -np.inf], np.float16)
    lhs = jnp.zeros((7, 64), jnp.float16).at[:, 5].set(met)
    options = how(architecture)
    run = jax.jit(lambda lhs, rhs: products.scaled_matmul(lhs, rhs, case.call, **options))
    weights = np.array([1, np.inf, -np.inf])
    with np.errstate(invalid="ignore"):
        expected = np.outer(met, weights).astype(np.float32)
    np.testing.assert_array_equal(run(lhs, rhs), expected)


@pytest.mark.parametrize(
    ("m", "n", "k"), [((0,), (3,), (32,)), ((2,), (0,), (32,)), ((2,), (3,), (0,))]
)
def test_empty(m: tuple[int], n: tuple[int], k: tuple[int]):
    case = case_of(MXFP4, m=m, n=n, k=k)
    lhs, rhs = case.operands(np.random.default_rng(0))
    out = products.scaled_matmul(lhs, rhs, case.call)
    np.testing.assert_array_equal(out, np.zeros((*m, *n), np.float32))


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
    packed = jax.jit(PackedWeights.of)(jax.tree.map(lambda a: a[None], w))
    expected = scaled_matmul(x, w, case.call.dimension_numbers, out_dtype)
    return lambda: products.multiply(x[None], packed, out_dtype, **how(tiles=tiles))[0], expected


@pytest.mark.parametrize(
    "what",
    mostly_slow(
        [
            FOUR,
            SHARED,
            (MXFP8_E4M3, Tiles(m=16, n=128, k=256, stages=2, splits=3), "float32"),
            (NVFP4, Tiles(m=8, n=192, k=256, stages=3, splits=2), "float16"),
        ],
        FOUR,
        SHARED,
    ),
    ids=str,
)
def test_hopper_is_the_reference_with_any_tiles(what: tuple[BlockFormat, Tiles, str]):
    run, expected = hopper_product(*what)
    assert_bitwise_equal(run(), expected, what="product")


@pytest.mark.parametrize("module", ["wgmma", "device"])
def test_each_missing_wait_is_a_race(module: str, monkeypatch: pytest.MonkeyPatch):
    """For a stage's copies, and for its readers."""
    kernel = importlib.import_module(f"mx_jax.backends.pallas_gpu.{module}")

    class Waitless:
        """Mosaic GPU, with waits left out."""

        barrier_wait = staticmethod(lambda barrier: None)
        __getattr__ = kernel.plgpu.__getattribute__

    monkeypatch.setattr(kernel, "plgpu", Waitless())
    run, _ = hopper_product(*SHARED)
    assert has_race(run)


def test_blackwells_missing_wait_is_a_race(
    monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
):
    from jax.experimental.pallas import mosaic_gpu

    case = MatmulCase(lhs=MXFP4, rhs=MXFP4, batch=(1,), k=(1024,))
    lhs, rhs = whole_numbers(rng, case)
    tiles = Tiles(m=128, k=256, stages=2, splits=1)
    # In the order in which they are traced.
    waits, wait = iter(("free stages", "copied tiles", "the sums")), mosaic_gpu.barrier_wait
    traced: list[str] = []

    def some(*args: Any, **kwargs: Any) -> None:
        traced.append(next(waits))
        if traced[-1] != "copied tiles":
            wait(*args, **kwargs)

    monkeypatch.setattr(mosaic_gpu, "barrier_wait", some)
    left, right = ScaledOperand.of(lhs), ScaledOperand.of(rhs)
    options = how(SM100, tiles=tiles)
    assert has_race(lambda: products.multiply_scaled(left, right, "float32", **options))
    assert len(traced) == 3


# Training ---------------------------------------------------------------------------------------


def test_gradients_are_the_references():
    """Powers of two and small integers: their sums are exact in any order."""
    rng = np.random.default_rng(0)
    x, w, g = (rng.integers(-2, 3, s).astype(jnp.bfloat16) for s in ((3, 64), (64, 40), (3, 40)))
    step = with_gradients(functools.partial(mx_jax.matmul, recipe="mxfp8"))
    with mx_jax.only_backend("reference"):
        expected = jax.jit(step)(x, w / 4, g)
    kernels = dataclasses.replace(backend_for(interpret=interpreter()), name="interpreted")
    products = set()

    def run(lhs: Any, rhs: Any, call: MatmulCall) -> jax.Array:
        products.add(call)
        return kernels.run(call, lhs, rhs)

    watched = altered(kernels, MatmulCall, run)
    with mx_jax.testing.target("cuda", (9, 0)), with_backends(watched):
        actual = jax.jit(step)(x, w / 4, g)
    assert len(products) == 3
    jax.tree.map(assert_bitwise_equal, actual, expected)


WEIGHT_ONLY = mx_jax.recipes.weight_only("mxfp4")


@pytest.mark.parametrize(
    ("capability", "recipe", "kernel"),
    [
        ((8, 0), WEIGHT_ONLY, "mx_jax_mma_mxfp4"),
        ((9, 0), WEIGHT_ONLY, "mx_jax_wgmma_mxfp4"),
        ((10, 0), WEIGHT_ONLY, "mx_jax_mma_mxfp4"),
        ((10, 0), mx_jax.recipes.mxfp8(), "mx_jax_tcgen05_float8_e4m3fn"),
    ],
)
def test_lowers_where_integers_have_64_bits(
    capability: tuple[int, int], recipe: mx_jax.recipes.Recipe, kernel: str
):
    """Several tiles along every axis, and several steps."""
    x, w = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((200, 1024), (1024, 260)))

    def run(x: jax.Array, w: jax.Array) -> Any:
        return mx_jax.matmul(x, w, recipe=recipe)

    with jax.enable_x64(True):
        text = for_gpu(run, x, w, capability=capability)
    assert kernel in text
