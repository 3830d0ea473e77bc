"""Packed codes to bfloat16 in registers: what the kernels that multiply bfloat16 share.

Device code. A 32-bit word holds the codes of two neighbouring columns of an operand in its halves.
A shift and masks bring one code of each half to where bfloat16 has sign, exponent and mantissa: two
values at a time, as many as a bfloat16 multiplication scales. All arithmetic is plain array code,
which the interpreter runs too; only what no array operation says, that one word is two numbers, is
written for Mosaic GPU itself (`_halves`), with a stand-in of the same meaning.

Imports Mosaic GPU, so only kernels import this file.
"""

import dataclasses
import functools
import operator
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import mosaic_gpu

from mx_jax.backends.pallas_gpu.layouts.storage import Field, Slot, Storage, storage
from mx_jax.backends.pallas_gpu.layouts.weights import CHUNK, granularity
from mx_jax.formats import BlockFormat, ElementFormat

# Its declared types differ between versions of JAX, and none fits its own use.
plgpu: Any = mosaic_gpu

# bfloat16: sign, 8 bits of exponent, 7 of mantissa.
_MANTISSA_BITS = 7
_SIGN_BIT = 15
_BIAS = 127
# An integer's bits in the mantissa of a number in [2, 4) are its value in steps of 1/64.
_TWO = 0x4000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decoder:
    """From a group of packed codes to operands of the tensor cores.

    Attributes:
      format: of the weights.
      interpreted: whether stand-ins replace what the interpreter lacks.
    """

    format: BlockFormat
    interpreted: bool = False

    @property
    def element(self) -> ElementFormat:
        """Format of the codes."""
        return self.format.element

    @property
    def storage(self) -> Storage:
        """Where the codes' bits lie."""
        return storage(self.element)

    @property
    def group(self) -> int:
        """Codes of a row that `operands` decodes."""
        return self.storage.group

    @property
    def words_layout(self) -> Any:
        """Of a plane's words: of a row, thread c has `4 c` to `4 c + 3`, or `2 c` and `2 c + 1`."""
        layouts = {16: plgpu.Layout.WGMMA_8BIT, 8: plgpu.Layout.WGMMA}
        return layouts[self.storage.words]

    @property
    def granularity(self) -> int:
        """Codes that share a scale."""
        block = self.format.block[1]
        assert isinstance(block, int)
        return granularity(block)

    @property
    def pairs(self) -> int:
        """Words of scales of a row of a group."""
        return self.group // (2 * self.granularity)

    def operands(self, words: Any, scales: Any, layout: Any) -> list[Any]:
        """A group of 64 rows as bfloat16 operands `[64, 64]`, in the order of k.

        Args:
          words: reference to packed codes, `[planes, 64, words]` of int32.
          scales: reference to packed scales, `[group / (2 * granularity), 64]` of int32.
          layout: of the operands: a row's columns `2 c, 2 c + 1` of each 8 in thread c.
        """
        loaded = [
            plgpu.load(words.at[plane], layout=self.words_layout, optimized=False)
            for plane in range(self.storage.planes)
        ]
        values = self.values(loaded, layout)
        factors = []
        for pair in range(self.pairs):
            both = plgpu.load(scales.at[pair], layout=layout.reduce(1), optimized=False)
            factors += [
                _scale(both & 0xFFFF),
                _scale(lax.shift_right_logical(both, _full(both, 16))),
            ]
        per_chunk = CHUNK // self.granularity
        return [
            chunk * _spread(factors[i * per_chunk : (i + 1) * per_chunk], layout)
            for i, chunk in enumerate(values)
        ]

    def values(self, words: Sequence[Any], layout: Any) -> list[Any]:
        """The elements' own values, before scales: a list of bfloat16 `[64, 64]`."""
        placed = [place(words, slot, self.element) for slot in self.storage.slots]
        chunks = self._halves([bits for bits, _ in placed], layout)
        if self.element.kind == "int":
            heads = self._halves([bits for _, bits in placed], layout)
            return [chunk - head for chunk, head in zip(chunks, heads, strict=True)]
        return [self.lift(chunk) for chunk in chunks]

    def lift(self, chunk: Any) -> Any:
        """From bfloat16's smallest exponents, where codes were placed, to the element's own."""
        bias = self.element.bias
        if self.interpreted:
            # XLA on CPU flushes bfloat16's subnormals, so there exponents are float16's.
            bits = lax.bitcast_convert_type(chunk, jnp.int16).astype(jnp.int32)
            moved = (bits & 0x8000 | (bits & 0x7FFF) << 3).astype(jnp.int16)
            half = lax.bitcast_convert_type(moved, jnp.float16).astype(jnp.float32)
            finite = jnp.where(jnp.isfinite(half), half, jnp.sign(half) * 65536.0)
            values = (finite * jnp.float32(2.0 ** (15 - bias))).astype(jnp.bfloat16)
        else:
            values = chunk * _bfloat16(2.0 ** (_BIAS - bias))
        if self.element.has_inf:
            # What is above the largest number overflows; NaN codes too, whose scale is NaN. Without
            # comparisons, which would take the two values of a word apart.
            largest = _bfloat16(self.element.max)
            excess = values - jnp.maximum(jnp.minimum(values, largest), -largest)
            values = values + excess * _bfloat16(2.0**127)
        return values

    def _halves(self, slots: list[Any], layout: Any) -> list[Any]:
        """Words as pairs of bfloat16, each where an operand has it."""
        count = self.group // CHUNK
        if self.interpreted:
            return _interpreted_halves(slots, count)
        operand = plgpu.ShapeDtypeStruct((slots[0].shape[0], CHUNK), jnp.bfloat16, layout=layout)
        types = (self.words_layout,) * len(slots)
        return list(
            plgpu.inline_mgpu(arg_types=types, return_type=(operand,) * count)(
                lambda _, *arrays: _mosaic_halves(arrays, count, layout)
            )(*slots)
        )


