"""Products of two block-scaled operands on Blackwell: which formats, and how operands lie."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mx_jax.backends.pallas_gpu.tuning import Tiles, choose
from mx_jax.formats import BlockFormat
from mx_jax.mxarray import MXArray

# Scales lie in tiles of 128 rows and 4 columns, as the tensor cores read them.
SCALE_ROWS = 128
SCALE_COLUMNS = 4
# Elements that may meet, with the scales and blocks that they may have.
KINDS: tuple[tuple[tuple[str, ...], tuple[tuple[str, int], ...]], ...] = (
    (("e4m3", "e5m2"), (("e8m0", 32),)),
    (("e2m1",), (("e8m0", 32), ("e8m0", 16), ("e4m3", 16))),
)
# What rows and k are padded to: a tile of scales, and 128 bytes of codes.
_PAD_ROWS = 128
_PAD_K = 256


def rejects_formats(lhs: BlockFormat | None, rhs: BlockFormat | None) -> str | None:
    """Why two formats do not meet in Blackwell's kernel, or None."""
    for side, format in (("lhs", lhs), ("rhs", rhs)):
        if format is None:
            return f"needs both sides quantized, got {side} in high precision"
        if _kind(format) is None:
            return (
                "multiplies MXFP8, MXFP4 (also in blocks of 16) and NVFP4, got "
                f"{side}={format.name} in blocks {format.block}"
            )
    assert lhs is not None and rhs is not None
    if _kind(lhs) != _kind(rhs) or (lhs.scale, lhs.block) != (rhs.scale, rhs.block):
        return f"needs elements of one width and equal scales, got {lhs.name} by {rhs.name}"
    return None


def _kind(format: BlockFormat) -> int | None:
    """Which of `KINDS` a format belongs to."""
    kept, block = format.block
    for index, (elements, scales) in enumerate(KINDS):
        if kept == 1 and format.element.name in elements and (format.scale.name, block) in scales:
            return index
    return None


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("codes", "scales", "tensor_scale"),
    meta_fields=("shape", "format"),
)
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ScaledOperand:
    """A batch of rows `[batch, rows, k]` as Blackwell's tensor cores read them.

    Padded with zeros to multiples of 128 rows and 256 of k, `rows'` and `k'`.

    Attributes:
      codes: `[batch * rows', k']` in the element's own dtype.
      scales: `[batch * rows' / 128, k' / (4 * block), 32, 16]` in the scale's own dtype: of
        a tile of 128 rows and 4 columns, row `32 i + j` lies at `[j, 4 i]` to `[j, 4 i + 3]`.
      tensor_scale: float32 scalar, or None.
      shape: `(batch, rows, k)`.
      format: the block format.
    """

    codes: jax.Array
    scales: jax.Array
    tensor_scale: jax.Array | None = None
    shape: tuple[int, int, int]
    format: BlockFormat


def lay_out(x: MXArray) -> ScaledOperand:
    """An MXArray `[batch, rows, k]`, with blocks along k, in the kernel's layout."""
    batch, rows, k = x.shape
    block = x.format.block[1]
    assert isinstance(block, int)
    padded_rows, padded_k = rows + -rows % _PAD_ROWS, k + -k % _PAD_K
    codes = jnp.pad(x.codes, ((0, 0), (0, padded_rows - rows), (0, padded_k - k)))
    missing = padded_k // block - x.scales.shape[2]
    scales = jnp.pad(x.scales, ((0, 0), (0, padded_rows - rows), (0, missing)))
    tiles = scales.reshape(-1, 4, 32, padded_k // (block * SCALE_COLUMNS), SCALE_COLUMNS)
    tiles = tiles.transpose(0, 3, 2, 1, 4).reshape(tiles.shape[0], tiles.shape[3], 32, 16)
    native = dataclasses.replace(x, codes=codes.reshape(-1, padded_k), scales=tiles)
    tensor_scale = x.tensor_scale
    return ScaledOperand(
        codes=native.elements,
        scales=native.scale_values,
        tensor_scale=None if tensor_scale is None else tensor_scale.reshape(()),
        shape=(batch, rows, k),
        format=x.format,
    )


def multiply(
    lhs: ScaledOperand,
    rhs: ScaledOperand,
    out_dtype: jax.typing.DTypeLike,
    *,
    architecture: str = "sm100",
    tiles: Tiles | None = None,
    interpret: Any = None,
) -> jax.Array:
    """`lhs[batch, m, k]` by `rhs[batch, n, k]`: `[batch, m, n]`, one rounding from float32 sums."""
    # Mosaic GPU is missing from older versions of JAX, which `rejects` keeps away from here.
    from mx_jax.backends.pallas_gpu import kernel_sm100

    (batch, m, _), n, dtype = lhs.shape, rhs.shape[1], np.dtype(out_dtype)
    (rows, k), columns = lhs.codes.shape, rhs.codes.shape[0] // batch
    rows //= batch
    if tiles is None:
        tiles = choose(architecture, lhs.format.element.bits, batch=batch, m=rows, n=columns, k=k)
    if columns % tiles.n:
        tiles = dataclasses.replace(tiles, n=_PAD_ROWS)
    factors = [x.tensor_scale for x in (lhs, rhs) if x.tensor_scale is not None]
    once = tiles.splits == 1 and dtype == jnp.bfloat16 and not factors
    block = lhs.format.block[1]
    assert isinstance(block, int)
    sums = kernel_sm100.matmul(
        lhs.codes,
        rhs.codes,
        lhs.scales,
        rhs.scales,
        block=block,
        batch=batch,
        tiles=tiles,
        out_dtype=jnp.bfloat16 if once else jnp.float32,
        interpret=interpret,
    )
    sums = sums.reshape(tiles.splits, batch, rows, columns)[:, :, :m, :n]
    out = sums[0] if tiles.splits == 1 else sums.sum(0)
    for factor in factors:
        out = out * factor
    return out.astype(dtype)
