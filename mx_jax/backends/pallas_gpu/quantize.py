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
from mx_jax.backends.pallas_gpu.views import View, padded
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
    if reason := rejects_machine(target):
        return reason
    if isinstance(call, QuantizeCall):
        return _rejects(call)
    return _rejects(call.first) or _rejects(call.second) or _rejects_pair(call)


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


def _rejects_pair(call: QuantizeBothCall) -> str | None:
    ((first, size),), ((second, other_size),) = call.first.blocks, call.second.blocks
    if {first, second} != {-1, -2}:
        return f"casts both ways along the last two axes, got axes {(first, second)}"
    if size != other_size:
        return f"casts both ways in blocks of one size, got {size} and {other_size}"
    return None


def quantize(
    x: jax.Array,
    random_bits: jax.Array | None,
    tensor_scale: jax.Array | None,
    call: QuantizeCall,
    *,
    architecture: Architecture | None = None,
    interpret: object = None,
) -> MXArray:
    """x quantized along one axis, by a tensor scale that is given or computed."""
    (out,) = _cast(x, (call,), tensor_scale, architecture, interpret)
    return out


def quantize_both(
    x: jax.Array,
    random_bits: tuple[jax.Array | None, jax.Array | None],
    tensor_scale: jax.Array | None,
    call: QuantizeBothCall,
    *,
    architecture: Architecture | None = None,
    interpret: object = None,
) -> tuple[MXArray, MXArray]:
    """x quantized along its last two axes, read once; see `quantize`."""
    first, second = _cast(x, (call.first, call.second), tensor_scale, architecture, interpret)
    return first, second


def _cast(
    x: jax.Array,
    calls: tuple[QuantizeCall, ...],
    tensor_scale: jax.Array | None,
    architecture: Architecture | None,
    interpret: object,
) -> list[MXArray]:
    x = lax.stop_gradient(x)
    architecture = architecture or current_architecture()
    if len({call.format.tensor_scale for call in calls}) > 1:
        # One may lift x, and the other must not.
        return [_cast(x, (c,), tensor_scale, architecture, interpret)[0] for c in calls]
    factors = [_tensor_scale(x, call, tensor_scale) for call in calls]
    if factors[0] is None:
        arrays = _run(x, None, calls, architecture, interpret)
    else:
        # Under vmap a loop: the kernel has one scale for all that it quantizes.
        @sequential_vmap
        def scaled(x: jax.Array, tensor_scale: jax.Array) -> tuple[jax.Array, ...]:
            return divided(
                x, tensor_scale, lambda x, scale: _run(x, scale, calls, architecture, interpret)
            )

        # Where there are two, both are of the same tensor.
        arrays = scaled(x, factors[0].reshape(()))
    return [
        MXArray(
            codes=codes,
            scales=scales,
            tensor_scale=factor,
            format=call.format,
            blocks=call.blocks,
            dtype=call.dtype,
        )
        for call, factor, codes, scales in zip(
            calls, factors, arrays[::2], arrays[1::2], strict=True
        )
    ]


def _tensor_scale(
    x: jax.Array, call: QuantizeCall, tensor_scale: jax.Array | None
) -> jax.Array | None:
    """The scale that is given, or computed from x by XLA; None where the format has none."""
    if not call.format.tensor_scale or tensor_scale is not None:
        return tensor_scale
    pieces, inside = block_shapes.split(x, call.blocks)
    magnitudes = float32.to_bits(pieces) & float32.ABS
    amax = jnp.max(magnitudes, axis=inside, keepdims=True, initial=0)
    return reference.tensor_scale_of(amax, call.scale_rule.largest_value(call.format), x.ndim)


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
    from mx_jax.backends.pallas_gpu import quantize_kernel

    # The kernel's order: columns before rows.
    ordered = sorted(calls, key=lambda call: call.blocks)
    view = View.of(x.shape, tuple(call.blocks[0] for call in ordered))
    tile = view.tile(x.dtype.itemsize)
    encoders = tuple(_encoder(call, architecture, interpret is not None) for call in ordered)
    outs = quantize_kernel.quantize(
        padded(view.into(x), tile.padded(view.shape)),
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


def _encoder(call: QuantizeCall, architecture: Architecture, interpreted: bool) -> Any:
    from mx_jax.backends.pallas_gpu.quantize_kernel import Encoder

    rule, of = call.scale_rule, call.format.scale.element
    smallest = 0.0
    if of is not None:
        subnormal = _ELEMENT_RULES[rule.scales]
        smallest = of.smallest_subnormal if subnormal else of.smallest_normal
    return Encoder(
        format=call.format,
        threshold=rule.kernel_threshold(call.format.element),
        smallest_scale=smallest,
        converts=architecture.converts_float8,
        interpreted=interpreted,
    )
