"""Which products and packings GPU kernels take, by descriptions of a call and a machine alone."""

import math
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp

from mx_jax.backends.calls import MatmulCall, OperandType, PackCall, RaggedCall
from mx_jax.backends.pallas_gpu import architecture as gpus
from mx_jax.backends.pallas_gpu.architecture import Architecture
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


def rejects_machine(target: Target) -> str | None:
    """Why there is no kernel for a machine, or None."""
    if target.platform != "cuda":
        return f"runs on platform=cuda, got platform={target.platform}"
    got = target.compute_capability
    if gpus.architecture_of(got) is None:
        known, shown = _capabilities(lambda row: True), None if got is None else _dotted(got)
        return f"has kernels for CUDA compute capability {known}, got {shown}"
    if jax.__version_info__ < gpus.MIN_JAX:
        return f"needs jax>={_dotted(gpus.MIN_JAX)}, got jax=={_dotted(jax.__version_info__)}"
    return None


def _dotted(numbers: Iterable[int]) -> str:
    return ".".join(map(str, numbers))


def _capabilities(able: Callable[[Architecture], bool]) -> str:
    """Compute capabilities of the rows that are able to do something."""
    return ", ".join(
        map(
            _dotted,
            sorted(
                capability
                for row in gpus.ARCHITECTURES
                if able(row)
                for capability in row.capabilities
            ),
        )
    )


# Products -----------------------------------------------------------------------------------------


def rejects(call: MatmulCall, target: Target) -> str | None:
    """Why no kernel takes a call on a machine, or None."""
    reason = rejects_machine(target) or _rejects_result(call)
    if reason := reason or rejects_scale_axes(call, batch=False):
        return reason
    reasons = [rejects_weights(operand.format) for _, operand in call.sides]
    if all(reasons):
        return f"needs weights in a block format on one side: lhs {reasons[0]}; rhs {reasons[1]}"
    side, activations = call.sides[1 if reasons[1] else 0]
    if activations.format is None and activations.dtype not in _ACTIVATIONS:
        return f"needs activations in bfloat16 or float16, got {side} in {activations.dtype}"
    if reason := _rejects_values(side, activations):
        return reason
    for side, operand in call.sides:
        if reason := _rejects_elements(side, operand):
            return reason
        if operand.rows > _MAX_ROWS:
            return f"needs at most {_MAX_ROWS} rows, got {side}_shape={operand.shape}"
    return rejects_parts_of_blocks(call)


def _rejects_result(call: MatmulCall | RaggedCall) -> str | None:
    if call.out_dtype not in _OUTPUTS:
        return f"gives float32, bfloat16 or float16, got out_dtype={call.out_dtype}"
    return None


def _rejects_values(side: str, operand: OperandType) -> str | None:
    if operand.format is not None and not fits_bfloat16(operand.format):
        return f"needs values that bfloat16 holds on both sides, got {side}={operand.format.name}"
    return None


def _rejects_elements(side: str, operand: OperandType) -> str | None:
    if math.prod(operand.shape) > _MAX_ELEMENTS:
        return f"needs at most {_MAX_ELEMENTS} elements, got {side}_shape={operand.shape}"
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
    element, bits = format.element, format.significand_bits
    signed = element.kind != "float" or element.has_negative_zero
    return format.is_known and signed and bits is not None and bits <= _SIGNIFICANT


def rejects_packing(call: PackCall, target: Target) -> str | None:
    """Why weights are not packed for a machine, or None."""
    reason = rejects_machine(target) or call.rejects_layout()
    if reason := reason or rejects_scale_axes(call, batch=False):
        return reason
    ((_, block),) = call.blocks
    if not isinstance(block, int):
        return f"packs blocks that end, got blocks={call.blocks}"
    if reason := rejects_weights(call.format.with_block(block)):
        return f"packs weights in a block format: this {reason}"
    if 0 in call.weights.shape:
        return f"packs weights that have elements, got shape={call.weights.shape}"
    return None


# Rows in groups ---------------------------------------------------------------------------------


def rejects_groups(call: RaggedCall, target: Target) -> str | None:
    """Why no kernel takes a product of rows in groups on a machine, or None."""
    if reason := rejects_machine(target):
        return reason
    row, got = gpus.architecture_of(target.compute_capability), target.compute_capability or ()
    assert row is not None
    if not _takes_groups(row):
        known = _capabilities(_takes_groups)
        return f"multiplies rows in groups on CUDA compute capability {known}, got {_dotted(got)}"
    if call.contracts_rows and not row.decoding.sums_groups:
        known = _capabilities(lambda row: row.decoding.sums_groups)
        return f"sums over rows of groups on CUDA compute capability {known}, got {_dotted(got)}"
    if not call.contracts_rows and not row.kernel(call.lhs.format, call.rhs.format).groups:
        lhs, rhs = (operand.format and operand.format.name for operand in (call.lhs, call.rhs))
        return (
            f"multiplies rows in groups on CUDA compute capability {_dotted(got)} where formats "
            f"meet, got lhs={lhs}, rhs={rhs}"
        )
    reason = _rejects_result(call)
    return reason or (_rejects_sums(call) if call.contracts_rows else _rejects_operands(call))


def _takes_groups(row: Architecture) -> bool:
    return row.decoding.groups or (row.direct is not None and row.direct.groups)


def _rejects_sums(call: RaggedCall) -> str | None:
    """Why the rows of groups are not summed over: groups must begin where steps of a product do."""
    sides = ("lhs", call.lhs), ("rhs", call.rhs)
    for side, operand in sides:
        if reason := _rejects_rows(side, operand) or _rejects_elements(side, operand):
            return reason
        if operand.scale_axes:
            return f"needs one tensor scale at most, got {side} with axes={operand.scale_axes}"
    blocks = [operand.format.block[1] for _, operand in sides if operand.format is not None]
    if math.lcm(*(size for size in blocks if isinstance(size, int))) % MIN_BLOCK:
        return f"needs groups in blocks of a multiple of {MIN_BLOCK} rows, got blocks={blocks}"
    return None


def _rejects_rows(side: str, operand: OperandType) -> str | None:
    """Why an operand does not come in bfloat16, which loses nothing."""
    if operand.format is None and operand.dtype != jnp.bfloat16:
        return f"needs rows in bfloat16, got {side} in {operand.dtype}"
    return _rejects_values(side, operand)


def _rejects_operands(call: RaggedCall) -> str | None:
    lhs, rhs = call.lhs, call.rhs
    if reason := rejects_weights(rhs.format):
        return f"needs groups' matrices in a block format: rhs {reason}"
    if reason := _rejects_rows("lhs", lhs):
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
