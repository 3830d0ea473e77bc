"""Formats that the kernels of products read, and weights packed once in the order of these kernels.

A product of few rows, as in decoding, is bound by reading its weights. Packed, codes take the bits
of their format, and every instruction set reads them in one stream: panels of 32 rows with all of
k. Float8 under scales that are whole along k is packed as MXFP8 under scales of one, for
`x @ w = (x @ codes) / scale`.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mx_jax.backends.calls import PackCall
from mx_jax.backends.cpu_ffi import handler
from mx_jax.backends.sums import rejects_scale_axes
from mx_jax.formats import E4M3_SCALE, E8M0, MX_FORMATS, MXFP8_E4M3, MXFP8_E5M2, WHOLE, BlockFormat
from mx_jax.formats.element import known_element, known_scale
from mx_jax.mxarray import MXArray
from mx_jax.packed import Layout, PackedMXArray

# Formats ------------------------------------------------------------------------------------------

# Rows of MX_ELEMENTS in custom_calls/products/elements.h.
ELEMENTS = tuple(format.element for format in MX_FORMATS)
_BLOCKS = (16, 32)


def rejects_format(format: BlockFormat) -> str | None:
    """Why the kernels do not multiply operands of a format, or None."""
    if known_element(format.element) not in ELEMENTS:
        names = ", ".join(element.name for element in ELEMENTS)
        return f"multiplies elements in {names}, got {format.element.name}"
    if known_scale(format.scale) not in (E8M0, E4M3_SCALE):
        return f"needs scales in e8m0 or e4m3, got {format.name} with {format.scale.name}"
    if format.block[1] not in _BLOCKS:
        return f"needs blocks of {' or '.join(map(str, _BLOCKS))} along k, got {format}"
    if format.block[0] is WHOLE:
        return f"needs blocks that end along the kept axes, got {format}"
    return None


def block_of(format: BlockFormat | None) -> tuple[int, int]:
    """Kept positions of one block, and those along k, of a format that kernels multiply."""
    rows, size = (1, 0) if format is None else format.block
    assert isinstance(rows, int) and isinstance(size, int), format
    return rows, size


def names(format: BlockFormat | None) -> tuple[str, str]:
    """What the handler calls the element and the scale of a format that it takes."""
    if format is None:
        return "none", "none"
    element, scale = known_element(format.element), known_scale(format.scale)
    assert element is not None and scale is not None, format
    return element.name, scale.name


def plain_format(format: BlockFormat | None) -> BlockFormat | None:
    """MXFP8 of the same elements; None of what is not float8 under scales that leave the sums."""
    if format is None or format.block not in ((1, WHOLE), (WHOLE, WHOLE)):
        return None
    if not format.is_known or not format.scale.is_float32:
        return None
    element = known_element(format.element)
    return next((plain for plain in (MXFP8_E4M3, MXFP8_E5M2) if plain.element == element), None)


# Panels -------------------------------------------------------------------------------------------

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


def _records(format: BlockFormat, k: int) -> tuple[int, int, int]:
    """How many records a panel has, and bytes of one's scales and of its codes."""
    positions = RECORD * CHUNK * PANEL_ROWS
    num_scales = positions // block_of(format)[1]
    return -(-k // (RECORD * CHUNK)), num_scales, positions * format.element.bits // 8


def unpack_panels(packed: PackedMXArray) -> MXArray:
    """The weights that panels were made of."""
    panels, scale = packed.arrays.bytes, packed.arrays.tensor_scale
    rows, k, bits = math.prod(packed.kept), math.prod(packed.k), packed.format.element.bits
    records, num_scales, num_codes = _records(packed.format, k)
    batch, num_panels, block = panels.shape[:-2], panels.shape[-2], block_of(packed.format)[1]
    padded, padded_k = num_panels * PANEL_ROWS, records * RECORD * CHUNK
    split = panels[..., SUMMARY:].reshape(*batch, num_panels, records, num_scales + num_codes)

    # No axis is left open: of no rows it could have any length.
    columns = records * num_codes // (4 * PANEL_ROWS)
    words = split[..., num_scales:].reshape(*batch, num_panels, columns, PANEL_ROWS, 4)
    if bits == 4:
        words = jnp.concatenate([words & 15, words >> 4], axis=-1)
    elif bits == 6:
        # Three words hold four: bits 6 and 7 of each are two bits of the last.
        threes = words.reshape(*batch, num_panels, columns // 3, 3, PANEL_ROWS, 4)
        first, second, third = (threes[..., i, :, :] >> 6 for i in range(3))
        last = first | second << 2 | third << 4
        words = jnp.concatenate([threes & 63, last[..., None, :, :]], axis=-3)
        words = words.reshape(*batch, num_panels, columns // 3 * 4, PANEL_ROWS, 4)
    codes = jnp.swapaxes(words, -3, -2).reshape(*batch, padded, padded_k)

    blocks = padded_k // block
    scales = split[..., :num_scales].reshape(*batch, num_panels, blocks, PANEL_ROWS)
    scales = jnp.swapaxes(scales, -2, -1).reshape(*batch, padded, blocks)
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
    # A batch of panels, one a matrix.
    panels = Panels(
        bytes=packed.arrays.bytes[panel, None],
        tensor_scale=None if scale is None else jnp.broadcast_to(scale, row.shape),
    )
    matrices = unpack_panels(dataclasses.replace(packed, arrays=panels, kept=(PANEL_ROWS,)))
    rows = jax.vmap(lambda matrix, lane: matrix[lane])(matrices, lane)
    return rows.reshape(*indices.shape, packed.k[0])


def check(packed: PackedMXArray) -> None:
    """Raise ValueError unless the panels are all of the weights."""
    panels = getattr(packed.arrays, "panels", packed.arrays)
    rows, tiles = math.prod(packed.kept), panels.bytes.shape[-2]
    if tiles != -(-rows // PANEL_ROWS):
        raise ValueError(
            f"packed weights are not cut, got {packed!r} with {tiles} tiles of "
            f"{PANEL_ROWS} rows for {rows}, as shard_map cuts them; shard the MXArray, or pack "
            "each part"
        )


def batch_of_panels(panels: Panels) -> tuple[int, ...]:
    """The lengths of the batch axes."""
    return panels.bytes.shape[:-2]


PANELS = Layout(
    backend="cpu_ffi",
    batch=batch_of_panels,
    unpack=unpack_panels,
    take=take,
    check=check,
)


# Rows of codes, and their scales apart ------------------------------------------------------------

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


def codes_alone(packed: PackedMXArray) -> PackedMXArray:
    """The codes of rows, as MXFP8 under scales of one."""
    format = plain_format(packed.format)
    assert format is not None
    return dataclasses.replace(packed, arrays=packed.arrays.panels, layout=PANELS, format=format)


def unpack_rows(packed: PackedMXArray) -> MXArray:
    """The weights that rows were made of."""
    # Codes as matrices: those of several axes fill whole blocks together, not each.
    matrices = dataclasses.replace(
        codes_alone(packed), kept=(math.prod(packed.kept),), k=(math.prod(packed.k),)
    )
    sizes = packed.matrix_axes((1,) * len(packed.k))
    if packed.format.block[0] is WHOLE:
        sizes = (1,) * len(sizes)
    return MXArray(
        codes=unpack_panels(matrices).codes.reshape(packed.shape),
        scales=packed.arrays.scales.reshape(*packed.batch, *sizes),
        tensor_scale=None,
        format=packed.format,
        blocks=packed.blocks,
        dtype=packed.dtype,
    )


def take_rows(packed: PackedMXArray, indices: jax.Array) -> MXArray:
    """Rows of weights `[n, k]`, each with its scale."""
    scales = jnp.broadcast_to(packed.arrays.scales, packed.kept)
    return dataclasses.replace(
        take(codes_alone(packed), indices),
        scales=scales[jnp.clip(indices, 0, packed.kept[0] - 1)][..., None],
        format=packed.format,
        blocks=((-1, WHOLE),),
    )


def batch_of_rows(rows: Rows) -> tuple[int, ...]:
    """The lengths of the batch axes."""
    return batch_of_panels(rows.panels)


ROWS = Layout(
    backend="cpu_ffi",
    batch=batch_of_rows,
    unpack=unpack_rows,
    take=take_rows,
    check=check,
)


# Packing ------------------------------------------------------------------------------------------

TARGET = "mx_jax_cpu_pack_weights"


def rejects_pack(call: PackCall) -> str | None:
    """Why weights cannot be packed here, or None."""
    if plain_format(call.format) is None:
        return (
            rejects_format(call.format)
            or call.rejects_layout()
            or rejects_scale_axes(call, batch=True)
        )
    axes = call.weights.axes
    batch = {axis - axes.ndim for axis in axes.batch}
    expected = {axis for axis, _ in axes.blocks(call.format)} - batch
    fits = {axis for axis, _ in call.blocks} == expected and axes.kept
    if not fits or not axes.has_canonical_order:
        return f"packs scales that are whole along all contracted axes, got {call}"
    return None


def pack(x: MXArray, call: PackCall) -> PackedMXArray:
    """Weights that `rejects_pack` lets through, in the kernels' order."""
    axes, plain = call.weights.axes, plain_format(call.format)
    batch, kept, k = axes.sizes(call.weights.shape)
    codes, tensor_scale = axes.merge_groups(x.codes), x.tensor_scale
    if plain is None:
        ((_, block),) = call.blocks
        assert isinstance(block, int), call.blocks
        format, scales = call.format.with_block(block), axes.merge_groups(x.scales)
    else:
        format, block, along = plain, CHUNK, -2 if axes.k_first else -1
        sizes = [*codes.shape]
        sizes[along] = -(-sizes[along] // CHUNK)
        scales = jnp.full(sizes, _ONE, jnp.uint8)

    (element, scale), (records, *parts) = names(format), _records(format, math.prod(k))
    operand_axes = ("*b k n", f"*b k/{block} n") if axes.k_first else ("*b n k", f"*b n k/{block}")
    (packed,) = handler.call(
        TARGET,
        zip((codes, scales), operand_axes, strict=True),
        [(f"*b n/{PANEL_ROWS} bytes", "uint8")],
        attributes={
            "element": element,
            "scale": scale,
            "block": np.int32(block),
            "k_first": axes.k_first,
        },
        sizes={"bytes": SUMMARY + records * sum(parts)},
    )
    if tensor_scale is not None:
        # One for each matrix: scan slices every array of a stack along the same axes.
        tensor_scale = tensor_scale.reshape(tensor_scale.shape[: len(batch)])
        tensor_scale = jnp.broadcast_to(tensor_scale, batch)
    arrays, layout = Panels(bytes=packed, tensor_scale=tensor_scale), PANELS
    if plain is not None:
        count = 1 if call.format.block[0] is WHOLE else math.prod(kept)
        arrays = Rows(panels=arrays, scales=x.scales.reshape(*batch, count))
        format, layout = call.format, ROWS
    return PackedMXArray(
        arrays=arrays,
        layout=layout,
        kept=kept,
        k=k,
        k_first=axes.k_first,
        format=format,
        dtype=x.dtype,
    )
