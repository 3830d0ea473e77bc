"""Arrays that are made when their turn to be written comes, so that one tensor is in memory."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

# Below this an array is kept: a tensor scale is asked for before its codes are written.
_SMALL = 1 << 16


@dataclasses.dataclass(frozen=True, eq=False)
class Deferred:
    """An array that `save` and `write` ask for when they write it.

    Attributes:
      shape: of the array.
      dtype: of it.
      fetch: makes it.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    fetch: Callable[[], Any]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.fetch(), dtype=dtype)


def deferred(make: Callable[[], Any], like: Any) -> Any:
    """What `make` gives, of which nothing is made before it is written.

    Args:
      make: gives an array, or an MXArray; called again only where its parts are asked for again.
      like: the same with anything that has a shape and a dtype for arrays.

    Examples:
      >>> import jax, jax.numpy as jnp, mx_jax
      >>> from mx_jax.checkpoint.deferred import deferred
      >>> make = lambda: mx_jax.quantize(jnp.ones((2, 64)), "mxfp4")
      >>> later = deferred(make, jax.eval_shape(make))
      >>> later.format.name, later.shape, type(later.codes).__name__
      ('mxfp4', (2, 64), 'Deferred')
    """
    leaves, structure = jax.tree.flatten(like)
    once = _Once(make)
    parts = [
        Deferred(tuple(leaf.shape), np.dtype(leaf.dtype), functools.partial(once.part, index))
        for index, leaf in enumerate(leaves)
    ]
    return jax.tree.unflatten(structure, parts)


class _Once:
    """The arrays of one tensor, each handed out once; the small ones as often as asked for."""

    def __init__(self, make: Callable[[], Any]):
        self._make = make
        self._small: dict[int, np.ndarray] = {}
        self._held: dict[int, np.ndarray] = {}

    def part(self, index: int) -> np.ndarray:
        if index in self._small:
            return self._small[index]
        if index not in self._held:
            arrays = enumerate(map(np.asarray, jax.tree.leaves(self._make())))
            found = dict(arrays)
            self._small = {i: array for i, array in found.items() if array.nbytes <= _SMALL}
            if index in self._small:
                return self._small[index]
            self._held = {i: array for i, array in found.items() if i not in self._small}
        return self._held.pop(index)
