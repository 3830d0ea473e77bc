"""Quantizing by the compiled handler: which calls it takes, and how it is called."""

import jax
import jax.numpy as jnp
import numpy as np

from mx_jax.backends.base import QuantizeCall
from mx_jax.backends.cpu_ffi import cast
from mx_jax.backends.cpu_ffi.tensor_scale import tensor_scale_of
from mx_jax.codecs.blocks import Blocks
from mx_jax.formats import WHOLE, ElementFormat
from mx_jax.mxarray import MXArray
from mx_jax.reference import quantize as reference

TARGET = "mx_jax_cpu_quantize"

# Rules of float32 and element scales that the handler computes, by name; rules with a threshold are
# told by it.
_NAMED_RULES = ("amax", "amax_subnormal", "float8", "float8_power_of_two", "amax_multiplier")
_ROUNDINGS = ("nearest", "away", "toward_zero", "stochastic")


def rejects(call: QuantizeCall) -> str | None:
    """Why the handler does not take a call, or None."""
    if call.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        return f"needs float32, bfloat16 or float16, got dtype={call.dtype}"
    if call.scale_rule.threshold is None and call.scale_rule.name not in _NAMED_RULES:
        return f"computes no scales by the rule {call.scale_rule.name!r}"
    if call.rounding.name not in _ROUNDINGS:
        return f"knows no rounding={call.rounding.name!r}"
    return rejects_blocks(call.blocks)


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
    call: QuantizeCall,
    random_bits: jax.Array | None,
    tensor_scale: jax.Array | None,
) -> MXArray:
    """x quantized by the handler."""
    x = jax.lax.stop_gradient(x)
    if call.format.tensor_scale and tensor_scale is None:
        tensor_scale = tensor_scale_of(x, call)
    optional = {}
    if tensor_scale is not None:
        optional["tensor_scale"] = cast.Entry(per="tensor"), tensor_scale
    if random_bits is not None:
        optional["random_bits"] = cast.Entry(per="element"), random_bits

    def elsewhere(x, *rest):
        given = dict(zip(optional, rest, strict=True))
        q = reference.quantize(
            x, call.format, call.blocks, call.scale_rule, rounding=call.rounding, **given
        )
        return q.codes, q.scales

    operands = (x, *(operand for _, operand in optional.values()))
    entries = tuple(entry for entry, _ in optional.values())
    codes, scales = cast.run(_cast(call, entries), operands, elsewhere)
    return as_mxarray(codes, scales, tensor_scale, call)


def _cast(call: QuantizeCall, optional: tuple[cast.Entry, ...]) -> cast.Cast:
    has_tensor_scale = any(entry.per == "tensor" for entry in optional)
    given = attributes(call) | {"has_tensor_scale": has_tensor_scale, "packed": False}
    return cast.Cast(
        target=TARGET,
        attributes=cast.hashable(given),
        blocks=call.blocks,
        operands=(cast.Entry(per="element"), *optional),
        results=results(call),
    )


def results(call: QuantizeCall) -> tuple[cast.Entry, cast.Entry]:
    """Codes and scales."""
    return (
        cast.Entry(per="element", dtype=np.dtype("uint8")),
        cast.Entry(per="block", dtype=call.format.scale.storage_dtype, blocks=call.blocks),
    )


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
    rule = call.scale_rule
    scale_element = call.format.scale.element
    threshold = None if rule.threshold is None else rule.threshold(call.format.element)
    return {
        "blocks": cast.flat_blocks(call.blocks),
        "element": facts(call.format.element),
        "rounding": call.rounding.name,
        "random_bits": np.int32(call.rounding.random_bits),
        "rule": rule.name if threshold is None else "exponent",
        "scale_element": np.zeros(0, np.int32) if scale_element is None else facts(scale_element),
        "threshold": np.int32(threshold or 0),
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
