"""What kernels read in memory: packed weights, lists of groups."""

import dataclasses
import functools
import math
import operator
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mx_jax.codecs import scale as scale_codec
from mx_jax.formats import BlockFormat, ElementFormat
from mx_jax.mxarray import MXArray
from mx_jax.packed import Layout, PackedMXArray

# Bits of each code in packed weights: data per width, from which all else follows -----------------


class Slot(NamedTuple):
    """Where a 16-bit half of a word has the lowest bit of a code's magnitude, and its sign."""

    magnitude: int
    sign: int


# By bits that a code takes. Four: the first two codes are moved to where bfloat16 has them by one
# shift for magnitude and sign, or none; found by trying all, no other order takes fewer
# instructions. Other elements take eight.
SLOTS = {4: (Slot(6, 15), Slot(3, 12), Slot(0, 13), Slot(9, 14)), 8: (Slot(8, 15), Slot(0, 7))}
# Adjacent 32-bit words of one row: four for each of four threads.
WORDS = 16


def stored_bits(element: ElementFormat) -> int:
    """Bits that a code takes in packed weights."""
    return 4 if element.bits == 4 else 8


def slots_of(element: ElementFormat) -> tuple[Slot, ...]:
    """Where a half has its codes."""
    return SLOTS[stored_bits(element)]


def codes_in_group(element: ElementFormat) -> int:
    """Adjacent codes of one row."""
    return WORDS * 2 * len(slots_of(element))


def words_of(codes: Sequence[jax.Array], element: ElementFormat) -> jax.Array:
    """Words, int32, of the codes of each slot, uint16 `[..., lane]`."""
    width, halves = element.bits - 1, jnp.zeros_like(codes[0])
    for code, slot in zip(codes, slots_of(element), strict=True):
        halves |= (code & (1 << width) - 1) << slot.magnitude | code >> width << slot.sign
    return lax.bitcast_convert_type(halves, jnp.int32)


def codes_of(words: jax.Array, element: ElementFormat) -> list[jax.Array]:
    """The inverse of `words_of`, as uint8."""
    width, halves = element.bits - 1, lax.bitcast_convert_type(words, jnp.uint16)
    return [
        (halves >> slot.magnitude & (1 << width) - 1 | (halves >> slot.sign & 1) << width).astype(
            jnp.uint8
        )
        for slot in slots_of(element)
    ]


# Weights in the order in which the kernels read them, packed once for any number of products ------

# Codes along k that one instruction of the tensor cores reads from registers.
CHUNK = 64
# The most codes that share a stored scale.
MAX_GRANULARITY = 32
# Blocks are multiples of this: an operand's 16 columns are one step of the tensor cores.
MIN_BLOCK = 16
# Rows that one warpgroup multiplies.
ROWS = 64
# What n and k are padded to: two warpgroups' rows, and a step of the pipeline.
PAD_N = 128
PAD_K = 128


