"""Where blocks of an operand lie, by where it holds its axes; no array is compiled."""

import pytest

from mx_jax.axes import Axes
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
