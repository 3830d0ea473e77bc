"""The scale of a whole tensor, by handlers: they find its largest magnitude, and divide it."""

import math

import jax
import numpy as np

from mx_jax.backends.calls import QuantizeCall
from mx_jax.backends.cpu_ffi.cast_axes import cast_axes, flat_blocks
from mx_jax.backends.cpu_ffi.handler import Handler, hashable
from mx_jax.formats import WHOLE

AMAX = "mx_jax_cpu_amax"
TARGET = "mx_jax_cpu_tensor_scale"


def tensor_scale_of(x: jax.Array, call: QuantizeCall) -> jax.Array:
    """The scale of the whole tensor, from its largest finite block: the reference's."""
    largest_value = call.scale_rule.largest_value(call.format)
    return _scale(x.ndim, largest_value)(*_amax(x.shape, call)(x))[0]


def _amax(shape: tuple[int, ...], call: QuantizeCall) -> Handler:
    """Patterns of the largest finite blocks: one a row, or one a row of blocks."""
    blocks = sorted(call.blocks)
    (axis, size), *more = blocks
    single = not more and math.prod(shape[axis:][1:]) == 1
    runs = ((axis, WHOLE if single else size), *((a, WHOLE) for a in range(axis + 1, 0)))
    axes = cast_axes(runs)
    return Handler(
        target=AMAX,
        axes=f"{axes.elements} -> {axes.scales[0]}",
        dtypes=(np.dtype("int32"),),
        attributes=hashable({"blocks": flat_blocks(call.blocks)}),
    )


def _scale(ndim: int, largest_value: float) -> Handler:
    """The scale of all patterns but for what vmap adds in front: no axis of theirs is a batch."""
    names = " ".join(f"a{place}" for place in reversed(range(ndim)))
    return Handler(
        target=TARGET,
        axes=f"*b {names} -> *b{' 1' * ndim}",
        dtypes=(np.dtype("float32"),),
        attributes=hashable({"largest_value": np.float32(largest_value)}),
    )
