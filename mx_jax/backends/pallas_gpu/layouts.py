"""Where bits and scales lie in what kernels read: packed weights, and operands of tensor cores."""

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

from mx_jax.codecs import packing
from mx_jax.codecs import scale as scale_codec
from mx_jax.formats import (
    E2M1,
    E4M3,
    E4M3_SCALE,
    E5M2,
    E8M0,
    BlockFormat,
    ElementFormat,
    ScaleFormat,
)
from mx_jax.formats.element import known_element, known_scale
from mx_jax.mxarray import MXArray
from mx_jax.packed import Layout, PackedMXArray

# Where each bit of a code lies in packed weights: data per width, from which all else follows -----


class Field(NamedTuple):
    """Bits of a code in a 16-bit half of a word.

    Attributes:
      plane: which of the words that a thread loads for the code's place.
      lowest: of the code's bits.
      width: how many bits.
      at: where the lowest lies in the half.
    """

    plane: int
    lowest: int
    width: int
    at: int


# Where each code of a half lies.
Slot = tuple[Field, ...]


def _whole(bits: int, magnitude: int, sign: int) -> Slot:
    """A code in one plane: where its magnitude's lowest bit lies, and its sign."""
    return Field(0, 0, bits - 1, magnitude), Field(0, bits - 1, 1, sign)


