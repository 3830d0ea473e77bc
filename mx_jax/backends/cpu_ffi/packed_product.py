"""Products with packed weights as JAX sees them: one call of the handler, batched or not."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap

from mx_jax.backends.base import MatmulCall, Operand
from mx_jax.backends.cpu_ffi import matmul
from mx_jax.backends.cpu_ffi.weights import PackedWeights
from mx_jax.codecs import tiny
from mx_jax.mxarray import MXArray

TARGET = "mx_jax_cpu_matmul_packed"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Static:
    """All that one product knows before it is traced."""

    lhs_element: str
    lhs_scale: str
    lhs_k_first: bool
    rhs_element: str
    rhs_scale: str
    block: int
    columns: int
    out_dtype: np.dtype

    @property
    def quantized(self) -> bool:
        """Whether lhs has scales."""
        return self.lhs_element != "none"


def packed_matmul(lhs: Operand, rhs: PackedWeights, call: MatmulCall) -> jax.Array:
    """The product `[*batch, *m, *n]`, with the bits that unpacked weights give."""
    return lax.platform_dependent(
        lhs,
        rhs,
        cpu=functools.partial(_by_handler, call),
        default=lambda lhs, rhs: matmul.elsewhere(call, lhs, rhs.unpack()),
    )


def _by_handler(call: MatmulCall, lhs: Operand, rhs: PackedWeights) -> jax.Array:
    contracting = call.contracting_axes("lhs")
    kept = [a for a in range(call.num_batch, lhs.ndim) if a not in contracting]
    elements, scales = matmul.arrays(lhs, contracting[-1])
    quantized = isinstance(lhs, MXArray)

    def matrices(array: jax.Array) -> jax.Array:
        sizes = [math.prod(array.shape[axis] for axis in g) for g in (kept, contracting)]
        order = -1 if call.lhs_k_first else 1
        return array.reshape(*array.shape[: call.num_batch], *sizes[::order])

    alpha = jnp.ones((1,) * call.num_batch, jnp.float32)
    if rhs.tensor_scale is not None:
        alpha = tiny.product(alpha, rhs.tensor_scale)
    if quantized and lhs.tensor_scale is not None:
        scale = lhs.tensor_scale
        alpha = tiny.product(alpha, scale.reshape(scale.shape[: call.num_batch]))
    lhs_element, lhs_scale = matmul.names(lhs.format if isinstance(lhs, MXArray) else None)
    rhs_element, rhs_scale = matmul.names(rhs.format)
    static = Static(
        lhs_element=lhs_element,
        lhs_scale=lhs_scale,
        lhs_k_first=call.lhs_k_first,
        rhs_element=rhs_element,
        rhs_scale=rhs_scale,
        block=matmul.block_size(rhs.format),
        columns=math.prod(rhs.kept),
        out_dtype=np.dtype(call.out_dtype),
    )
    scales = matrices(scales) if quantized else scales
    product = _product(static)(matrices(elements), scales, rhs.panels, alpha)
    rows = [lhs.shape[axis] for axis in kept]
    return product.reshape(*product.shape[:-2], *rows, *rhs.kept)


@functools.lru_cache(maxsize=1024)
def _product(static: Static) -> Any:
    """The handler's call, of which a batch is one call too."""
    product: Any = custom_vmap(functools.partial(_call, static))
    product.def_vmap(lambda *batched: (_batch(static, *batched), True))
    return product


def _call(
    static: Static, lhs: jax.Array, scales: jax.Array, panels: jax.Array, alpha: jax.Array
) -> jax.Array:
    pairs = zip(lhs.shape[:-2], panels.shape[:-2], strict=True)
    batch = tuple(right if left == 1 else left for left, right in pairs)
    if math.prod(alpha.shape) > 1:
        alpha = jnp.broadcast_to(alpha, batch)
    rows = lhs.shape[-1 if static.lhs_k_first else -2]
    result = jax.ShapeDtypeStruct((*batch, rows, static.columns), static.out_dtype)
    return jax.ffi.ffi_call(TARGET, result)(
        lhs,
        scales,
        panels,
        alpha,
        lhs_element=static.lhs_element,
        rhs_element=static.rhs_element,
        lhs_scale=static.lhs_scale,
        rhs_scale=static.rhs_scale,
        block=np.int32(static.block),
        lhs_k_first=static.lhs_k_first,
    )


def _batch(
    static: Static,
    size: int,
    in_batched: Any,
    lhs: jax.Array,
    scales: jax.Array,
    panels: jax.Array,
    alpha: jax.Array,
) -> jax.Array:
    """One more batch axis in front; what is not batched gets one of length one."""
    lhs, panels, alpha = (
        operand if batched else operand[None]
        for operand, batched in zip(
            (lhs, panels, alpha), (in_batched[0], *in_batched[2:]), strict=True
        )
    )
    if static.quantized:
        scales = scales if in_batched[1] else scales[None]
    if size not in (lhs.shape[0], panels.shape[0]) or (
        static.quantized and scales.shape[0] != lhs.shape[0]
    ):
        # Only alpha differs, or only the scales or the codes of lhs.
        lhs = jnp.broadcast_to(lhs, (size, *lhs.shape[1:]))
        if static.quantized:
            scales = jnp.broadcast_to(scales, (size, *scales.shape[1:]))
    return _product(static)(lhs, scales, panels, alpha)
