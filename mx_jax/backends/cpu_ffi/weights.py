"""Weights packed once, ahead of time, in the order in which the CPU's kernels read them.

A product of few rows, as in decoding, is bound by reading its weights. Packed, codes take the bits
of their format, and every instruction set reads them in one stream: panels of 32 rows with all of
k. Weights that devices share along k are packed in as many parts, whose products are added in
float32. Float8 under scales that are whole along k is packed as MXFP8 under scales of one, for
`x @ w = (x @ codes) / scale`.
"""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mx_jax.axes import Axes
from mx_jax.backends.calls import MatmulCall, Operand, OperandType, PackCall
from mx_jax.backends.cpu_ffi import rejections
from mx_jax.backends.cpu_ffi.handler import Handler, hashable
from mx_jax.backends.sums import SumScale, rejects_scale_axes, row_scales, scaled
from mx_jax.codecs.scale import scale_to_float32
from mx_jax.formats import WHOLE, BlockFormat
from mx_jax.mxarray import MXArray
from mx_jax.packed import Cut, Layout, PackedMXArray

PANEL_ROWS = 32
CHUNK = 32  # along k
RECORD = 2  # chunks whose scales lie together, before their codes
SUMMARY = 64  # bytes at the front of a panel; all as in custom_calls/products/weights.h


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("bytes", "tensor_scale"), meta_fields=()
)
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Panels:
    """Weights panel by panel."""

    bytes: jax.Array  # uint8 `[*batch, ceil(n / 32), bytes of a panel]`, with n the product of kept
    tensor_scale: jax.Array | None  # float32 `[*batch]` (NVFP4), else None


def panels_batch(panels: Panels) -> tuple[int, ...]:
    """Sizes of the batch axes."""
    return panels.bytes.shape[:-2]


