"""Checks of what users pass in: once, at the public functions, before tracing goes further."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mx_jax.codecs.blocks import Blocks
from mx_jax.codecs.rounding import Rounding
from mx_jax.formats import BlockFormat, BlockSize, Whole, check_block_size

QUANTIZABLE = ("float32", "bfloat16", "float16")


def as_quantizable(x: Any, operation: str) -> jax.Array:
    """x as an array of a dtype that can be quantized.

    Raises:
      TypeError: any other dtype, with the remedy.
    """
    dtype = getattr(x, "dtype", None)
    array = x if isinstance(x, jax.Array) else jnp.asarray(x)
    # asarray would quietly narrow NumPy's float64 and int64: judge what was passed.
    name = np.dtype(dtype if dtype is not None else array.dtype).name
    if name not in QUANTIZABLE:
        raise TypeError(
            f"{operation}: needs float32, bfloat16 or float16 input, got dtype={name}, "
            f"shape={array.shape}; convert it first, e.g. x.astype(jnp.float32)"
        )
    return array


def blocks_along(
    shape: tuple[int, ...], axis: int, block_size: BlockSize | None, format: BlockFormat
) -> Blocks:
    """The blocks of an array quantized along one axis.

    A two-dimensional format also covers the neighbouring axis: the one before, or the next one
    where there is none before.

    Raises:
      ValueError: axis out of range, or block size below 1.
      TypeError: axis is not an int.
    """
    if isinstance(axis, bool) or not isinstance(axis, int | np.integer):
        raise TypeError(f"quantize: axis must be an int, got axis={axis!r}")
    if not -len(shape) <= axis < len(shape):
        raise ValueError(
            f"quantize: axis={axis} is out of range for shape={shape}; "
            + ("a scalar has no axis for blocks" if not shape else f"use -{len(shape)}..-1 or 0..")
        )
    if block_size is not None:
        check_block_size(block_size, "quantize")
        format = format.with_block(block_size if isinstance(block_size, Whole) else int(block_size))
    contracting = int(axis) % len(shape) - len(shape)
    kept_size, contracting_size = format.block
    sizes: dict[int, BlockSize] = {contracting: contracting_size}
    if isinstance(kept_size, Whole):
        sizes |= {other: kept_size for other in range(-len(shape), 0) if other != contracting}
    elif kept_size != 1:
        sizes[_neighbour(contracting, shape, format)] = kept_size
    return tuple(sorted(sizes.items()))


def _neighbour(axis: int, shape: tuple[int, ...], format: BlockFormat) -> int:
    if len(shape) < 2:
        raise ValueError(
            f"quantize: format={format.name} has two-dimensional blocks={format.block} and needs "
            f"at least two axes, got shape={shape}"
        )
    return axis - 1 if axis > -len(shape) else axis + 1


def check_key(key: Any, rounding: Rounding, operation: str) -> None:
    """Raise unless a key is there exactly when the rounding draws random bits."""
    if not rounding.random_bits:
        if key is not None:
            raise ValueError(
                f"{operation}: a key is for stochastic rounding only, got "
                f"rounding={rounding.name!r} and a key; drop the key or use rounding='stochastic'"
            )
        return
    if key is None:
        raise ValueError(
            f"{operation}: stochastic rounding needs a key, got key=None; "
            "pass key=jax.random.key(seed)"
        )
    check_is_key(key, operation)


def check_is_key(key: Any, operation: str) -> None:
    """Raise TypeError unless key is one PRNG key, typed or raw."""
    dtype, shape = getattr(key, "dtype", None), getattr(key, "shape", None)
    if dtype is not None:
        if jnp.issubdtype(dtype, jax.dtypes.prng_key) and shape == ():
            return
        if dtype == jnp.uint32 and shape is not None and len(shape) == 1:
            return
    described = f"dtype={dtype}, shape={shape}" if dtype is not None else f"{key!r}"
    raise TypeError(
        f"{operation}: key must be one PRNG key from jax.random.key or jax.random.PRNGKey, "
        f"got {described}"
    )


def check_tensor_scale(tensor_scale: Any, format: BlockFormat, ndim: int) -> jax.Array | None:
    """A given tensor scale as float32 of shape [1] * ndim, or None.

    Raises:
      ValueError: the format has no tensor scale, or it is not one number.
    """
    if tensor_scale is None:
        return None
    if not format.tensor_scale:
        raise ValueError(
            f"quantize: format={format.name} has no tensor scale, got tensor_scale; drop it"
        )
    scale = jnp.asarray(tensor_scale, jnp.float32)
    if scale.size != 1:
        raise ValueError(
            f"quantize: tensor_scale must be one number, got tensor_scale.shape={scale.shape}"
        )
    return scale.reshape((1,) * ndim)
