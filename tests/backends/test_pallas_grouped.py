"""GPU kernels for rows in groups, and sums over them: numbers and races in the interpreter, what
they take, what is lowered."""

import dataclasses
import functools
import re
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mx_jax
from mx_jax import formats, recipes
from mx_jax.backends.calls import OperandType, PackCall, RaggedCall
from mx_jax.backends.pallas_gpu import PALLAS_GPU, backend_for, products
from mx_jax.backends.pallas_gpu.architecture import SM90, SM100
from mx_jax.backends.pallas_gpu.layouts import PackedWeights, factors_of
from mx_jax.backends.pallas_gpu.products import pack_weights
from mx_jax.backends.pallas_gpu.rejections import rejects_groups
from mx_jax.backends.pallas_gpu.tiles import FIELDS, Tiles, num_visits, visits
from mx_jax.backends.reference import REFERENCE
from mx_jax.backends.select import Choice
from mx_jax.backends.target import Target
from mx_jax.formats import MXFP4, MXFP8_E4M3, MXFP8_E5M2, NVFP4, WHOLE
from mx_jax.mxarray import MXArray
from mx_jax.ops import ragged_product as ops
from mx_jax.reference.ragged import scaled_ragged_dot
from mx_jax.testing.backend_suite import check_ragged
from mx_jax.testing.cases import RAGGED_CASES, RaggedCase
from mx_jax.testing.compare import assert_bitwise_equal
from tests.backends.mosaic import (
    few_octaves,
    interpreter,
    needs_newer_mosaic,
)
from tests.quick import quick

H200, B200 = (Target(platform="cuda", compute_capability=own) for own in ((9, 0), (10, 0)))
NEW = (0, 12, 0)
SMALL = Tiles(m=16, n=64, k=128, stages=2)


def case_of(rhs: formats.BlockFormat | None = MXFP4, **facts: Any) -> RaggedCase:
    given: dict[str, Any] = {"lhs": None, "sizes": (0, 1, 7, 0, 13), "rows": 24, "n": 64}
    return RaggedCase(rhs=rhs, **given | facts)


def whole_numbers(case: RaggedCase) -> tuple[jax.Array, MXArray, jax.Array]:
    """Operands of sums that are exact in float32 in any order."""
    rng = np.random.default_rng(0)
    lhs, rhs, sizes = case.operands(rng)
    assert isinstance(rhs, MXArray)
    rhs = few_octaves(rng, dataclasses.replace(rhs, scales=rhs.scales * 0 + 127))
    return jnp.asarray(rng.integers(-8, 9, lhs.shape), jnp.bfloat16), rhs, sizes


def product(case: RaggedCase, tiles: Tiles) -> tuple[Any, Any]:
    """The kernel's, as a function to be called, and the reference's."""
    x, w, sizes = whole_numbers(case)
    expected = scaled_ragged_dot(x, w, sizes, case.call.contracting, case.out_dtype)
    bare = dataclasses.replace(w, tensor_scale=None)
    matrices = bare if not case.rhs_k_first else _transposed(bare)
    scale = None if w.tensor_scale is None else w.tensor_scale.reshape(())
    factors = factors_of((scale, None), len(case.sizes))

    def run() -> jax.Array:
        packed = jax.jit(PackedWeights.of)(matrices)
        how = {"architecture": SM90, "tiles": tiles, "interpret": interpreter()}
        how["factors"] = factors
        return products.multiply(x[None], packed, case.out_dtype, group_sizes=sizes, **how)[0]

    return run, expected


def _transposed(w: MXArray) -> MXArray:
    return w.transpose(0, 2, 1)


# Which rows of which group --------------------------------------------------------------------


