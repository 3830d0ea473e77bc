"""Weights in float8 whose scales are whole along k: panels of MXFP8, and the scales beside them.

One scale for all of a row leaves its sum: `x @ w = (x @ codes) / scale`. So codes are packed as
those of MXFP8 whose scales are all one, and its kernels multiply by them.
"""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from mx_jax.axes import Axes
from mx_jax.backends.calls import MatmulCall, Operand, OperandType, PackCall
from mx_jax.backends.cpu_ffi import panels
from mx_jax.backends.cpu_ffi.rejections import plain_call, plain_format
from mx_jax.backends.sums import SumScale, row_scales, scaled
from mx_jax.codecs.scale import scale_to_float32
from mx_jax.formats import WHOLE
from mx_jax.mxarray import MXArray
from mx_jax.packed import Layout, PackedMXArray

# E8M0's one.
_ONE = 127
_PANELS = Layout(backend="cpu_ffi", batch=panels.batch_of, unpack=panels.unpack)


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("panels", "scales"), meta_fields=()
)
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Rows:
    """Codes and scales apart.

    Attributes:
      panels: the codes as MXFP8 under scales of one.
      scales: of the format, `[*batch, n]`, or `[*batch, 1]` where one is for all rows.
    """

    panels: panels.Panels
    scales: jax.Array


def rejects_weights(call: PackCall) -> str | None:
    """Why weights in a format that has a `plain_format` cannot be packed, or None."""
    axes = call.weights.axes
    batch = {axis - axes.ndim for axis in axes.batch}
    expected = {axis for axis, _ in axes.blocks(call.format)} - batch
    if {axis for axis, _ in call.blocks} != expected or not axes.kept or not axes.is_canonical:
        return f"packs scales that are whole along all contracted axes, got {call}"
    return None


def codes_alone(x: MXArray, call: PackCall) -> tuple[MXArray, PackCall]:
    """Weights as MXFP8 under scales of one, in matrices, and how to pack those."""
    axes, format = call.weights.axes, plain_format(call.format)
    assert format is not None
    codes = axes.as_matrices(x.codes)
    k = -2 if axes.k_first else -1
    sizes = [*codes.shape]
    sizes[k] = -(-sizes[k] // panels.CHUNK)
    matrices = MXArray(
        codes=codes,
        scales=jnp.full(sizes, _ONE, jnp.uint8),
        tensor_scale=None,
        format=format,
        blocks=((k, panels.CHUNK),),
        dtype=x.dtype,
    )
    own = Axes.ordered(batch=len(axes.batch), k_first=axes.k_first)
    weights = OperandType.of(matrices, own)
    return matrices, PackCall(weights=weights, blocks=matrices.blocks, dtype=call.dtype)


def with_scales(codes: PackedMXArray, x: MXArray, call: PackCall) -> PackedMXArray:
    """Weights, from what their `codes_alone` was packed to."""
    axes = call.weights.axes
    batch, kept, k = axes.sizes(call.weights.shape)
    count = 1 if call.format.block[0] is WHOLE else math.prod(kept)
    return PackedMXArray(
        arrays=Rows(panels=codes.arrays, scales=x.scales.reshape(*batch, count)),
        layout=ROWS,
        kept=kept,
        k=k,
        k_first=axes.k_first,
        format=call.format,
        dtype=x.dtype,
    )


def by_rows(
    multiply: Callable[[MatmulCall, Operand, PackedMXArray], jax.Array],
    call: MatmulCall,
    lhs: Operand,
    rhs: PackedMXArray,
) -> jax.Array:
    """The product by weights in rows: that by their codes, and then the scales.

    Activations in float8 are multiplied as the bfloat16 numbers that their codes are.
    """
    values = scale_to_float32(rhs.arrays.scales, rhs.format.scale)
    rows = rhs.kept if values.shape[-1] == math.prod(rhs.kept) else (1,) * len(rhs.kept)
    ones = (1,) * len(call.lhs.axes.kept)
    values = values.reshape(*values.shape[:-1], *ones, *rows)
    scales = [SumScale(values, rhs.format.scale.kind == "divisor")]
    if isinstance(lhs, MXArray) and plain_format(lhs.format) is not None:
        scales.append(row_scales("lhs", lhs, call))
        lhs = lhs.elements.astype(jnp.bfloat16)
    sums = multiply(plain_call(call), lhs, _codes_of(rhs))
    return scaled(sums, *scales).astype(call.out_dtype)


def _codes_of(packed: PackedMXArray) -> PackedMXArray:
    format = plain_format(packed.format)
    assert format is not None
    return dataclasses.replace(packed, arrays=packed.arrays.panels, layout=_PANELS, format=format)


def _batch_of(rows: Rows) -> tuple[int, ...]:
    return panels.batch_of(rows.panels)


def _unpack(packed: PackedMXArray) -> MXArray:
    # Codes as matrices: those of several axes fill whole blocks together, not each.
    matrices = dataclasses.replace(
        _codes_of(packed), kept=(math.prod(packed.kept),), k=(math.prod(packed.k),)
    )
    scales = packed.arrays.scales
    whole = packed.format.block[0] is WHOLE
    sizes = packed.matrix_axes((1,) * len(packed.k))
    return MXArray(
        codes=panels.unpack(matrices).codes.reshape(packed.shape),
        scales=scales.reshape(*packed.batch, *((1,) * len(sizes) if whole else sizes)),
        tensor_scale=None,
        format=packed.format,
        blocks=packed.blocks,
        dtype=packed.dtype,
    )


def _take(packed: PackedMXArray, indices: jax.Array) -> MXArray:
    """Rows of weights `[n, k]`, each with its scale."""
    rows = panels.take(_codes_of(packed), indices)
    scales = jnp.broadcast_to(packed.arrays.scales, packed.kept)
    return dataclasses.replace(
        rows,
        scales=scales[jnp.clip(indices, 0, packed.kept[0] - 1)][..., None],
        format=packed.format,
        blocks=((-1, WHOLE),),
    )


def _local(packed: PackedMXArray) -> PackedMXArray:
    rows, tiles = math.prod(packed.kept), packed.arrays.panels.bytes.shape[-2]
    if tiles != -(-rows // panels.PANEL_ROWS):
        raise ValueError(
            f"matmul: packed weights of this layout are not cut, got {packed!r} with {tiles} tiles "
            f"of {panels.PANEL_ROWS} rows for {rows}, as shard_map cuts them; shard the MXArray, "
            "or pack each part"
        )
    return packed


ROWS = Layout(backend="cpu_ffi", batch=_batch_of, unpack=_unpack, take=_take, local=_local)
