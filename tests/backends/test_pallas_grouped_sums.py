"""Hopper's kernel for sums over the rows of each group, in the interpreter with races detected."""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mx_jax
from mx_jax import formats, recipes
from mx_jax.backends.calls import RaggedCall
from mx_jax.backends.pallas_gpu import backend_for
from mx_jax.backends.pallas_gpu.architecture import SM90
from mx_jax.backends.pallas_gpu.rejections import rejects_groups
from mx_jax.backends.pallas_gpu.tiles import Tiles
from mx_jax.backends.reference import REFERENCE
from mx_jax.backends.select import Choice
from mx_jax.formats import MXFP4, MXFP8_E4M3, NVFP4, WHOLE
from mx_jax.ops import ragged_dot as ops
from mx_jax.testing.backend_suite import check_ragged
from mx_jax.testing.cases import RAGGED_CASES, RaggedCase
from mx_jax.testing.compare import assert_bitwise_equal
from tests.backends.mosaic import interpreter, needs_newer_mosaic
from tests.backends.test_pallas_grouped import H200, NEW

SUMS = tuple(case for case in RAGGED_CASES if case.contracts_rows)


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
def test_is_exact(sizes: tuple[int, ...], tiles: Tiles, out_dtype: str):
    run, expected = group_sums(sizes, tiles, out_dtype)
    assert_bitwise_equal(run(), expected, what="sums")


@needs_newer_mosaic
@pytest.mark.slow
@pytest.mark.parametrize("case", SUMS, ids=str)
def test_is_near_float64(case: RaggedCase):
    assert rejects_groups(case.call, H200, NEW) is None
    check_ragged(backend_for(architecture=SM90, interpret=interpreter()), case)


def sums_of(
    lhs: formats.BlockFormat | None, rhs: formats.BlockFormat | None, **facts: Any
) -> RaggedCall:
    return RaggedCase(lhs=lhs, rhs=rhs, sizes=(32,), rows=32, contracts_rows=True, **facts).call


FLOAT16 = dataclasses.replace(sums_of(None, MXFP4).lhs, dtype=jnp.dtype("float16"))


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (sums_of(MXFP4, MXFP8_E4M3), None),
        (sums_of(None, NVFP4), None),
        (sums_of(MXFP4.with_block(WHOLE), MXFP4), None),
        (
            dataclasses.replace(sums_of(None, MXFP4), lhs=FLOAT16),
            "needs rows in bfloat16, got lhs in float16",
        ),
        (
            sums_of(MXFP4, formats.FLOAT8_ROWWISE_E4M3),
            "needs values that bfloat16 holds on both sides, got rhs=float8_rowwise_e4m3",
        ),
        (
            sums_of(MXFP4.with_block(8), MXFP4.with_block(24)),
            "needs groups in blocks of a multiple of 16 rows, got blocks=[8, 24]",
        ),
        (
            sums_of(MXFP4.with_block(WHOLE), None),
            "needs groups in blocks of a multiple of 16 rows",
        ),
        (sums_of(MXFP4, MXFP4, k=2**27), "at most 2147483647 elements, got lhs_shape=(32,"),
    ],
)
def test_rejects(call: RaggedCall, reason: str | None):
    found = rejects_groups(call, H200, NEW)
    assert found is None if reason is None else found is not None and reason in found


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
