"""Which products GPU kernels take, by the description of a call and of the machine alone."""

import math

import jax
import jax.numpy as jnp

from mx_jax.backends.calls import MatmulCall
from mx_jax.backends.pallas_gpu.architecture import rejects_machine
from mx_jax.backends.pallas_gpu.layouts.weights import MIN_BLOCK, ROWS
from mx_jax.backends.sums import rejects_parts_of_blocks, rejects_scale_axes
from mx_jax.backends.target import Target
from mx_jax.formats import BlockFormat

_ACTIVATIONS = tuple(map(jnp.dtype, ("bfloat16", "float16")))
OUTPUTS = tuple(map(jnp.dtype, ("float32", "bfloat16", "float16")))
# Significant bits of a bfloat16.
_SIGNIFICANT = 8
# Kernels count elements in 32 bits; a grid's second axis has 16, in tiles of at least 64 rows.
MAX_ELEMENTS = 2**31 - 1
MAX_ROWS = 65535 * ROWS


def rejects(
    call: MatmulCall, target: Target, jax_version: tuple[int, ...] = jax.__version_info__
) -> str | None:
    """Why no kernel takes a call on a machine, or None."""
    reason = rejects_machine(target, jax_version)
    if reason is not None:
        return reason
    if call.out_sharding is not None:
        return f"takes no out_sharding, got out_sharding={call.out_sharding}"
    if call.out_dtype not in OUTPUTS:
        return f"gives float32, bfloat16 or float16, got out_dtype={call.out_dtype}"
    return rejects_scale_axes(call, batch=False) or _rejects_formats(call) or _rejects_sizes(call)


def _rejects_formats(call: MatmulCall) -> str | None:
    reasons = [rejects_weights(own.format) for _, own in call.sides]
    if all(reasons):
        return f"needs weights in a block format on one side: lhs {reasons[0]}; rhs {reasons[1]}"
    weights = "lhs" if reasons[1] else "rhs"
    for side, own in call.sides:
        if side == weights:
            continue
        if own.format is None and own.dtype not in _ACTIVATIONS:
            return f"needs activations in bfloat16 or float16, got {side} in {own.dtype}"
        if own.format is not None and not fits_bfloat16(own.format):
            return f"needs values that bfloat16 holds on both sides, got {side}={own.format.name}"
    return None


def rejects_weights(format: BlockFormat | None) -> str | None:
    """Why weights of a format are not taken, or None."""
    if format is None:
        return "is in high precision"
    if not fits_bfloat16(format):
        return f"is {format.name}"
    kept, block = format.block
    if kept != 1 or not isinstance(block, int) or block % MIN_BLOCK:
        return f"has blocks {format.block}, not (1, a multiple of {MIN_BLOCK})"
    return None


def fits_bfloat16(format: BlockFormat) -> bool:
    """Whether each element times its block's scale is a bfloat16, exponent aside."""
    element, scale = format.element, format.scale
    if (
        not format.is_known
        or scale.is_float32
        or (element.kind == "float" and not element.has_negative_zero)
    ):
        return False
    in_scale = 0 if scale.element is None else scale.element.mantissa_bits + 1
    return element.mantissa_bits + 1 + in_scale <= _SIGNIFICANT


def _rejects_sizes(call: MatmulCall) -> str | None:
    for side, own in call.sides:
        if math.prod(own.shape) > MAX_ELEMENTS:
            return f"needs at most {MAX_ELEMENTS} elements, got {side}_shape={own.shape}"
        if own.rows > MAX_ROWS:
            return f"needs at most {MAX_ROWS} rows, got {side}_shape={own.shape}"
    return rejects_parts_of_blocks(call)