@pytest.mark.parametrize("tile_rows", [8, 16, 64])
def test_every_row_is_one_visits_own(tile_rows: int, rng: np.random.Generator):
    m, g = 100, 5
    find = jax.jit(lambda sizes: visits(sizes, m, tile_rows))
    for _ in range(30):
        total = rng.integers(0, m + 1)
        sizes = rng.multinomial(total, rng.dirichlet([0.4] * g)).astype(np.int32)
        found = np.asarray(find(sizes)).reshape(-1, FIELDS)
        assert len(found) == num_visits(m, g, tile_rows) <= -(-m // tile_rows) + g
        group_of = np.append(np.repeat(np.arange(g), sizes), [g] * (m - total))
        owners = np.zeros(m, int)
        for group, first, begin, end in found:
            assert first % 8 == 0 and (begin >= end or first <= begin < end <= first + tile_rows)
            assert (group_of[begin:end] == group).all()
            owners[begin:end] += 1
        assert (owners == 1).all()


def test_a_small_groups_weights_are_read_once():
    of_sizes = quick(visits, static_argnums=(1, 2))
    found = np.asarray(of_sizes(np.array([5, 9, 9, 9], np.int32), 32, 16)).reshape(-1, FIELDS)
    assert sorted(found[found[:, 2] < found[:, 3]][:, 0]) == [0, 1, 2, 3]


# Numbers --------------------------------------------------------------------------------------


@needs_newer_mosaic
@pytest.mark.parametrize(
    ("case", "tiles"),
    [
        (case_of(sizes=(0, 1, 7, 5), rows=16), SMALL),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (
                (case_of(MXFP8_E4M3, sizes=(40,), rows=40, out_dtype="bfloat16"), SMALL),
                (case_of(NVFP4, sizes=(3, 21), k=200, rhs_k_first=False), SMALL),
                (case_of(MXFP8_E5M2, sizes=(30, 2, 1), rows=40, n=20, out_dtype="float16"), SMALL),
                (case_of(k=512), Tiles(m=8, n=64, k=128, stages=8)),
                (case_of(k=512, n=130), Tiles(m=24, n=128, k=128, stages=3, splits=2)),
            )
        ),
    ],
    ids=str,
)
def test_is_the_reference_after_rounding(case: RaggedCase, tiles: Tiles):
    run, expected = product(case, tiles)
    assert_bitwise_equal(run(), expected, what="product")


@needs_newer_mosaic
@pytest.mark.slow
@pytest.mark.parametrize("case", RAGGED_CASES, ids=str)
def test_is_near_float64(case: RaggedCase):
    """The shared suite's cases, tiles by the table."""
    assert rejects_groups(case.call, H200, NEW) is None
    check_ragged(backend_for(architecture=SM90, interpret=interpreter()), case)


@needs_newer_mosaic
@pytest.mark.slow
def test_packed_experts_and_a_tensor_scale_of_each(rng: np.random.Generator):
    case = case_of(NVFP4, sizes=(9, 12), n=64)
    x, _, sizes = whole_numbers(case)
    w = jax.vmap(functools.partial(mx_jax.quantize, format="nvfp4", axis=0))(
        jnp.asarray(rng.integers(-6, 7, (2, 96, 64)), jnp.float32) * jnp.array([[[1.0]], [[8.0]]])
    )
    types = case.call.lhs, OperandType.of(w, case.call.rhs.axes)
    call = dataclasses.replace(case.call, lhs=types[0], rhs=types[1])
    assert call.rhs.scale_axes == (0,) and rejects_groups(call, H200, NEW) is None
    expected = scaled_ragged_dot(x, w, sizes, call.contracting, "float32")
    backend = backend_for(architecture=SM90, interpret=interpreter())
    run = jax.jit(lambda x, w, sizes: backend.run(call, x, w, sizes))
    np.testing.assert_allclose(run(x, w, sizes), expected, rtol=1e-6, atol=1e-3)
    one = mx_jax.quantize(jnp.ones((2, 96, 64)), "nvfp4", axis=1)
    whole = dataclasses.replace(call, rhs=OperandType.of(one, call.rhs.axes))
    packing = PackCall(weights=whole.rhs, blocks=one.blocks)
    pack = jax.jit(lambda w: pack_weights(w, packing))
    expected = scaled_ragged_dot(x, one, sizes, call.contracting, "float32")
    run = jax.jit(lambda x, w, sizes: backend.run(whole, x, w, sizes))
    np.testing.assert_allclose(run(x, pack(one), sizes), expected, rtol=1e-6, atol=1e-3)


