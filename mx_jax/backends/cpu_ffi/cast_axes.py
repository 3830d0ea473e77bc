"""The axes of a tensor that is cast, as `geometry` reads them and as the handlers are told them."""

from typing import NamedTuple

import numpy as np

from mx_jax.codecs.blocks import Blocks
from mx_jax.formats import WHOLE


class CastAxes(NamedTuple):
    """Names of a cast's arrays' axes, such as `"*b a1 a0"` where blocks lie along the last but one.

    Attributes:
      elements: what has one entry for each element.
      tensor_scale: one entry for all, or for each position of some of the tensor's first axes.
      scales: what has one entry for each block, for each kind of blocks.
    """

    elements: str
    tensor_scale: str
    scales: tuple[str, ...]


def cast_axes(*kinds: Blocks) -> CastAxes:
    """Axes of a tensor with these blocks: as far as blocks lie, each has a name."""
    depth = max(-axis for blocks in kinds for axis, _ in blocks)
    names = [f"a{place}" for place in reversed(range(depth))]
    scales = []
    for blocks in kinds:
        counted = list(names)
        for axis, size in blocks:
            counted[axis] += f"/{names[axis] if size is WHOLE else size}"
        scales.append(" ".join(["*b", *counted]))
    return CastAxes(" ".join(["*b", *names]), "*t" + " 1" * depth, tuple(scales))


def flat_blocks(blocks: Blocks) -> np.ndarray:
    """Axis from the end and size, in turn, ascending; 0 stands for WHOLE."""
    pairs = [(axis, 0 if size is WHOLE else size) for axis, size in sorted(blocks)]
    return np.array(pairs, np.int64).reshape(-1)
