"""Packed codes to bfloat16 in registers, and the kernel that decodes whole weights.

Device code. A 32-bit word holds the codes of two neighbouring columns of an operand in its halves.
A shift and masks bring one code of each half to where bfloat16 has sign, exponent and mantissa: two
values at a time, as many as a bfloat16 multiplication scales. All arithmetic is plain array code,
which the interpreter runs too; only what no array operation says, that one word is two numbers, is
written for Mosaic GPU itself (`_mosaic_halves`), with a stand-in of the same meaning.

Imports Mosaic GPU, so only kernels import this file.
"""

import dataclasses
import functools
import operator
from collections.abc import Iterator, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from mx_jax.backends.pallas_gpu.device import plgpu, store, transforms
from mx_jax.backends.pallas_gpu.layouts import (
    CHUNK,
    PAD_K,
    ROWS,
    Field,
    Slot,
    Storage,
    granularity,
    storage,
)
from mx_jax.backends.pallas_gpu.tiles import Tiles
from mx_jax.formats import BlockFormat, ElementFormat

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


# What the kernels that multiply have in common ---------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodingProgram:
    """What every warpgroup runs of a program that multiplies by weights.

    Attributes:
      decoder: of the weights.
      tiles: sizes.
      out_dtype: of the result.
      batch: products.
      num_m: tiles along m of one product.
      num_n: tiles along n.
      num_k: steps along k of a tile.
      weight_tiles: tiles of 64 rows that one product's weights lie in.
    """

    decoder: Decoder
    tiles: Tiles
    out_dtype: Any
    batch: int
    num_m: int
    num_n: int
    num_k: int
    weight_tiles: int

    @classmethod
    def of(
        cls,
        x: jax.Array,
        codes: jax.Array,
        n: int,
        *,
        decoder: Decoder,
        tiles: Tiles,
        out_dtype: Any,
    ) -> Self:
        """The program for `x[batch, m, k]` by `codes[batch, n' / 64, ...]` of n rows."""
        batch, m, k = x.shape
        return cls(
            decoder=decoder,
            tiles=tiles,
            out_dtype=jnp.dtype(out_dtype),
            batch=batch,
            num_m=-(-m // tiles.m),
            num_n=-(-n // tiles.n),
            num_k=-(-k // tiles.k),
            weight_tiles=codes.shape[1],
        )

    @property
    def row_tiles(self) -> int:
        """Tiles of 64 rows of weights that a program has."""
        return self.tiles.n // ROWS

    @property
    def blocks(self) -> tuple[tuple[tuple[int, ...], Any, tuple[Any, ...]], ...]:
        """What a step copies of activations, codes and scales: shape, dtype, how it lies.

        cp.async takes what has no tiling for one piece of memory, and says nothing if it is not:
        codes and scales of one tile of rows are.
        """
        tiles, decoder, rows = self.tiles, self.decoder, self.row_tiles
        stored = decoder.storage
        pieces = tiles.k // stored.group * stored.planes
        return (
            ((tiles.m, tiles.k), jnp.bfloat16, transforms(CHUNK)),
            ((rows, pieces, ROWS, stored.words), jnp.int32, ()),
            ((rows, tiles.k // (2 * decoder.granularity), ROWS), jnp.int32, ()),
        )

    def weights_at(self, codes: Any, scales: Any, matrix: Any, n: Any, step: Any) -> list[Any]:
        """A step's codes and scales of a tile along n, of one product of the batch."""
        first = matrix * self.weight_tiles + n * self.row_tiles
        taken = []
        for ref, (shape, _, _) in zip((codes, scales), self.blocks[1:], strict=True):
            rows, pieces = shape[:2]
            taken.append(ref.at[pl.ds(first, rows), pl.ds(step * pieces, pieces)])
        return taken

    def operands(
        self, codes_smem: Any, scales_smem: Any, row_tile: Any, layout: Any
    ) -> Iterator[tuple[Any, Any]]:
        """The operands `[64, 64]` of a step's tile of rows, each with its columns of the step."""
        decoder = self.decoder
        planes = decoder.storage.planes
        for group in range(self.tiles.k // decoder.group):
            operands = decoder.operands(
                codes_smem.at[row_tile, pl.ds(group * planes, planes)],
                scales_smem.at[row_tile, pl.ds(group * decoder.pairs, decoder.pairs)],
                layout,
            )
            for chunk, operand in enumerate(operands):
                yield operand, pl.ds(group * decoder.group + chunk * CHUNK, CHUNK)


# Weights of many rows' products -------------------------------------------------------------------

# Columns of a program, at most: enough loads to wait for together.
_COLUMNS = 512


def dequantize(
    codes: jax.Array,
    scales: jax.Array,
    *,
    format: BlockFormat,
    accelerated: bool,
    interpret: Any = None,
) -> jax.Array:
    """Weights as bfloat16 in one pass over memory, their tensor scale left out.

    For products of so many rows that XLA makes. A program decodes 64 rows of some groups of codes,
    straight from memory to registers: programs are many and small, so while one waits, others of
    its processor work. Where there is a tensor memory accelerator, values go through shared memory,
    from which whole lines are copied; elsewhere threads write what they hold.

    Args:
      codes: int32 `[n / 64, k / group * planes, 64, words]`, as `PackedWeights` has them, batches
        merged.
      scales: int32 `[n / 64, k / (2 * granularity), 64]`.
      format: of the weights.
      accelerated: whether the GPU has a tensor memory accelerator: from Hopper on.
      interpret: parameters of Mosaic's interpreter, None to compile.

    Returns:
      `[n, k]`.
    """
    decoder = Decoder(format=format, interpreted=interpret is not None)
    tiles, pieces = codes.shape[:2]
    k = pieces // decoder.storage.planes * decoder.group
    columns = next(c for c in (_COLUMNS, _COLUMNS // 2, PAD_K) if k % c == 0)
    program = DequantizeProgram(decoder=decoder, columns=columns, accelerated=accelerated)
    return plgpu.kernel(
        program.body,
        out_type=jax.ShapeDtypeStruct((tiles * ROWS, k), jnp.bfloat16),
        # CUDA lets only the last axis be long.
        grid=(k // columns, tiles),
        grid_names=("k", "tile"),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        scratch_types=program.scratch_types(),
        kernel_name=f"mx_jax_dequantize_{format.name}",
        interpret=interpret,
    )(codes, scales)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DequantizeProgram:
    """What the warpgroup of each program runs.

    Attributes:
      decoder: of the weights.
      columns: that it decodes.
      accelerated: as `dequantize` has it.
    """

    decoder: Decoder
    columns: int
    accelerated: bool

    def scratch_types(self) -> list[Any]:
        """Shared memory for the values, in chunks of 64 columns."""
        if not self.accelerated:
            return []
        shape = (self.columns // CHUNK, ROWS, CHUNK)
        return [plgpu.SMEM(shape, jnp.bfloat16, transforms=transforms(CHUNK))]

    def body(self, codes_gmem, scales_gmem, out_gmem, *values_smem):
        """Decode, write."""
        decoder, accelerated = self.decoder, self.accelerated
        layout = plgpu.Layout.WGMMA if accelerated else plgpu.Layout.MMA_LHS(jnp.bfloat16)
        tile, part = lax.axis_index("tile"), lax.axis_index("k")
        groups, planes = self.columns // decoder.group, decoder.storage.planes
        rows = pl.ds(tile * ROWS, ROWS)
        chunk = 0
        for i in range(groups):
            group = part * groups + i
            operands = decoder.operands(
                codes_gmem.at[tile, pl.ds(group * planes, planes)],
                scales_gmem.at[tile, pl.ds(group * decoder.pairs, decoder.pairs)],
                layout,
            )
            for values in operands:
                columns = pl.ds(part * self.columns + chunk * CHUNK, CHUNK)
                out = out_gmem.at[rows, columns]
                if accelerated:
                    values_smem[0][chunk] = values
                    plgpu.commit_smem()
                    plgpu.copy_smem_to_gmem(values_smem[0].at[chunk], out)
                else:
                    store(out, values)
                chunk += 1
        if accelerated:
            plgpu.wait_smem_to_gmem(0)
