"""Products by the compiled handlers, of codes as they are or of packed weights.

Float8 under float32 scales is decoded by a handler, and multiplied by XLA's float32 dot.
"""

import dataclasses
import math
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mx_jax.axes import Axes
from mx_jax.backends.calls import DequantizeCall, MatmulCall, Operand
from mx_jax.backends.cpu_ffi import dequantize, rejections
from mx_jax.backends.cpu_ffi.handler import Handler, hashable
from mx_jax.backends.cpu_ffi.panels import PANEL_ROWS
from mx_jax.backends.cpu_ffi.parts import by_parts
from mx_jax.backends.cpu_ffi.rejections import DTYPES, MATMUL, PACKED_MATMUL, block_size, names
from mx_jax.backends.cpu_ffi.rows import ROWS, by_rows
from mx_jax.backends.cpu_ffi.weights import PANELS
from mx_jax.formats import BlockFormat
from mx_jax.mxarray import MXArray
from mx_jax.packed import PackedMXArray


def rejects(call: MatmulCall) -> str | None:
    """Why no handler multiplies or decodes for a product, or None."""
    reason = rejections.rejects(call)
    return None if reason is None or _is_decoded(call) else reason


def multiply(lhs: Operand, rhs: Operand | PackedMXArray, call: MatmulCall) -> jax.Array:
    """The product `[*batch, *m, *n]`. Packed weights give the bits that they give unpacked."""
    if isinstance(rhs, PackedMXArray):
        return by_packed(call, lhs, rhs)
    return by_values(call, lhs, rhs) if _is_decoded(call) else by_codes(call, lhs, rhs)


def _is_decoded(call: MatmulCall) -> bool:
    """Whether all that is quantized is float8 under float32 scales, and not packed."""
    found = [own for _, own in call.sides if own.format is not None]
    return call.out_sharding is None and all(
        own.format is not None
        and own.format.scale.is_float32
        and own.packed_by is None
        and dequantize.rejects(_dequantize_call(own.shape, own.format, own.axes)) is None
        for own in found
    )


def _dequantize_call(shape: tuple[int, ...], format: BlockFormat, axes: Axes) -> DequantizeCall:
    float32 = np.dtype(np.float32)
    return DequantizeCall(shape=shape, dtype=float32, format=format, blocks=axes.blocks(format))


def by_values(call: MatmulCall, lhs: Operand, rhs: Operand) -> jax.Array:
    """The reference's product, of values that the handler decodes."""

    def values(x: Operand, axes: Axes) -> jax.Array:
        if not isinstance(x, MXArray):
            return x.astype(jnp.float32)
        return dequantize.dequantize(x, _dequantize_call(x.shape, x.format, axes))

    quantized = isinstance(lhs, MXArray) and isinstance(rhs, MXArray)
    return lax.dot_general(
        values(lhs, call.lhs.axes),
        values(rhs, call.rhs.axes),
        call.dimension_numbers,
        precision=lax.Precision.HIGHEST if quantized else call.precision,
        preferred_element_type=jnp.float32,
    ).astype(call.out_dtype)


def by_codes(call: MatmulCall, lhs: Operand, rhs: Operand) -> jax.Array:
    """The product of codes as they are, by the handler."""
    (format, *_) = [f for f in (call.lhs.format, call.rhs.format) if f is not None]
    left, right = _side(lhs, call.lhs.axes, "lhs"), _side(rhs, call.rhs.axes, "rhs")
    handler = Handler(
        target=MATMUL,
        axes=f"{left.axes}, {right.axes} -> *lr {left.kept} {right.kept}",
        dtypes=(np.dtype(call.out_dtype),),
        attributes=hashable(
            left.attributes | right.attributes | {"block": np.int32(block_size(format))}
        ),
    )
    (product,) = handler(*left.arrays, *right.arrays)
    return product


def by_packed(call: MatmulCall, lhs: Operand, rhs: PackedMXArray) -> jax.Array:
    """The product by packed weights, by the handler."""
    if rhs.layout == ROWS:
        return by_rows(by_packed, call, lhs, rhs)
    if rhs.layout.parts is not None:
        return by_parts(by_packed, PANELS, call, lhs, rhs)
    rows = math.prod(rhs.kept)
    left, (element, scale) = _side(lhs, call.lhs.axes, "lhs"), names(rhs.format)
    tensor_scale, axes = _tensor_scale(rhs.arrays.tensor_scale, "*t")
    handler = Handler(
        target=PACKED_MATMUL,
        axes=f"{left.axes}, *r n/{PANEL_ROWS} bytes, {axes} -> *lr {left.kept} n",
        dtypes=(np.dtype(call.out_dtype),),
        attributes=hashable(
            left.attributes
            | {"rhs_element": element, "rhs_scale": scale}
            | {"block": np.int32(block_size(rhs.format))}
        ),
        sizes=(("n", rows),),
    )
    (product,) = handler(*left.arrays, rhs.arrays.bytes, tensor_scale)
    return product.reshape(*product.shape[:-1], *rhs.kept)


def _tensor_scale(scale: jax.Array | None, axes: str) -> tuple[jax.Array, str]:
    """One for each matrix of an operand, and its axes; an empty array where there is none."""
    return (jnp.zeros((0,), jnp.float32), "0") if scale is None else (scale, axes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Side:
    """One operand as the handler takes it.

    Attributes:
      arrays: elements, scales and tensor scales.
      axes: of all.
      kept: the kept ones, which the handler takes as one.
      attributes: what it is told of them.
    """

    arrays: tuple[jax.Array, ...]
    axes: str
    kept: str
    attributes: dict[str, object]


def _side(operand: Operand, axes: Axes, which: Literal["lhs", "rhs"]) -> _Side:
    """One operand of a product."""
    format = operand.format if isinstance(operand, MXArray) else None
    batch, letter = ("*l", "m") if which == "lhs" else ("*r", "n")
    kept = f"({' '.join(f'{letter}{index}' for index in range(len(axes.kept)))})"
    k = " ".join(f"k{index}" for index in range(len(axes.contracting)))

    def in_order(k: str) -> str:
        return f"{batch} ({k}) {kept}" if axes.k_first else f"{batch} {kept} ({k})"

    scales = "0" if format is None else in_order(f"{k}/{block_size(format)}")
    # A batch of its own: one matrix's scale may stand for all.
    own = ("*s" if which == "lhs" else "*t") + " 1" * (operand.ndim - len(axes.batch))
    given = operand.tensor_scale if isinstance(operand, MXArray) else None
    tensor_scale, own = _tensor_scale(given, own)
    element, scale = names(format)
    return _Side(
        arrays=(*_arrays(operand, axes.contracting[-1]), tensor_scale),
        axes=f"{in_order(k)}, {scales}, {own}",
        kept=kept,
        attributes={
            f"{which}_element": element,
            f"{which}_scale": scale,
            f"{which}_k_first": axes.k_first,
        },
    )


def _arrays(operand: Operand, contracting: int) -> tuple[jax.Array, jax.Array]:
    """Elements and scales; blocks that span rows too get a scale for each row."""
    if not isinstance(operand, MXArray):
        known = operand.dtype in DTYPES
        return operand if known else operand.astype(jnp.float32), jnp.zeros((0,), jnp.uint8)
    scales = operand.scales
    for axis, size in operand.blocks:
        if axis % operand.ndim != contracting:
            assert isinstance(size, int), operand.blocks
            repeated = jnp.repeat(scales, size, axis)
            scales = lax.slice_in_dim(repeated, 0, operand.shape[axis], axis=axis)
    return operand.codes, scales
