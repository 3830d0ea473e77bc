"""Casts by rules that look at more of a block than its amax: by handlers, joined by plain JAX."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mx_jax.backends.calls import DequantizeCall, QuantizeCall
from mx_jax.backends.cpu_ffi import quantize as by_handler
from mx_jax.backends.cpu_ffi.dequantize import dequantize
from mx_jax.backends.cpu_ffi.tensor_scale import tensor_scale_of
from mx_jax.codecs import blocks as block_shapes
from mx_jax.codecs.rounding import NEAREST
from mx_jax.mxarray import MXArray
from mx_jax.reference.scale_rules import BlockData, FromAmax, LeastLoss


def quantize(
    x: jax.Array,
    random_bits: jax.Array | None,
    tensor_scale: jax.Array | None,
    call: QuantizeCall,
) -> MXArray:
    """x quantized by any rule that `quantize.rejects` takes."""
    rule = call.scale_rule
    if rule.correction is None and not isinstance(rule.scales, LeastLoss):
        return by_handler.quantize(x, random_bits, tensor_scale, call)
    x = lax.stop_gradient(x)
    if call.format.tensor_scale and tensor_scale is None:
        tensor_scale = tensor_scale_of(x, call)
    how = _corrected if rule.correction is not None else _of_least_loss
    return how(x, random_bits, tensor_scale, call)


def _corrected(
    x: jax.Array, random_bits: Any, tensor_scale: jax.Array | None, call: QuantizeCall
) -> MXArray:
    found = by_handler.quantize(x, None, tensor_scale, by_handler.first_cast(call))
    pieces, inside = block_shapes.split(x, call.blocks, fill=True)
    codes, _ = block_shapes.split(found.codes, call.blocks, fill=True)
    spread, scales, drawn = (
        None if own is None else block_shapes.spread(own, inside)
        for own in (tensor_scale, found.scales, random_bits)
    )
    unseen: Any = None
    data = BlockData(pieces, inside, unseen, call.format, spread)
    assert call.scale_rule.correction is not None and scales is not None
    scales = call.scale_rule.correction(data, scales, codes, drawn)
    return dataclasses.replace(found, scales=lax.squeeze(scales, inside))


def _of_least_loss(
    x: jax.Array, random_bits: Any, tensor_scale: jax.Array | None, call: QuantizeCall
) -> MXArray:
    """Of two casts, in each block that which loses less where it rounds to nearest."""
    assert isinstance(call.scale_rule.scales, LeastLoss)
    casts = [
        dataclasses.replace(
            call, scale_rule=dataclasses.replace(call.scale_rule, scales=FromAmax(rule))
        )
        for rule in call.scale_rule.scales.rules
    ]
    nearest = [
        by_handler.quantize(x, None, tensor_scale, dataclasses.replace(cast, rounding=NEAREST))
        for cast in casts
    ]
    lost, other = (_lost(x, own, call) for own in nearest)
    first, second = nearest
    if call.rounding != NEAREST:
        first, second = (by_handler.quantize(x, random_bits, tensor_scale, own) for own in casts)
    better = other < lost
    (left, inside), (right, _) = (
        block_shapes.split(own.codes, call.blocks, fill=True) for own in (first, second)
    )
    return dataclasses.replace(
        first,
        codes=block_shapes.merge(jnp.where(better, right, left), x.shape, inside),
        scales=jnp.where(lax.squeeze(better, inside), second.scales, first.scales),
    )


def _lost(x: jax.Array, found: MXArray, call: QuantizeCall) -> jax.Array:
    """`reference.scale_rules.squared_error` of codes that are known."""
    back = DequantizeCall(
        shape=x.shape, dtype=np.dtype(np.float32), format=call.format, blocks=call.blocks
    )
    difference = dequantize(found, back) - x.astype(jnp.float32)
    pieces, inside = block_shapes.split(difference, call.blocks, fill=True)
    return jnp.sum(jnp.square(pieces), axis=inside, keepdims=True)
