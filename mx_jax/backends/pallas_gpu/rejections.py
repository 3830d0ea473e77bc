"""Which products and packings GPU kernels take, by descriptions of a call and a machine alone."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from mx_jax.axes import Side
from mx_jax.backends.calls import MatmulCall, OperandType, PackCall, RaggedCall
from mx_jax.backends.pallas_gpu.architecture import (
    ARCHITECTURES,
    Kernel,
    architecture_of,
    rejects_machine,
)
from mx_jax.backends.pallas_gpu.layouts import MIN_BLOCK, ROWS, stored_bits
from mx_jax.backends.sums import rejects_parts_of_blocks, rejects_scale_axes
from mx_jax.backends.target import Target
from mx_jax.formats import BlockFormat

_ACTIVATIONS = tuple(map(jnp.dtype, ("bfloat16", "float16")))
_OUTPUTS = tuple(map(jnp.dtype, ("float32", "bfloat16", "float16")))
# Significant bits of a bfloat16.
_SIGNIFICANT = 8
# Kernels count elements in 32 bits; a grid's second axis has 16, in tiles of at least 64 rows.
_MAX_ELEMENTS = 2**31 - 1
_MAX_ROWS = 65535 * ROWS
# Copies fill with zeros and clip what is outside an array, from this version of JAX on.
_MIN_JAX_GROUPS = (0, 12, 0)


def rejects(
    call: MatmulCall, target: Target, jax_version: tuple[int, ...] = jax.__version_info__
) -> str | None:
    """Why no kernel takes a call on a machine, or None."""
    reason = rejects_machine(target, jax_version)
    if reason is not None:
        return reason
    if call.out_dtype not in _OUTPUTS:
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
        if reason := _rejects_elements(side, own):
            return reason
        if own.rows > _MAX_ROWS:
            return f"needs at most {_MAX_ROWS} rows, got {side}_shape={own.shape}"
    return rejects_parts_of_blocks(call)


def _rejects_elements(side: str, own: OperandType) -> str | None:
    if math.prod(own.shape) > _MAX_ELEMENTS:
        return f"needs at most {_MAX_ELEMENTS} elements, got {side}_shape={own.shape}"
    return None


def rejects_packing(
    call: PackCall, target: Target, jax_version: tuple[int, ...] = jax.__version_info__
) -> str | None:
    """Why weights are not packed for a machine, or None."""
    reason = rejects_machine(target, jax_version)
    if reason is not None:
        return reason
    reason = call.rejects_layout() or rejects_scale_axes(call, batch=False)
    if reason is not None:
        return reason
    ((_, block),) = call.blocks
    if not isinstance(block, int):
        return f"packs blocks that end, got blocks={call.blocks}"
    reason = rejects_weights(call.format.with_block(block))
    if reason is not None:
        return f"packs weights in a block format: this {reason}"
    if 0 in call.weights.shape:
        return f"packs weights that have elements, got shape={call.weights.shape}"
    return None


# Rows in groups ---------------------------------------------------------------------------------


def rejects_groups(
    call: RaggedCall, target: Target, jax_version: tuple[int, ...] = jax.__version_info__
) -> str | None:
    """Why no kernel takes a product of rows in groups on a machine, or None."""
    reason = rejects_machine(target, jax_version) or _rejects_kernel(call, target, jax_version)
    if reason is not None:
        return reason
    if call.out_dtype not in _OUTPUTS:
        return f"gives float32, bfloat16 or float16, got out_dtype={call.out_dtype}"
    if call.contracts_rows:
        return _rejects_sums(call)
    return _rejects_operands(call)


def _rejects_sums(call: RaggedCall) -> str | None:
    """Why the rows of groups are not summed over: groups must begin where steps of a product do."""
    sides: tuple[tuple[Side, OperandType], ...] = (("lhs", call.lhs), ("rhs", call.rhs))
    for side, own in sides:
        if reason := _rejects_values(side, own) or _rejects_elements(side, own):
            return reason
        if own.scale_axes:
            return f"needs one tensor scale at most, got {side} with axes={own.scale_axes}"
    blocks = [own.format.block[1] for _, own in sides if own.format is not None]
    if math.lcm(*(size for size in blocks if isinstance(size, int))) % MIN_BLOCK:
        return f"needs groups in blocks of a multiple of {MIN_BLOCK} rows, got blocks={blocks}"
    return None


def _rejects_values(side: Side, own: OperandType) -> str | None:
    """Why an operand does not come in bfloat16, which loses nothing."""
    if own.format is None and own.dtype != jnp.bfloat16:
        return f"needs rows in bfloat16, got {side} in {own.dtype}"
    if own.format is not None and not fits_bfloat16(own.format):
        return f"needs values that bfloat16 holds on both sides, got {side}={own.format.name}"
    return None


def _rejects_kernel(call: RaggedCall, target: Target, jax_version: tuple[int, ...]) -> str | None:
    row = architecture_of(target.compute_capability)
    got = ".".join(map(str, target.compute_capability or ()))
    if row is None or not any(kernel.groups for kernel in row.kernels):
        known = _capabilities(lambda kernel: kernel.groups)
        return f"multiplies rows in groups on CUDA compute capability {known}, got {got}"
    if call.contracts_rows and row.decoding.load_group_sums is None:
        known = _capabilities(lambda kernel: kernel.load_group_sums is not None)
        return f"sums over rows of groups on CUDA compute capability {known}, got {got}"
    lhs, rhs = call.lhs.format, call.rhs.format
    if not call.contracts_rows and not row.kernel(lhs, rhs).groups:
        names = (None if format is None else format.name for format in (lhs, rhs))
        return (
            f"multiplies rows in groups on CUDA compute capability {got} where formats meet, got "
            "lhs={}, rhs={}".format(*names)
        )
    if jax_version < _MIN_JAX_GROUPS:
        needed, got = (".".join(map(str, version)) for version in (_MIN_JAX_GROUPS, jax_version))
        return f"multiplies rows in groups from jax=={needed} on, got jax=={got}"
    return None


def _capabilities(able: Callable[[Kernel], bool]) -> str:
    """Of the GPUs that have a kernel of a kind."""
    rows = (row for row in ARCHITECTURES if any(map(able, row.kernels)))
    return ", ".join(f"{major}.{minor}" for row in rows for major, minor in row.capabilities)


def _rejects_operands(call: RaggedCall) -> str | None:
    lhs, rhs = call.lhs, call.rhs
    if reason := rejects_weights(rhs.format):
        return f"needs groups' matrices in a block format: rhs {reason}"
    if reason := _rejects_values("lhs", lhs):
        return reason
    if lhs.scale_axes or set(rhs.scale_axes) - set(rhs.axes.batch):
        return (
            "needs one tensor scale of all rows and one of each matrix at most, got one for each "
            f"position of axes={lhs.scale_axes} of lhs, axes={rhs.scale_axes} of rhs"
        )
    assert rhs.format is not None
    in_a_word = 32 // stored_bits(rhs.format.element)
    if math.prod(rhs.shape) // in_a_word > _MAX_ELEMENTS:
        return f"needs at most {_MAX_ELEMENTS} words of codes, got rhs_shape={rhs.shape}"
    if rhs.rows > _MAX_ROWS:
        return f"needs at most {_MAX_ROWS} columns of a matrix, got rhs_shape={rhs.shape}"
    return _rejects_elements("lhs", lhs)
