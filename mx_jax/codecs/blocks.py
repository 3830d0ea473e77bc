"""Shape algebra of blocks: cutting blocked axes in two and putting them back.

`blocks` pairs axes counted from the end with block sizes, e.g. `((-2, 16), (-1, 16))`. Axes that
are not named have blocks of one. Counting from the end keeps the pairs valid under `vmap` and
`scan`; storing them, rather than comparing shapes, keeps an axis that holds exactly one block
blocked.
"""

import math

import jax
import jax.numpy as jnp

from mx_jax.codecs.explicit_axes import join_axes, split_axes
from mx_jax.formats import WHOLE, BlockSize

Blocks = tuple[tuple[int, BlockSize], ...]


def block_extent(size: BlockSize, length: int) -> int:
    """Positions of one block along an axis of that length; a WHOLE block takes them all."""
    return max(length, 1) if size is WHOLE else int(size)


def num_blocks(size: BlockSize, length: int) -> int:
    """How many blocks cover an axis: `ceil(length / size)`."""
    return -(-length // block_extent(size, length))


def scales_shape(shape: tuple[int, ...], blocks: Blocks) -> tuple[int, ...]:
    """Shape of the scales of a tensor: blocked axes count blocks, others keep their length."""
    counts = list(shape)
    for axis, size in blocks:
        counts[axis] = num_blocks(size, shape[axis])
    return tuple(counts)


def split(x: jax.Array, blocks: Blocks, *, fill: bool = False) -> tuple[jax.Array, tuple[int, ...]]:
    """Cut each blocked axis into (blocks, position in the block), zero-padding the last block.

    Zeros do not change a block's amax (MX v1.0, 5.2). So an axis that is shorter than its block
    stays as it is: padded, it could take any multiple of its memory.

    Args:
      x: any array.
      blocks: axes from the end with block sizes.
      fill: pad an axis that is shorter than its block too, for those who count positions.

    Returns:
      The reshaped array, and its axes that run inside blocks.
    """
    sizes = {axis % x.ndim: size for axis, size in blocks}
    padding = [(0, 0)] * x.ndim
    shape: list[int] = []
    inside: list[int] = []
    for axis, length in enumerate(x.shape):
        if axis not in sizes:
            shape.append(length)
            continue
        extent, count = block_extent(sizes[axis], length), num_blocks(sizes[axis], length)
        if isinstance(length, int) and 0 < length < extent and not fill:
            extent = length
        padding[axis] = (0, count * extent - length)
        shape += [count, extent]
        inside.append(len(shape) - 1)
    if any(high for _, high in padding):
        x = jnp.pad(x, padding)
    return split_axes(x, shape, inside), tuple(inside)


def merge(y: jax.Array, shape: tuple[int, ...], inside: tuple[int, ...]) -> jax.Array:
    """Undo `split`: join (blocks, position) axes and drop the padding down to `shape`."""
    joined: list[int] = []
    for axis, length in enumerate(y.shape):
        if axis in inside:
            joined[-1] *= length
        else:
            joined.append(length)
    y = join_axes(y, joined, inside)
    if y.shape == shape:
        return y
    return y[tuple(slice(length) for length in shape)]


def spread(scales: jax.Array, inside: tuple[int, ...]) -> jax.Array:
    """Give block scales an axis of one wherever `split` made an axis inside blocks."""
    return jnp.expand_dims(scales, inside)


def elements_per_block(shape: tuple[int, ...], blocks: Blocks) -> int:
    """Positions that share one scale."""
    return math.prod(block_extent(size, shape[axis]) for axis, size in blocks)
