"""What is computed by `custom_calls/casts/`: casts, what they draw and transform, statistics."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mx_jax.backends.calls import (
    CastStatisticsCall,
    DequantizeCall,
    QuantizeBothCall,
    QuantizeCall,
    RandomBitsCall,
    TransformCall,
    rejects_symbolic,
)
from mx_jax.backends.cpu_ffi import handler
from mx_jax.codecs import blocks as block_shapes
from mx_jax.codecs.lowering import lowering
from mx_jax.codecs.rounding import AWAY, NEAREST, TOWARD_ZERO, DerivedKey, Rounding
from mx_jax.formats import WHOLE, BlockFormat, ElementFormat, Whole
from mx_jax.mxarray import MXArray
from mx_jax.reference import quantize as reference
from mx_jax.reference import scale_rules
from mx_jax.reference import statistics as reference_statistics

DTYPES = tuple(map(jnp.dtype, ("float32", "bfloat16", "float16")))


class CastAxes(NamedTuple):
    """Names of a cast's axes, such as `"*b a1 a0"` where blocks lie along the last but one."""

    elements: str  # what has one entry for each element
    tensor_scale: str  # one entry for all, or for each position of some of the tensor's first axes
    tensor_scales: str  # one for each of a batch, where all of the tensor's axes have names
    scales: tuple[str, ...]  # one entry for each block, for each kind of blocks


def cast_axes(*kinds: block_shapes.Blocks, depth: int = 0) -> CastAxes:
    """Axes of a tensor with these blocks: as far as blocks lie, and `depth`, each has a name."""
    depth = max(depth, *(-axis for blocks in kinds for axis, _ in blocks))
    names = [f"a{place}" for place in reversed(range(depth))]
    scales = []
    for blocks in kinds:
        counted = list(names)
        for axis, size in blocks:
            counted[axis] += f"/{names[axis] if size is WHOLE else size}"
        scales.append(" ".join(["*b", *counted]))
    ones = " 1" * depth
    return CastAxes(" ".join(["*b", *names]), f"*t{ones}", f"*b{ones}", tuple(scales))


def flat_blocks(blocks: block_shapes.Blocks) -> np.ndarray:
    """Axis from the end and size, in turn, ascending; 0 stands for WHOLE."""
    pairs = [(axis, 0 if size is WHOLE else size) for axis, size in sorted(blocks)]
    return np.array(pairs, np.int64).reshape(-1)


def rejects_parts(format: BlockFormat) -> str | None:
    """Why the handlers do not know a format's elements or scales, or None."""
    if format.is_known:
        return None
    element, scale = format.element.name, format.scale.name
    return f"knows the library's own formats, got other facts of element={element}, scale={scale}"


def rejects_blocks(blocks: block_shapes.Blocks) -> str | None:
    """Why the handlers cannot walk these blocks, or None."""
    axes = sorted(axis for axis, _ in blocks)
    if not axes:
        return "needs a blocked axis"
    if axes != [-2, -1] and len(axes) > 1 and any(size is not WHOLE for _, size in blocks):
        return f"takes two-dimensional blocks of the last two axes, got blocks={blocks}"
    if axes != list(range(axes[0], axes[-1] + 1)):
        return f"needs neighbouring blocked axes, got blocks={blocks}"
    return None


def facts(element: ElementFormat | None) -> np.ndarray:
    """The independent facts of a format, as `custom_calls/common/element_codec.h` orders them."""
    if element is None:
        return np.zeros(0, np.int32)
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


# Quantize -----------------------------------------------------------------------------------------

QUANTIZE = "mx_jax_cpu_quantize"
LEAST_LOSS = "mx_jax_cpu_least_loss"
QUANTIZE_BOTH = "mx_jax_cpu_quantize_both"

# Rows that a strip holds in the cache while both casts read it.
_LARGEST_BLOCK = 1024

# Rules of float32 and element scales that the handler computes, by what they compute: its name for
# them, and the kind of scale that it fills. Rules of powers of two have a threshold.
_RULES = {
    scale_rules.AMAX.scales: ("amax", "element"),
    scale_rules.AMAX_SUBNORMAL.scales: ("amax_becomes", "element"),
    scale_rules.FLOAT8.scales: ("float8", "divisor"),
    scale_rules.FLOAT8_POWER_OF_TWO.scales: ("float8_power_of_two", "divisor"),
    scale_rules.AMAX_DIVISOR.scales: ("amax_divisor", "divisor"),
    scale_rules.AMAX_MULTIPLIER.scales: ("amax_multiplier", "multiplier"),
}
_ROUNDINGS = {NEAREST.apply: "nearest", AWAY.apply: "away", TOWARD_ZERO.apply: "toward_zero"}

