"""Blocks that several devices have a part of: each quantizes its own, under the maximum of all.

A device's part is given one position more, which holds the largest magnitude that any of them has
in the block, and loses it again behind the cast. So every cast whose scale is a function of that
maximum gives the codes of the whole block, whoever computes it; what moves are maxima.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from mx_jax.codecs import blocks as block_shapes
from mx_jax.codecs import float32
from mx_jax.codecs.blocks import Blocks
from mx_jax.mxarray import MXArray


def block_maxima(x: jax.Array, blocks: Blocks) -> jax.Array:
    """Float32 patterns of each block's largest magnitude, int32, of the scales' shape."""
    pieces, inside = block_shapes.split(lax.stop_gradient(x), blocks)
    return jnp.max(float32.to_bits(pieces) & float32.ABS, axis=inside, initial=0)


def with_maxima(x: jax.Array, blocks: Blocks, axis: int, names: Sequence[str]) -> jax.Array:
    """A device's part of an array, and behind it along an axis the maxima of its blocks.

    Args:
      x: the part, less than a block along the axis.
      blocks: axes from the end with block sizes.
      axis: a blocked one, from the end.
      names: mesh axes of the devices that share blocks, whichever axis they cut.
    """
    maxima = float32.from_bits(lax.pmax(block_maxima(x, blocks), tuple(names)), x.dtype)
    for other, size in blocks:
        if other != axis:
            extent, length = block_shapes.block_extent(size, x.shape[other]), x.shape[other]
            maxima = lax.slice_in_dim(
                jnp.repeat(maxima, extent, other), 0, length, axis=other % x.ndim
            )
    return jnp.concatenate([x, maxima], axis)


def without_maxima(array: MXArray, axis: int) -> MXArray:
    """The part alone, quantized."""
    length = array.codes.shape[axis] - 1
    codes = lax.slice_in_dim(array.codes, 0, length, axis=axis % array.ndim)
    return dataclasses.replace(array, codes=codes, primal=None)
