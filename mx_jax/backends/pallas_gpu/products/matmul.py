"""Products by GPU kernels: how operands reach them, and which one computes."""

from typing import Any

import jax
import jax.numpy as jnp

from mx_jax.axes import Side
from mx_jax.backends.calls import MatmulCall, Operand
from mx_jax.backends.pallas_gpu.architecture import Architecture, current_architecture
from mx_jax.backends.pallas_gpu.layouts.scaled import ScaledOperand
from mx_jax.backends.pallas_gpu.layouts.weights import PackedWeights
from mx_jax.backends.pallas_gpu.products import decoded, scaled
from mx_jax.backends.pallas_gpu.products.rejections import rejects_weights
from mx_jax.backends.sums import as_matrices
from mx_jax.mxarray import MXArray
from mx_jax.packed import PackedMXArray


def scaled_matmul(
    lhs: Operand,
    rhs: Operand | PackedMXArray,
    call: MatmulCall,
    *,
    architecture: Architecture | None = None,
    interpret: Any = None,
) -> jax.Array:
    """The product `[*batch, *m, *n]` in `call.out_dtype`.

    Args:
      lhs: left operand.
      rhs: right operand, or weights that were packed for the product.
      call: their description, which `rejects` takes.
      architecture: the GPU; None: that of the machine it is for.
      interpret: parameters of Mosaic's interpreter.
    """
    if isinstance(rhs, PackedMXArray):
        return packed_matmul(lhs, rhs, call, architecture=architecture, interpret=interpret)
    left, m = as_matrices(lhs, call.lhs.axes)
    right, n = as_matrices(rhs, call.rhs.axes)
    shape = (*call.lhs.shape[: call.num_batch], *m, *n)
    if 0 in (*left.shape, *right.shape):
        return jnp.zeros(shape, call.out_dtype)
    architecture = architecture or current_architecture()
    if architecture.kernel(call.lhs.format, call.rhs.format).layout is ScaledOperand:
        assert isinstance(left, MXArray) and isinstance(right, MXArray)
        operands = ScaledOperand.of(left, left=True), ScaledOperand.of(right)
        out = scaled.multiply(*operands, call.out_dtype, architecture, interpret=interpret)
        return out.reshape(shape)
    swapped = rejects_weights(call.rhs.format) is not None
    activations, weights = (right, left) if swapped else (left, right)
    assert isinstance(weights, MXArray)
    out = decoded.by_weights(activations, weights, call.out_dtype, architecture, interpret)
    return (out.swapaxes(1, 2) if swapped else out).reshape(shape)


def lays_out(call: MatmulCall, architecture: Architecture | None = None) -> Side | None:
    """The side whose weights `scaled_matmul` lays out: for few rows, and not packed before."""
    if call.rhs.packed_by is not None:
        return None
    swapped = rejects_weights(call.rhs.format) is not None
    rows, weights = (call.rhs, call.lhs) if swapped else (call.lhs, call.rhs)
    assert weights.format is not None
    architecture = architecture or current_architecture()
    if rows.rows >= decoded.crossover(architecture, weights.format):
        return None
    return "lhs" if swapped else "rhs"


def packed_matmul(
    lhs: Operand,
    rhs: PackedMXArray,
    call: MatmulCall,
    *,
    architecture: Architecture | None = None,
    interpret: Any = None,
) -> jax.Array:
    """The product `[*batch, *m, *n]` by weights that were packed for it; see `scaled_matmul`.

    Weights in the layout that the product does not want are brought into the other: for many rows
    that is little beside the product itself, for few it takes longer than the product.
    """
    left, m = as_matrices(lhs, call.lhs.axes)
    shape = (*call.lhs.shape[: call.num_batch], *m, *rhs.kept)
    if 0 in left.shape:
        return jnp.zeros(shape, call.out_dtype)
    architecture = architecture or current_architecture()
    weights = rhs.arrays.merged()
    wanted = architecture.kernel(call.lhs.format, call.rhs.format).layout
    if wanted is ScaledOperand:
        many = left.shape[1] >= decoded.crossover(architecture, weights.format)
        if many and isinstance(weights, PackedWeights):
            weights = ScaledOperand.of(weights.unpack())
        if isinstance(weights, ScaledOperand):
            assert isinstance(left, MXArray)
            laid_out = ScaledOperand.of(left, left=True)
            out = scaled.multiply(
                laid_out, weights, call.out_dtype, architecture, interpret=interpret
            )
            return out.reshape(shape)
    if isinstance(weights, ScaledOperand):
        weights = weights.unpack()
    out = decoded.by_weights(left, weights, call.out_dtype, architecture, interpret)
    return out.reshape(shape)