# Random bits, or what they are drawn by.
Bits = jax.Array | DerivedKey | None


class _Rule(NamedTuple):
    """A scale rule as the handler knows it."""

    name: str
    threshold: int  # of a power of two; else 0
    target: float  # what amax becomes over the scale


def _rule(call: QuantizeCall) -> _Rule | None:
    """The rule of a call as the handler has it; None if it has none."""
    rule, element = call.scale_rule, call.format.element
    function = rule.scales.function if isinstance(rule.scales, scale_rules.FromAmax) else None
    if (threshold := rule.kernel_threshold(element)) is not None:
        kind, result = "exponent", _Rule("exponent", threshold, 0.0)
    elif isinstance(function, scale_rules.AmaxBecomes):
        kind, result = "element", _Rule("amax_becomes", 0, function.largest)
    elif rule.scales in _RULES:
        name, kind = _RULES[rule.scales]
        result = _Rule(name, 0, element.max)
    else:
        return None
    return result if kind == call.format.scale.kind else None


def _rounding(rounding: Rounding) -> str | None:
    if rounding.is_stochastic:
        return "stochastic"
    return None if rounding.random_bits else _ROUNDINGS.get(rounding.apply)


def _first_of_two(call: QuantizeCall) -> QuantizeCall:
    """The first of the casts that `LeastLoss` chooses between; else the cast itself."""
    scales = call.scale_rule.scales
    if not isinstance(scales, scale_rules.LeastLoss):
        return call
    rule = dataclasses.replace(call.scale_rule, scales=scale_rules.FromAmax(scales.rules[0]))
    return dataclasses.replace(call, scale_rule=rule)


def rejects_quantize(call: QuantizeCall) -> str | None:
    """Why the handler does not take a call, or None."""
    if call.dtype not in DTYPES:
        return f"needs float32, bfloat16 or float16, got dtype={call.dtype}"
    if call.scale_rule.correction is not None or _rule(_first_of_two(call)) is None:
        return f"computes no scales by the rule {call.scale_rule.name!r} for {call.format.name}"
    if _rounding(call.rounding) is None:
        return f"knows no rounding={call.rounding.name!r}"
    if (reason := _rejects_scale_axes(call)) is not None:
        return reason
    return rejects_parts(call.format) or rejects_blocks(call.blocks)


def quantize(
    x: jax.Array, random_bits: Bits, tensor_scale: jax.Array | None, call: QuantizeCall
) -> MXArray:
    """x quantized by the handler; of a rule with two casts, the better of both in each block."""
    if not isinstance(call.scale_rule.scales, scale_rules.LeastLoss):
        return _quantize(x, random_bits, tensor_scale, call)
    if isinstance(random_bits, DerivedKey):
        random_bits = draw_bits(random_bits, call.drawn_by(random_bits))
    return _of_least_loss(x, random_bits, tensor_scale, call)


def _of_least_loss(
    x: jax.Array, random_bits: jax.Array | None, tensor_scale: jax.Array | None, call: QuantizeCall
) -> MXArray:
    """Of two casts, in each block that which loses less where it rounds to nearest."""
    rule = call.scale_rule
    assert isinstance(rule.scales, scale_rules.LeastLoss)
    casts = [
        dataclasses.replace(
            call, scale_rule=dataclasses.replace(rule, scales=scale_rules.FromAmax(function))
        )
        for function in rule.scales.rules
    ]
    in_turn = [dataclasses.replace(cast, rounding=NEAREST) for cast in casts]
    first = _quantize(x, None, tensor_scale, in_turn[0])
    tensor_scale = first.tensor_scale
    second = _quantize(x, None, tensor_scale, in_turn[1])
    float32 = np.dtype(np.float32)
    back = DequantizeCall(shape=x.shape, dtype=float32, format=call.format, blocks=call.blocks)
    values = [dequantize(array, back) for array in (first, second)]
    if call.rounding != NEAREST:
        first, second = (_quantize(x, random_bits, tensor_scale, cast) for cast in casts)
    axes = cast_axes(call.blocks)
    of_scales = axes.scales[0]
    codes, scales = handler.call(
        LEAST_LOSS,
        [
            *((array, axes.elements) for array in (x, *values, first.codes, second.codes)),
            *((array, of_scales) for array in (first.scales, second.scales)),
        ],
        [(axes.elements, "uint8"), (of_scales, "uint8")],
        attributes={"blocks": flat_blocks(call.blocks)},
    )
    return dataclasses.replace(first, codes=codes, scales=scales)


