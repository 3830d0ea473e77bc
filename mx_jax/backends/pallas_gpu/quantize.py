"""Casts by the GPU's quantizing kernel: which calls it takes, and how a tensor reaches it."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import sequential_vmap

from mx_jax.backends.calls import QuantizeBothCall, QuantizeCall
from mx_jax.backends.pallas_gpu.architecture import Architecture, current_architecture
from mx_jax.backends.pallas_gpu.rejections import rejects_machine
from mx_jax.backends.target import Target
from mx_jax.codecs import blocks as block_shapes
from mx_jax.codecs import float32
from mx_jax.codecs.rounding import NEAREST
from mx_jax.codecs.scale import divided
from mx_jax.mxarray import MXArray
from mx_jax.reference import quantize as reference
from mx_jax.reference.scale_rules import AMAX, AMAX_SUBNORMAL

_DTYPES = tuple(map(jnp.dtype, ("float32", "bfloat16", "float16")))
# A warp holds whole blocks, in both directions.
BLOCKS = (16, 32)
# The kernel counts elements in 32 bits.
_MAX_ELEMENTS = 2**31 - 1
# Rules of scales in an element format, by what they compute: whether subnormal scales are used.
_ELEMENT_RULES = {AMAX.scales: False, AMAX_SUBNORMAL.scales: True}


def rejects(call: QuantizeCall | QuantizeBothCall, target: Target) -> str | None:
    """Why the kernel does not take a call on a machine, or None."""
    if isinstance(call, QuantizeCall):
        return rejects_machine(target) or _rejects(call)
    if reason := rejects_machine(target) or _rejects(call.first) or _rejects(call.second):
        return reason
    ((first, size),), ((second, other_size),) = call.first.blocks, call.second.blocks
    if {first, second} != {-1, -2}:
        return f"casts both ways along the last two axes, got axes {(first, second)}"
    if size != other_size:
        return f"casts both ways in blocks of one size, got {size} and {other_size}"
    return None


def _rejects(call: QuantizeCall) -> str | None:
    if call.scale_axes:
        return f"takes one tensor scale, got one for each position of axes={call.scale_axes}"
    if call.dtype not in _DTYPES:
        return f"needs float32, bfloat16 or float16, got dtype={call.dtype}"
    if call.rounding != NEAREST:
        return f"rounds to nearest even, got rounding={call.rounding.name!r}"
    sizes = [size for _, size in call.blocks]
    if len(sizes) != 1 or sizes[0] not in BLOCKS:
        return f"takes blocks of 16 or 32 along one axis, got blocks={call.blocks}"
    rule, element, kind = call.scale_rule, call.format.element, call.format.scale.kind
    if rule.correction is not None:
        return f"stores scales as the rule gives them, got {rule.name!r}, which corrects them"
    if not call.format.is_known:
        return f"knows the library's own formats, got other facts of {call.format.name}"
    threshold = rule.kernel_threshold(element)
    if kind != ("element" if threshold is None else "exponent") or (
        threshold is None and rule.scales not in _ELEMENT_RULES
    ):
        return f"computes no scales by the rule {rule.name!r} for {call.format.name}"
    if element.kind == "float" and not element.has_negative_zero:
        return f"needs elements with a negative zero, got element={element.name}"
    if threshold is None and element.nan_code is not None:
        return f"needs elements without NaN under float scales, got element={element.name}"
    if math.prod(call.shape) > _MAX_ELEMENTS:
        return f"needs at most {_MAX_ELEMENTS} elements, got shape={call.shape}"
    return None


def quantize(
    x: jax.Array,
    random_bits: Any,
    tensor_scale: jax.Array | None,
    call: QuantizeCall | QuantizeBothCall,
    *,
    architecture: Architecture | None = None,
    interpret: object = None,
) -> Any:
    """x quantized along one axis, by a tensor scale that is given or computed.

    Or along its last two axes, read once: a pair.
    """
    x = lax.stop_gradient(x)
    calls = (call,) if isinstance(call, QuantizeCall) else (call.first, call.second)
    architecture = architecture or current_architecture()
    if len({own.format.tensor_scale for own in calls}) > 1:
        # One may lift x, and the other must not.
        how: dict[str, Any] = {"architecture": architecture, "interpret": interpret}
        return tuple(quantize(x, None, tensor_scale, own, **how) for own in calls)
    # Where there are two, both are of the same tensor and of the same kind.
    factors = [tensor_scale] * len(calls)
    if calls[0].format.tensor_scale and tensor_scale is None:
        factors = []
        for own in calls:
            pieces, inside = block_shapes.split(x, own.blocks)
            magnitudes = float32.to_bits(pieces) & float32.ABS
            amax = jnp.max(magnitudes, axis=inside, keepdims=True, initial=0)
            largest = own.scale_rule.largest_value(own.format)
            factors.append(reference.tensor_scale_of(amax, largest, x.ndim))
    if factors[0] is None:
        arrays = _run(x, None, calls, architecture, interpret)
    else:
        # Under vmap a loop: the kernel has one scale for all that it quantizes.
        @sequential_vmap
        def scaled(x: jax.Array, tensor_scale: jax.Array) -> tuple[jax.Array, ...]:
            return divided(
                x, tensor_scale, lambda x, scale: _run(x, scale, calls, architecture, interpret)
            )

        arrays = scaled(x, factors[0].reshape(()))
    found = tuple(
        MXArray(
            codes=codes,
            scales=scales,
            tensor_scale=factor,
            format=own.format,
            blocks=own.blocks,
            dtype=own.dtype,
        )
        for own, factor, codes, scales in zip(
            calls, factors, arrays[::2], arrays[1::2], strict=True
        )
    )
    return found if isinstance(call, QuantizeBothCall) else found[0]


def _run(
    x: jax.Array,
    tensor_scale: jax.Array | None,
    calls: tuple[QuantizeCall, ...],
    architecture: Architecture,
    interpret: object,
) -> tuple[jax.Array, ...]:
    """Codes and scales of each call: a view of x, in whole tiles, through the kernel."""
    if x.size == 0:
        whole = [(x.shape, block_shapes.scales_shape(x.shape, call.blocks)) for call in calls]
        return tuple(jnp.zeros(shape, jnp.uint8) for shapes in whole for shape in shapes)
    # Mosaic GPU is missing from older versions of JAX, which `rejects` keeps away from here.
    from mx_jax.backends.pallas_gpu import quantize_kernel as kernel

    # The kernel's order: columns before rows.
    ordered = sorted(calls, key=lambda call: call.blocks)
    view = kernel.View.of(x.shape, tuple(call.blocks[0] for call in ordered))
    tile, encoders = view.tile(x.dtype.itemsize), []
    for call in ordered:
        of, smallest = call.format.scale.element, 0.0
        if of is not None:
            subnormal = _ELEMENT_RULES[call.scale_rule.scales]
            smallest = of.smallest_subnormal if subnormal else of.smallest_normal
        encoders.append(
            kernel.Encoder(
                format=call.format,
                threshold=call.scale_rule.kernel_threshold(call.format.element),
                smallest_scale=smallest,
                converts=architecture.converts_float8,
                interpreted=interpret is not None,
            )
        )
    outs = kernel.quantize(
        kernel.padded(view.into(x), tile.padded(view.shape)),
        None if tensor_scale is None else tensor_scale.reshape(1),
        tile=tile,
        encoders=encoders,
        interpret=interpret,
    )
    found = {
        call: (
            view.codes(outs[2 * i]),
            view.scales(outs[2 * i + 1], i, block_shapes.scales_shape(x.shape, call.blocks)),
        )
        for i, call in enumerate(ordered)
    }
    return tuple(array for call in calls for array in found[call])
