"""einsum against jnp.einsum: every shape of subscripts, and products that contract nothing."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import mx_jax
from mx_jax import recipes
from mx_jax.testing.compare import assert_bitwise_equal
from mx_jax.testing.draw import draw_few_octaves
from tests.quick import quick

SUBSCRIPTS = (
    # subscripts, shape of lhs, shape of rhs
    ("ij,jk->ik", (3, 40), (40, 4)),
    ("ij,jk->ki", (3, 40), (40, 4)),
    ("ji,kj->ik", (40, 3), (4, 40)),
    ("ij,jk", (3, 40), (40, 4)),
    ("ba,ca", (3, 40), (4, 40)),
    ("zj,ja", (3, 40), (40, 4)),
    (" i j , j k -> k i ", (3, 40), (40, 4)),
    ("Ij,jK->KI", (3, 40), (40, 4)),
    ("i,i->", (40,), (40,)),
    ("i,i", (40,), (40,)),
    ("ij,ij->", (3, 40), (3, 40)),
    ("ij,ji->", (3, 40), (40, 3)),
    ("ij,ij->i", (3, 40), (3, 40)),
    ("bij,bjk->bik", (2, 3, 40), (2, 40, 4)),
    ("bij,bjk->kib", (2, 3, 40), (2, 40, 4)),
    ("bthd,bshd->bhts", (2, 3, 4, 40), (2, 5, 4, 40)),
    ("bhts,bshd->bthd", (2, 4, 3, 40), (2, 40, 4, 5)),
    ("btd,dhk->bthk", (2, 3, 40), (40, 4, 5)),
    ("bthk,hkd->btd", (2, 3, 4, 40), (4, 40, 5)),
    ("ijx,jk->ik", (3, 40, 2), (40, 4)),
    ("ij,yjk->ik", (3, 40), (2, 40, 4)),
    ("ijx,yjk->ki", (3, 40, 2), (2, 40, 4)),
    ("...j,jk->...k", (2, 3, 40), (40, 4)),
    ("...j,jk->...k", (40,), (40, 4)),
    ("...j,jk", (2, 3, 40), (40, 4)),
    ("...ij,...jk->...ik", (2, 3, 40), (2, 40, 4)),
    ("...ij,...jk->...ik", (3, 40), (2, 40, 4)),
    ("...ij,...jk->ki...", (6, 2, 3, 40), (2, 40, 4)),
    ("b...j,b...kj->b...k", (2, 3, 40), (2, 3, 4, 40)),
    ("ij...,jk...->ik...", (3, 40, 2), (40, 4, 2)),
    ("ij...,jk...", (3, 40, 2), (40, 4, 2)),
)


def operands(rng: np.random.Generator) -> list[tuple[np.ndarray, np.ndarray]]:
    """Few octaves and few bits: sums come out the same in any order."""
    return [
        (np.round(draw_few_octaves(rng, left) * 8), np.round(draw_few_octaves(rng, right) * 8))
        for _, left, right in SUBSCRIPTS
    ]


def all_of_them(einsum):
    """Every einsum of the table and its gradients, compiled as one program."""

    def run(pairs):
        results = []
        for (subscripts, _, _), (lhs, rhs) in zip(SUBSCRIPTS, pairs, strict=True):

            def loss(lhs, rhs, subscripts=subscripts):
                product = einsum(subscripts, lhs, rhs)
                return jnp.sum(product * jnp.arange(1, product.size + 1).reshape(product.shape) % 8)

            results.append(
                (einsum(subscripts, lhs, rhs), *jax.grad(loss, argnums=(0, 1))(lhs, rhs))
            )
        return results

    return quick(run)


def test_high_precision_is_jnp(rng: np.random.Generator):
    pairs = operands(rng)
    recipe = recipes.high_precision()
    actual = all_of_them(lambda s, a, b: mx_jax.einsum(s, a, b, recipe=recipe))(pairs)
    expected = all_of_them(jnp.einsum)(pairs)
    jax.tree.map(assert_bitwise_equal, actual, expected)


def test_blocks_lie_along_the_last_contracted_letter_of_lhs(rng: np.random.Generator):
    x, w = draw_few_octaves(rng, (6, 3, 40)), draw_few_octaves(rng, (40, 5, 3))
    recipe = recipes.mxfp4()
    actual = mx_jax.einsum("mij,jni->mn", x, w, recipe=recipe)
    expected = mx_jax.dot_general(x, w, (((1, 2), (2, 0)), ((), ())), recipe=recipe)
    assert_bitwise_equal(actual, expected)
    other = mx_jax.einsum("mji,jni->mn", x.swapaxes(1, 2), w, recipe=recipe)
    assert not np.array_equal(actual, other)


# Of operands [3, 40] and [40, 4], but for two.
OTHER_SHAPES = {"ii,ij->j": ((3, 3), (3, 4)), "ij,jk->ik": ((3, 40), (41, 4))}
ERRORS = {
    "ij->i": "needs exactly two operands, got subscripts='ij->i'",
    "ij,jk,kl->il": "needs exactly two operands",
    "ii,ij->j": "a letter may occur once in each term, got subscripts='ii,ij",
    "ij,jk->ii": "Output character 'i' appeared more than once in the output",
    "ij,jk->iz": "Output character 'z' did not appear in the input (got subscripts='ij,jk->iz'",
    "ij,jk->ik": "sizes of 'j' in subscripts='ij,jk->ik' must agree, got lhs.shape=(3, 40) with 40 "
    "and rhs.shape=(41, 4) with 41",
    "ijk,kl->il": "a term names 3 axes, the operand has ndim=2, got subscripts='ijk,kl->il'",
    "j,jk->k": "names 1 axes, the operand has ndim=2",
    "ij,jk->i,k": "subscripts are letters and '...', got subscripts='ij,jk->i,k'",
    "i1,1k->ik": "subscripts are letters and '...', got subscripts='i1,1k->",
}


@pytest.mark.parametrize("subscripts", ERRORS)
def test_errors(subscripts: str):
    shapes = OTHER_SHAPES.get(subscripts, ((3, 40), (40, 4)))
    operands = [np.ones(shape, np.float32) for shape in shapes]
    with pytest.raises(ValueError, match=f"^einsum: .*{re.escape(ERRORS[subscripts])}"):
        mx_jax.einsum(subscripts, *operands, recipe=recipes.mxfp8())


def test_axes_of_an_ellipsis_broadcast(rng: np.random.Generator):
    x, w = draw_few_octaves(rng, (1, 4, 40)), draw_few_octaves(rng, (3, 40, 5))
    subscripts = "...ik,...kj->...ij"
    expected = mx_jax.matmul(x, w, recipe="mxfp8")
    for lhs in (x, x[0]):
        assert_bitwise_equal(mx_jax.einsum(subscripts, lhs, w, recipe="mxfp8"), expected)
    with pytest.raises(ValueError, match=r"MXArray is not broadcast, got shape=\(1, 4, 40\) where"):
        mx_jax.einsum(subscripts, mx_jax.quantize(x, "mxfp8"), w, recipe="mxfp8")


def test_a_sum_over_an_mxarray_is_refused():
    x, w = (
        np.ones((3, 40), np.float32),
        mx_jax.quantize(np.ones((40, 4), np.float32), "mxfp4", axis=0),
    )
    with pytest.raises(ValueError, match="sum over an axis of an MXArray alone; pass dequantize"):
        mx_jax.einsum("ij,jk->i", x, w, recipe=recipes.mxfp8())


# Products that contract nothing have nothing to quantize: they are XLA's own ----------------------


A = np.random.default_rng(0).standard_normal((3, 40)).astype(np.float32)
B = np.random.default_rng(1).standard_normal((3, 40)).astype(np.float32)
OUTER_RECIPES = (recipes.mxfp8(), recipes.mxfp4_stochastic())
BATCH = (((), ()), ((0, 1), (0, 1)))
EINSUMS = {
    "bk,bk->bk": (A, B),
    "bk,ck->bck": (A, B),
    "i,j->ij": (A[0], B[1]),
    "i,j->ji": (A[0], B[1]),
    "...k,k->...k": (A, B[0]),
    "bk,b->kb": (A, B[:, 0]),
    "b,->b": (A[0], B[0, 0]),
}


@pytest.mark.parametrize("recipe", OUTER_RECIPES, ids=lambda recipe: recipe.name)
def test_nothing_contracted(recipe):
    def run(operation, a, b):
        product, pullback = jax.vjp(operation, a, b)
        return product, *pullback(jnp.ones_like(product))

    def both(subscripts, pair):
        ours = functools.partial(mx_jax.einsum, subscripts, recipe=recipe)
        return run(ours, *pair), run(functools.partial(jnp.einsum, subscripts), *pair)

    run_all = quick(lambda pairs: list(map(both, EINSUMS, pairs)))
    near = functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6)
    for ours, theirs in run_all([*EINSUMS.values()]):
        jax.tree.map(near, ours, theirs)


def test_dot_general_is_lax_s():
    for options in ({}, {"preferred_element_type": jnp.int32}, {"precision": "highest"}):
        ours = mx_jax.dot_general(A, B, BATCH, recipe=OUTER_RECIPES[0], **options)
        assert_bitwise_equal(ours, lax.dot_general(A, B, BATCH, **options))
    mixed = mx_jax.dot_general(A, jnp.bfloat16(B), BATCH, recipe=OUTER_RECIPES[0])
    assert mixed.dtype == jnp.float32
    key = jax.random.key(0)
    drawn = mx_jax.dot_general(A, B, BATCH, recipe=OUTER_RECIPES[1], key=key)
    assert_bitwise_equal(drawn, lax.dot_general(A, B, BATCH))


def test_what_is_quantized_already_is_read():
    q = mx_jax.quantize(B, "mxfp8_e4m3")
    product = mx_jax.dot_general(A, q, BATCH, recipe=OUTER_RECIPES[0])
    assert_bitwise_equal(product, lax.dot_general(A, q.dequantize(), BATCH))
    through = jax.grad(
        lambda b: mx_jax.einsum(
            "bk,bk->bk", A, mx_jax.quantize(b, "mxfp8_e4m3"), recipe=OUTER_RECIPES[0]
        ).sum()
    )(B)
    np.testing.assert_allclose(through, A)
