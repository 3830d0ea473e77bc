"""Few rows of activations by weights of few bits: packed once, or as they are stored.

Such a product is bound by reading its weights. A kernel (`columns.py`) reads their codes and scales
once, in the order `[k, n]`: of E2M1 only if packed, of elements of a byte also where they lie.
"""

import dataclasses
import math
import re

import jax
import jax.numpy as jnp

from mx_jax.backends.calls import MatmulCall, PackCall
from mx_jax.backends.sums import rejects_parts_of_blocks, rejects_scale_axes
from mx_jax.backends.target import Target
from mx_jax.formats import E2M1, E4M3, E4M3_SCALE, E8M0, INT8, BlockFormat
from mx_jax.formats.element import known_element, known_scale
from mx_jax.mxarray import MXArray
from mx_jax.packed import Layout, PackedMXArray

# Values along k that one product on the matrix unit contracts, and that a step of the kernel reads:
# 32 rows of scales or 64, since a tile has 32 rows of bytes. It has 128 columns.
DEPTH, STEP, TILE = 256, 1024, 128
# Elements and scales. Not E5M2: its infinities would make NaN of zeros in other blocks' rows.
_KINDS = (E2M1, E8M0), (E2M1, E4M3_SCALE), (E4M3, E8M0), (INT8, E8M0)

# The layout ---------------------------------------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Columns:
    """Weights `[*batch, k, n]`, with both axes padded with zeros to whole steps and tiles."""

    codes: jax.Array  # uint8, as they are stored; of E2M1 half as many rows, see `paired`
    scales: jax.Array  # uint8, a row for each block
    tensor_scale: jax.Array | None  # float32 `[*batch]` (NVFP4), else None


