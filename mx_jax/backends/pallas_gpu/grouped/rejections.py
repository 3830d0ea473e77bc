"""Which products of rows in groups have a kernel, by descriptions of a call and a machine."""

import math

import jax
import jax.numpy as jnp

from mx_jax.axes import Side
from mx_jax.backends.calls import OperandType, RaggedCall
from mx_jax.backends.pallas_gpu.architecture import (
    ARCHITECTURES,
    architecture_of,
    rejects_machine,
)
from mx_jax.backends.pallas_gpu.kernels import Kernel
from mx_jax.backends.pallas_gpu.layouts.storage import storage
from mx_jax.backends.pallas_gpu.layouts.weights import MIN_BLOCK
from mx_jax.backends.pallas_gpu.products.rejections import (
    MAX_ELEMENTS,
    MAX_ROWS,
    OUTPUTS,
    fits_bfloat16,
    rejects_weights,
)
from mx_jax.backends.target import Target
from mx_jax.formats import BlockSize

# The first version of JAX whose copies fill with zeros and clip what lies outside an array.
_MIN_JAX = (0, 12, 0)


def rejects(
    call: RaggedCall, target: Target, jax_version: tuple[int, ...] = jax.__version_info__
) -> str | None:
    """Why no kernel takes a product of rows in groups on a machine, or None."""
    reason = rejects_machine(target, jax_version) or _rejects_machine(call, target, jax_version)
    if reason is not None:
        return reason
    if call.out_dtype not in OUTPUTS:
        return f"gives float32, bfloat16 or float16, got out_dtype={call.out_dtype}"
    if call.contracts_rows:
        return _rejects_sums(call)
    return _rejects_operands(call) or _rejects_sizes(call)


def _rejects_sums(call: RaggedCall) -> str | None:
    """Why the rows of groups are not summed over: groups must begin where steps of a product do."""
    blocks: list[BlockSize] = []
    sides: tuple[tuple[Side, OperandType], ...] = (("lhs", call.lhs), ("rhs", call.rhs))
    for side, own in sides:
        reason = _rejects_values(side, own)
        if reason is not None:
            return reason
        if own.scale_axes:
            return f"needs one tensor scale at most, got {side} with axes={own.scale_axes}"
        if math.prod(own.shape) > MAX_ELEMENTS:
            return f"needs at most {MAX_ELEMENTS} elements, got {side}_shape={own.shape}"
        if own.format is not None:
            blocks.append(own.format.block[1])
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


def _rejects_machine(call: RaggedCall, target: Target, jax_version: tuple[int, ...]) -> str | None:
    row = architecture_of(target.compute_capability)
    got = ".".join(map(str, target.compute_capability or ()))
    if row is None or not any(map(_has_groups, row.kernels)):
        able = (row for row in ARCHITECTURES if any(map(_has_groups, row.kernels)))
        known = ", ".join(f"{a}.{b}" for row in able for a, b in row.capabilities)
        return f"multiplies rows in groups on CUDA compute capability {known}, got {got}"
    if call.contracts_rows and row.decoding.load_group_sums is None:
        able = (row for row in ARCHITECTURES if row.decoding.load_group_sums is not None)
        known = ", ".join(f"{a}.{b}" for row in able for a, b in row.capabilities)
        return f"sums over rows of groups on CUDA compute capability {known}, got {got}"
    lhs, rhs = call.lhs.format, call.rhs.format
    if not call.contracts_rows and not _has_groups(row.kernel(lhs, rhs)):
        names = (None if format is None else format.name for format in (lhs, rhs))
        return (
            f"multiplies rows in groups on CUDA compute capability {got} where formats meet, got "
            "lhs={}, rhs={}".format(*names)
        )
    if jax_version < _MIN_JAX:
        needed, got = (".".join(map(str, version)) for version in (_MIN_JAX, jax_version))
        return f"multiplies rows in groups from jax=={needed} on, got jax=={got}"
    return None


def _has_groups(kernel: Kernel) -> bool:
    return kernel.load_groups is not None


def _rejects_operands(call: RaggedCall) -> str | None:
    lhs, rhs = call.lhs, call.rhs
    reason = rejects_weights(rhs.format)
    if reason is not None:
        return f"needs groups' matrices in a block format: rhs {reason}"
    reason = _rejects_values("lhs", lhs)
    if reason is not None:
        return reason
    if lhs.scale_axes or set(rhs.scale_axes) - set(rhs.axes.batch):
        return (
            "needs one tensor scale of all rows and one of each matrix at most, got one for each "
            f"position of axes={lhs.scale_axes} of lhs, axes={rhs.scale_axes} of rhs"
        )
    return None


def _rejects_sizes(call: RaggedCall) -> str | None:
    assert call.rhs.format is not None
    in_a_word = 32 // storage(call.rhs.format.element).bits
    if math.prod(call.lhs.shape) > MAX_ELEMENTS:
        return f"needs at most {MAX_ELEMENTS} elements, got lhs_shape={call.lhs.shape}"
    if math.prod(call.rhs.shape) // in_a_word > MAX_ELEMENTS:
        return f"needs at most {MAX_ELEMENTS} words of codes, got rhs_shape={call.rhs.shape}"
    if call.rhs.rows > MAX_ROWS:
        return f"needs at most {MAX_ROWS} columns of a matrix, got rhs_shape={call.rhs.shape}"
    return None