@needs_newer_mosaic
@pytest.mark.slow
def test_rows_of_no_group_are_zeros_whatever_the_scales():
    x, w, sizes = whole_numbers(case_of(sizes=(4,), rows=16))
    how = {"architecture": SM90, "tiles": SMALL, "interpret": interpreter()}
    packed, factors = PackedWeights.of(_transposed(w)), jnp.full(2, jnp.nan)
    found = products.multiply(
        x[None], packed, "float32", group_sizes=sizes, factors=factors, **how
    )[0]
    assert np.isnan(found[:4]).all() and not np.asarray(found[4:]).any()


# Groups of none, of one, of several and of more than a tile, and rows of none.
LONG = (3, 140, 0, 9)


def scaled_operands(case: RaggedCase) -> tuple[MXArray, MXArray, jax.Array]:
    """Of sums that are exact in float32 in any order; other scales in every row and block."""
    rng = np.random.default_rng(0)
    lhs, rhs, sizes = case.operands(rng)

    def exact(x: Any) -> MXArray:
        assert isinstance(x, MXArray)
        scales = rng.integers(126, 129, x.scales.shape).astype(np.uint8)
        return few_octaves(rng, dataclasses.replace(x, scales=jnp.asarray(scales)))

    return exact(lhs), exact(rhs), sizes


def of(format: Any, **facts: Any) -> RaggedCase:
    return RaggedCase(
        **{"lhs": format, "rhs": format, "sizes": (0, 1, 7, 0, 13), "rows": 24, "n": 64} | facts
    )


