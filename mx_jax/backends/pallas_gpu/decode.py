"""Packed codes to bfloat16 in registers, on their way to the tensor cores.

A 32-bit word holds the codes of two neighbouring columns of an operand in its halves. A shift and
masks bring one code of each half to where bfloat16 has sign, exponent and mantissa: two values at a
time, as many as a bfloat16 multiplication scales. All arithmetic is plain array code, which the
interpreter runs too; only what no array operation says, that one word is two numbers, is written
for Mosaic GPU itself (`_mosaic_halves`), with a stand-in of the same meaning.

Device code; imports Mosaic GPU, so only kernels import this file.
"""

import dataclasses
import functools
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

from mx_jax.backends.pallas_gpu.layouts import (
    CHUNK,
    ROWS,
    WORDS,
    Slot,
    codes_in_group,
    codes_per_scale,
    slots_of,
)
from mx_jax.backends.pallas_gpu.tiles import Tiles
from mx_jax.formats import BlockFormat, ElementFormat

# Its declared types differ between versions of JAX, and none fits its own use.
plgpu: Any = mosaic_gpu

# Bytes of a row of a tile in shared memory: 64 bfloat16, as wide as an operand in registers.
SWIZZLE = 128
# An operand's in registers.
_LAYOUT = plgpu.Layout.WGMMA
# bfloat16: sign, 8 bits of exponent, 7 of mantissa.
_MANTISSA_BITS = 7
_SIGN_BIT = 15
_BIAS = 127
# An integer's bits in the mantissa of a number in [2, 4) are its value in steps of 1/64.
_TWO = 0x4000
# A NumPy scalar: with NumPy arrays it stays NumPy's arithmetic, which keeps subnormals.
_bfloat16 = np.dtype(jnp.bfloat16).type


