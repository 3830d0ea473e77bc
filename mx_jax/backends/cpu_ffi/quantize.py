"""Quantizing by the compiled handler: which calls it takes, and how it is called."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mx_jax.backends.calls import DequantizeCall, QuantizeCall
from mx_jax.backends.cpu_ffi.cast_axes import (
    cast_axes,
    facts,
    flat_blocks,
    rejects_blocks,
    rejects_parts,
)
from mx_jax.backends.cpu_ffi.dequantize import dequantize
from mx_jax.backends.cpu_ffi.handler import Handler, hashable
from mx_jax.backends.cpu_ffi.tensor_scale import tensor_scale_of
from mx_jax.codecs import blocks as block_shapes
from mx_jax.codecs.rounding import AWAY, NEAREST, TOWARD_ZERO, Rounding
from mx_jax.mxarray import MXArray
from mx_jax.reference.scale_rules import (
    AMAX,
    AMAX_MULTIPLIER,
    AMAX_SUBNORMAL,
    FLOAT8,
    FLOAT8_POWER_OF_TWO,
    AmaxBecomes,
    BlockData,
    FromAmax,
    LeastLoss,
)

TARGET = "mx_jax_cpu_quantize"

# Rules of float32 and element scales that the handler computes, by what they compute: its name for
# them, and the kind of scale that it fills. Rules of powers of two are told by their threshold.
_RULES = {
    AMAX.scales: ("amax", "element"),
    AMAX_SUBNORMAL.scales: ("amax_becomes", "element"),
    FLOAT8.scales: ("float8", "divisor"),
    FLOAT8_POWER_OF_TWO.scales: ("float8_power_of_two", "divisor"),
    AMAX_MULTIPLIER.scales: ("amax_multiplier", "multiplier"),
}
_ROUNDINGS = {NEAREST.apply: "nearest", AWAY.apply: "away", TOWARD_ZERO.apply: "toward_zero"}


def rejects(call: QuantizeCall) -> str | None:
    """Why the handler does not take a call, or None."""
    if call.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        return f"needs float32, bfloat16 or float16, got dtype={call.dtype}"
    if _rule(_first_cast(call)) is None:
        return f"computes no scales by the rule {call.scale_rule.name!r} for {call.format.name}"
    if _rounding(call.rounding) is None:
        return f"knows no rounding={call.rounding.name!r}"
    reason = rejects_parts(call.format)
    if reason is not None:
        return reason
    return rejects_blocks(call.blocks)


class _Rule(NamedTuple):
    """What the handler is told of a rule.

    Attributes:
      name: what it calls it.
      threshold: of a power of two; else 0.
      target: what amax becomes over the scale.
    """

    name: str
    threshold: int = 0
    target: float = 0.0


def _rule(call: QuantizeCall) -> _Rule | None:
    """What the handler is told of a call's rule; None if it does not know it."""
    rule, element = call.scale_rule, call.format.element
    if (threshold := rule.kernel_threshold(element)) is not None:
        found = _Rule("exponent", threshold), "exponent"
    elif isinstance(rule.scales, FromAmax) and isinstance(rule.scales.function, AmaxBecomes):
        found = _Rule("amax_becomes", target=rule.scales.function.largest), "element"
    elif rule.scales in _RULES:
        name, kind = _RULES[rule.scales]
        found = _Rule(name, target=element.max), kind
    else:
        return None
    return found[0] if found[1] == call.format.scale.kind else None


def _first_cast(call: QuantizeCall) -> QuantizeCall:
    """The cast that is made first: by the rule without a correction, or by the first of two."""
    rule = dataclasses.replace(call.scale_rule, correction=None)
    call = dataclasses.replace(call, scale_rule=rule)
    return _by(call, rule.scales.rules[0]) if isinstance(rule.scales, LeastLoss) else call


