"""The scale of a whole tensor, whose largest magnitude a handler finds."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mx_jax.backends.base import QuantizeCall
from mx_jax.backends.cpu_ffi.cast_axes import cast_axes, flat_blocks
from mx_jax.backends.cpu_ffi.handler import Handler, hashable
from mx_jax.codecs import float32
from mx_jax.codecs.blocks import Blocks, split
from mx_jax.formats import WHOLE
from mx_jax.reference import quantize as reference

TARGET = "mx_jax_cpu_amax"


def tensor_scale_of(x: jax.Array, call: QuantizeCall) -> jax.Array:
    """The scale of the whole tensor, from its largest finite block: the reference's."""
    amax = _amax(x, call.blocks) if x.size and len(call.blocks) == 1 else _plain(x, call.blocks)
    largest_scale = call.scale_rule.largest_scale or call.format.scale.max
    return reference.tensor_scale_of(amax, largest_scale * call.format.element.max, x.ndim)


def _amax(x: jax.Array, blocks: Blocks) -> jax.Array:
    """Patterns of the largest finite blocks: one a row, or one a row of blocks."""
    axis, size = blocks[0]
    single = math.prod(x.shape[axis:][1:]) == 1
    runs = ((axis, WHOLE if single else size), *((a, WHOLE) for a in range(axis + 1, 0)))
    axes = cast_axes(runs)
    handler = Handler(
        target=TARGET,
        axes=f"{axes.elements} -> {axes.scales[0]}",
        dtypes=(np.dtype("int32"),),
        attributes=hashable({"blocks": flat_blocks(blocks)}),
    )

    def elsewhere(x):
        amax = _plain(x, blocks)
        finite = jnp.where(amax < float32.INF, amax, 0)
        reduced = tuple(range(axis if single else axis + 1, 0))
        return (jnp.max(finite, axis=reduced, keepdims=True),)

    (amax,) = lax.platform_dependent(x, cpu=handler, default=elsewhere)
    return amax


def _plain(x: jax.Array, blocks: Blocks) -> jax.Array:
    """Patterns of the largest magnitude of each block."""
    pieces, inside = split(x, blocks)
    magnitudes = float32.to_bits(pieces) & float32.ABS
    return lax.squeeze(jnp.max(magnitudes, axis=inside, keepdims=True, initial=0), inside)
