"""Which products of rows in groups have a kernel, by descriptions of a call and a machine."""

import math

import jax
import jax.numpy as jnp

from mx_jax.backends.base import Target
from mx_jax.backends.calls import RaggedCall
from mx_jax.backends.pallas_gpu.architecture import (
    ARCHITECTURES,
    architecture_of,
    rejects_machine,
)
from mx_jax.backends.pallas_gpu.layouts.storage import storage
from mx_jax.backends.pallas_gpu.products.rejections import (
    MAX_ELEMENTS,
    MAX_ROWS,
    OUTPUTS,
    fits_bfloat16,
    rejects_weights,
)

# The first version of JAX whose copies fill with zeros and clip what lies outside an array.
_MIN_JAX = (0, 12, 0)


def rejects(
    call: RaggedCall, target: Target, jax_version: tuple[int, ...] = jax.__version_info__
) -> str | None:
    """Why no kernel takes a product of rows in groups on a machine, or None."""
    reason = rejects_machine(target, jax_version) or _rejects_machine(target, jax_version)
    if reason is not None:
        return reason
    if call.contracts_rows:
        return "has no kernel that sums over the rows of each group"
    if call.out_dtype not in OUTPUTS:
        return f"gives float32, bfloat16 or float16, got out_dtype={call.out_dtype}"
    return _rejects_operands(call) or _rejects_sizes(call)


def _rejects_machine(target: Target, jax_version: tuple[int, ...]) -> str | None:
    row = architecture_of(target.compute_capability)
    if row is None or row.decoding.load_groups is None:
        able = (row for row in ARCHITECTURES if row.decoding.load_groups is not None)
        known = ", ".join(f"{a}.{b}" for row in able for a, b in row.capabilities)
        got = ".".join(map(str, target.compute_capability or ()))
        return f"multiplies rows in groups on CUDA compute capability {known}, got {got}"
    if jax_version < _MIN_JAX:
        needed, got = (".".join(map(str, version)) for version in (_MIN_JAX, jax_version))
        return f"multiplies rows in groups from jax=={needed} on, got jax=={got}"
    return None


def _rejects_operands(call: RaggedCall) -> str | None:
    lhs, rhs = call.lhs, call.rhs
    reason = rejects_weights(rhs.format)
    if reason is not None:
        return f"needs groups' matrices in a block format: rhs {reason}"
    if lhs.format is None and lhs.dtype != jnp.bfloat16:
        return f"needs rows in bfloat16, got lhs in {lhs.dtype}"
    if lhs.format is not None and not fits_bfloat16(lhs.format):
        return f"needs values that bfloat16 holds on both sides, got lhs={lhs.format.name}"
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
