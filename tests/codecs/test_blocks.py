"""Cutting axes into blocks and putting them back; which tensor scales fit, by shapes alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mx_jax
from mx_jax.codecs.blocks import merge, scales_shape, split, spread
from mx_jax.formats import WHOLE
from tests.extending.least_error import LEAST_ERROR
from tests.quick import quick

# shape, blocks, shape of the scales, split shape, axes inside blocks
CASES = [
    ((64,), ((-1, 32),), (2,), (2, 32), (1,)),
    ((65,), ((-1, 32),), (3,), (3, 32), (1,)),
    ((4, 64), ((-1, 32),), (4, 2), (4, 2, 32), (2,)),
    ((70, 3), ((-2, 32),), (3, 3), (3, 32, 3), (1,)),
    ((2, 5, 3), ((-2, 7),), (2, 1, 3), (2, 1, 5, 3), (2,)),
    ((20, 33), ((-2, 16), (-1, 16)), (2, 3), (2, 16, 3, 16), (1, 3)),
    ((4, 6), ((-1, WHOLE),), (4, 1), (4, 1, 6), (2,)),
    ((4, 6), ((-2, WHOLE), (-1, WHOLE)), (1, 1), (1, 4, 1, 6), (1, 3)),
    ((0, 64), ((-1, 32),), (0, 2), (0, 2, 32), (2,)),
    ((3, 0), ((-1, 32),), (3, 0), (3, 0, 32), (2,)),
    ((3, 0), ((-1, WHOLE),), (3, 0), (3, 0, 1), (2,)),
    ((5, 4), ((-1, 1),), (5, 4), (5, 4, 1), (2,)),
    ((5, 4), (), (5, 4), (5, 4), ()),
]


@pytest.mark.parametrize(("shape", "blocks", "counts", "pieces", "inside"), CASES)
def test_split_and_merge(shape, blocks, counts, pieces, inside):
    x = np.arange(1, 1 + np.prod(shape, dtype=int), dtype=np.float32).reshape(shape)
    axes = []

    @quick
    def there_and_back(x):
        split_x, axes_inside = split(x, blocks)
        axes.append(axes_inside)
        return split_x, merge(split_x, shape, axes_inside)

    split_x, merged = there_and_back(x)
    assert split_x.shape == pieces
    assert axes == [inside]
    assert scales_shape(shape, blocks) == counts
    np.testing.assert_array_equal(merged, x)
    # Padding is zeros, after everything else.
    assert np.asarray(split_x, np.float64).sum() == x.sum(dtype=np.float64)
    spread_shape = jax.eval_shape(lambda x: spread(x, inside), np.zeros(counts)).shape
    assert all(have in (1, want) for have, want in zip(spread_shape, pieces, strict=True))


def test_an_axis_shorter_than_its_block_is_not_padded():
    x = jnp.ones((3, 5))
    pieces, inside = split(x, ((-1, 1_000_000),))
    assert (pieces.shape, inside) == ((3, 1, 5), (2,))
    assert merge(pieces, x.shape, inside).shape == x.shape
    assert split(x, ((-1, 8),), fill=True)[0].shape == (3, 1, 8)


@pytest.mark.parametrize("format", ["mxfp8_e4m3", "nvfp4", "mxint8"])
@pytest.mark.parametrize("rule", [None, "reads_values"])
def test_a_block_longer_than_its_axis_gives_the_same_bits(format: str, rule: str | None):
    """As many zeros by hand as the block has room for."""
    how = {"block_size": 64, "scale_rule": None}
    if rule:
        how["scale_rule"] = "four_over_six" if format == "nvfp4" else LEAST_ERROR
    x = np.random.default_rng(0).normal(size=(4, 40)).astype(np.float32)
    with mx_jax.only_backend("reference"):
        short = mx_jax.quantize(x, format, **how)
        full = mx_jax.quantize(np.pad(x, ((0, 0), (0, 24))), format, **how)
        np.testing.assert_array_equal(short.codes, np.asarray(full.codes)[:, :40])
        np.testing.assert_array_equal(short.scales, full.scales)
        values = map(np.asarray, map(mx_jax.dequantize, (short, full)))
        np.testing.assert_array_equal(next(values), next(values)[:, :40])