def place(words: Sequence[Any], slot: Slot, element: ElementFormat) -> tuple[Any, Any]:
    """One code of each half of int32 words, a word of each plane, as patterns of bfloat16.

    Floats: `(bits, 0)`, where bits are `value * 2^(bias - 127)`. The element's exponent stands in
    the lowest bits of bfloat16's, so its subnormals are bfloat16's. Integers, in two's complement:
    `(bits, head)`, the value is their difference.
    """
    magnitude = [field for field in slot if field.lowest < element.bits - 1]
    sign = [field for field in slot if field.lowest == element.bits - 1]
    if element.kind == "int":
        # Seven bits in steps of 1/64, and the sign's -2: from 2 + bits/64 take 2, or 4.
        to = _MANTISSA_BITS - element.exponent_bits - element.mantissa_bits
        bits = _gathered(words, [(field, to + field.lowest) for field in magnitude])
        head = _gathered(words, [(field, _MANTISSA_BITS) for field in sign])
        return bits | _both(_TWO), head | _both(_TWO)
    to = _MANTISSA_BITS - element.mantissa_bits
    moves = [(field, to + field.lowest) for field in magnitude]
    return _gathered(words, moves + [(field, _SIGN_BIT) for field in sign]), None


def _gathered(words: Sequence[Any], moves: Sequence[tuple[Field, int]]) -> Any:
    """Each field moved to a bit of its half; those that move alike go together."""
    masks: dict[tuple[int, int], int] = {}
    for field, to in moves:
        key = field.plane, to - field.at
        masks[key] = masks.get(key, 0) | ((1 << field.width) - 1) << to
    parts = [_moved(words[plane], left) & _both(mask) for (plane, left), mask in masks.items()]
    return functools.reduce(operator.or_, parts)


def _moved(words: Any, left: int) -> Any:
    """Shifted to the left, or to the right if negative; what crosses halves is masked later."""
    if left == 0:
        return words
    if left > 0:
        return words << left
    return lax.shift_right_logical(words, _full(words, -left))


def _both(half: int) -> Any:
    """A mask of 16 bits in both halves of an int32."""
    return jnp.int32(np.uint32(half * 0x10001).astype(np.int32))


# A NumPy scalar: with NumPy arrays it stays NumPy's arithmetic, which keeps subnormals.
_bfloat16 = np.dtype(jnp.bfloat16).type


def _full(like: Any, value: int) -> Any:
    return jnp.full_like(like, value)


def _scale(half: Any) -> Any:
    """Low 16 bits of int32 as bfloat16."""
    return lax.bitcast_convert_type(half.astype(jnp.int16), jnp.bfloat16)


def _spread(factors: list[Any], layout: Any) -> Any:
    """Scales of rows over the columns `[64, 64]` of an operand."""
    columns = CHUNK // len(factors)
    spread = [
        plgpu.layout_cast(lax.broadcast_in_dim(f, (f.shape[0], columns), (0,)), layout)
        for f in factors
    ]
    return spread[0] if len(spread) == 1 else lax.concatenate(spread, 1)


def _interpreted_halves(slots: list[Any], count: int) -> list[Any]:
    """`_mosaic_halves` in terms of columns."""
    rows = slots[0].shape[0]
    # [row, thread, word, slot, lane]: words and slots together count pairs of a thread.
    pairs = lax.bitcast_convert_type(jnp.stack(slots, axis=-1), jnp.bfloat16)
    pairs = pairs.reshape(rows, 4, count, CHUNK // 8, 2).transpose(2, 0, 3, 1, 4)
    return [pairs[i].reshape(rows, CHUNK) for i in range(count)]


def _mosaic_halves(arrays: Any, count: int, layout: Any) -> Any:
    """Only names: pair p of a thread is slot `p % slots` of its word `p / slots`."""
    from jax.experimental.mosaic import gpu
    from jaxlib.mlir import ir

    mgpu: Any = gpu
    target, pair = layout.to_mgpu(), ir.VectorType.get((2,), ir.BF16Type.get())
    # [row of a thread, slot] -> its four words.
    registers = np.stack([array.registers.reshape(-1) for array in arrays], axis=-1)
    shape, operands = target.registers_shape((arrays[0].shape[0], CHUNK)), []
    for chunk in range(count):
        # Tiles of 8 columns are the second axis; only rows vary besides.
        out = np.empty((CHUNK // 8, registers.shape[0]), dtype=object)
        for t, row in np.ndindex(*out.shape):
            word, slot = divmod(CHUNK // 8 * chunk + t, len(arrays))
            source = mgpu.utils.vector_slice(registers[row, slot], slice(word, word + 1))
            out[t, row] = mgpu.utils.bitcast(source, pair)
        operands.append(
            mgpu.FragmentedArray(_registers=out.reshape(shape), _layout=target, _is_signed=None)
        )
    return tuple(operands)