def _by(call: QuantizeCall, function: AmaxBecomes) -> QuantizeCall:
    """The cast by another function of amax, and the same tensor scale."""
    rule = dataclasses.replace(call.scale_rule, scales=FromAmax(function))
    return dataclasses.replace(call, scale_rule=rule)


def _rounding(rounding: Rounding) -> str | None:
    """What the handler calls a rounding; None if it does not know it."""
    if rounding.is_stochastic:
        return "stochastic"
    return None if rounding.random_bits else _ROUNDINGS.get(rounding.apply)


def quantize(
    x: jax.Array,
    random_bits: jax.Array | None,
    tensor_scale: jax.Array | None,
    call: QuantizeCall,
) -> MXArray:
    """x quantized: elements by the handler, what some rules do besides by plain JAX."""
    x, rule = lax.stop_gradient(x), call.scale_rule
    if call.format.tensor_scale and tensor_scale is None:
        tensor_scale = tensor_scale_of(x, call)
    how = _quantize
    if rule.correction is not None:
        how = _corrected
    elif isinstance(rule.scales, LeastLoss):
        how = _of_least_loss
    return how(x, random_bits, tensor_scale, call)


def _corrected(
    x: jax.Array, random_bits: Any, tensor_scale: jax.Array | None, call: QuantizeCall
) -> MXArray:
    found = _quantize(x, None, tensor_scale, _first_cast(call))
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
    casts = [_by(call, function) for function in call.scale_rule.scales.rules]
    nearest = [
        _quantize(x, None, tensor_scale, dataclasses.replace(cast, rounding=NEAREST))
        for cast in casts
    ]
    lost, other = (_lost(x, own, call) for own in nearest)
    first, second = nearest
    if call.rounding != NEAREST:
        first, second = (_quantize(x, random_bits, tensor_scale, own) for own in casts)
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


def _quantize(
    x: jax.Array,
    random_bits: jax.Array | None,
    tensor_scale: jax.Array | None,
    call: QuantizeCall,
) -> MXArray:
    """By a rule of amax, by the handler alone, which is given the tensor scale."""
    axes, optional = cast_axes(call.blocks), {}
    if tensor_scale is not None:
        optional["tensor_scale"] = axes.tensor_scale, tensor_scale
    if random_bits is not None:
        optional["random_bits"] = axes.elements, random_bits
    given = ", ".join([axes.elements, *(own for own, _ in optional.values())])
    handler = Handler(
        target=TARGET,
        axes=f"{given} -> {axes.elements}, {axes.scales[0]}",
        dtypes=result_dtypes(call),
        attributes=hashable(attributes(call) | {"has_tensor_scale": tensor_scale is not None}),
    )
    codes, scales = handler(x, *(operand for _, operand in optional.values()))
    return as_mxarray(codes, scales, tensor_scale, call)


def result_dtypes(call: QuantizeCall) -> tuple[np.dtype, np.dtype]:
    """Of codes and scales."""
    return np.dtype("uint8"), call.format.scale.storage_dtype


def as_mxarray(
    codes: jax.Array, scales: jax.Array, tensor_scale: jax.Array | None, call: QuantizeCall
) -> MXArray:
    """What the handler gave, as what backends return."""
    return MXArray(
        codes=codes,
        scales=scales,
        tensor_scale=tensor_scale,
        format=call.format,
        blocks=call.blocks,
        dtype=np.dtype(call.dtype),
    )


def attributes(call: QuantizeCall) -> dict[str, object]:
    """What the handler is told about a call, besides shapes and dtypes."""
    rule, rounding = _rule(call), _rounding(call.rounding)
    assert rule is not None and rounding is not None, call
    scale_element = call.format.scale.element
    return {
        "blocks": flat_blocks(call.blocks),
        "element": facts(call.format.element),
        "rounding": rounding,
        "random_bits": np.int32(call.rounding.random_bits),
        "rule": rule.name,
        "scale_element": np.zeros(0, np.int32) if scale_element is None else facts(scale_element),
        "target": np.float32(rule.target),
        "threshold": np.int32(rule.threshold),
    }
