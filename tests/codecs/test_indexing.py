"""What indexing, transposing and reshaping do to codes, scales and blocks, by shapes alone."""

from typing import Any

import numpy as np
import pytest

from mx_jax.codecs.indexing import index_blocks, reshape_blocks
from mx_jax.formats import WHOLE

SHAPE = (3, 4, 80)
B = ((-1, 32),)
S = slice(None)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ((0, 0, 0, 0), "too many indices, got 4 for ndim=3"),
        ((..., 0, ...), "only one ellipsis is allowed"),
        ((S, S, 0), "takes slices only"),
        ((S, S, slice(1, 32)), "between blocks with step 1, got 1:32:1"),
        ((S, S, slice(0, 33)), "between blocks with step 1, got 0:33:1"),
        ((S, S, slice(0, 64, 2)), "between blocks with step 1, got 0:64:2"),
        ((S, S, slice(64, 32, -1)), "between blocks with step 1"),
        ((True,), "got True on axis=-3"),
        ((np.array([True, False, True]),), "on axis=-3"),
        (([0, 1],), r"got \[0, 1\] on axis=-3"),
        ((0, np.array([0])), "got an array at position 1"),
        ((None, np.array([0])), "got an array at position 1"),
        ((0, S, np.array([0])), "takes slices only"),
    ],
)
def test_refused(index: Any, message: str):
    with pytest.raises(IndexError, match=f"MXArray index: .*{message}") as caught:
        index_blocks(index, SHAPE, B)
    said = "dequantize() first, or index whole blocks" in str(caught.value)
    assert said == (not message.startswith(("too many", "only one")))


@pytest.mark.parametrize("index", [1.0, "a", slice(0, 1.5)], ids=repr)
def test_what_is_no_int(index: Any):
    text = (
        "slice indices must be" if isinstance(index, slice) else f"MXArray index: .* {index!r} on"
    )
    with pytest.raises(TypeError, match=text):
        index_blocks((0, 0, index) if isinstance(index, slice) else (index,), SHAPE, B)


BOTH = ((-2, 32), (-1, 32))
ROWS = ((-1, WHOLE),)


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
    ("shape", "wanted", "before", "spread", "after"),
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
def test_tensor_scales_of_a_reshape(shape, wanted, before, spread, after):
    result = reshape_blocks(wanted, shape, B, before)
    assert (result.spread, result.tensor_scale) == (spread, after)


def test_a_tensor_scale_that_changes_within_blocks_is_cut():
    with pytest.raises(ValueError, match="would cut blocks"):
        reshape_blocks((256,), (2, 128), B, (2, 1))


@pytest.mark.parametrize(
    ("shape", "wanted", "error"),
    [
        ((4, 64), (5, -1), ValueError),
        ((1, 1), (-1, -1), ValueError),
        ((4, 64), (0, -1), ValueError),
        ((4, 64), (-4, -64), ValueError),
        ((4, 64), (4, 63), ValueError),
        ((4, 64), (4.0, 64), TypeError),
    ],
)
def test_shapes_that_are_none(shape, wanted, error):
    with pytest.raises(error, match=r"needs a shape of size=|lengths must be ints"):
        reshape_blocks(wanted, shape, B, None)
