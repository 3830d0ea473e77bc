"""Checks of what users pass in: once, at the public functions, before tracing goes further."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from mx_jax.codecs import float32
from mx_jax.codecs.blocks import Blocks, tensor_scale_shape
from mx_jax.formats import BlockFormat, BlockSize, Whole
from mx_jax.specs import OperandSpec

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


def blocks_along(shape: tuple[int, ...], axis: int, format: BlockFormat) -> Blocks:
    """The blocks of an array quantized along one axis.

    A two-dimensional format also covers the neighbouring axis: the one before, or the next one
    where there is none before.

    Raises:
      ValueError: axis out of range.
      TypeError: axis is not an int.
    """
    axis = as_axis(axis, "quantize")
    if not -len(shape) <= axis < len(shape):
        raise ValueError(
            f"quantize: axis={axis} is out of range for shape={shape}; "
            + ("a scalar has no axis for blocks" if not shape else f"use -{len(shape)}..-1 or 0..")
        )
    contracting = axis % len(shape) - len(shape)
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


def check_key(key: Any, spec: OperandSpec, operation: str) -> None:
    """Raise unless a key is there exactly when a cast draws random bits."""
    if not spec.random_bits:
        if key is not None:
            raise ValueError(
                f"{operation}: a key is for stochastic rounding only, got "
                f"rounding={spec.rounding.name!r} and a key; drop the key or use "
                "rounding='stochastic'"
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


def as_axis(axis: Any, operation: str, name: str = "axis") -> int:
    """An axis as an int.

    Raises:
      TypeError: anything that is no integer, which int() would cut down to one.
    """
    if isinstance(axis, bool) or not isinstance(axis, int | np.integer):
        raise TypeError(
            f"{operation}: {name} must be an int, got {name}={axis!r}; count axes from 0, or from "
            "the end with -1"
        )
    return int(axis)


def as_axes(axes: Any, operation: str, name: str) -> tuple[int, ...]:
    """A sequence of axes as ints.

    Raises:
      TypeError: no sequence, or one with what is no integer.
    """
    if not isinstance(axes, Sequence) or isinstance(axes, str):
        raise TypeError(
            f"{operation}: {name} must be a sequence of ints, got {name}={axes!r}; e.g. (-1, -2)"
        )
    return tuple(as_axis(axis, operation, name) for axis in axes)


def check_tensor_scale(
    tensor_scale: Any, format: BlockFormat, shape: tuple[int, ...], blocks: Blocks
) -> jax.Array | None:
    """A given tensor scale as float32 with an axis for each of x's, or None.

    A traced one that is no scale becomes NaN, and with it every value.

    Raises:
      ValueError: the format has no tensor scale, or its shape does not fit, or a number in it is
        not finite and positive.
    """
    if tensor_scale is None:
        return None
    if not format.tensor_scale:
        raise ValueError(
            f"quantize: format={format.name} has no tensor scale, got tensor_scale; drop it"
        )
    scale = jnp.asarray(tensor_scale, jnp.float32)
    if scale.size == 1 and scale.ndim < len(shape):
        scale = scale.reshape((1,) * len(shape))
    reason = _leading_axes(scale.shape, shape) or tensor_scale_shape(scale.shape, shape, blocks)
    if reason is not None:
        raise ValueError(f"quantize: {reason}; pass one number, or one for each matrix of a batch")
    # By its bits: XLA takes subnormals for zeros when it compares.
    bits = float32.to_bits(scale)
    valid = (bits > 0) & (bits < float32.INF)
    if not isinstance(valid, Tracer) and not bool(valid.all()):
        raise ValueError(
            f"quantize: tensor_scale must be finite and positive, got tensor_scale={tensor_scale}; "
            "leave it out, and it is computed"
        )
    return jnp.where(valid, scale, jnp.float32(jnp.nan))


def _leading_axes(given: tuple[int, ...], shape: tuple[int, ...]) -> str | None:
    """Why scales are not one for all, or one for each position of x's first axes."""
    varying = [axis for axis, length in enumerate(given) if length != 1]
    if all(given[axis] != 1 or shape[axis] == 1 for axis in range(max(varying, default=0))):
        return None
    return (
        "a tensor scale belongs to the whole tensor, or to each position of its first axes, got "
        f"tensor_scale.shape={given}, shape={shape}"
    )