def transforms(columns: int) -> tuple[Any, ...]:
    """Tiles of 8 rows, `SWIZZLE` bytes wide, without bank conflicts."""
    return plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(SWIZZLE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decoder:
    """From a group of packed codes to operands of the tensor cores."""

    format: BlockFormat
    interpreted: bool = False

    @property
    def group(self) -> int:
        """Codes of a row that are decoded together."""
        return codes_in_group(self.format.element)

    @property
    def codes_per_scale(self) -> int:
        """Codes that share a scale."""
        block = self.format.block[1]
        assert isinstance(block, int)
        return codes_per_scale(block)

    def blocks(self, tiles: Tiles) -> tuple[tuple[tuple[int, ...], Any, tuple[Any, ...]], ...]:
        """What a step copies of activations, codes and scales: shape, dtype, transforms."""
        rows, pairs = tiles.n // ROWS, tiles.k // (2 * self.codes_per_scale)
        return (
            ((tiles.m, tiles.k), jnp.bfloat16, transforms(CHUNK)),
            ((rows, tiles.k // self.group, ROWS, WORDS), jnp.int32, ()),
            ((rows, pairs, ROWS), jnp.int32, ()),
        )

    def step(self, codes: Any, scales: Any, row_tile: Any, k: int) -> Iterator[tuple[Any, Any]]:
        """Operands `[64, 64]` of a tile of rows, as bfloat16, each with its columns of a step.

        Of references to what is copied of codes and scales. Thread c has a row's columns `2 c` and
        `2 c + 1` of each 8.
        """
        pairs, per_chunk = self.group // (2 * self.codes_per_scale), CHUNK // self.codes_per_scale
        for group in range(k // self.group):
            # Of a row, thread c has words `4 c` to `4 c + 3`.
            words = plgpu.load(
                codes.at[row_tile, group], layout=plgpu.Layout.WGMMA_8BIT, optimized=False
            )
            values = self.values(words)
            of_group, factors = scales.at[row_tile, pl.ds(group * pairs, pairs)], []
            for pair in range(pairs):
                both = plgpu.load(of_group.at[pair], layout=_LAYOUT.reduce(1), optimized=False)
                factors += [_scale(both & 0xFFFF), _scale(_moved(both, -16))]
            # All of them before the first is multiplied.
            operands = [
                chunk * _spread(factors[i * per_chunk : (i + 1) * per_chunk])
                for i, chunk in enumerate(values)
            ]
            for i, operand in enumerate(operands):
                yield operand, pl.ds(group * self.group + i * CHUNK, CHUNK)

    def values(self, words: jax.Array) -> list[Any]:
        """The elements' own values, before scales: a list of bfloat16 `[64, 64]`."""
        element = self.format.element
        placed = [place(words, slot, element) for slot in slots_of(element)]
        chunks = self._halves([bits for bits, _ in placed])
        if element.kind == "int":
            heads = self._halves([bits for _, bits in placed])
            return [chunk - head for chunk, head in zip(chunks, heads, strict=True)]
        return [self.lift(chunk) for chunk in chunks]

    def lift(self, chunk: jax.Array) -> jax.Array:
        """From bfloat16's smallest exponents, where codes were placed, to the element's own."""
        element = self.format.element
        if self.interpreted:
            # XLA on CPU flushes bfloat16's subnormals, so there exponents are float16's.
            bits = lax.bitcast_convert_type(chunk, jnp.int16).astype(jnp.int32)
            moved = (bits & 0x8000 | (bits & 0x7FFF) << 3).astype(jnp.int16)
            half = lax.bitcast_convert_type(moved, jnp.float16).astype(jnp.float32)
            finite = jnp.where(jnp.isfinite(half), half, jnp.sign(half) * 65536.0)
            values = (finite * jnp.float32(2.0 ** (15 - element.bias))).astype(jnp.bfloat16)
        else:
            values = chunk * _bfloat16(2.0 ** (_BIAS - element.bias))
        if element.has_inf:
            # What is above the largest number overflows; NaN codes too, whose scale is NaN. Without
            # comparisons, which would take the two values of a word apart.
            largest = _bfloat16(element.max)
            excess = values - jnp.maximum(jnp.minimum(values, largest), -largest)
            values = values + excess * _bfloat16(2.0**127)
        return values

    def _halves(self, slots: list[Any]) -> list[Any]:
        """Words as pairs of bfloat16, each where an operand has it."""
        count = self.group // CHUNK
        if self.interpreted:
            return _interpreted_halves(slots, count)
        operand = plgpu.ShapeDtypeStruct((slots[0].shape[0], CHUNK), jnp.bfloat16, layout=_LAYOUT)
        types = (plgpu.Layout.WGMMA_8BIT,) * len(slots)
        return list(
            plgpu.inline_mgpu(arg_types=types, return_type=(operand,) * count)(
                lambda _, *arrays: _mosaic_halves(arrays, count)
            )(*slots)
        )


def place(words: jax.Array, slot: Slot, element: ElementFormat) -> tuple[Any, Any]:
    """One code of each half of int32 words as patterns of bfloat16.

    Floats: `(bits, None)`, where bits are `value * 2^(bias - 127)`. The element's exponent stands
    in the lowest bits of bfloat16's, so its subnormals are bfloat16's. Integers, in two's
    complement: `(bits, head)`, the value is their difference.
    """
    width, to = element.bits - 1, _MANTISSA_BITS - element.mantissa_bits
    if element.kind == "int":
        # Seven bits in steps of 1/64, and the sign's -2: from 2 + bits/64 take 2, or 4.
        to -= element.exponent_bits
        bits = _gathered(words, [(slot.magnitude, to, width)])
        head = _gathered(words, [(slot.sign, _MANTISSA_BITS, 1)])
        return bits | _both(_TWO), head | _both(_TWO)
    return _gathered(words, [(slot.magnitude, to, width), (slot.sign, _SIGN_BIT, 1)]), None


def _gathered(words: jax.Array, moves: Sequence[tuple[int, int, int]]) -> jax.Array:
    """Bits (from, to, how many) of each half; those that move alike go together."""
    masks: dict[int, int] = {}
    for at, to, width in moves:
        masks[to - at] = masks.get(to - at, 0) | ((1 << width) - 1) << to
    parts = [_moved(words, left) & _both(mask) for left, mask in masks.items()]
    return functools.reduce(operator.or_, parts)


def _moved(words: jax.Array, left: int) -> jax.Array:
    """Shifted to the left, or to the right if negative; what crosses halves is masked later."""
    if left < 0:
        return lax.shift_right_logical(words, jnp.full_like(words, -left))
    return words << left if left else words


def _both(half: int) -> Any:
    """A mask of 16 bits in both halves of an int32."""
    return jnp.int32(np.uint32(half * 0x10001).astype(np.int32))


def _scale(half: jax.Array) -> jax.Array:
    """Low 16 bits of int32 as bfloat16."""
    return lax.bitcast_convert_type(half.astype(jnp.int16), jnp.bfloat16)


def _spread(factors: list[Any]) -> Any:
    """Scales of rows over the columns `[64, 64]` of an operand."""
    shape = ROWS, CHUNK // len(factors)
    spread = [
        plgpu.layout_cast(lax.broadcast_in_dim(factor, shape, (0,)), _LAYOUT) for factor in factors
    ]
    return spread[0] if len(spread) == 1 else lax.concatenate(spread, 1)


def _interpreted_halves(slots: list[Any], count: int) -> list[Any]:
    """`_mosaic_halves` in terms of columns."""
    rows = slots[0].shape[0]
    # [row, thread, word, slot, lane]: words and slots together count pairs of a thread.
    pairs = lax.bitcast_convert_type(jnp.stack(slots, axis=-1), jnp.bfloat16)
    pairs = pairs.reshape(rows, 4, count, CHUNK // 8, 2).transpose(2, 0, 3, 1, 4)
    return [pairs[i].reshape(rows, CHUNK) for i in range(count)]


def _mosaic_halves(arrays: Any, count: int) -> Any:
    """Only names: pair p of a thread is slot `p % slots` of its word `p / slots`."""
    from jax.experimental.mosaic import gpu
    from jaxlib.mlir import ir

    mgpu: Any = gpu
    target, pair = _LAYOUT.to_mgpu(), ir.VectorType.get((2,), ir.BF16Type.get())
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
