"""Products with packed weights by the compiled handler."""

import functools
import math

import jax
import numpy as np
from jax import lax

from mx_jax.backends.base import MatmulCall, Operand
from mx_jax.backends.cpu_ffi import matmul
from mx_jax.backends.cpu_ffi.handler import Handler, hashable
from mx_jax.backends.cpu_ffi.weights import PANEL_ROWS, PackedWeights
from mx_jax.mxarray import MXArray

TARGET = "mx_jax_cpu_matmul_packed"


def packed_matmul(lhs: Operand, rhs: PackedWeights, call: MatmulCall) -> jax.Array:
    """The product `[*batch, *m, *n]`, with the bits that unpacked weights give."""
    return lax.platform_dependent(
        lhs,
        rhs,
        cpu=functools.partial(_by_handler, call),
        default=lambda lhs, rhs: matmul.elsewhere(call, lhs, rhs.unpack()),
    )


def _by_handler(call: MatmulCall, lhs: Operand, rhs: PackedWeights) -> jax.Array:
    left, (element, scale) = matmul.side(lhs, call.lhs.axes, "lhs"), matmul.names(rhs.format)
    handler = Handler(
        target=TARGET,
        axes=f"{left.axes}, *r n/{PANEL_ROWS} bytes, *lr -> *lr {left.kept} n",
        dtypes=(np.dtype(call.out_dtype),),
        attributes=hashable(
            left.attributes
            | {"rhs_element": element, "rhs_scale": scale}
            | {"block": np.int32(matmul.block_size(rhs.format))}
        ),
        sizes=(("n", math.prod(rhs.kept)),),
    )
    lhs_scale = lhs.tensor_scale if isinstance(lhs, MXArray) else None
    alpha = matmul.alpha(call, lhs_scale, rhs.tensor_scale)
    (product,) = handler(*left.arrays, rhs.panels, alpha)
    return product.reshape(*product.shape[:-1], *rhs.kept)
