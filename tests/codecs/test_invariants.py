"""Which tensor scales fit a tensor, by shapes alone."""

import pytest

from mx_jax.codecs.invariants import tensor_scale_shape, varying_axes

BLOCKS = ((-1, 16),)


@pytest.mark.parametrize(
    ("given", "fits"),
    [
        ((1, 1, 1), True),
        ((2, 1, 1), True),
        ((2, 3, 1), True),
        ((1, 3, 1), True),
        ((2, 3, 2), False),
        ((1, 1, 32), False),
        ((3, 1, 1), False),
        ((1, 1), False),
        ((1, 1, 1, 1), False),
    ],
)
def test_one_for_all_or_for_each_position_without_blocks(given: tuple[int, ...], fits: bool):
    reason = tensor_scale_shape(given, (2, 3, 32), BLOCKS)
    assert reason is None if fits else reason is not None and f"shape={given}" in reason


def test_axes_along_which_it_differs():
    class Of:
        shape = (2, 1, 3)

    assert varying_axes(Of) == (0, 2)
    assert varying_axes(None) == ()
