"""Writing whole blocks into a blocked tensor: codes and scales, and nothing else.

A tensor scale is never written. Values under another one than the tensor's would be wrong, so they
are refused; what is only known when it runs becomes NaN.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from mx_jax.codecs import float32, indexing
from mx_jax.codecs.invariants import check_parts
from mx_jax.codecs.scale import E8M0_NAN
from mx_jax.formats import ScaleFormat, Whole


@dataclasses.dataclass(frozen=True)
class At:
    """`x.at`, to be indexed.

    Attributes:
      array: the MXArray.
    """

    array: Any

    def __getitem__(self, index: Any) -> "Region":
        return Region(self.array, index)


@dataclasses.dataclass(frozen=True)
class Region:
    """`x.at[index]`: whole blocks of an MXArray, to be set.

    Attributes:
      array: the MXArray.
      index: as `x[index]` takes it.
    """

    array: Any
    index: Any

    def set(self, values: Any) -> Any:
        """The MXArray with other blocks there: `values`, an MXArray of that shape."""
        x, operation = self.array, "MXArray.at[].set"
        indexed = indexing.index_blocks(self.index, x.shape, x.blocks)
        here = jax.eval_shape(lambda codes: codes[indexed.codes], x.codes)
        _check_values(values, x, here.shape, indexed.blocks, operation)
        tensor_scale = x.tensor_scale
        if tensor_scale is not None:
            tensor_scale = indexing.index_tensor_scale(tensor_scale, indexed.codes)
        scales = _valid_scales(values, _same_bits(tensor_scale, values, operation))
        return dataclasses.replace(
            x,
            codes=x.codes.at[indexed.codes].set(values.codes),
            scales=x.scales.at[indexed.scales].set(scales),
            primal=None,
        )


def dynamic_update_slice(x: Any, update: Any, start_indices: Sequence[Any]) -> Any:
    """See `MXArray.dynamic_update_slice`."""
    operation = "MXArray.dynamic_update_slice"
    if len(start_indices) != len(x.shape):
        raise ValueError(
            f"{operation}: needs a start for each axis, got {len(start_indices)} starts for "
            f"shape={x.shape}"
        )
    _check_values(update, x, update.shape, x.blocks, operation)
    starts = [jnp.asarray(start) for start in start_indices]
    code_starts, scale_starts, aligned = list(starts), list(starts), jnp.bool_(True)
    for axis, size in x.blocks:
        length, taken = x.shape[axis], update.shape[axis]
        whole = taken == length
        if not whole and (isinstance(size, Whole) or taken % size or length % size):
            raise ValueError(
                f"{operation}: axis={axis} has blocks of {size!r}, which are written whole, got "
                f"shape={x.shape}, update.shape={update.shape}; write whole blocks"
            )
        if whole or isinstance(size, Whole):
            scale_starts[axis] = jnp.zeros_like(starts[axis])
            continue
        scale_starts[axis] = starts[axis] // size
        # Codes and scales of the same blocks: where the start lies inside one, all become NaN.
        code_starts[axis] = scale_starts[axis] * size
        aligned = aligned & _aligned(starts[axis], size, axis, operation)
    ok = aligned & _same_bits(x.tensor_scale, update, operation)
    return dataclasses.replace(
        x,
        codes=lax.dynamic_update_slice(x.codes, update.codes, code_starts),
        scales=lax.dynamic_update_slice(x.scales, _valid_scales(update, ok), scale_starts),
        primal=None,
    )


def _check_values(values: Any, x: Any, shape: Any, blocks: Any, operation: str) -> None:
    """Raise unless values are an MXArray that may stand in that part of x."""
    if not isinstance(values, type(x)):
        raise TypeError(
            f"{operation}: needs an MXArray, got values of type {type(values).__name__}; quantize "
            f"them first, format={x.format.name}, with blocks={blocks}"
        )
    check_parts(values, operation)
    found = (values.shape, values.format, sorted(values.blocks))
    if found != (shape, x.format, sorted(blocks)):
        raise ValueError(
            f"{operation}: values must have the format, the shape and the blocks of what they "
            f"replace, format={x.format.name}, shape={shape}, blocks={blocks}, got "
            f"format={values.format.name}, shape={values.shape}, blocks={values.blocks}; quantize "
            "them likewise"
        )


def _aligned(start: jax.Array, size: int, axis: int, operation: str) -> jax.Array:
    """Whether a start lies between blocks; raises if it is known not to."""
    aligned = start % size == 0
    if not isinstance(aligned, Tracer) and not bool(aligned):
        raise ValueError(
            f"{operation}: a start must lie between blocks of {size}, got start={start} on "
            f"axis={axis}; use a multiple of {size}"
        )
    return aligned


def _same_bits(tensor_scale: jax.Array | None, values: Any, operation: str) -> jax.Array:
    """Whether values are under that tensor scale; raises if they are known not to be."""
    if tensor_scale is None:
        return jnp.bool_(True)
    same = (float32.to_bits(tensor_scale) == float32.to_bits(values.tensor_scale)).all()
    if not isinstance(same, Tracer) and not bool(same):
        raise ValueError(
            f"{operation}: values must be under the array's tensor scale, got "
            f"tensor_scale={np.asarray(tensor_scale)} and values.tensor_scale="
            f"{np.asarray(values.tensor_scale)}; quantize them with tensor_scale=x.tensor_scale"
        )
    return same


def _valid_scales(values: Any, valid: jax.Array) -> jax.Array:
    """The scales of values, or NaN."""
    return jnp.where(valid, values.scales, _nan_of(values.format.scale))


def _nan_of(scale: ScaleFormat) -> np.ndarray:
    """The scale that makes its block NaN, as it is stored."""
    if scale.is_float32:
        return np.array(np.nan, scale.storage_dtype)
    code = E8M0_NAN if scale.element is None else scale.element.nan_code
    return np.array(code, scale.storage_dtype)
