"""Statistics of a cast by the compiled handler: values, codes and scales are read once for all."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mx_jax.backends.calls import CastStatisticsCall, rejects_symbolic
from mx_jax.backends.cpu_ffi.casts import (
    array_attributes,
    cast_axes,
    rejects_blocks,
    rejects_parts,
)
from mx_jax.backends.cpu_ffi.handler import Handler, hashable
from mx_jax.codecs.blocks import scales_shape
from mx_jax.mxarray import MXArray
from mx_jax.reference import statistics as reference

TARGET = "mx_jax_cpu_cast_statistics"

_DTYPES = ("float32", "bfloat16", "float16")
# What the handler gives, in its order, with the dtype of each.
_RESULTS = {
    "channel_amax": "float32",
    "amax": "float32",
    "exponents": "uint32",
    "underflow": "uint32",
    "saturated": "uint32",
    "bad_blocks": "uint32",
    "signal": "float32",
    "noise": "float32",
}


def rejects(call: CastStatisticsCall) -> str | None:
    """Why the handler does not take a call, or None."""
    if call.dtype.name not in _DTYPES:
        return f"reads float32, bfloat16 or float16, got dtype={call.dtype}"
    if call.scale_axes:
        return f"takes one tensor scale, got them along axes={call.scale_axes}"
    reason = rejects_symbolic(call)
    if reason is not None:
        return reason
    if 0 in call.shape:
        return f"needs elements, got shape={call.shape}"
    return rejects_parts(call.format) or rejects_blocks(call.blocks)


def cast_statistics(x: jax.Array, array: MXArray, call: CastStatisticsCall) -> reference.Raw:
    """What the reference gives; sums are of squares in float64, rounded once."""
    scale = () if array.tensor_scale is None else (array.tensor_scale,)
    told = array_attributes(call.format, call.blocks) | {
        "axis": np.int64(call.axis),
        "has_tensor_scale": bool(scale),
    }
    axes = cast_axes(call.blocks, depth=len(call.shape))
    given = (axes.elements, axes.elements, *axes.scales, *[axes.tensor_scale] * len(scale))
    # No result has an axis of the operands', so that devices which share a tensor gather it.
    lengths = {"channel_amax": call.shape[call.axis], "exponents": reference.EXPONENTS}
    results = (f"*b {lengths[name]}" if name in lengths else "*b" for name in _RESULTS)
    handler = Handler(
        target=TARGET,
        axes=f"{', '.join(given)} -> {', '.join(results)}",
        dtypes=tuple(np.dtype(dtype) for dtype in _RESULTS.values()),
        attributes=hashable(told),
    )
    found = handler(lax.stop_gradient(x), array.codes, array.scales, *scale)
    return dict(zip(_RESULTS, found, strict=True)) | {
        "size": jnp.full((), math.prod(call.shape), jnp.uint32),
        "blocks": jnp.full((), math.prod(scales_shape(call.shape, call.blocks)), jnp.uint32),
    }
