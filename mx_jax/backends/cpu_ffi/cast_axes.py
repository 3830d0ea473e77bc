"""What handlers of casts are told of a tensor: its axes, blocks and elements."""

from typing import NamedTuple

import numpy as np

from mx_jax.codecs.blocks import Blocks
from mx_jax.formats import WHOLE, BlockFormat, ElementFormat


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


def rejects_parts(format: BlockFormat) -> str | None:
    """Why the handlers do not know a format's elements or scales, or None."""
    if format.is_known:
        return None
    element, scale = format.element.name, format.scale.name
    return f"knows the library's own formats, got other facts of element={element}, scale={scale}"


def rejects_blocks(blocks: Blocks) -> str | None:
    """Why the handlers cannot walk these blocks, or None."""
    axes = sorted(axis for axis, _ in blocks)
    if not axes:
        return "needs a blocked axis"
    if axes != [-2, -1] and len(axes) > 1 and any(size is not WHOLE for _, size in blocks):
        return f"takes two-dimensional blocks of the last two axes, got blocks={blocks}"
    if axes != list(range(axes[0], axes[-1] + 1)):
        return f"needs neighbouring blocked axes, got blocks={blocks}"
    return None


def facts(element: ElementFormat) -> np.ndarray:
    """The independent facts of a format, as `custom_calls/common/element_codec.h` orders them."""
    numbers = (
        element.exponent_bits,
        element.mantissa_bits,
        element.bias,
        element.num_reserved_codes,
        element.has_inf,
        element.kind == "int",
        element.has_negative_zero,
        element.negative_extra,
    )
    return np.array(numbers, np.int32)
