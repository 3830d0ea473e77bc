"""Block Hadamard transform with random signs: spreads outliers before quantizing.

`T(x) = (x * s) H / sqrt(g)` on consecutive groups of g values along the last axis, with H the
symmetric Sylvester matrix and s signs. T is orthogonal, so applied to both operands of a product
along the contracting axis it cancels: `T(a) . T(b) = a . b`.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mx_jax.codecs import blocks as block_shapes
from mx_jax.codecs.explicit_axes import explicit_sharding, partitions, with_partitions
from mx_jax.codecs.lowering import platform_dependent


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Hadamard:
    """A block Hadamard transform along the contracting axis of both operands of a product.

    Attributes:
      size: g, a power of two; the contracting axis is padded with zeros to a multiple of it.
      signs: g values of 1 or -1, or None to draw new signs from the matmul's key every time.

    Raises:
      TypeError: if size is no int, or the signs are no tuple.
      ValueError: if size is no power of two above 1, or the signs are not g values of 1 or -1.

    Examples:
      >>> from mx_jax.recipes import Hadamard, MatmulSpec, mxfp4
      >>> spread = MatmulSpec(lhs="mxfp4", rhs="mxfp4", transform=Hadamard(size=32, signs=None))
      >>> recipe = mxfp4().with_(grad_weight=spread, name="mxfp4, spread dW")
      >>> recipe.is_stochastic, recipe.output.transform
      (True, None)
    """

    size: int
    signs: tuple[int, ...] | None

    def __post_init__(self):
        if isinstance(self.size, bool) or not isinstance(self.size, int):
            raise TypeError(
                f"Hadamard: size must be an int, got size={self.size!r}; e.g. "
                "Hadamard(size=16, signs=None)"
            )
        if not isinstance(self.signs, tuple | None):
            raise TypeError(
                f"Hadamard: signs must be a tuple or None, got signs={self.signs!r}; e.g. (1, -1)"
            )
        if self.size < 2 or self.size & (self.size - 1):
            raise ValueError(f"Hadamard: size must be a power of two above 1, got size={self.size}")
        if self.signs is None:
            return
        if len(self.signs) != self.size or not set(self.signs) <= {1, -1}:
            raise ValueError(
                f"Hadamard: needs size={self.size} signs of 1 or -1, got signs={self.signs}"
            )

    @property
    def is_random(self) -> bool:
        """Whether the signs are drawn from a key."""
        return self.signs is None

    def __repr__(self) -> str:
        signs = str(self.signs)
        if self.signs and len(set(self.signs)) == 1:
            signs = f"({self.signs[0]},) * {self.size}"
        return f"Hadamard(size={self.size}, signs={signs})"

    def __str__(self) -> str:
        return f"Hadamard {self.size}, {'random' if self.is_random else 'fixed'} signs"


@functools.cache
def _sylvester(size: int) -> np.ndarray:
    """Sylvester's Hadamard matrix: symmetric, of 1 and -1."""
    result = np.ones((1, 1))
    while result.shape[0] < size:
        result = np.block([[result, result], [result, -result]])
    return result


@functools.cache
def matrix(size: int) -> np.ndarray:
    """Sylvester's Hadamard matrix over sqrt(size): symmetric and orthogonal, float32."""
    return (_sylvester(size) / math.sqrt(size)).astype(np.float32)


def apply(x: jax.Array, signs: jax.Array, axis: int = -1) -> jax.Array:
    """`T(x)` along one axis, in float32.

    Accelerators multiply bfloat16 values by 1 and -1, which is exact, and divide the float32 sums
    by sqrt(g): the same but for rounding, on units that are faster.

    Args:
      x: values, length k along the axis.
      signs: `[g]`, of which negative ones stand for -1.
      axis: the axis.

    Returns:
      float32, length k' along the axis, the next multiple of g: the transform fills the padding.
    """
    # Groups are split without moving the axis, which XLA on CPU takes long for.
    size = signs.shape[0]
    axis %= x.ndim
    groups, (within,) = block_shapes.split(x, ((axis - x.ndim, size),), fill=True)
    signs = jnp.where(signs < 0, jnp.float32(-1), jnp.float32(1))
    signs = jnp.expand_dims(signs, [at for at in range(groups.ndim) if at != within])
    filled = groups.shape[axis] * size
    shape = (*x.shape[:axis], filled, *x.shape[axis + 1 :])
    in_float32 = functools.partial(_in_float32, within=within)
    if x.dtype == jnp.bfloat16:
        in_bfloat16 = functools.partial(_in_bfloat16, within=within)
        transformed = platform_dependent(groups, signs, cpu=in_float32, default=in_bfloat16)
    else:
        transformed = in_float32(groups, signs)
    return block_shapes.merge(transformed, shape, (within,))


def _in_float32(groups: jax.Array, signs: jax.Array, within: int) -> jax.Array:
    values = groups.astype(jnp.float32) * signs
    return _times(values, matrix(signs.size), within, lax.Precision.HIGHEST)


def _in_bfloat16(groups: jax.Array, signs: jax.Array, within: int) -> jax.Array:
    values, square = groups * signs.astype(jnp.bfloat16), _sylvester(signs.size)
    sums = _times(values, square.astype(jnp.bfloat16), within, lax.Precision.DEFAULT)
    return sums * jnp.float32(1 / math.sqrt(signs.size))


def _times(
    groups: jax.Array, square: np.ndarray, within: int, precision: lax.Precision
) -> jax.Array:
    """Each group by a symmetric matrix, summed in float32."""
    # Where groups do not lie along the last axis, a matrix for each of those before them multiplies
    # from the left, so that no axis moves: XLA on CPU, which computes what depends on constants
    # alone when it compiles, has given wrong numbers for a product of constants whose axes moved
    # after it (jaxlib 0.10.2 and 0.12.0).
    product = functools.partial(
        lax.dot_general, precision=precision, preferred_element_type=jnp.float32
    )
    if within == groups.ndim - 1:
        return product(groups, jnp.asarray(square), (((within,), (0,)), ((), ())))
    place = explicit_sharding(groups)
    if place is not None:
        place = with_partitions(place, [*partitions(place, groups.ndim)[:within], None, None])
    shape = (*groups.shape[:within], *square.shape)
    squares = jnp.broadcast_to(jnp.asarray(square), shape, out_sharding=place)
    before = tuple(range(within))
    return product(squares, groups, (((within + 1,), (within,)), (before, before)))
