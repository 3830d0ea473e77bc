"""Shapes and blocks of a reshaped tensor as a function of shapes alone: no array, no compiling."""

import pytest

from mx_jax.codecs.reshaping import reshape_blocks
from mx_jax.formats import WHOLE

B = ((-1, 32),)
BOTH = ((-2, 32), (-1, 32))
ROWS = ((-1, WHOLE),)
ALL = ((-2, WHOLE), (-1, WHOLE))


@pytest.mark.parametrize(
    ("shape", "blocks", "wanted", "new", "scales", "new_blocks"),
    [
        ((4, 64), B, (2, 2, 64), (2, 2, 64), (2, 2, 2), B),
        ((4, 64), B, ((4, 2, 32),), (4, 2, 32), (4, 2, 1), B),
        ((4, 64), B, (-1,), (256,), (8,), B),
        ((4, 64), B, (2, -1, 32), (2, 4, 32), (2, 4, 1), B),
        ((4, 40), B, (2, 1, 2, 40), (2, 1, 2, 40), (2, 1, 2, 2), B),
        ((4, 40), B, (4, 40), (4, 40), (4, 2), B),
        ((1, 32), B, (32,), (32,), (1,), B),
        ((4, 1), B, (4, 1), (4, 1), (4, 1), B),
        ((64, 2, 3), ((-3, 32),), (64, 6), (64, 6), (2, 6), ((-2, 32),)),
        ((64, 32), BOTH, (2, 32, 32), (2, 32, 32), (2, 1, 1), BOTH),
        ((64, 32), BOTH, (64, 1, 32), (64, 1, 32), (2, 1, 1), ((-3, 32), (-1, 32))),
        ((4, 40), ROWS, (2, 2, 1, 40), (2, 2, 1, 40), (2, 2, 1, 1), ROWS),
        ((4, 6), ALL, (3, 8), (3, 8), (1, 1), ALL),
        ((4, 6), ALL, (24,), (24,), (1,), ROWS),
        ((4, 6), ALL, (1, 24), (1, 24), (1, 1), ALL),
        ((4, 6), (), (2, 12), (2, 12), (2, 12), ()),
        ((0, 64), B, (0, 64), (0, 64), (0, 2), B),
    ],
)
def test_what_it_is(shape, blocks, wanted, new, scales, new_blocks):
    found = reshape_blocks(wanted, shape, blocks, None)
    assert (found.codes, found.scales, found.blocks) == (new, scales, new_blocks)
    assert found.spread == (1,) * len(shape) and found.tensor_scale == (1,) * len(new)


@pytest.mark.parametrize(
    ("shape", "blocks", "wanted"),
    [
        ((4, 64), B, (4, 4, 16)),
        ((4, 40), B, (160,)),
        ((4, 40), B, (2, 80)),
        ((3, 96), B, (3, 2, 48)),
        ((64, 4), ((-2, 32),), (256,)),
        ((64, 64), BOTH, (4096,)),
        ((4, 40), ROWS, (160,)),
        ((4, 40), ROWS, (4, 2, 20)),
        ((0, 64), B, (64, 0)),
        ((4, 1), B, (4,)),
    ],
)
def test_what_would_cut_blocks(shape, blocks, wanted):
    with pytest.raises(ValueError, match="would cut blocks"):
        reshape_blocks(wanted, shape, blocks, None)


@pytest.mark.parametrize(
    ("shape", "wanted", "given", "spread", "after"),
    [
        # One for each matrix: its axis may move, be joined and be divided; others may too.
        ((2, 4, 32), (2, 1, 4, 32), (2, 1, 1), (2, 1, 1), (2, 1, 1, 1)),
        ((2, 3, 4, 32), (6, 4, 32), (2, 3, 1, 1), (2, 3, 1, 1), (6, 1, 1)),
        ((2, 3, 4, 32), (6, 4, 32), (2, 1, 1, 1), (2, 3, 1, 1), (6, 1, 1)),
        ((6, 4, 32), (2, 3, 4, 32), (6, 1, 1), (6, 1, 1), (2, 3, 1, 1)),
        ((2, 4, 32), (8, 32), (2, 1, 1), (2, 4, 1), (8, 1)),
        ((2, 4, 32), (2, 128), (2, 1, 1), (2, 1, 1), (2, 1)),
        ((2, 4, 32), (2, 4, 32), (2, 1, 1), (2, 1, 1), (2, 1, 1)),
    ],
)
def test_tensor_scales(shape, wanted, given, spread, after):
    found = reshape_blocks(wanted, shape, B, given)
    assert (found.spread, found.tensor_scale) == (spread, after)


def test_a_tensor_scale_that_changes_within_blocks_is_cut():
    with pytest.raises(ValueError, match="would cut blocks"):
        reshape_blocks((256,), (2, 128), B, (2, 1))


@pytest.mark.parametrize(
    ("shape", "wanted", "error"),
    [
        ((4, 64), (5, -1), ValueError),
        ((4, 64), (-1, -1), ValueError),
        ((1, 1), (-1, -1), ValueError),
        ((4, 64), (0, -1), ValueError),
        ((4, 64), (-4, -64), ValueError),
        ((4, 64), (-2, -1), ValueError),
        ((4, 64), (-4, -64, 1), ValueError),
        ((4, 64), (4, 63), ValueError),
        ((4, 64), (4.0, 64), TypeError),
    ],
)
def test_shapes_that_are_none(shape, wanted, error):
    with pytest.raises(error, match=r"needs a shape of size=|lengths must be ints"):
        reshape_blocks(wanted, shape, B, None)
