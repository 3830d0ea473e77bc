"""The GPU kernel for rows in groups: numbers and races in the interpreter, what is lowered."""

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mx_jax
from mx_jax.backends.pallas_gpu import products
from mx_jax.backends.pallas_gpu.layouts import FIELDS, visits
from mx_jax.formats import MXFP4, MXFP8_E4M3, MXFP8_E5M2, NVFP4, BlockFormat
from mx_jax.mxarray import MXArray
from mx_jax.reference.matmul import scaled_ragged_dot
from mx_jax.testing.backend_suite import check_ragged
from mx_jax.testing.cases import RAGGED_CASES, RaggedCase
from mx_jax.testing.compare import assert_bitwise_equal
from tests.backends.mosaic import (
    few_octaves,
    interpreter,
    lowered,
    needs_mosaic,
    packed,
    packing_backend,
)
from tests.needs import slow

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


PRODUCTS = [
    case_of(MXFP4, sizes=(0, 1, 7, 5), rows=16),
    case_of(MXFP8_E5M2, MXFP8_E4M3, k=300),
    slow(case_of(MXFP8_E4M3, sizes=(40,), rows=40, out_dtype="bfloat16")),
    slow(case_of(NVFP4, sizes=(3, 21), k=200, rhs_k_first=False)),
    slow(case_of(MXFP8_E5M2, sizes=LONG, rows=155, k=1024, n=130, out_dtype="float16")),
    slow(case_of(NVFP4, NVFP4, k=64)),
]


@needs_mosaic
@pytest.mark.parametrize("case", PRODUCTS, ids=str)
def test_is_the_reference_after_rounding(case: RaggedCase):
    lhs, rhs, sizes = operands(case)
    weights = packed(case.call, rhs)
    interpret = interpreter()
    run = jax.jit(lambda lhs, rhs: products.ragged_dot(lhs, rhs, sizes, case.call, interpret))
    assert "grouped_wgmma" in str(run.trace(lhs, weights).jaxpr)
    expected = scaled_ragged_dot(lhs, rhs, sizes, case.call.contracting, case.out_dtype)
    assert_bitwise_equal(run(lhs, weights), expected, what="product")


@needs_mosaic
@pytest.mark.slow
@pytest.mark.parametrize("case", [x for x in RAGGED_CASES if not x.contracts_rows], ids=str)
def test_is_near_float64(case: RaggedCase):
    """The shared suite's cases, tiles by the table."""
    check_ragged(packing_backend(), case)


@needs_mosaic
def test_a_tensor_scale_of_each_matrix_is_not_packed():
    w = jax.vmap(functools.partial(mx_jax.quantize, format="nvfp4", axis=0))(jnp.ones((2, 96, 64)))
    with (
        mx_jax.testing.target("cuda", (9, 0)),
        mx_jax.only_backend("pallas_gpu"),
        pytest.raises(ValueError, match=r"pallas_gpu: needs one tensor scale an operand"),
    ):
        mx_jax.pack_weights(w, contracting=1, num_batch=1)


# What is lowered ------------------------------------------------------------------------------


def experts(k: int, n: int, format: str = "mxfp4") -> Any:
    """Types of four packed matrices."""

    def pack(w: jax.Array) -> Any:
        weights = mx_jax.quantize(w, format, axis=1)
        with mx_jax.prefer_backends("pallas_gpu"):
            return mx_jax.pack_weights(weights, contracting=1, num_batch=1)

    with mx_jax.testing.target("cuda", (9, 0)):
        return jax.eval_shape(pack, jax.ShapeDtypeStruct((4, k, n), jnp.bfloat16))


@needs_mosaic
@pytest.mark.parametrize(("n", "integers"), [(40, "int32"), (1000, "int64")])
def test_any_number_of_columns_is_lowered(n: int, integers: str):
    """Mosaic wants whole tiles of what is copied, where there are several; of 64 bits or not."""
    x, recipe = jnp.ones((64, 512), jnp.bfloat16), mx_jax.recipes.weight_only("mxfp4")
    multiply, weights = functools.partial(mx_jax.ragged_dot, recipe=recipe), experts(512, n)
    with jax.enable_x64(integers == "int64"):
        text = lowered(multiply, x, weights, jax.ShapeDtypeStruct((4,), integers))
    assert "mx_jax_grouped_wgmma_mxfp4" in text and f"-> (tensor<64x{n}xbf16>" in text
    assert "chlo.ragged_dot" not in text


@needs_mosaic
@pytest.mark.parametrize("recipe", ["mxfp4", "nvfp4"])
def test_rows_are_masked_only_for_a_scale_that_counts_them(recipe: str):
    def run(x: jax.Array, w: Any, sizes: jax.Array) -> jax.Array:
        return mx_jax.ragged_dot(x, w, sizes, recipe=recipe)

    x = jnp.ones((64, 512), jnp.bfloat16)
    text = lowered(run, x, experts(512, 256, recipe), jnp.zeros(4, jnp.int32))
    assert "mx_jax_grouped_wgmma" in text
    masks = re.findall(r"stablehlo.select .*tensor<64x512x(?:bf16|f32)>", text)
    assert bool(masks) == (recipe == "nvfp4")
