"""cuDNN's block-scaled product on Blackwell, through `jax.nn.scaled_matmul`.

Not yet run on a GPU. `rejects` lets through exactly what XLA hands to cuDNN: everything else it
would dequantize without a word, in the product's dtype, which may be too narrow for the values.
"""

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp

from mx_jax.backends.calls import MatmulCall, Operand, rejects_symbolic
from mx_jax.backends.sums import as_matrices, rejects_parts_of_blocks, rejects_scale_axes
from mx_jax.backends.target import Backend, Offer, Target
from mx_jax.formats import MXFP8_E4M3, MXFP8_E5M2, NVFP4, NVFP4_ONE_LEVEL
from mx_jax.mxarray import MXArray

# Data-centre Blackwell: 10.0 and 10.3.
_CUDA_MAJOR = 10
# What XLA hands to cuDNN (its block scaling rewriter). E5M2 by E5M2 is not among it.
PAIRS = (
    (MXFP8_E4M3, MXFP8_E4M3),
    (MXFP8_E4M3, MXFP8_E5M2),
    (MXFP8_E5M2, MXFP8_E4M3),
    *itertools.product((NVFP4, NVFP4_ONE_LEVEL), repeat=2),
)
_OUTPUTS = tuple(map(jnp.dtype, ("float32", "bfloat16", "float16")))
# Scales lie in tiles of four columns; k is padded to whole ones, which XLA leaves to its callers.
_SCALE_COLUMNS = 4


def _rejects(call: MatmulCall, target: Target) -> str | None:
    """Why not: another machine, or a product that XLA would dequantize."""
    if target.platform != "cuda":
        return f"runs on platform=cuda, got platform={target.platform}"
    capability = target.compute_capability
    if capability is None or capability[0] != _CUDA_MAJOR:
        shown = None if capability is None else ".".join(map(str, capability))
        return f"cuDNN multiplies by block on compute capability {_CUDA_MAJOR}.x, got {shown}"
    reason = rejects_symbolic(call) or rejects_scale_axes(call, batch=False)
    if reason is not None:
        return reason
    given = call.lhs.format, call.rhs.format
    if given not in PAIRS:
        names = " by ".join("high precision" if f is None else f.name for f in given)
        return f"cuDNN multiplies MXFP8, but not E5M2 by E5M2, and NVFP4, got {names}"
    if call.out_dtype not in _OUTPUTS:
        return f"gives float32, bfloat16 or float16, got out_dtype={call.out_dtype}"
    return rejects_parts_of_blocks(call)


def _whole_tiles(x: MXArray) -> MXArray:
    """x `[batch, rows, k]` with k padded by zeros to whole tiles of scales."""
    block = x.format.block[1]
    assert isinstance(block, int)
    padded = math.ceil(x.shape[2] / (block * _SCALE_COLUMNS)) * block * _SCALE_COLUMNS
    codes = jnp.pad(x.codes, ((0, 0), (0, 0), (0, padded - x.shape[2])))
    missing = padded // block - x.scales.shape[2]
    scales = jnp.pad(x.scales, ((0, 0), (0, 0), (0, missing)))
    return dataclasses.replace(x, codes=codes, scales=scales)


def _multiply(lhs: Operand, rhs: Operand, call: MatmulCall) -> jax.Array:
    """One product of a batch of matrices; tensor scales multiply its float32 sums."""
    left, m = as_matrices(lhs, call.lhs.axes)
    right, n = as_matrices(rhs, call.rhs.axes)
    assert isinstance(left, MXArray) and isinstance(right, MXArray)
    shape = (*call.lhs.shape[: call.num_batch], *m, *n)
    if 0 in (*left.shape, *right.shape):
        return jnp.zeros(shape, call.out_dtype)
    left, right = _whole_tiles(left), _whole_tiles(right)
    factors = [x.tensor_scale for x in (left, right) if x.tensor_scale is not None]
    product = jax.nn.scaled_matmul(
        left.elements,
        right.elements,
        left.scale_values,
        right.scale_values,
        preferred_element_type=jnp.float32 if factors else call.out_dtype,
    )
    for factor in factors:
        product = product * factor
    return product.astype(call.out_dtype).reshape(shape)


# `jax.nn.scaled_matmul` where XLA gives it to cuDNN. The bound is wider than the reference's:
# tensor cores truncate where they add.
CUDNN = Backend(
    name="cudnn",
    epsilon_bound=4.0,
    table=(Offer(call=MatmulCall, rejects=_rejects, run=_multiply, inline=True),),
)
