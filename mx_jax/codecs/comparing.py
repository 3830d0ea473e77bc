"""What `==` says of quantized arrays: the same as of arrays."""

from typing import Any

import jax
import numpy as np


class ComparedByValue:
    """`==` and `!=` as arrays have them: elementwise, of the values; and like arrays, no hash.

    Whoever wants one answer about codes and scales compares these, or asks
    `mx_jax.testing.compare.assert_bitwise_equal`.
    """

    __hash__: Any = None

    def dequantize(self) -> jax.Array:
        """The values."""
        raise NotImplementedError

    def __eq__(self, other: Any) -> Any:
        return self.dequantize() == _values(other) if _has_values(self) else NotImplemented

    def __ne__(self, other: Any) -> Any:
        return self.dequantize() != _values(other) if _has_values(self) else NotImplemented


def _values(other: Any) -> Any:
    return other.dequantize() if isinstance(other, ComparedByValue) else other


def _has_values(x: ComparedByValue) -> bool:
    """Not where leaves are shapes or shardings: these are compared by identity."""
    return all(isinstance(leaf, jax.Array | np.ndarray) for leaf in jax.tree.leaves(x))
