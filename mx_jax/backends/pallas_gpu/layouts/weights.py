"""Weights in the order in which the kernels read them, packed once for any number of products."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mx_jax.backends.pallas_gpu.layouts.storage import codes_of, storage, words_of
from mx_jax.codecs import scale as scale_codec
from mx_jax.formats import BlockFormat, ElementFormat
from mx_jax.mxarray import MXArray

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
