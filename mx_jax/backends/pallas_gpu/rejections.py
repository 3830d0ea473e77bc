"""Which products and packings the GPU kernel takes, by a call and a machine alone."""

import math
from collections.abc import Iterable

import jax
import jax.numpy as jnp

from mx_jax.backends.calls import MatmulCall, PackCall, RaggedCall
from mx_jax.backends.pallas_gpu import tiles
from mx_jax.backends.pallas_gpu.layouts import MIN_BLOCK, ROWS, stored_bits
from mx_jax.backends.sums import rejects_parts_of_blocks, rejects_scale_axes
from mx_jax.backends.target import Target
from mx_jax.formats import BlockFormat

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
    if (got := target.compute_capability) != tiles.CAPABILITY:
        shown = None if got is None else _dotted(got)
        return f"has a kernel for CUDA compute capability {_dotted(tiles.CAPABILITY)}, got {shown}"
    if jax.__version_info__ < tiles.MIN_JAX:
        return f"needs jax>={_dotted(tiles.MIN_JAX)}, got jax=={_dotted(jax.__version_info__)}"
    return None


def _dotted(numbers: Iterable[int]) -> str:
    return ".".join(map(str, numbers))


# Products -----------------------------------------------------------------------------------------


def rejects(call: MatmulCall, target: Target) -> str | None:
    """Why no kernel takes a call on a machine, or None."""
    reason = rejects_machine(target) or _rejects_product(call)
    if reason := reason or rejects_scale_axes(call, batch=False):
        return reason
    for side, operand in call.sides:
        if math.prod(operand.shape) > _MAX_ELEMENTS:
            return f"needs at most {_MAX_ELEMENTS} elements, got {side}_shape={operand.shape}"
        if operand.rows > _MAX_ROWS:
            return f"needs at most {_MAX_ROWS} rows, got {side}_shape={operand.shape}"
    return rejects_parts_of_blocks(call)


def rejects_groups(call: RaggedCall, target: Target) -> str | None:
    """Why no kernel takes a product of rows in groups on a machine, or None."""
    if reason := rejects_machine(target) or _rejects_product(call):
        return reason
    lhs, rhs = call.lhs, call.rhs
    if lhs.scale_axes:
        return (
            "needs one tensor scale of all rows, got one for each position of "
            f"axes={lhs.scale_axes} of lhs"
        )
    assert rhs.format is not None
    if math.prod(rhs.shape) // (32 // stored_bits(rhs.format.element)) > _MAX_ELEMENTS:
        return f"needs at most {_MAX_ELEMENTS} words of codes, got rhs_shape={rhs.shape}"
    if rhs.rows > _MAX_ROWS:
        return f"needs at most {_MAX_ROWS} columns of a matrix, got rhs_shape={rhs.shape}"
    if math.prod(lhs.shape) > _MAX_ELEMENTS:
        return f"needs at most {_MAX_ELEMENTS} elements, got lhs_shape={lhs.shape}"
    return None


def _rejects_product(call: MatmulCall | RaggedCall) -> str | None:
    """Why not: an operand or a result that kernels do not read or write."""
    lhs, rhs = call.lhs, call.rhs
    if call.out_dtype not in _OUTPUTS:
        return f"gives float32, bfloat16 or float16, got out_dtype={call.out_dtype}"
    if rhs.packed_by != "pallas_gpu":
        return (
            "multiplies by weights that mx_jax.pack_weights laid out for it, got "
            f"rhs={rhs.text}, packed_by={rhs.packed_by}"
        )
    if lhs.format is None and lhs.dtype != jnp.bfloat16:
        return f"needs activations in bfloat16, or quantized, got lhs_dtype={lhs.dtype}"
    if lhs.format is not None and not fits_bfloat16(lhs.format):
        return f"needs values that bfloat16 holds on both sides, got lhs={lhs.format.name}"
    return None


# Weights ------------------------------------------------------------------------------------------


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
    format = call.format.with_block(block)
    if not fits_bfloat16(format):
        return f"packs values that bfloat16 holds, got {format.name}"
    if format.block[0] != 1 or block % MIN_BLOCK:
        return f"packs blocks of (1, a multiple of {MIN_BLOCK}), got {format.block}"
    if 0 in call.weights.shape:
        return f"packs weights that have elements, got shape={call.weights.shape}"
    return None
