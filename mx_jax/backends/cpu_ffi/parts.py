"""Packed weights that are cut along k: each part has panels of its own, so that devices share them.

A panel holds all of k for 32 rows, so what several devices are to have a part of k of is packed in
as many parts. Their products are added in float32.
"""

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mx_jax.backends.calls import MatmulCall, Operand, OperandType
from mx_jax.backends.cpu_ffi import panels
from mx_jax.mxarray import MXArray
from mx_jax.packed import Cut, Layout, PackedMXArray


def apart(whole: MXArray, packed: PackedMXArray, number: int) -> MXArray:
    """Weights with k in so many parts, which are a batch behind those that there are."""
    batch, axis = len(packed.batch), packed.first_k

    def cut(x: jax.Array) -> jax.Array:
        x = x.reshape(*x.shape[:axis], number, x.shape[axis] // number, *x.shape[axis + 1 :])
        return jnp.moveaxis(x, axis, batch)

    scale = whole.tensor_scale
    return dataclasses.replace(
        whole,
        codes=cut(whole.codes),
        scales=cut(whole.scales),
        tensor_scale=None if scale is None else jnp.expand_dims(scale, batch),
    )


def unpack(packed: PackedMXArray) -> MXArray:
    """The weights that parts were made of."""
    batch, parts = packed.batch, packed.arrays.bytes.shape[-3]
    axis = packed.first_k
    scale = packed.arrays.tensor_scale
    each = panels.unpack(
        dataclasses.replace(
            packed,
            k=(packed.k[0] // parts, *packed.k[1:]),
            arrays=panels.Panels(
                bytes=packed.arrays.bytes,
                tensor_scale=None
                if scale is None
                else jnp.broadcast_to(scale[..., None], (*batch, parts)),
            ),
        )
    )

    def together(x: jax.Array) -> jax.Array:
        x = jnp.moveaxis(x, len(batch), axis)
        return x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])

    scale = each.tensor_scale
    return dataclasses.replace(
        each,
        codes=together(each.codes),
        scales=together(each.scales),
        tensor_scale=None if scale is None else scale[(slice(None),) * len(batch) + (0,)],
    )


def batch_of(arrays: panels.Panels) -> tuple[int, ...]:
    """Sizes of the batch axes."""
    return arrays.bytes.shape[:-3]


def cut(packed: PackedMXArray, number: int | None, in_parts: Callable[..., PackedMXArray]) -> Cut:
    """How devices may cut panels: between them, and parts of k: between those.

    Args:
      packed: weights.
      number: of parts; None: panels have no axis of parts.
      in_parts: as `Cut` has it.
    """
    batch = tuple(range(len(packed.batch)))
    arrays = [(*batch, *(() if number is None else ("k",)), "n", None)]
    if packed.arrays.tensor_scale is not None:
        arrays.append(batch)
    return Cut(arrays=tuple(arrays), rows=panels.PANEL_ROWS, parts=number or 1, in_parts=in_parts)


def local(packed: PackedMXArray) -> PackedMXArray:
    """The weights that one device's panels are, and of parts of k those that it has.

    Raises:
      ValueError: a device whose last panel is not full, which panels do not tell.
    """
    panel_rows, layout, rows = panels.PANEL_ROWS, packed.layout, math.prod(packed.kept)
    here, whole = packed.arrays.bytes.shape[-2], -(-rows // panels.PANEL_ROWS)
    kept, k, shares = packed.kept, packed.k, whole // max(here, 1)
    if here != whole:
        if here * shares != whole or rows % (panel_rows * shares) or kept[0] % shares:
            raise ValueError(
                f"matmul: every shard needs whole tiles of packed weights, got {packed!r} with "
                f"{here} tiles of {panel_rows} rows on a device of shard_map, {whole} in all, for "
                f"{rows} rows; cut them as sharding.device_put does, or pack each part"
            )
        kept = (kept[0] // shares, *kept[1:])
    if layout.parts is not None and (own := packed.arrays.bytes.shape[-3]) != layout.parts:
        k = (k[0] * own // layout.parts, *k[1:])
        layout = dataclasses.replace(layout, parts=own)
    return dataclasses.replace(packed, kept=kept, k=k, layout=layout)


def by_parts(
    multiply: Callable[[MatmulCall, Operand, PackedMXArray], jax.Array],
    layout: Layout,
    call: MatmulCall,
    lhs: Operand,
    rhs: PackedMXArray,
) -> jax.Array:
    """The product by weights in parts: the sum of those by each part, which has `layout`."""
    parts = rhs.arrays.bytes.shape[-3]
    axis = call.lhs.axes.contracting[0]
    total: jax.Array | None = None
    for part in range(parts):
        left = _part_of(lhs, axis, part, parts)
        right = dataclasses.replace(
            rhs,
            layout=layout,
            k=(rhs.k[0] // parts, *rhs.k[1:]),
            arrays=dataclasses.replace(rhs.arrays, bytes=rhs.arrays.bytes[..., part, :, :]),
        )
        own = dataclasses.replace(
            call,
            lhs=OperandType.of(left, call.lhs.axes),
            rhs=OperandType.of(right, call.rhs.axes),
            out_dtype=np.dtype(np.float32),
        )
        product = multiply(own, left, right)
        total = product if total is None else total + product
    assert total is not None
    return total.astype(call.out_dtype)


def _part_of(operand: Operand, axis: int, part: int, parts: int) -> Operand:
    """One of several equal parts of an operand."""

    def cut(x: jax.Array) -> jax.Array:
        size = x.shape[axis] // parts
        return lax.slice_in_dim(x, part * size, (part + 1) * size, axis=axis)

    if not isinstance(operand, MXArray):
        return cut(operand)
    return dataclasses.replace(
        operand, codes=cut(operand.codes), scales=cut(operand.scales), primal=None
    )
