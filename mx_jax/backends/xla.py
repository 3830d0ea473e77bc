"""XLA's own float8 dot: whole-axis scales leave the sum, so the product needs no dequantizing.

With one scale s_a for a row of lhs and s_b for a row of rhs,
`C = (sum of a_code b_code) / s_a / s_b`: the codes go to the platform's matrix units as they are.
"""

import jax
import jax.numpy as jnp
from jax import lax

from mx_jax.backends.calls import MatmulCall, Operand
from mx_jax.backends.sums import row_scales, scaled
from mx_jax.backends.target import Backend, Offer, Target
from mx_jax.formats import WHOLE, BlockFormat
from mx_jax.mxarray import MXArray

# Matrix units multiply float8 from Ada (8.9) on.
_CUDA_CAPABILITY = (8, 9)


def _rejects(call: MatmulCall, target: Target) -> str | None:
    """Why not: a platform without float8 units, an operand that is not whole-axis float8."""
    if target.platform == "cuda":
        if target.compute_capability is None or target.compute_capability < _CUDA_CAPABILITY:
            return (
                f"needs CUDA compute capability >= {_CUDA_CAPABILITY} for float8, got "
                f"{target.compute_capability}"
            )
    elif target.platform != "rocm":
        return f"XLA has no native float8 dot on platform={target.platform}"
    return _rejects_format("lhs", call.lhs.format) or _rejects_format("rhs", call.rhs.format)


def _rejects_format(side: str, format: BlockFormat | None) -> str | None:
    if format is None:
        return f"needs two float8 operands, got {side} in high precision"
    if format.element.bits != 8 or format.element.kind != "float":
        return f"needs float8 elements, got {side}={format.name}"
    if not format.is_known:
        return f"multiplies the library's own float8, got {side}={format.name} of other facts"
    if format.block[1] is not WHOLE:
        return f"needs one scale along the contracting axis, got {side}={format.name}"
    return None


def _multiply(lhs: Operand, rhs: Operand, call: MatmulCall) -> jax.Array:
    """The dot of the codes over the scales of the kept axes."""
    assert isinstance(lhs, MXArray) and isinstance(rhs, MXArray)
    # On GPUs, XLA lets float8 products accumulate fast exactly when the precision is DEFAULT.
    precision = lax.Precision.DEFAULT if call.fast_accumulation else lax.Precision.HIGHEST
    sums = lax.dot_general(
        lhs.elements,
        rhs.elements,
        call.dimension_numbers,
        precision=precision,
        preferred_element_type=jnp.float32,
        out_sharding=call.out_sharding,
    )
    scales = row_scales("lhs", lhs, call), row_scales("rhs", rhs, call)
    return scaled(sums, *scales).astype(call.out_dtype)


# `jax.lax.dot_general` on float8 arrays, where the platform multiplies them natively.
XLA = Backend(
    name="xla",
    epsilon_bound=2.0,
    table=(Offer(call=MatmulCall, rejects=_rejects, run=_multiply, is_plain=True),),
)