def _quantize(
    x: jax.Array, random_bits: Bits, tensor_scale: jax.Array | None, call: QuantizeCall
) -> MXArray:
    (array,) = _by_handler(QUANTIZE, {"": call}, x, (random_bits,), tensor_scale)
    return array


def _by_handler(
    target: str,
    calls: Mapping[str, QuantizeCall],
    x: jax.Array,
    bits: Sequence[Bits],
    tensor_scale: jax.Array | None,
) -> list[MXArray]:
    """One cast or two of x, by what the handler's attributes of each begin with.

    It draws by keys, and computes missing tensor scales where no devices share x.
    """
    casts = list(calls.values())
    finds = casts[0].format.tensor_scale and tensor_scale is None
    tensor_scales = [tensor_scale] * len(casts)
    if finds and not lowering.value.on_one_device:
        finds = False
        # One each: blocks with NaN or Inf count for neither, and they are other blocks.
        tensor_scales = [
            reference.find_tensor_scale(x, cast.blocks, cast.scale_rule.largest_value(cast.format))
            for cast in casts
        ]
    axes = cast_axes(*(call.blocks for call in casts), depth=x.ndim if finds else 0)
    operands: list[tuple[jax.Array | None, str]] = [(x, axes.elements)]
    kinds: list[tuple[str, str | np.dtype]] = []
    attributes: dict[str, object] = {}
    each = zip(calls.items(), bits, tensor_scales, axes.scales, strict=True)
    for (prefix, call), drawn, tensor_scale, scales in each:
        operands.append((tensor_scale, axes.tensor_scale))
        is_key = isinstance(drawn, DerivedKey)
        operands.append((drawn.data, "*k 2") if is_key else (drawn, axes.elements))
        kinds += [(axes.elements, "uint8"), (scales, call.format.scale.storage_dtype)]
        of_call = quantize_attributes(call, drawn, tensor_scale)
        attributes |= {f"{prefix}{name}": value for name, value in of_call.items()}
    kinds += [(axes.tensor_scales, "float32")] * (len(casts) * finds)
    results = handler.call(target, operands, kinds, attributes=attributes)
    tensor_scales = results[2 * len(casts) :] or tensor_scales
    return [
        MXArray(
            codes=results[2 * place],
            scales=results[2 * place + 1],
            tensor_scale=tensor_scales[place],
            format=call.format,
            blocks=call.blocks,
            dtype=np.dtype(call.dtype),
        )
        for place, call in enumerate(casts)
    ]


def quantize_attributes(
    call: QuantizeCall, random_bits: Bits, tensor_scale: jax.Array | None
) -> dict[str, object]:
    """The handler's attributes of a call."""
    has_tensor_scale = tensor_scale is not None
    finds = call.format.tensor_scale and not has_tensor_scale
    largest_value = call.scale_rule.largest_value(call.format) if finds else 0
    rule, rounding = _rule(call), _rounding(call.rounding)
    assert rule is not None and rounding is not None, call
    return {
        "blocks": flat_blocks(call.blocks),
        "derivations": _numbers(random_bits),
        "element": facts(call.format.element),
        "has_tensor_scale": has_tensor_scale,
        "largest_value": np.float32(largest_value),
        "rounding": rounding,
        "random_bits": np.int32(call.rounding.random_bits),
        "rule": rule.name,
        "scale_element": facts(call.format.scale.element),
        "target": np.float32(rule.target),
        "threshold": np.int32(rule.threshold),
    }


def rejects_both(call: QuantizeBothCall) -> str | None:
    """Why the handler does not take both casts, or None."""
    for single in (call.first, call.second):
        if (reason := rejects_quantize(single)) is not None:
            return reason
        if single.scale_rule.reads_values:
            return f"casts both ways by rules of amax alone, got {single.scale_rule.name!r}"
        sizes = [size for _, size in single.blocks]
        if len(sizes) != 1 or isinstance(sizes[0], Whole):
            return f"casts both ways along one axis each, got blocks={single.blocks}"
        if sizes[0] > _LARGEST_BLOCK:
            return f"casts both ways blocks <= {_LARGEST_BLOCK}, got blocks={single.blocks}"
    last, other = _last_first(call)
    (axis, size), (other_axis, _) = last.blocks[0], other.blocks[0]
    if axis != -1 or other_axis == -1:
        axes = (axis, other_axis)
        return f"casts both ways along the last axis and another one, got axes {axes}"
    if other_axis != -2 and last.shape[-1] % block_shapes.block_extent(size, last.shape[-1]):
        return (
            f"casts both ways along distant axes in whole blocks, got shape={last.shape}, "
            f"blocks={last.blocks}"
        )
    if call.first.format.tensor_scale != call.second.format.tensor_scale:
        return "casts both ways with tensor scales, or without, got one of each"
    return None


