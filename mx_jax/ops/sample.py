"""A fixed sample of a product's entries: what a large one is compared with float32 by.

Along the axes that a product has from one operand at most `POSITIONS` positions count, at equal
distances. The distances are odd: heads, pairs of rotary embeddings and blocks repeat by powers of
two, and none of them is met in the same place always.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
from jax import lax

from mx_jax.codecs.explicit_axes import explicit_sharding, partitions

POSITIONS = 128
"""Of each operand: a product whose operands keep no more is compared as a whole."""


class Free(NamedTuple):
    """An axis that a product has from one of its operands.

    Attributes:
      operand: 0 or 1.
      axis: of the operand.
      result: the axis of the product that it becomes.
    """

    operand: int
    axis: int
    result: int


class Sample(NamedTuple):
    """Which positions count.

    Attributes:
      strides: from one position to the next, along each axis that does not count whole.
    """

    strides: tuple[tuple[Free, int], ...]

    @classmethod
    def of(cls, free: Sequence[Free], operands: Sequence[jax.Array], product: jax.Array):
        """A sample of a product, along axes that are whole where types say where arrays lie."""
        found: list[tuple[Free, int]] = []
        for number, operand in enumerate(operands):
            own = [
                axis
                for axis in free
                if axis.operand == number
                and _whole(operand, axis.axis)
                and _whole(product, axis.result)
            ]
            steps = strides([operand.shape[axis.axis] for axis in own])
            found += [pair for pair in zip(own, steps, strict=True) if pair[1] > 1]
        return cls(tuple(found))

    def operand(self, x: jax.Array, number: int) -> jax.Array:
        """What of an operand counts."""
        return _every(x, {axis.axis: s for axis, s in self.strides if axis.operand == number})

    def product(self, x: jax.Array) -> jax.Array:
        """What of the product counts."""
        return _every(x, {axis.result: stride for axis, stride in self.strides})


def strides(sizes: Sequence[int]) -> list[int]:
    """Odd distances along axes of these sizes that leave at most `POSITIONS` of them together."""
    found = [1] * len(sizes)

    def count(axis: int) -> int:
        return -(-sizes[axis] // found[axis])

    axes = range(len(sizes))
    while math.prod(map(count, axes)) > POSITIONS:
        longest = max(axes, key=count)
        others = math.prod(count(axis) for axis in axes if axis != longest)
        least = -(-sizes[longest] // max(POSITIONS // others, count(longest) // 2))
        found[longest] = max(found[longest] + 2, least | 1)
    return found


def _whole(x: jax.Array, axis: int) -> bool:
    sharding = explicit_sharding(x)
    return sharding is None or partitions(sharding, x.ndim)[axis] is None


def _every(x: jax.Array, steps: dict[int, int]) -> jax.Array:
    if not steps:
        return x
    own = [steps.get(axis, 1) for axis in range(x.ndim)]
    return lax.slice(x, [0] * x.ndim, x.shape, own)
