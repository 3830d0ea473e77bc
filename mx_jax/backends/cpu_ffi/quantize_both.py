"""Quantizing along two axes at once by the compiled handler, which reads the array once."""

import jax
from jax import lax

from mx_jax.backends.calls import QuantizeBothCall, QuantizeCall
from mx_jax.backends.cpu_ffi import quantize
from mx_jax.backends.cpu_ffi.cast_axes import cast_axes
from mx_jax.backends.cpu_ffi.handler import Handler, hashable
from mx_jax.backends.cpu_ffi.tensor_scale import tensor_scale_of
from mx_jax.codecs.blocks import Blocks, block_extent
from mx_jax.formats import Whole
from mx_jax.mxarray import MXArray

TARGET = "mx_jax_cpu_quantize_both"

# Rows that a strip holds in the cache while both casts read it.
_LARGEST_BLOCK = 1024

Bits = tuple[jax.Array | None, jax.Array | None]


def rejects(call: QuantizeBothCall) -> str | None:
    """Why the handler does not take both casts, or None."""
    for single in (call.first, call.second):
        reason = quantize.rejects(single) or _rejects_rule(single) or _rejects_blocks(single.blocks)
        if reason is not None:
            return reason
    last, other = _ordered(call)
    (axis, size), (other_axis, _) = last.blocks[0], other.blocks[0]
    if axis != -1 or other_axis == -1:
        axes = (axis, other_axis)
        return f"casts both ways along the last axis and another one, got axes {axes}"
    if other_axis != -2 and last.shape[-1] % block_extent(size, last.shape[-1]):
        return (
            f"casts both ways along distant axes in whole blocks, got shape={last.shape}, "
            f"blocks={last.blocks}"
        )
    if call.first.format.tensor_scale != call.second.format.tensor_scale:
        return "casts both ways with tensor scales, or without, got one of each"
    return None


def quantize_both(
    x: jax.Array, random_bits: Bits, tensor_scale: jax.Array | None, call: QuantizeBothCall
) -> tuple[MXArray, MXArray]:
    """x quantized twice by the handler."""
    x = lax.stop_gradient(x)
    last, other = _ordered(call)
    swapped = last is not call.first
    first, second = random_bits
    bits = (second, first) if swapped else (first, second)
    of_last, of_other = tensor_scale, tensor_scale
    if call.first.format.tensor_scale and tensor_scale is None:
        # One each: blocks with NaN or Inf count for neither, and they are other blocks.
        of_last, of_other = tensor_scale_of(x, last), tensor_scale_of(x, other)
    parts = _by_handler((last, other), bits, x, (of_last, of_other))
    codes, scales, other_codes, other_scales = parts
    along_last = quantize.as_mxarray(codes, scales, of_last, last)
    along_other = quantize.as_mxarray(other_codes, other_scales, of_other, other)
    return (along_other, along_last) if swapped else (along_last, along_other)


def _by_handler(
    calls: tuple[QuantizeCall, QuantizeCall],
    bits: Bits,
    x: jax.Array,
    tensor_scales: tuple[jax.Array | None, jax.Array | None],
) -> tuple[jax.Array, ...]:
    last, other = calls
    axes, has_tensor_scale = cast_axes(last.blocks, other.blocks), tensor_scales[0] is not None
    operands, given = [x], [axes.elements]
    for drawn, tensor_scale in zip(bits, tensor_scales, strict=True):
        if tensor_scale is not None:
            operands.append(tensor_scale)
            given.append(axes.tensor_scale)
        if drawn is not None:
            operands.append(drawn)
            given.append(axes.elements)
    wanted = [f"{axes.elements}, {scales}" for scales in axes.scales]
    handler = Handler(
        target=TARGET,
        axes=f"{', '.join(given)} -> {', '.join(wanted)}",
        dtypes=quantize.result_dtypes(last) + quantize.result_dtypes(other),
        attributes=hashable(attributes(calls, has_tensor_scale)),
    )
    return handler(*operands)


def attributes(
    calls: tuple[QuantizeCall, QuantizeCall], has_tensor_scale: bool
) -> dict[str, object]:
    """What the handler is told: the single cast's attributes, of the last axis and of the other."""
    return {
        f"{prefix}_{name}": value
        for prefix, call in zip(("last", "other"), calls, strict=True)
        for name, value in (
            quantize.attributes(call) | {"has_tensor_scale": has_tensor_scale}
        ).items()
    }


def _rejects_blocks(blocks: Blocks) -> str | None:
    sizes = [size for _, size in blocks]
    if len(sizes) != 1 or isinstance(sizes[0], Whole):
        return f"casts both ways along one axis each, got blocks={blocks}"
    if sizes[0] > _LARGEST_BLOCK:
        return f"casts both ways blocks <= {_LARGEST_BLOCK}, got blocks={blocks}"
    return None


def _rejects_rule(call: QuantizeCall) -> str | None:
    if not call.scale_rule.reads_values:
        return None
    return f"casts both ways by rules of amax alone, got {call.scale_rule.name!r}"


def _ordered(call: QuantizeBothCall) -> tuple[QuantizeCall, QuantizeCall]:
    """The cast along the last axis first, if there is one."""
    if call.first.blocks[0][0] == -1:
        return call.first, call.second
    return call.second, call.first