def quantize_both(
    x: jax.Array,
    random_bits: tuple[Bits, Bits],
    tensor_scale: jax.Array | None,
    call: QuantizeBothCall,
) -> tuple[MXArray, MXArray]:
    """Both casts of x, by the handler."""
    last, other = _last_first(call)
    order = 1 if last is call.first else -1
    calls = {"last_": last, "other_": other}
    arrays = _by_handler(QUANTIZE_BOTH, calls, x, random_bits[::order], tensor_scale)
    first, second = arrays[::order]
    return first, second


def _last_first(call: QuantizeBothCall) -> tuple[QuantizeCall, QuantizeCall]:
    """The cast along the last axis first, if there is one."""
    if call.first.blocks[0][0] == -1:
        return call.first, call.second
    return call.second, call.first


# Codes that are read ------------------------------------------------------------------------------

DEQUANTIZE = "mx_jax_cpu_dequantize"


def format_attributes(format: BlockFormat) -> dict[str, object]:
    """The attributes by which handlers decode a format."""
    return {
        "element": facts(format.element),
        "kind": format.scale.kind,
        "scale_element": facts(format.scale.element),
    }


def _operands(x: MXArray, axes: CastAxes) -> list[tuple[jax.Array | None, str]]:
    """Codes, scales and the tensor scale, with their axes."""
    return [
        (x.codes, axes.elements),
        (x.scales, axes.scales[0]),
        (x.tensor_scale, axes.tensor_scale),
    ]


def _rejects_scale_axes(call: QuantizeCall | DequantizeCall) -> str | None:
    """Why not: the handlers know tensor scales of the first axes, those of one position too."""
    last = max(call.scale_axes, default=-1)
    if all(axis in call.scale_axes or call.shape[axis] == 1 for axis in range(last)):
        return None
    return f"needs tensor scales of the first axes, got them along axes={call.scale_axes}"


def rejects_dequantize(call: DequantizeCall) -> str | None:
    """Why the handler does not take a call, or None."""
    if (reason := _rejects_scale_axes(call)) is not None:
        return reason
    if call.dtype not in DTYPES:
        return f"gives float32, bfloat16 or float16, got dtype={call.dtype}"
    if call.saturates and call.format.element.has_inf:
        return f"keeps Inf as it is, got saturates=True with {call.format.name}, which has Inf"
    return rejects_parts(call.format) or rejects_blocks(call.blocks)


def dequantize(x: MXArray, call: DequantizeCall, exponent: int = 0) -> jax.Array:
    """The values of x times `2^exponent` in `call.dtype`, by the handler."""
    attributes: dict[str, Any] = {**format_attributes(x.format)}
    # A format whose bias is larger is one of smaller values.
    attributes["element"] -= np.array([0, 0, exponent, 0, 0, 0, 0, 0], np.int32)
    attributes |= {
        "blocks": flat_blocks(x.blocks),
        "has_tensor_scale": x.tensor_scale is not None,
    }
    (values,) = handler.call(
        DEQUANTIZE,
        _operands(x, cast_axes(x.blocks)),
        [(cast_axes(x.blocks).elements, call.dtype)],
        attributes=attributes,
    )
    if call.saturates and call.format.scale.kind == "exponent":
        # No element is Inf: an Inf is a value above the dtype's largest.
        largest = jnp.finfo(call.dtype).max
        values = jnp.minimum(jnp.maximum(values, -largest), largest)
    return values


STATISTICS = "mx_jax_cpu_cast_statistics"

# What the handler gives, in its order, with the dtype of each.
_STATISTICS = {
    "channel_amax": "float32",
    "amax": "float32",
    "exponents": "uint32",
    "underflow": "uint32",
    "saturated": "uint32",
    "bad_blocks": "uint32",
    "signal": "float32",
    "noise": "float32",
}


