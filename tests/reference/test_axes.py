"""Where operands hold their axes, and which product gives a cotangent; no array is compiled."""

import itertools

import numpy as np
import pytest

from mx_jax.axes import Axes, ProductAxes, Side
from mx_jax.formats import (
    FLOAT8_ROWWISE_E4M3,
    FLOAT8_TENSORWISE_E4M3,
    MXFP4,
    MXFP4_2D,
    NVFP4,
    WHOLE,
)

TWO_OF_EACH = Axes((0, 1), (2, 3), (4, 5))
K_FIRST = Axes((0, 1), (4, 5), (2, 3))


@pytest.mark.parametrize(
    ("format", "blocks", "k_first"),
    [
        (MXFP4, ((-1, 32),), ((-3, 32),)),
        (NVFP4, ((-1, 16),), ((-3, 16),)),
        (MXFP4_2D, ((-3, 32), (-1, 32)), ((-3, 32), (-1, 32))),
        (MXFP4.with_block(1), (), ()),
        (FLOAT8_ROWWISE_E4M3, ((-2, WHOLE), (-1, WHOLE)), ((-4, WHOLE), (-3, WHOLE))),
        (
            FLOAT8_TENSORWISE_E4M3,
            tuple((axis, WHOLE) for axis in range(-6, 0)),
            tuple((axis, WHOLE) for axis in range(-6, 0)),
        ),
    ],
)
def test_blocks(format, blocks, k_first):
    assert TWO_OF_EACH.blocks(format) == blocks
    assert K_FIRST.blocks(format) == k_first


def test_blocks_lie_along_the_last_axis_of_a_group():
    """Of three axes, and of one."""
    assert Axes.ordered(kept=3, contracting=3).blocks(MXFP4_2D) == ((-4, 32), (-1, 32))
    assert Axes.ordered().blocks(MXFP4_2D) == ((-2, 32), (-1, 32))


def dot_general(lhs: np.ndarray, rhs: np.ndarray, axes: ProductAxes) -> np.ndarray:
    """As `jax.lax.dot_general`, by einsum."""
    (k_lhs, k_rhs), (b_lhs, b_rhs) = axes.dimension_numbers
    letters = iter("abcdefghijklmnopqrstuvwxyz")
    left = {axis: next(letters) for axis in range(lhs.ndim)}
    right = dict(zip((*k_rhs, *b_rhs), (left[a] for a in (*k_lhs, *b_lhs)), strict=True))
    right |= {axis: next(letters) for axis in range(rhs.ndim) if axis not in right}
    out = [left[a] for a in b_lhs]
    out += [left[a] for a in axes.lhs.kept] + [right[a] for a in axes.rhs.kept]
    subscripts = ["".join(side[a] for a in range(len(side))) for side in (left, right)]
    return np.einsum(f"{subscripts[0]},{subscripts[1]}->{''.join(out)}", lhs, rhs)


BATCH, M, N, K = (2,), (3, 4), (5,), (6, 7)


def operand(kept: tuple[int, ...], k_first: bool) -> tuple[Axes, np.ndarray]:
    axes = Axes.ordered(batch=1, kept=len(kept), contracting=2, k_first=k_first)
    shape = (*BATCH, *((*K, *kept) if k_first else (*kept, *K)))
    return axes, np.random.default_rng(len(kept)).integers(-9, 9, shape)


@pytest.mark.parametrize("side", ["lhs", "rhs"])
def test_cotangents(side: Side):
    """<g, product(d, other)> = <cotangent, d> for every d, in d's own order of axes."""
    for k_firsts in itertools.product((False, True), repeat=2):
        (lhs_axes, lhs), (rhs_axes, rhs) = map(operand, (M, N), k_firsts)
        axes = ProductAxes(lhs_axes, rhs_axes)
        g = np.random.default_rng(7).integers(-9, 9, (*BATCH, *M, *N))
        of, g_is_left = axes.gradient_axes(side)
        target, other = (lhs, rhs) if side == "lhs" else (rhs, lhs)
        bar = dot_general(g, other, of) if g_is_left else dot_general(other, g, of)
        assert bar.shape == target.shape
        step = np.random.default_rng(8).integers(-9, 9, target.shape)
        moved = dot_general(step, rhs, axes) if side == "lhs" else dot_general(lhs, step, axes)
        assert (g * moved).sum() == (bar * step).sum()
        # Every group in canonical order: backends take nothing else.
        assert of.lhs.has_canonical_order and of.rhs.has_canonical_order
        assert g_is_left is not (k_firsts[0] if side == "lhs" else k_firsts[1])
