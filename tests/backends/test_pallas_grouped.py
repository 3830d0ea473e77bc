"""GPU kernels for rows in groups, and sums over them: numbers and races in the interpreter, what is
lowered."""

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mx_jax
from mx_jax.backends.calls import OperandType, PackCall
from mx_jax.backends.pallas_gpu import PALLAS_GPU, backend_for, products
from mx_jax.backends.pallas_gpu.architecture import SM90, SM100, Architecture, Tiles
from mx_jax.backends.pallas_gpu.layouts import FIELDS, visits
from mx_jax.backends.pallas_gpu.products import pack_weights
from mx_jax.backends.target import Target
from mx_jax.formats import MXFP4, MXFP8_E4M3, MXFP8_E5M2, NVFP4, BlockFormat
from mx_jax.mxarray import MXArray
from mx_jax.reference.matmul import scaled_ragged_dot
from mx_jax.testing.backend_suite import check_ragged
from mx_jax.testing.cases import RAGGED_CASES, RaggedCase
from mx_jax.testing.compare import assert_bitwise_equal
from tests.backends.mosaic import few_octaves, for_gpu, interpreter, mostly_slow, needs_mosaic

H200 = Target(platform="cuda", compute_capability=(9, 0))
# Groups of none, of one, of several and of more than a tile, and rows of none.
SHORT, LONG = (0, 1, 7, 0, 13), (3, 140, 0, 9)


def case_of(rhs: BlockFormat, lhs: BlockFormat | None = None, **facts: Any) -> RaggedCase:
    return RaggedCase(lhs=lhs, rhs=rhs, **{"sizes": SHORT, "rows": 24, "n": 64} | facts)


def operands(case: RaggedCase) -> tuple[Any, MXArray, jax.Array]:
    """Of sums that are exact in float32 in any order; other scales in every row and block."""
    rng = np.random.default_rng(0)
    lhs, rhs, sizes = case.operands(rng)

    def exact(x: MXArray) -> MXArray:
        scales = rng.integers(126, 129, x.scales.shape).astype(np.uint8)
        return few_octaves(rng, dataclasses.replace(x, scales=jnp.asarray(scales)))

    assert isinstance(rhs, MXArray)
    if isinstance(lhs, MXArray):
        return exact(lhs), exact(rhs), sizes
    return jnp.asarray(rng.integers(-8, 9, lhs.shape), jnp.bfloat16), exact(rhs), sizes


# Which rows of which group --------------------------------------------------------------------