def rejects_statistics(call: CastStatisticsCall) -> str | None:
    """Why the handler does not take a call, or None."""
    if call.dtype not in DTYPES:
        return f"reads float32, bfloat16 or float16, got dtype={call.dtype}"
    if call.scale_axes:
        return f"takes one tensor scale, got them along axes={call.scale_axes}"
    reason = rejects_symbolic(call)
    if reason is not None:
        return reason
    if 0 in call.shape:
        return f"needs elements, got shape={call.shape}"
    return rejects_parts(call.format) or rejects_blocks(call.blocks)


def cast_statistics(
    x: jax.Array, array: MXArray, call: CastStatisticsCall
) -> reference_statistics.Raw:
    """What the reference gives; sums are of squares in float64, rounded once.

    Values, codes and scales are read once for all.
    """
    axes = cast_axes(call.blocks, depth=len(call.shape))
    # No result has an axis of the operands', so that devices which share a tensor gather it.
    lengths = {"channel_amax": call.shape[call.axis], "exponents": reference_statistics.EXPONENTS}
    statistics = handler.call(
        STATISTICS,
        [(lax.stop_gradient(x), axes.elements), *_operands(array, axes)],
        [(f"*b {lengths.get(name, '')}", dtype) for name, dtype in _STATISTICS.items()],
        attributes=format_attributes(call.format)
        | {
            "blocks": flat_blocks(call.blocks),
            "axis": np.int64(call.axis),
            "has_tensor_scale": array.tensor_scale is not None,
        },
    )
    num_blocks = math.prod(block_shapes.scales_shape(call.shape, call.blocks))
    return dict(zip(_STATISTICS, statistics, strict=True)) | {
        "size": jnp.full((), math.prod(call.shape), jnp.uint32),
        "blocks": jnp.full((), num_blocks, jnp.uint32),
    }


# What casts draw and transform --------------------------------------------------------------------

TRANSFORM = "mx_jax_cpu_transform"
_LARGEST_TRANSFORM = 1024


def rejects_transform(call: TransformCall) -> str | None:
    """Why the handler does not take a call, or None."""
    if call.size > _LARGEST_TRANSFORM:
        return f"transforms groups of at most {_LARGEST_TRANSFORM}, got size={call.size}"
    return rejects_symbolic(call)


def transform(x: jax.Array, signs: jax.Array | DerivedKey, call: TransformCall) -> jax.Array:
    """`reference.hadamard.apply`, by the handler."""
    names = [f"e{axis}" for axis in range(len(call.shape))]
    before, after = " ".join(names[: call.axis]), " ".join(names[call.axis + 1 :])
    (values,) = handler.call(
        TRANSFORM,
        [
            (x, f"*b {before} k {after}"),
            (signs.data if isinstance(signs, DerivedKey) else signs, "*b signs"),
        ],
        [(f"*b {before} n {after}", "float32")],
        attributes={
            "derivations": _numbers(signs),
            "num_inner": np.int32(len(call.shape) - 1 - call.axis),
            "size": np.int32(call.size),
        },
        sizes={"n": call.result_length},
    )
    return values


RANDOM_BITS = "mx_jax_cpu_random_bits"


def rejects_random_bits(call: RandomBitsCall) -> str | None:
    """Why the handler does not take a call, or None."""
    if call.implementation != "threefry2x32" or not call.is_partitionable:
        return (
            "draws by jax_threefry_partitionable alone, got implementation="
            f"{call.implementation!r}, partitionable={call.is_partitionable}"
        )
    if not call.shape:
        return "draws for an axis at least, got shape=()"
    return rejects_symbolic(call)


def _numbers(key: Bits) -> np.ndarray:
    """The derivations of a key, which a handler repeats."""
    # A key of `split` and what `fold_in` makes are the same function of their numbers.
    derivations = key.derivations if isinstance(key, DerivedKey) else ()
    return np.array([index for index, _ in derivations], np.int64)


def draw_bits(key: DerivedKey, call: RandomBitsCall) -> jax.Array:
    """int32 of `call.shape`, by the handler."""
    names = [f"e{axis}" for axis in range(len(call.shape))]
    (bits,) = handler.call(
        RANDOM_BITS,
        [(key.data, "*b 2")],
        [(f"*b {' '.join(names)}", "int32")],
        attributes={"width": np.int32(call.width), "derivations": _numbers(key)},
        sizes=dict(zip(names, call.shape, strict=True)),
    )
    return bits