@needs_newer_mosaic
@pytest.mark.parametrize(
    "case",
    [
        of(MXFP8_E4M3, rhs=MXFP8_E5M2, k=300),
        pytest.param(
            of(NVFP4, sizes=LONG, rows=160, n=200, k=40, out_dtype="bfloat16"),
            id="more than a tile",
        ),
        pytest.param(of(MXFP4, sizes=(24,), out_dtype="float16"), marks=pytest.mark.slow),
        pytest.param(
            of(MXFP4, sizes=LONG, rows=155, n=300, rhs_k_first=True), marks=pytest.mark.slow
        ),
        pytest.param(of(MXFP4, sizes=(0, 0), rows=5, n=3), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_blackwell_is_the_reference_after_rounding(case: RaggedCase):
    lhs, rhs, sizes = scaled_operands(case)
    how = {"architecture": SM100, "interpret": interpreter()}
    run = jax.jit(lambda lhs, rhs: products.ragged_dot(lhs, rhs, sizes, case.call, **how))
    assert "grouped_tcgen05" in str(run.trace(lhs, rhs).jaxpr)
    expected = scaled_ragged_dot(lhs, rhs, sizes, case.call.contracting, case.out_dtype)
    assert_bitwise_equal(run(lhs, rhs), expected, what="product")


@needs_newer_mosaic
@pytest.mark.slow
def test_blackwell_lays_out_what_was_packed_to_be_decoded():
    """To be decoded: they are laid out at every call."""
    case = of(NVFP4, k=64)
    lhs, rhs, sizes = scaled_operands(case)
    packed = pack_weights(rhs, PackCall(weights=case.call.rhs, blocks=rhs.blocks))
    how = {"architecture": SM100, "interpret": interpreter()}
    run = jax.jit(lambda lhs, rhs: products.ragged_dot(lhs, rhs, sizes, case.call, **how))
    expected = scaled_ragged_dot(lhs, rhs, sizes, case.call.contracting, case.out_dtype)
    assert_bitwise_equal(run(lhs, packed), expected, what="product")


def group_sums(sizes: tuple[int, ...], tiles: Tiles, out_dtype: str = "float32") -> Any:
    """The kernel's sums, as a function to be called, and exact ones."""
    from mx_jax.backends.pallas_gpu import wgmma

    rng, rows = np.random.default_rng(0), 256
    left, right = (rng.integers(-8, 9, (rows, columns)) for columns in (64, 128))
    ends = np.cumsum(sizes)
    begins = ends - np.asarray(sizes)
    expected = np.stack([left[i:j].T @ right[i:j] for i, j in zip(begins, ends, strict=True)])
    given = (
        jnp.asarray(left, jnp.bfloat16),
        jnp.asarray(right, jnp.bfloat16),
        jnp.asarray(np.concatenate([begins, sizes]), jnp.int32),
        jnp.asarray([0.25, 2.0], jnp.float32),
    )
    how = {"tiles": tiles, "out_dtype": out_dtype, "interpret": interpreter()}
    return lambda: wgmma.group_sums(*given, **how), jnp.asarray(expected / 2, out_dtype)


@needs_newer_mosaic
@pytest.mark.parametrize(
    ("sizes", "tiles", "out_dtype"),
    [
        # Whole steps and parts of one, a group of none, rows of no group.
        ((96, 0, 16), Tiles(m=64, n=128, k=64, stages=2), "float32"),
        pytest.param(
            (16, 240), Tiles(m=64, n=64, k=64, stages=4), "bfloat16", marks=pytest.mark.slow
        ),
        pytest.param(
            (0, 256), Tiles(m=64, n=64, k=64, stages=3), "float32", marks=pytest.mark.slow
        ),
    ],
)
def test_sums_are_exact(sizes: tuple[int, ...], tiles: Tiles, out_dtype: str):
    run, expected = group_sums(sizes, tiles, out_dtype)
    assert_bitwise_equal(run(), expected, what="sums")


# What is taken, and what is lowered -----------------------------------------------------------

TAKEN_CALL = case_of().call
TYPE = TAKEN_CALL.rhs


def sums_of(
    lhs: formats.BlockFormat | None, rhs: formats.BlockFormat | None, **facts: Any
) -> RaggedCall:
    return RaggedCase(lhs=lhs, rhs=rhs, sizes=(32,), rows=32, contracts_rows=True, **facts).call


FLOAT16 = dataclasses.replace(sums_of(None, MXFP4).lhs, dtype=jnp.dtype("float16"))


@pytest.mark.parametrize(
    ("call", "target", "reason"),
    [
        (TAKEN_CALL, H200, None),
        (case_of(lhs=MXFP8_E4M3, rhs_k_first=False, out_dtype="float16").call, H200, None),
        (TAKEN_CALL, Target(platform="cpu"), "runs on platform=cuda, got platform=cpu"),
        (
            TAKEN_CALL,
            B200,
            "multiplies rows in groups on CUDA compute capability 10.0 where formats meet, got "
            "lhs=None, rhs=mxfp4",
        ),
        (
            dataclasses.replace(
                TAKEN_CALL, lhs=dataclasses.replace(TAKEN_CALL.lhs, dtype=jnp.dtype("float16"))
            ),
            H200,
            "needs rows in bfloat16, got lhs in float16",
        ),
        (
            case_of(None, lhs=MXFP4).call,
            H200,
            "needs groups' matrices in a block format: rhs is in high precision",
        ),
        (
            case_of(MXFP4.with_block(8)).call,
            H200,
            "matrices in a block format: rhs has blocks (1, 8), not (1, a multiple of 16)",
        ),
        (
            case_of(lhs=formats.FLOAT8_ROWWISE_E4M3).call,
            H200,
            "needs values that bfloat16 holds on both sides, got lhs=float8_rowwise_e4m3",
        ),
        (
            dataclasses.replace(TAKEN_CALL, out_dtype=jnp.dtype("float64")),
            H200,
            "gives float32, bfloat16 or float16, got out_dtype=float64",
        ),
        (
            dataclasses.replace(TAKEN_CALL, rhs=dataclasses.replace(TYPE, scale_axes=(1,))),
            H200,
            "got one for each position of axes=() of lhs, axes=(1,) of rhs",
        ),
        (case_of(rows=2**20, k=2**11).call, H200, "2147483647 elements, got lhs_shape=(1048576,"),
        (
            case_of(sizes=(0,) * 2**11, k=2**13, n=2**11).call,
            H200,
            "at most 2147483647 words of codes, got rhs_shape=(2048, 8192, 2048)",
        ),
        (case_of(n=2**22, k=32, sizes=(1,)).call, H200, "at most 4194240 columns of a matrix"),
        (sums_of(MXFP4, MXFP8_E4M3), H200, None),
        (sums_of(None, NVFP4), H200, None),
        (sums_of(MXFP4.with_block(WHOLE), MXFP4), H200, None),
        (
            dataclasses.replace(sums_of(None, MXFP4), lhs=FLOAT16),
            H200,
            "needs rows in bfloat16, got lhs in float16",
        ),
        (
            sums_of(MXFP4, formats.FLOAT8_ROWWISE_E4M3),
            H200,
            "needs values that bfloat16 holds on both sides, got rhs=float8_rowwise_e4m3",
        ),
        (
            sums_of(MXFP4.with_block(8), MXFP4.with_block(24)),
            H200,
            "needs groups in blocks of a multiple of 16 rows, got blocks=[8, 24]",
        ),
        (
            sums_of(MXFP4.with_block(WHOLE), None),
            H200,
            "needs groups in blocks of a multiple of 16 rows",
        ),
        (sums_of(MXFP4, MXFP4, k=2**27), H200, "at most 2147483647 elements, got lhs_shape=(32,"),
        (of(MXFP8_E4M3, rhs=MXFP8_E5M2).call, B200, None),
        (of(NVFP4).call, B200, None),
        (
            of(MXFP8_E4M3, rhs=MXFP4).call,
            B200,
            "multiplies rows in groups on CUDA compute capability 10.0 where formats meet, got "
            "lhs=mxfp8_e4m3, rhs=mxfp4",
        ),
        (
            of(MXFP8_E4M3, contracts_rows=True).call,
            B200,
            "sums over rows of groups on CUDA compute capability 9.0, got 10.0",
        ),
    ],
)
def test_rejects(call: RaggedCall, target: Target, reason: str | None):
    found = rejects_groups(call, target, NEW)
    assert found is None if reason is None else found is not None and reason in found


def test_rejects_jax_that_does_not_clip_copies():
    found = rejects_groups(TAKEN_CALL, H200, (0, 11, 2))
    assert found == "multiplies rows in groups from jax==0.12.0 on, got jax==0.11.2"


@needs_newer_mosaic
@pytest.mark.parametrize("differentiated", [False, True])
def test_stored_experts_warn_of_packing(differentiated: bool):
    """Once; not of packed experts, nor of those that the product or its gradients quantize."""
    # Of other shapes, so that nothing was traced before.
    rows = 16 if differentiated else 8
    x, w = jnp.ones((rows, 64), jnp.bfloat16), jnp.ones((2, 64, 64), jnp.bfloat16)
    sizes = np.array([3, 4], np.int32)
    stored, recipe = mx_jax.quantize(w, "mxfp4", axis=1), mx_jax.recipes.mxfp4()

    def trace(w: Any) -> None:
        def run(x: jax.Array, w: Any) -> jax.Array:
            return mx_jax.ragged_dot(x, w, sizes, recipe=recipe)

        if differentiated:
            jax.jit(jax.grad(lambda x, w: jnp.sum(run(x, w)).astype(jnp.float32))).trace(x, w)
        else:
            jax.jit(run).trace(x, w)

    with mx_jax.testing.target("cuda", (9, 0)):
        trace(stored)
        with mx_jax.prefer_backends("pallas_gpu"), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trace(w)
            if not differentiated:
                trace(mx_jax.pack_weights(stored, contracting=1, num_batch=1))
            assert not caught
            trace(stored)
            messages = [str(warning.message) for warning in caught]
    assert messages == [
        "ragged_dot: weights are laid out for backend pallas_gpu at every call, which takes longer "
        "than a product of few rows: shape=(2, 64, 64), format=mxfp4; lay them out once with "
        "mx_jax.pack_weights(..., contracting=1, num_batch=1)"
    ]


@needs_newer_mosaic
def test_nothing_is_padded_gathered_or_masked_around_the_kernel():
    case = case_of(sizes=(0,) * 8, rows=64, k=512, n=256, out_dtype="bfloat16")
    x = jax.ShapeDtypeStruct((64, 512), jnp.bfloat16)
    w = jax.eval_shape(PackedWeights.of, _transposed(whole_numbers(case)[1]))
    sizes = jax.ShapeDtypeStruct((8,), jnp.int32)

    def run(x: Any, w: Any, sizes: Any) -> jax.Array:
        return products.multiply(x[None], w, "bfloat16", group_sizes=sizes, architecture=SM90)[0]

    text = jax.jit(run).trace(x, w, sizes).lower(lowering_platforms=("cuda",)).as_text()
    (call,) = (line for line in text.splitlines() if "custom_call @mosaic_gpu" in line)
    assert "(tensor<1x64x512xbf16>, tensor<32x4x64x16xi32>, tensor<32x8x64xi32>" in call
    assert "-> tensor<1x64x256xbf16>" in call
    around = [line for line in text.splitlines() if "64x512xbf16" in line or "64x256xbf16" in line]
    free = re.compile(
        r"custom_call @mosaic_gpu|func\.func|return|call @|reshape|broadcast_in_dim|"
        r"high = \[0, 0, 0\]"
    )
    assert all(free.search(line) for line in around)


@needs_newer_mosaic
@pytest.mark.parametrize("capability", [(9, 0), (10, 0)], ids=str)
@pytest.mark.parametrize("n", [40, 1000])
def test_any_number_of_columns_is_lowered(n: int, capability: tuple[int, int]):
    """Mosaic wants whole tiles of what is copied, where there are several."""
    x, w = jnp.ones((64, 512), jnp.bfloat16), jnp.ones((4, 512, n), jnp.bfloat16)
    multiply = functools.partial(mx_jax.ragged_dot, recipe="mxfp8")
    with mx_jax.testing.target("cuda", capability), mx_jax.only_backend("pallas_gpu"):
        traced = jax.jit(multiply).trace(x, w, jnp.zeros(4, jnp.int32))
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "mx_jax_grouped_" in text and traced.out_info.shape == (64, n)


@needs_newer_mosaic
@pytest.mark.parametrize("recipe", ["mxfp4", "nvfp4"])
def test_rows_are_masked_only_for_a_scale_that_counts_them(recipe: str):
    x, w = jnp.ones((64, 512), jnp.bfloat16), jnp.ones((8, 512, 256), jnp.bfloat16)

    def run(x: jax.Array, w: Any, sizes: jax.Array) -> jax.Array:
        return mx_jax.ragged_dot(x, w, sizes, recipe=recipe)

    with mx_jax.testing.target("cuda", (9, 0)), mx_jax.prefer_backends("pallas_gpu"):
        traced = jax.jit(run).trace(x, w, jnp.zeros(8, jnp.int32))
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "mx_jax_grouped_wgmma" in text
    masks = re.findall(r"stablehlo.select .*tensor<64x512x(?:bf16|f32)>", text)
    assert bool(masks) == (recipe == "nvfp4")


def test_the_backend_offers_it():
    assert PALLAS_GPU.rejects(TAKEN_CALL, Target(platform="rocm")) is not None
    assert RaggedCall in PALLAS_GPU.offers


@needs_newer_mosaic
@pytest.mark.slow
def test_a_training_step_by_the_kernels_alone(
    monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
):
    """The output, both gradients and the casts along the rows, in groups of any length."""
    backend = backend_for(architecture=SM90, interpret=interpreter())
    asked = []

    def select(call: RaggedCall) -> Choice:
        reason = backend.rejects(call, H200)
        asked.append((call.contracts_rows, reason))
        chosen = backend if reason is None else REFERENCE
        return Choice(backend=chosen, offer=chosen.offers[RaggedCall], target=H200, rejections=())

    tokens, experts, g = (
        jnp.asarray(rng.standard_normal(shape), jnp.bfloat16)
        for shape in ((24, 64), (3, 64, 64), (24, 64))
    )
    sizes = np.array([13, 0, 6], np.int32)

    def three(tokens: jax.Array, experts: jax.Array, g: jax.Array) -> tuple[jax.Array, ...]:
        def product(x: jax.Array, w: jax.Array) -> jax.Array:
            return mx_jax.ragged_dot(x, w, sizes, recipe="nvfp4")

        y, pullback = jax.vjp(product, tokens, experts)
        return y, *pullback(g)

    with mx_jax.only_backend("reference"):
        expected = jax.jit(three)(tokens, experts, g)
    monkeypatch.setattr(ops, "choose", select)
    found = jax.jit(lambda *given: three(*given))(tokens, experts, g)
    assert asked == [(False, None), (False, None), (True, None)]
    for actual, wanted in zip(found, expected, strict=True):
        wide = np.float32(wanted)
        np.testing.assert_allclose(np.float32(actual), wide, atol=2e-2 * np.abs(wide).max())


@needs_newer_mosaic
def test_explain_names_what_takes_each_product():
    """Of a step on a Hopper: three products and their casts, blocks along the rows among them."""
    tokens, experts = jnp.zeros((64, 64), jnp.bfloat16), jnp.zeros((2, 64, 64), jnp.bfloat16)
    sizes = np.array([3, 13], np.int32)

    def step(recipe: Any) -> str:
        def loss(x: jax.Array, w: jax.Array) -> jax.Array:
            return mx_jax.ragged_dot(x, w, sizes, recipe=recipe).sum()

        with mx_jax.testing.target("cuda", (9, 0)), mx_jax.prefer_backends("pallas_gpu"):
            return mx_jax.inspect.explain_call(jax.grad(loss, (0, 1)), tokens, experts)

    text = step(recipes.mxfp8())
    products = [line for line in text.splitlines() if line.startswith("ragged product")]
    assert len(products) == 3 and all("-> pallas_gpu" in line for line in products)
    casts = [line for line in text.splitlines() if "quantize" in line or "cast" in line]
    assert casts and all("-> pallas_gpu" in line for line in casts), text
    plain = step(recipes.float8_rowwise())
    products = [line for line in plain.splitlines() if line.startswith("ragged product")]
    assert len(products) == 3 and not any("-> pallas_gpu" in line for line in products), plain
    # Experts in few bits are no operand of these gradients any more: the plain path takes them.
    weights = mx_jax.quantize(experts, "mxfp4", axis=1)
    weight_only = recipes.weight_only("mxfp4")
    with mx_jax.testing.target("cuda", (9, 0)), mx_jax.prefer_backends("pallas_gpu"):
        text = mx_jax.inspect.explain_call(
            jax.grad(lambda x: mx_jax.ragged_dot(x, weights, sizes, recipe=weight_only).sum()),
            tokens,
        )
    forward, gradient = (line for line in text.splitlines() if line.startswith("ragged product"))
    assert forward.endswith("-> pallas_gpu")
    assert gradient.endswith("2 groups, to bfloat16 -> jax.lax, not quantized"), text


@needs_newer_mosaic
def test_lowers_where_integers_have_64_bits():
    def step(x: jax.Array, w: jax.Array, sizes: jax.Array) -> tuple[jax.Array, ...]:
        y, pullback = jax.vjp(lambda x, w: mx_jax.ragged_dot(x, w, sizes, recipe="mxfp8"), x, w)
        return y, *pullback(y)

    rows, experts = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((32, 64), (3, 64, 64)))
    with (
        mx_jax.testing.target("cuda", (9, 0)),
        mx_jax.prefer_backends("pallas_gpu"),
        jax.enable_x64(True),
    ):
        traced = jax.jit(step).trace(rows, experts, jax.ShapeDtypeStruct((3,), jnp.int64))
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert len(re.findall("mx_jax_grouped_wgmma_mxfp8_e4m3|mx_jax_group_sums", text)) >= 3
    assert "chlo.ragged_dot" not in text