def paired(codes: jax.Array) -> jax.Array:
    """E2M1 `[..., k, n]`, two in a byte: of 256 rows, row i below 128 with row i + 128.

    The first has its sign in bit 7, and its magnitude in bits 3 to 1, where E5M2 has exponent and
    mantissa; the second in bit 0, and in bits 6 to 4. The mantissas of magnitudes from 1 on are
    inverted: so the kernel needs one operation for all codes but zero.
    """
    rows = codes.reshape(*codes.shape[:-2], -1, 2, DEPTH // 2, codes.shape[-1])
    first, second = rows[..., 0, :, :], rows[..., 1, :, :]
    pairs = _inverted(first & 7) << 1 | first >> 3 << 7 | _inverted(second & 7) << 4 | second >> 3
    return pairs.reshape(*codes.shape[:-2], -1, codes.shape[-1])


def apart(pairs: jax.Array) -> jax.Array:
    """The inverse of `paired`."""
    pairs = pairs.reshape(*pairs.shape[:-2], -1, DEPTH // 2, pairs.shape[-1])
    first = _inverted(pairs >> 1 & 7) | pairs >> 7 << 3
    second = _inverted(pairs >> 4 & 7) | (pairs & 1) << 3
    rows = jnp.stack([first, second], axis=-3)
    return rows.reshape(*rows.shape[:-4], -1, rows.shape[-1])


def _inverted(magnitudes: jax.Array) -> jax.Array:
    return magnitudes ^ (magnitudes > 1).astype(jnp.uint8)


def pack(x: MXArray, call: PackCall, interpret: bool) -> PackedMXArray:
    """Weights that `rejects_pack` lets through, in the kernel's order."""
    axes, ((_, block),), scale = call.weights.axes, call.blocks, x.tensor_scale
    batch, kept, k = axes.sizes(call.weights.shape)
    assert isinstance(block, int)

    def columns(array: jax.Array, step: int) -> jax.Array:
        array = axes.merge_groups(array)
        array = array if axes.k_first else array.swapaxes(-1, -2)
        edges = (0, -array.shape[-2] % step), (0, -array.shape[-1] % TILE)
        return jnp.pad(array, ((0, 0),) * len(batch) + edges)

    codes = columns(x.codes, STEP)
    if scale is not None:
        scale = jnp.broadcast_to(scale.reshape(scale.shape[: len(batch)]), batch)
    return PackedMXArray(
        arrays=Columns(
            codes=paired(codes) if call.format.element.bits == 4 else codes,
            scales=columns(x.scales, STEP // block),
            tensor_scale=scale,
        ),
        layout=COLUMNS,
        kept=kept,
        k=k,
        k_first=axes.k_first,
        format=call.format.with_block(block),
        dtype=x.dtype,
    )


def unpack(packed: PackedMXArray) -> MXArray:
    """The weights that were packed."""
    arrays, block, n = packed.arrays, packed.format.block[1], math.prod(packed.kept)
    codes, scale = arrays.codes, arrays.tensor_scale
    assert isinstance(block, int)

    def arrange(columns: jax.Array, k: tuple[int, ...]) -> jax.Array:
        matrices = columns[..., : math.prod(k), :n].swapaxes(-1, -2)
        return packed.arrange(matrices, packed.batch, k)

    ones = (1,) * (len(packed.kept) + len(packed.k))
    return MXArray(
        codes=arrange(apart(codes) if packed.format.element.bits == 4 else codes, packed.k),
        scales=arrange(arrays.scales, (*packed.k[:-1], -(-packed.k[-1] // block))),
        tensor_scale=None if scale is None else scale.reshape(*packed.batch, *ones),
        format=packed.format,
        blocks=packed.blocks,
        dtype=packed.dtype,
    )


def batch_of(columns: Columns) -> tuple[int, ...]:
    """The lengths of the batch axes."""
    return columns.codes.shape[:-2]


COLUMNS = Layout(backend="pallas_tpu", batch=batch_of, unpack=unpack)

# Which calls --------------------------------------------------------------------------------------


def generation(kind: str | None) -> int | None:
    """Of a TPU by its kind, where that tells."""
    match = re.match(r"TPU ?v?(\d+)", kind or "")
    return None if match is None else int(match[1])


def rejects_format(format: BlockFormat | None, target: Target) -> str | None:
    """Why weights of a format are not taken on a TPU, or None."""
    if (generation(target.device_kind) or 5) < 5:
        return f"needs a TPU from v5 on, which multiplies float8, got {target.device_kind}"
    if format is None:
        return "reads weights in a block format, got rhs in high precision"
    kind = known_element(format.element), known_scale(format.scale)
    if kind not in _KINDS or format.block not in ((1, 16), (1, 32)):
        kinds = ", ".join(f"{element.name} under {scale.name}" for element, scale in _KINDS)
        return f"reads {kinds}, in blocks of 16 or 32 along k, got {format.name} {format.block}"
    return None


def rejects_pack(call: PackCall, target: Target) -> str | None:
    """Why weights are not packed, or None."""
    if target.program_devices > 1:
        return f"packs weights that lie on one device, got devices={target.program_devices}"
    if call.lhs_format is not None:
        return f"packs for activations in high precision, got {call.lhs_format.name}"
    if 0 in call.weights.shape:
        return f"packs weights that have elements, got shape={call.weights.shape}"
    reason = call.rejects_layout() or rejects_scale_axes(call, batch=True)
    return reason or rejects_format(call.format.with_block(call.blocks[0][1]), target)


def rejects(call: MatmulCall, target: Target) -> str | None:
    """Why a product is not taken, or None."""
    lhs, rhs, format = call.lhs, call.rhs, call.rhs.format
    if lhs.dtype != jnp.bfloat16 or call.out_dtype == jnp.float16:
        got = lhs.dtype if lhs.format is None else lhs.format.name
        return f"multiplies bfloat16 to itself or float32, got {got} to {call.out_dtype}"
    if reason := rejects_format(format, target) or rejects_parts_of_blocks(call):
        return reason
    assert format is not None and isinstance(format.block[1], int)
    # The matrix unit is given a row for each of them and each block of 256 values: 256 at most.
    if not 0 < lhs.rows <= format.block[1] or 0 in rhs.shape:
        most = f"1 to {format.block[1]} rows by {format.name} that has elements"
        return f"is faster for {most}, got rows={lhs.rows}, rhs_shape={rhs.shape}"
    if rhs.packed_by is not None:
        return None
    k = math.prod(rhs.shape[axis] for axis in rhs.axes.contracting)
    if format.element.bits != 8 or not rhs.axes.k_first or k % STEP or rhs.rows % TILE:
        return (
            f"reads elements of a byte, with k % {STEP} == 0 before n % {TILE} == 0, where they "
            f"are stored, got {format.name}, shape={rhs.shape}, "
            f"contracting={rhs.axes.contracting}; pack_weights lays out the others"
        )
    return rejects_scale_axes(call, batch=False)