@pytest.mark.parametrize("tile_rows", [8, 16, 64])
def test_each_row_belongs_to_one_visit(tile_rows: int, rng: np.random.Generator):
    m, g = 100, 5
    find = jax.jit(lambda sizes: visits(sizes, m, tile_rows))
    for _ in range(30):
        total = rng.integers(0, m + 1)
        sizes = rng.multinomial(total, rng.dirichlet([0.4] * g)).astype(np.int32)
        table = np.asarray(find(sizes)).reshape(-1, FIELDS)
        assert len(table) <= -(-m // tile_rows) + g
        group_of = np.append(np.repeat(np.arange(g), sizes), [g] * (m - total))
        owners = np.zeros(m, int)
        for group, first, begin, end in table:
            assert first % 8 == 0 and (begin >= end or first <= begin < end <= first + tile_rows)
            assert (group_of[begin:end] == group).all()
            owners[begin:end] += 1
        assert (owners == 1).all()


# Numbers --------------------------------------------------------------------------------------


# Matrices as they come, or packed: on Blackwell those are laid out anew at every call.
PRODUCTS = [
    (SM90, case_of(MXFP4, sizes=(0, 1, 7, 5), rows=16), False),
    (SM100, case_of(MXFP8_E5M2, MXFP8_E4M3, k=300), False),
    (SM100, case_of(NVFP4, NVFP4, sizes=LONG, rows=160, n=200, k=40, out_dtype="bfloat16"), False),
]
SLOW_PRODUCTS = [
    (SM90, case_of(MXFP8_E4M3, sizes=(40,), rows=40, out_dtype="bfloat16"), False),
    (SM90, case_of(NVFP4, sizes=(3, 21), k=200, rhs_k_first=False), True),
    (SM90, case_of(MXFP8_E5M2, sizes=LONG, rows=155, k=1024, n=130, out_dtype="float16"), False),
    (SM100, case_of(MXFP4, MXFP4, sizes=LONG, rows=155, n=300, rhs_k_first=True), False),
    (SM100, case_of(NVFP4, NVFP4, k=64), True),
]


@needs_mosaic
@pytest.mark.parametrize("what", mostly_slow([*PRODUCTS, *SLOW_PRODUCTS], *PRODUCTS), ids=str)
def test_is_the_reference_after_rounding(what: tuple[Architecture, RaggedCase, bool]):
    architecture, case, packed = what
    lhs, rhs, sizes = operands(case)
    weights: Any = rhs
    if packed:
        weights = pack_weights(rhs, PackCall(weights=case.call.rhs, blocks=rhs.blocks))
    how = {"architecture": architecture, "interpret": interpreter()}
    run = jax.jit(lambda lhs, rhs: products.ragged_dot(lhs, rhs, sizes, case.call, **how))
    kernel = architecture.kernel(case.lhs, case.rhs)
    assert f"grouped_{kernel}" in str(run.trace(lhs, weights).jaxpr)
    expected = scaled_ragged_dot(lhs, rhs, sizes, case.call.contracting, case.out_dtype)
    assert_bitwise_equal(run(lhs, weights), expected, what="product")


@needs_mosaic
@pytest.mark.slow
@pytest.mark.parametrize("case", RAGGED_CASES, ids=str)
def test_is_near_float64(case: RaggedCase):
    """The shared suite's cases, tiles by the table."""
    check_ragged(backend_for(architecture=SM90, interpret=interpreter()), case)


@needs_mosaic
@pytest.mark.slow
def test_a_tensor_scale_of_each_matrix(rng: np.random.Generator):
    case = case_of(NVFP4, sizes=(9, 12), n=64)
    x, _, sizes = operands(case)
    w = jax.vmap(functools.partial(mx_jax.quantize, format="nvfp4", axis=0))(
        jnp.asarray(rng.integers(-6, 7, (2, 96, 64)), jnp.float32) * jnp.array([[[1.0]], [[8.0]]])
    )
    types = case.call.lhs, OperandType.of(w, case.call.rhs.axes)
    call = dataclasses.replace(case.call, lhs=types[0], rhs=types[1])
    assert call.rhs.scale_axes == (0,) and PALLAS_GPU.rejects(call, H200) is None
    expected = scaled_ragged_dot(x, w, sizes, call.contracting, "float32")
    backend = backend_for(architecture=SM90, interpret=interpreter())
    run = jax.jit(lambda x, w, sizes: backend.run(call, x, w, sizes))
    np.testing.assert_allclose(run(x, w, sizes), expected, rtol=1e-6, atol=1e-3)


@needs_mosaic
@pytest.mark.parametrize(
    ("sizes", "tiles", "out_dtype"),
    [
        # Whole steps and parts of one, a group of none, rows of no group.
        ((96, 0, 16), Tiles(m=64, n=128, k=64, stages=2), "float32"),
        pytest.param(
            (16, 240), Tiles(m=64, n=64, k=64, stages=4), "bfloat16", marks=pytest.mark.slow
        ),
    ],
)
def test_sums_are_exact(
    sizes: tuple[int, ...], tiles: Tiles, out_dtype: str, rng: np.random.Generator
):
    from mx_jax.backends.pallas_gpu import wgmma

    left, right = (rng.integers(-8, 9, (256, columns)) for columns in (64, 128))
    ends = np.cumsum(sizes)
    begins = ends - np.asarray(sizes)
    exact = np.stack([left[i:j].T @ right[i:j] for i, j in zip(begins, ends, strict=True)])
    sums = wgmma.group_sums(
        jnp.asarray(left, jnp.bfloat16),
        jnp.asarray(right, jnp.bfloat16),
        jnp.asarray(np.concatenate([begins, sizes]), jnp.int32),
        jnp.asarray([0.25, 2.0], jnp.float32),
        tiles=tiles,
        out_dtype=jnp.dtype(out_dtype),
        interpret=interpreter(),
    )
    assert_bitwise_equal(sums, jnp.asarray(exact / 2, out_dtype), what="sums")


# What is lowered ------------------------------------------------------------------------------


@needs_mosaic
@pytest.mark.parametrize("capability", [(9, 0), (10, 0)], ids=str)
@pytest.mark.parametrize("n", [40, 1000])
def test_any_number_of_columns_is_for_gpu(n: int, capability: tuple[int, int]):
    """Mosaic wants whole tiles of what is copied, where there are several."""
    x, w = jnp.ones((64, 512), jnp.bfloat16), jnp.ones((4, 512, n), jnp.bfloat16)
    multiply = functools.partial(mx_jax.ragged_dot, recipe="mxfp8")
    with jax.enable_x64(True):
        text = for_gpu(multiply, x, w, jnp.zeros(4, jnp.int64), capability=capability)
    assert "mx_jax_grouped_" in text and f"-> (tensor<64x{n}xbf16>" in text


@needs_mosaic
@pytest.mark.parametrize("recipe", ["mxfp4", "nvfp4"])
def test_rows_are_masked_only_for_a_scale_that_counts_them(recipe: str):
    x, w = jnp.ones((64, 512), jnp.bfloat16), jnp.ones((8, 512, 256), jnp.bfloat16)

    def run(x: jax.Array, w: Any, sizes: jax.Array) -> jax.Array:
        return mx_jax.ragged_dot(x, w, sizes, recipe=recipe)

    text = for_gpu(run, x, w, jnp.zeros(8, jnp.int32))
    assert "mx_jax_grouped_wgmma" in text
    masks = re.findall(r"stablehlo.select .*tensor<64x512x(?:bf16|f32)>", text)
    assert bool(masks) == (recipe == "nvfp4")