def unpack_panels(packed: PackedMXArray) -> MXArray:
    """The weights that panels were made of."""
    panels, scale = packed.arrays.bytes, packed.arrays.tensor_scale
    rows, k = math.prod(packed.kept), math.prod(packed.k)
    batch, num_panels, records = panels.shape[:-2], panels.shape[-2], _records(k)
    block, padded = rejections.block_size(packed.format), num_panels * PANEL_ROWS
    num_scales, num_codes = _record_bytes(packed.format)
    split = panels[..., SUMMARY:].reshape(*batch, num_panels, records, num_scales + num_codes)
    words = split[..., num_scales:].reshape(*batch, num_panels, -1, PANEL_ROWS, 4)
    words = _codes_of(words, packed.format.element.bits)
    codes = jnp.swapaxes(words, -3, -2).reshape(*batch, padded, records * RECORD * CHUNK)
    scales = split[..., :num_scales].reshape(*batch, num_panels, -1, PANEL_ROWS)
    scales = jnp.swapaxes(scales, -2, -1).reshape(*batch, padded, records * RECORD * CHUNK // block)
    scale_k = (*packed.k[:-1], -(-packed.k[-1] // block))
    ones = (1,) * (len(packed.kept) + len(packed.k))
    return MXArray(
        codes=packed.arrange(codes[..., :rows, :k], batch, packed.k),
        scales=packed.arrange(scales[..., :rows, : math.prod(scale_k)], batch, scale_k),
        tensor_scale=None if scale is None else scale.reshape(*scale.shape, *ones),
        format=packed.format,
        blocks=packed.blocks,
        dtype=packed.dtype,
    )


def take(packed: PackedMXArray, indices: jax.Array) -> MXArray:
    """Rows of the weights `[n, k]`, each unpacked from its lane of its panel."""
    row = jnp.clip(indices.reshape(-1), 0, packed.kept[0] - 1)
    # Not `//` and `%`, whose signs take longer to trace than all else here.
    panel, lane = (of(row, np.asarray(PANEL_ROWS, row.dtype)) for of in (lax.div, lax.rem))
    scale = packed.arrays.tensor_scale
    # A batch of panels, each a matrix of its own.
    panels = Panels(
        bytes=packed.arrays.bytes[panel, None],
        tensor_scale=None if scale is None else jnp.broadcast_to(scale, row.shape),
    )
    matrices = unpack_panels(dataclasses.replace(packed, arrays=panels, kept=(PANEL_ROWS,)))
    rows = jax.vmap(lambda matrix, lane: matrix[lane])(matrices, lane)
    return rows.reshape(*indices.shape, packed.k[0])


def panel_bytes(format: BlockFormat, k: int) -> int:
    """Bytes of one panel, of k contracted positions."""
    return SUMMARY + _records(k) * sum(_record_bytes(format))


def _records(k: int) -> int:
    return -(-k // (RECORD * CHUNK))


def _record_bytes(format: BlockFormat) -> tuple[int, int]:
    scales = RECORD * CHUNK // rejections.block_size(format) * PANEL_ROWS
    return scales, RECORD * CHUNK * PANEL_ROWS * format.element.bits // 8


def _codes_of(words: jax.Array, bits: int) -> jax.Array:
    """Codes `[..., words along k, rows, 4 or 8]` of words `[..., words in memory, rows, 4]`."""
    if bits == 4:
        return jnp.concatenate([words & 15, words >> 4], axis=-1)
    if bits == 6:
        # Three words hold four: bits 6 and 7 of each are two bits of the last.
        threes = words.reshape(*words.shape[:-3], -1, 3, *words.shape[-2:])
        first, second, third = (threes[..., i, :, :] >> 6 for i in range(3))
        last = first | second << 2 | third << 4
        fours = jnp.concatenate([threes & 63, last[..., None, :, :]], axis=-3)
        return fours.reshape(*words.shape[:-3], -1, *words.shape[-2:])
    return words


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


def unpack_parts(packed: PackedMXArray) -> MXArray:
    """The weights that parts were made of."""
    batch, parts = packed.batch, packed.arrays.bytes.shape[-3]
    axis = packed.first_k
    scale = packed.arrays.tensor_scale
    each = unpack_panels(
        dataclasses.replace(
            packed,
            k=(packed.k[0] // parts, *packed.k[1:]),
            arrays=Panels(
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


def parts_batch(arrays: Panels) -> tuple[int, ...]:
    """Sizes of the batch axes."""
    return arrays.bytes.shape[:-3]


def cut(packed: PackedMXArray, number: int | None, in_parts: Callable[..., PackedMXArray]) -> Cut:
    """How devices may cut panels into a `number` of parts of k, or whole ones where it is None."""
    batch = tuple(range(len(packed.batch)))
    arrays = [(*batch, *(() if number is None else ("k",)), "n", None)]
    if packed.arrays.tensor_scale is not None:
        arrays.append(batch)
    return Cut(arrays=tuple(arrays), rows=PANEL_ROWS, parts=number or 1, in_parts=in_parts)


def local(packed: PackedMXArray) -> PackedMXArray:
    """The weights that one device's panels are, and of parts of k those that it has."""
    panel_rows, layout, rows = PANEL_ROWS, packed.layout, math.prod(packed.kept)
    here, whole = packed.arrays.bytes.shape[-2], -(-rows // PANEL_ROWS)
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
    def cut(x: jax.Array) -> jax.Array:
        size = x.shape[axis] // parts
        return lax.slice_in_dim(x, part * size, (part + 1) * size, axis=axis)

    if not isinstance(operand, MXArray):
        return cut(operand)
    return dataclasses.replace(
        operand, codes=cut(operand.codes), scales=cut(operand.scales), primal=None
    )


# E8M0's one.
_ONE = 127


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("panels", "scales"), meta_fields=()
)
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Rows:
    """Codes and scales apart."""

    panels: Panels  # the codes as MXFP8 under scales of one
    scales: jax.Array  # of the format, `[*batch, n]`, or `[*batch, 1]` where one is for all rows


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
    axes, format = call.weights.axes, rejections.plain_format(call.format)
    assert format is not None
    codes = axes.as_matrices(x.codes)
    k = -2 if axes.k_first else -1
    sizes = [*codes.shape]
    sizes[k] = -(-sizes[k] // CHUNK)
    matrices = MXArray(
        codes=codes,
        scales=jnp.full(sizes, _ONE, jnp.uint8),
        tensor_scale=None,
        format=format,
        blocks=((k, CHUNK),),
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
    """The product by weights in rows: that by their codes, and then the scales."""
    # Activations in float8 are multiplied as the bfloat16 numbers that their codes are.
    values = scale_to_float32(rhs.arrays.scales, rhs.format.scale)
    rows = rhs.kept if values.shape[-1] == math.prod(rhs.kept) else (1,) * len(rhs.kept)
    ones = (1,) * len(call.lhs.axes.kept)
    values = values.reshape(*values.shape[:-1], *ones, *rows)
    scales = [SumScale(values, rhs.format.scale.kind == "divisor")]
    if isinstance(lhs, MXArray) and rejections.plain_format(lhs.format) is not None:
        scales.append(row_scales("lhs", lhs, call))
        lhs = lhs.elements.astype(jnp.bfloat16)
    sums = multiply(rejections.plain_call(call), lhs, _codes_alone_of(rhs))
    return scaled(sums, *scales).astype(call.out_dtype)


def _codes_alone_of(packed: PackedMXArray) -> PackedMXArray:
    format = rejections.plain_format(packed.format)
    assert format is not None
    return dataclasses.replace(packed, arrays=packed.arrays.panels, layout=PANELS, format=format)


def _rows_batch(rows: Rows) -> tuple[int, ...]:
    return panels_batch(rows.panels)


def _unpack_rows(packed: PackedMXArray) -> MXArray:
    # Codes as matrices: those of several axes fill whole blocks together, not each.
    matrices = dataclasses.replace(
        _codes_alone_of(packed), kept=(math.prod(packed.kept),), k=(math.prod(packed.k),)
    )
    scales = packed.arrays.scales
    whole = packed.format.block[0] is WHOLE
    sizes = packed.matrix_axes((1,) * len(packed.k))
    return MXArray(
        codes=unpack_panels(matrices).codes.reshape(packed.shape),
        scales=scales.reshape(*packed.batch, *((1,) * len(sizes) if whole else sizes)),
        tensor_scale=None,
        format=packed.format,
        blocks=packed.blocks,
        dtype=packed.dtype,
    )


def _take_rows(packed: PackedMXArray, indices: jax.Array) -> MXArray:
    """Rows of weights `[n, k]`, each with its scale."""
    rows = take(_codes_alone_of(packed), indices)
    scales = jnp.broadcast_to(packed.arrays.scales, packed.kept)
    return dataclasses.replace(
        rows,
        scales=scales[jnp.clip(indices, 0, packed.kept[0] - 1)][..., None],
        format=packed.format,
        blocks=((-1, WHOLE),),
    )


def _local_rows(packed: PackedMXArray) -> PackedMXArray:
    rows, tiles = math.prod(packed.kept), packed.arrays.panels.bytes.shape[-2]
    if tiles != -(-rows // PANEL_ROWS):
        raise ValueError(
            f"matmul: packed weights of this layout are not cut, got {packed!r} with {tiles} tiles "
            f"of {PANEL_ROWS} rows for {rows}, as shard_map cuts them; shard the MXArray, "
            "or pack each part"
        )
    return packed


ROWS = Layout(
    backend="cpu_ffi", batch=_rows_batch, unpack=_unpack_rows, take=_take_rows, local=_local_rows
)


TARGET = "mx_jax_cpu_pack_weights"


def in_parts(packed: PackedMXArray, number: int) -> PackedMXArray:
    """The same weights with k in so many parts, so that devices can share it."""
    weights = apart(packed.unpack(), packed, number)
    axes = Axes.ordered(
        batch=len(packed.batch) + 1,
        kept=len(packed.kept),
        contracting=len(packed.k),
        k_first=packed.k_first,
    )
    call = PackCall(
        weights=OperandType.of(weights, axes), blocks=weights.blocks, dtype=packed.dtype
    )
    arrays = dataclasses.replace(packed.arrays, bytes=pack(weights, call).arrays.bytes)
    layout = dataclasses.replace(PARTS, parts=number)
    return dataclasses.replace(packed, arrays=arrays, layout=layout)


def _cut(packed: PackedMXArray) -> Cut:
    """How devices may cut panels: between them."""
    return cut(packed, number=None, in_parts=in_parts)


def _cut_parts(packed: PackedMXArray) -> Cut:
    return cut(packed, number=packed.arrays.bytes.shape[-3], in_parts=in_parts)


PANELS = Layout(
    backend="cpu_ffi",
    batch=panels_batch,
    unpack=unpack_panels,
    take=take,
    cut=_cut,
    local=local,
)
PARTS = Layout(
    backend="cpu_ffi",
    batch=parts_batch,
    unpack=unpack_parts,
    cut=_cut_parts,
    local=local,
    parts=1,
)


def rejects_pack(call: PackCall) -> str | None:
    """Why weights cannot be packed here, or None."""
    if rejections.plain_format(call.format) is not None:
        return rejects_weights(call)
    return (
        rejections.rejects_format(call.format)
        or call.rejects_layout()
        or rejects_scale_axes(call, batch=True)
    )


def pack(x: MXArray, call: PackCall) -> PackedMXArray:
    """Weights that `rejects` lets through, in the kernels' order."""
    if rejections.plain_format(call.format) is not None:
        return with_scales(pack(*codes_alone(x, call)), x, call)
    ((_, block),) = call.blocks
    assert isinstance(block, int), call.blocks
    format = call.format.with_block(block)
    axes = call.weights.axes
    batch, kept, k = axes.sizes(call.weights.shape)

    element, scale = rejections.names(format)
    given = "*b k n, *b k/{block} n" if axes.k_first else "*b n k, *b n k/{block}"
    handler = Handler(
        target=TARGET,
        axes=f"{given.format(block=block)} -> *b n/{PANEL_ROWS} bytes",
        dtypes=(np.dtype("uint8"),),
        attributes=hashable(
            {"element": element, "scale": scale, "block": np.int32(block), "k_first": axes.k_first}
        ),
        sizes=(("bytes", panel_bytes(format, math.prod(k))),),
    )
    (packed,) = handler(axes.as_matrices(x.codes), axes.as_matrices(x.scales))
    tensor_scale = x.tensor_scale
    if tensor_scale is not None:
        # One for each matrix: scan slices every array of a stack along the same axes.
        tensor_scale = tensor_scale.reshape(tensor_scale.shape[: len(batch)])
        tensor_scale = jnp.broadcast_to(tensor_scale, batch)
    return PackedMXArray(
        arrays=Panels(bytes=packed, tensor_scale=tensor_scale),
        layout=PANELS,
        kept=kept,
        k=k,
        k_first=axes.k_first,
        format=format,
        dtype=x.dtype,
    )
