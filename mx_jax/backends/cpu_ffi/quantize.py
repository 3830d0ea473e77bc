"""Quantizing by the compiled handler: which calls it takes, and how it is called."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mx_jax.backends.calls import QuantizeCall
from mx_jax.backends.cpu_ffi.cast_axes import cast_axes, flat_blocks
from mx_jax.backends.cpu_ffi.handler import Handler, hashable
from mx_jax.backends.cpu_ffi.tensor_scale import tensor_scale_of
from mx_jax.codecs.blocks import Blocks
from mx_jax.codecs.rounding import AWAY, NEAREST, TOWARD_ZERO, Rounding
from mx_jax.formats import WHOLE, BlockFormat, ElementFormat
from mx_jax.mxarray import MXArray
from mx_jax.reference.scale_rules import (
    AMAX,
    AMAX_MULTIPLIER,
    AMAX_SUBNORMAL,
    FLOAT8,
    FLOAT8_POWER_OF_TWO,
    AmaxBecomes,
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
    if _rule(first_cast(call)) is None:
        return f"computes no scales by the rule {call.scale_rule.name!r} for {call.format.name}"
    if _rounding(call.rounding) is None:
        return f"knows no rounding={call.rounding.name!r}"
    reason = rejects_parts(call.format)
    if reason is not None:
        return reason
    return rejects_blocks(call.blocks)


def rejects_parts(format: BlockFormat) -> str | None:
    """Why the handlers do not know a format's elements or scales, or None."""
    if format.is_known:
        return None
    element, scale = format.element.name, format.scale.name
    return f"knows the library's own formats, got other facts of element={element}, scale={scale}"


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


def first_cast(call: QuantizeCall) -> QuantizeCall:
    """The cast that is made first: by the rule without a correction, or by the first of two."""
    rule = dataclasses.replace(call.scale_rule, correction=None)
    if isinstance(rule.scales, LeastLoss):
        rule = dataclasses.replace(rule, scales=FromAmax(rule.scales.rules[0]))
    return dataclasses.replace(call, scale_rule=rule)


def _rounding(rounding: Rounding) -> str | None:
    """What the handler calls a rounding; None if it does not know it."""
    if rounding.is_stochastic:
        return "stochastic"
    return None if rounding.random_bits else _ROUNDINGS.get(rounding.apply)


def rejects_blocks(blocks: Blocks) -> str | None:
    """Why the handlers cannot walk these blocks, or None."""
    axes = sorted(axis for axis, _ in blocks)
    if not axes:
        return "needs a blocked axis"
    if axes != [-2, -1] and len(axes) > 1 and any(size is not WHOLE for _, size in blocks):
        return f"takes two-dimensional blocks of the last two axes, got blocks={blocks}"
    if axes != list(range(axes[0], axes[-1] + 1)):
        return f"needs neighbouring blocked axes, got blocks={blocks}"
    return None


def quantize(
    x: jax.Array,
    random_bits: jax.Array | None,
    tensor_scale: jax.Array | None,
    call: QuantizeCall,
) -> MXArray:
    """x quantized by the handler, by a rule of amax."""
    x = lax.stop_gradient(x)
    if call.format.tensor_scale and tensor_scale is None:
        tensor_scale = tensor_scale_of(x, call)
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


def facts(element: ElementFormat) -> np.ndarray:
    """The independent facts of a format, as `custom_calls/common/element_codec.h` orders them."""
    numbers = (
        element.exponent_bits,
        element.mantissa_bits,
        element.bias,
        element.num_reserved_codes,
        element.has_inf,
        element.kind == "int",
        element.has_negative_zero,
        element.negative_extra,
    )
    return np.array(numbers, np.int32)