def _split(*tops: tuple[int, int]) -> tuple[Slot, ...]:
    """Six bits in three planes: where in the third each code has its highest magnitude bit, and its
    sign; the first two hold four codes each, four bits of all."""
    return tuple(
        (Field(i // 4, 0, 4, 4 * (i % 4)), Field(2, 4, 1, top), Field(2, 5, 1, sign))
        for i, (top, sign) in enumerate(tops)
    )


# By stored bits and mantissa bits of an element, None for any. Four bits: the first two codes are
# moved to where bfloat16 has them by one shift for magnitude and sign, or none. Found by trying
# all: no other order takes fewer instructions. Six bits: the two bits that lie apart from the other
# four are as far from each other as in bfloat16, for as many codes as fit: one shift for both.
SLOTS: dict[tuple[int, int | None], tuple[Slot, ...]] = {
    (4, None): tuple(_whole(4, *at) for at in ((6, 15), (3, 12), (0, 13), (9, 14))),
    (6, 3): _split((8, 15), (7, 14), (6, 13), (5, 12), (4, 11), (3, 10), (2, 9), (0, 1)),
    (6, 2): _split((9, 15), (8, 14), (7, 13), (6, 12), (5, 11), (4, 10), (2, 3), (0, 1)),
    (8, None): tuple(_whole(8, *at) for at in ((8, 15), (0, 7))),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Storage:
    """How codes of an element lie in packed weights.

    Attributes:
      bits: that a code takes.
      slots: where each code of a half lies.
    """

    bits: int
    slots: tuple[Slot, ...]

    @functools.cached_property
    def planes(self) -> int:
        """Words that hold the codes of one place."""
        return 1 + max(field.plane for slot in self.slots for field in slot)

    @functools.cached_property
    def words(self) -> int:
        """32-bit words of one row that lie together: as many for each of four threads."""
        return 16 if self.planes == 1 else 8

    @functools.cached_property
    def group(self) -> int:
        """Codes of one row that lie together."""
        return self.words * 2 * len(self.slots)


@functools.cache
def storage(element: ElementFormat) -> Storage:
    """Of the narrowest kind that holds an element's codes."""
    for bits, mantissa in SLOTS:
        if bits == 8 or (bits == element.bits and mantissa in (None, element.mantissa_bits)):
            slots = SLOTS[bits, mantissa]
            if bits != element.bits:
                slots = tuple(_whole(element.bits, low.at, sign.at) for low, sign in slots)
            return Storage(bits=bits, slots=slots)
    raise AssertionError(element)


def words_of(codes: Sequence[jax.Array], element: ElementFormat) -> list[jax.Array]:
    """A word of each plane, int32, of the codes of each slot, uint16 `[..., lane]`."""
    stored = storage(element)
    halves = [jnp.zeros_like(codes[0]) for _ in range(stored.planes)]
    for of_slot, slot in zip(codes, stored.slots, strict=True):
        for field in slot:
            bits = of_slot >> field.lowest & (1 << field.width) - 1
            halves[field.plane] |= bits << field.at
    return [lax.bitcast_convert_type(half, jnp.int32) for half in halves]


def codes_of(words: Sequence[jax.Array], element: ElementFormat) -> list[jax.Array]:
    """The inverse of `words_of`, as uint8."""
    halves, codes = [lax.bitcast_convert_type(word, jnp.uint16) for word in words], []
    for slot in storage(element).slots:
        bits = (
            (halves[field.plane] >> field.at & (1 << field.width) - 1) << field.lowest
            for field in slot
        )
        codes.append(functools.reduce(lax.bitwise_or, bits).astype(jnp.uint8))
    return codes


# Weights in the order in which the kernels read them, packed once for any number of products ------

# What the operand of one tensor-core instruction spans along k, in registers.
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


def granularity(block: int) -> int:
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
        codes: 128 of FP4, 64 of any other element that takes a byte. Four threads share a row of an
        operand. Thread c has words `4 c` to `4 c + 3`, and in each chunk of 64 codes those at
        `8 t + 2 c + j`, for t in 0..7 and j in 0..1: what the tensor cores want of it. They follow
        each other in the order of t in the halves j (low and high) of its words, each half laid out
        as `SLOTS` says.
      - FP6 has groups of 128 codes in three planes of 8 words a row, `codes[b, tile, 3 * group + p,
        row]`: two with four bits of a code, one with the other two. Thread c has words `2 c` and
        `2 c + 1` of each, which say together what one word says above.
      - `scales[b, tile, i, row]` holds two scales as bfloat16, of a row's blocks `2 i` (low half)
        and `2 i + 1`. A block is 16 or 32 codes here; a longer one repeats its scale. Blocks with a
        NaN among their codes have NaN for a scale: either makes the whole row's products NaN.

    So what a kernel reads of one tile, step by step along k, lies in one piece.

    Attributes:
      codes: int32 `[batch, n' / 64, planes * k' / group, 64, words]`, as `Storage` counts them.
      scales: int32 `[batch, n' / 64, k' / (2 * granularity), 64]`.
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
        """Weights `[batch, n, k]` with blocks along k in the kernels' layout.

        Args:
          weights: blocks of a multiple of 16 codes along the last axis; scales of one byte.

        Returns:
          PackedWeights.
        """
        format, element = weights.format, weights.format.element
        batch, n, k = weights.shape
        _, block = format.block
        assert isinstance(block, int)
        extra = ((0, 0), (0, -n % PAD_N), (0, -k % PAD_K))
        padded_k = k + -k % PAD_K
        spread = functools.partial(jnp.repeat, repeats=block // granularity(block), axis=2)
        scales = spread(_bfloat16_bits(_with_nans(weights, block), format))
        scales = scales[..., : padded_k // granularity(block)]
        width = padded_k // granularity(block) - scales.shape[2]
        scales = jnp.pad(scales, (*extra[:2], (0, width)))
        scales = scales.reshape(batch, -1, ROWS, scales.shape[2] // 2, 2)
        planes = words_of(_to_threads(jnp.pad(weights.codes, extra), element), element)
        words = jnp.stack(planes, axis=3)
        tensor_scale = weights.tensor_scale
        return cls(
            codes=words.reshape(batch, words.shape[1], -1, *words.shape[4:]),
            scales=lax.bitcast_convert_type(scales, jnp.int32).swapaxes(2, 3),
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
    def padded_n(self) -> int:
        """Rows, padded."""
        return self.codes.shape[1] * ROWS

    @property
    def padded_k(self) -> int:
        """Contracted length, padded."""
        stored = storage(self.format.element)
        return self.codes.shape[2] // stored.planes * stored.group

    @property
    def nbytes(self) -> int:
        """Bytes that kernels read: codes and scales."""
        return 4 * int(np.prod(self.codes.shape) + np.prod(self.scales.shape))

    def unpack(self) -> MXArray:
        """The weights as an MXArray `[batch, n, k]` with blocks along k."""
        _, n, k = self.shape
        element = self.format.element
        batch, tiles, _, *row = self.codes.shape
        planes = self.codes.reshape(batch, tiles, -1, storage(element).planes, *row)
        slots = codes_of(tuple(jnp.moveaxis(planes, 3, 0)), element)
        codes = _from_threads(jnp.stack(slots, axis=-1), self.padded_k)
        tensor_scale = self.tensor_scale
        return MXArray(
            codes=codes[:, :n, :k],
            scales=self.scale_bytes,
            tensor_scale=None if tensor_scale is None else tensor_scale.reshape(-1, 1, 1),
            format=self.format,
            blocks=((-1, self.format.block[1]),),
            dtype=self.dtype,
        )


def _to_threads(codes: jax.Array, element: ElementFormat) -> list[jax.Array]:
    """Codes `[batch, n, k]` of each slot: uint16 `[batch, tile, group, 64, word, lane]`."""
    (batch, n, k), stored = codes.shape, storage(element)
    size, slots = stored.group, len(stored.slots)
    # k = (group, chunk, t, thread, lane); a thread's words hold (chunk, t) in this order.
    split = codes.reshape(batch, n // ROWS, ROWS, k // size, size // CHUNK, CHUNK // 8, 4, 2)
    split = split.transpose(0, 1, 3, 2, 6, 4, 5, 7)
    split = split.reshape(*split.shape[:4], stored.words, slots, 2).astype(jnp.uint16)
    return [split[..., slot, :] for slot in range(slots)]


def _from_threads(slots: jax.Array, k: int) -> jax.Array:
    """Codes `[batch, n, k]` of uint8 `[batch, tile, group, 64, word, lane, slot]`."""
    batch, tiles, groups = slots.shape[:3]
    split = slots.swapaxes(5, 6).reshape(batch, tiles, groups, ROWS, 4, -1, CHUNK // 8, 2)
    return split.transpose(0, 1, 3, 2, 5, 6, 4, 7).reshape(batch, tiles * ROWS, k)


def _with_nans(weights: MXArray, block: int) -> jax.Array:
    """Scales, with NaN for every block with a code that is NaN."""
    element = weights.format.element
    if element.nan_code is None:
        return weights.scales
    half = weights.codes & (element.sign_code - 1)
    nan = half > element.max_code + element.has_inf
    batch, n, k = nan.shape
    nan = jnp.pad(nan, ((0, 0), (0, 0), (0, -k % block))).reshape(batch, n, -1, block).any(-1)
    scale = weights.format.scale
    nan_byte = scale_codec.E8M0_NAN if scale.element is None else scale.element.nan_code
    return jnp.where(nan, jnp.uint8(nan_byte), weights.scales)


def _bfloat16_bits(scales: jax.Array, format: BlockFormat) -> jax.Array:
    """Scales as patterns of bfloat16, uint16: exact, 2^-127 as a subnormal."""
    values = scale_codec.scale_to_float32(scales, format.scale)
    return lax.bitcast_convert_type(values, jnp.uint16)[..., 1]


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

# Block-scaled operands as Blackwell's tensor cores read them, and which formats meet there --------

# Scales lie in tiles of 128 rows and 4 columns, as the tensor cores read them.
SCALE_ROWS = 128
SCALE_COLUMNS = 4
# Elements that may meet, with the scales and blocks that they may have.
KINDS: tuple[tuple[tuple[ElementFormat, ...], tuple[tuple[ScaleFormat, int], ...]], ...] = (
    ((E4M3, E5M2), ((E8M0, 32),)),
    ((E2M1,), ((E8M0, 32), (E8M0, 16), (E4M3_SCALE, 16))),
)
# What rows and k are padded to: a tile of scales, and 128 bytes of codes. A left operand of fewer
# rows than a tile brings codes for a multiple of 8 alone.
_PAD_ROWS = 128
_PAD_FEW = 8
PAD_SCALED_K = 256


def meet(lhs: BlockFormat | None, rhs: BlockFormat | None) -> bool:
    """Whether the tensor cores multiply operands of two formats as they are."""
    if lhs is None or rhs is None or _kind(lhs) is None:
        return False
    return _kind(lhs) == _kind(rhs) and (lhs.scale, lhs.block) == (rhs.scale, rhs.block)


def _kind(format: BlockFormat) -> int | None:
    """Which of `KINDS` a format belongs to."""
    kept, block = format.block
    element, scale = known_element(format.element), known_scale(format.scale)
    for index, (elements, scales) in enumerate(KINDS):
        if kept == 1 and element in elements and (scale, block) in scales:
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

    Padded with zeros to multiples of 128 rows and 256 of k, `rows'` and `k'`; a left operand of
    fewer than 128 rows has codes for a multiple of 8. Everything is bytes: what kernels take as FP4
    or FP8 is the same memory under another name.

    Attributes:
      codes: uint8 `[batch * rows', bytes of k' codes]`; of two FP4 codes the first lies in the low
        half of a byte.
      scales: uint8 `[batch * rows' / 128, k' / (4 * block), 32, 16]`: of a tile of 128 rows and 4
        columns, row `32 i + j` lies at `[j, 4 i]` to `[j, 4 i + 3]`.
      tensor_scale: float32 scalar, or `[batch, 1, 1]`, or None.
      shape: `(batch, rows, k)`.
      format: the block format.
    """

    codes: jax.Array
    scales: jax.Array
    tensor_scale: jax.Array | None = None
    shape: tuple[int, int, int]
    format: BlockFormat

    @classmethod
    def of(cls, x: MXArray, *, left: bool = False) -> "ScaledOperand":
        """An MXArray `[batch, rows, k]`, with blocks along k, in this layout.

        Args:
          x: to be laid out.
          left: whether as a left operand, of which few rows are read as they are.
        """
        batch, rows, k = x.shape
        block = x.format.block[1]
        assert isinstance(block, int)
        padded_rows, padded_k = rows + -rows % _PAD_ROWS, k + -k % PAD_SCALED_K
        unit = _PAD_FEW if left and rows < _PAD_ROWS else _PAD_ROWS
        codes = jnp.pad(x.codes, ((0, 0), (0, -rows % unit), (0, padded_k - k)))
        missing = padded_k // block - x.scales.shape[2]
        scales = jnp.pad(x.scales, ((0, 0), (0, padded_rows - rows), (0, missing)))
        return cls(
            codes=packing.pack(codes.reshape(-1, padded_k), x.format.element.bits),
            scales=scale_tiles(scales.reshape(-1, scales.shape[2])),
            tensor_scale=x.tensor_scale,
            shape=(batch, rows, k),
            format=x.format,
        )

    @property
    def padded_k(self) -> int:
        """Contracted length, padded."""
        return self.codes.shape[1] * 8 // self.format.element.bits

    @property
    def elements(self) -> jax.Array:
        """The codes in the element's own dtype: `[batch * rows', k']`."""
        native = lax.bitcast_convert_type(self.codes, self.format.element.dtype)
        return native.reshape(-1, self.padded_k)

    @property
    def scale_values(self) -> jax.Array:
        """The scales in their own dtype."""
        return lax.bitcast_convert_type(self.scales, self.format.scale.dtype)


def scale_tiles(scales: jax.Array) -> jax.Array:
    """Scales `[rows, columns]` in tiles of 128 rows and 4 columns, `[tiles, tiles, 32, 16]`."""
    along = scales.shape[0] // SCALE_ROWS, scales.shape[1] // SCALE_COLUMNS
    tiles = scales.reshape(along[0], 4, 32, along[1], SCALE_COLUMNS)
    return tiles.transpose(0, 3, 2, 1, 4).reshape(*along, 32, 16)


def factors_of(scales: tuple[jax.Array | None, ...], count: int) -> jax.Array | None:
    """float32 `[len(scales) * count]`, or None if there are no scales.

    Args:
      scales: one number, or one for each product; None counts as ones.
      count: of products, or of groups.
    """
    if all(scale is None for scale in scales):
        return None
    ones = jnp.ones(count, jnp.float32)
    return jnp.concatenate(
        [ones if scale is None else ones * scale.reshape(-1) for scale in scales]
    )