def codes_per_scale(block: int) -> int:
    """Codes that share a stored scale: 16 or 32; longer blocks repeat theirs."""
    return min(block & -block, MAX_GRANULARITY)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("codes", "scales", "scale_bytes", "tensor_scale"),
    meta_fields=("shape", "format", "dtype"),
)
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PackedWeights:
    """A batch of weights `[batch, n, k]` in the kernels' layout; `unpack` gives them back.

    Padded to multiples of 128, `n'` and `k'`, with codes and scales of zero.

      - `codes[b, tile, group, row]` are the 16 words of a row of a tile of 64 rows, for a group of
        codes: 128 of FP4, 64 of any other element, which takes a byte. Four threads share a row of
        an operand. Thread c has words `4 c` to `4 c + 3`, and in each chunk of 64 codes those at
        `8 t + 2 c + j`, for t in 0..7 and j in 0..1: what the tensor cores want of it. They follow
        each other in the order of t in the halves j (low and high) of its words, each half laid out
        as `SLOTS` says.
      - `scales[b, tile, i, row]` holds two scales as bfloat16, of a row's blocks `2 i` (low half)
        and `2 i + 1`. A block is 16 or 32 codes here; a longer one repeats its scale. Blocks with a
        NaN among their codes have NaN for a scale: either makes the whole row's products NaN.

    So what a kernel reads of one tile, step by step along k, is contiguous.

    Attributes:
      codes: int32 `[batch, n' / 64, k' / group, 64, 16]`.
      scales: int32 `[batch, n' / 64, k' / (2 * codes_per_scale), 64]`.
      scale_bytes: uint8 `[batch, n, blocks]`, as they came: no kernel reads them.
      tensor_scale: float32 scalar, or `[batch, 1, 1]`, or None.
      shape: `(batch, n, k)`.
      format: the block format, with blocks along k.
      dtype: the dtype that was quantized.
    """

    codes: jax.Array
    scales: jax.Array
    scale_bytes: jax.Array
    tensor_scale: jax.Array | None = None
    shape: tuple[int, int, int]
    format: BlockFormat
    dtype: np.dtype

    @classmethod
    def of(cls, weights: MXArray) -> "PackedWeights":
        """Weights `[batch, n, k]`, with blocks along k and scales of one byte, laid out."""
        format, element, scale = weights.format, weights.format.element, weights.format.scale
        (batch, n, k), (_, block) = weights.shape, format.block
        assert isinstance(block, int)
        rows, columns, shared = n + -n % PAD_N, k + -k % PAD_K, codes_per_scale(block)
        scales = weights.scales
        if element.nan_code is not None:
            nan = (weights.codes & (element.sign_code - 1)) > element.max_code + element.has_inf
            nan = jnp.pad(nan, ((0, 0), (0, 0), (0, -k % block)))
            nan = nan.reshape(batch, n, -1, block).any(-1)
            byte = scale_codec.E8M0_NAN if scale.element is None else scale.element.nan_code
            scales = jnp.where(nan, jnp.uint8(byte), scales)
        # As patterns of bfloat16: exact, 2^-127 as a subnormal.
        values = scale_codec.scale_to_float32(scales, scale)
        halves = lax.bitcast_convert_type(values, jnp.uint16)[..., 1]
        halves = jnp.repeat(halves, block // shared, axis=2)[..., : columns // shared]
        missing = columns // shared - halves.shape[2]
        halves = jnp.pad(halves, ((0, 0), (0, rows - n), (0, missing)))
        halves = halves.reshape(batch, -1, ROWS, halves.shape[2] // 2, 2)
        # k = (group, chunk, t, thread, lane); a thread's words hold (chunk, t) in this order.
        size, slots = codes_in_group(element), len(slots_of(element))
        codes = jnp.pad(weights.codes, ((0, 0), (0, rows - n), (0, columns - k)))
        codes = codes.reshape(
            batch, rows // ROWS, ROWS, columns // size, size // CHUNK, CHUNK // 8, 4, 2
        )
        codes = codes.transpose(0, 1, 3, 2, 6, 4, 5, 7)
        codes = codes.reshape(*codes.shape[:4], WORDS, slots, 2).astype(jnp.uint16)
        tensor_scale = weights.tensor_scale
        return cls(
            codes=words_of([codes[..., slot, :] for slot in range(slots)], element),
            scales=lax.bitcast_convert_type(halves, jnp.int32).swapaxes(2, 3),
            scale_bytes=weights.scales,
            tensor_scale=None if tensor_scale is None else tensor_scale.reshape(()),
            shape=(batch, n, k),
            format=format,
            dtype=weights.dtype,
        )

    @property
    def stacked(self) -> tuple[int, ...]:
        """Leading axes of a stack."""
        return self.codes.shape[:-5]

    def merged(self) -> "PackedWeights":
        """A stack as one batch, which is what kernels take."""
        if not self.stacked:
            return self
        codes, scales, scale_bytes = (
            array.reshape(-1, *array.shape[len(self.stacked) + 1 :])
            for array in (self.codes, self.scales, self.scale_bytes)
        )
        return dataclasses.replace(
            self,
            codes=codes,
            scales=scales,
            scale_bytes=scale_bytes,
            tensor_scale=None if self.tensor_scale is None else self.tensor_scale.reshape(-1, 1, 1),
            shape=(codes.shape[0], *self.shape[1:]),
        )

    @property
    def padded_k(self) -> int:
        """Contracted length, padded."""
        return self.codes.shape[2] * codes_in_group(self.format.element)

    def unpack(self) -> MXArray:
        """The weights as an MXArray `[batch, n, k]` with blocks along k."""
        batch, n, k = self.shape
        tiles, groups = self.codes.shape[1:3]
        # [batch, tile, group, row, word, lane, slot], whose words and slots count (chunk, t).
        codes = jnp.stack(codes_of(self.codes, self.format.element), axis=-1).swapaxes(5, 6)
        codes = codes.reshape(batch, tiles, groups, ROWS, 4, -1, CHUNK // 8, 2)
        codes = codes.transpose(0, 1, 3, 2, 5, 6, 4, 7)
        tensor_scale = self.tensor_scale
        return MXArray(
            codes=codes.reshape(batch, tiles * ROWS, self.padded_k)[:, :n, :k],
            scales=self.scale_bytes,
            tensor_scale=None if tensor_scale is None else tensor_scale.reshape(-1, 1, 1),
            format=self.format,
            blocks=((-1, self.format.block[1]),),
            dtype=self.dtype,
        )


def unpack(packed: PackedMXArray) -> MXArray:
    """The weights that `mx_jax.pack_weights` laid out for these kernels."""
    if packed.batch:
        return jax.vmap(unpack)(packed)
    matrices = packed.arrays.unpack()
    blocks, scale = matrices.scales.shape[-1] // math.prod(packed.k[:-1]), matrices.tensor_scale
    return MXArray(
        codes=packed.arrange(matrices.codes, (), packed.k),
        scales=packed.arrange(matrices.scales, (), (*packed.k[:-1], blocks)),
        tensor_scale=None if scale is None else scale.reshape((1,) * packed.ndim),
        format=packed.format,
        blocks=packed.blocks,
        dtype=packed.dtype,
    )


MATRICES = Layout(backend="pallas_gpu", batch=operator.attrgetter("stacked"), unpack=unpack)


def concatenate_tensor_scales(scales: tuple[jax.Array | None, ...], count: int) -> jax.Array | None:
    """float32 `[len(scales) * count]`, of scales of one number or `count`; None if all are None."""
    if all(scale is None for scale in scales):
        return None
    ones = jnp.ones(count, jnp.float32)
    return jnp.concatenate(
        [ones if scale is None else ones * scale.reshape(-1) for scale in scales]
    )


# Rows in groups ---------------------------------------------------------------------------------

# What a copy of activations or of sums begins at: a tile of shared memory has so many rows.
CHUNK_ROWS = 8
# Numbers that a program reads: group, first row to copy, first and last row that are its own.
FIELDS = 4


def visits(sizes: jax.Array, num_rows: int, tile_rows: int) -> jax.Array:
    """What each program reads, `[visits * FIELDS]`.

    A group's first tile begins at the multiple of eight at or below its first row, so copies are
    aligned wherever groups begin; what a tile has of other groups' rows is multiplied and not
    stored. Rows of no group are a last group, of which nothing is multiplied.

    Args:
      sizes: int32 `[g]`, not negative, which sum to at most `num_rows`.
      num_rows: of all groups, and behind them; positive.
      tile_rows: a multiple of eight.

    Returns:
      int32: group, g for rows of none; the first row of the tile; its own rows from and up to. A
      program that has nothing to do has no rows.
    """
    ends = jnp.append(jnp.cumsum(sizes, dtype=jnp.int32), num_rows)
    starts = jnp.concatenate([jnp.zeros_like(ends[:1]), ends[:-1]])
    firsts = starts // CHUNK_ROWS * CHUNK_ROWS
    tiles = jnp.where(ends > starts, -(-(ends - firsts) // tile_rows), 0)
    last = jnp.cumsum(tiles, dtype=jnp.int32)
    # The most tiles that groups of any sizes take: one for each beyond those of all rows.
    of_rows = -(-(num_rows + -num_rows % CHUNK_ROWS) // tile_rows)
    visit = jnp.arange(of_rows + min(sizes.shape[0], num_rows - 1), dtype=jnp.int32)
    group = jnp.searchsorted(last, visit, side="right", method="compare_all").astype(jnp.int32)

    def of(each: jax.Array) -> jax.Array:
        return jnp.append(each, 0)[group]

    first = of(firsts) + (visit - of(last - tiles)) * tile_rows
    used = group <= sizes.shape[0]
    first = jnp.where(used, first, 0)
    begin = jnp.maximum(first, of(starts))
    end = jnp.minimum(first + tile_rows, of(ends))
    group = jnp.minimum(group, sizes.shape[0])
    return jnp.stack([group, first, begin, end], axis=1).reshape(-1)
