"""Casts of a bfloat16 matrix along columns, along rows, or both, from one read.

XLA lays bfloat16 out in tiles of 8 rows by 128 columns, half a register each, one beside the other.
Kernels are handed pairs of them, `[m / 8, n / 256, 16, 128]`, which is the same memory: as words, a
register has four pairs of rows of one tile in its first sublanes, and of the next in its last.

Along columns a block is four registers, whose sublanes are compared. Along rows it is 32 lanes,
where rolls count: 62 of them find the largest of 128 blocks in each sublane.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from mx_jax.backends.pallas_tpu.call import call_kernel
from mx_jax.backends.pallas_tpu.words import (
    Coding,
    as_bytes,
    down,
    larger,
    magnitudes,
    numbers,
    words,
)
from mx_jax.codecs.float32 import (
    bitwise_and,
    bitwise_or,
    eq,
    gt,
    lt,
    select,
    shift_left,
    shift_right,
)

BLOCK, TILE_ROWS, TILE_COLUMNS = 32, 8, 256
_LANES, _SUBLANES = 128, 8
# Not a Python number, which is 64 bits wide under `jax_enable_x64`.
_FIRST = np.int32(0)
# Registers of 32 rows in a column of pairs of tiles.
_STRIP = BLOCK // TILE_ROWS
# Rows whose scales along columns fill a register; columns whose scales along rows do.
_HIGH, _WIDE = BLOCK * _SUBLANES, BLOCK * _LANES


def cast(
    x: jax.Array, columns: Coding | None, rows: Coding | None, interpret: bool
) -> list[jax.Array]:
    """Codes and scales, or values, of the blocks of columns, then of rows.

    Args:
      x: bfloat16 `[m, n]`, of whole `TILE_ROWS` and `TILE_COLUMNS`, and whole blocks.
      columns: what blocks of 32 rows become; None: nothing.
      rows: likewise blocks of 32 columns.
      interpret: as in `call_kernel`.
    """
    m, n = x.shape
    high = min(_HIGH if rows else 4 * _HIGH, pl.cdiv(m, _HIGH) * _HIGH)
    wide = min(_WIDE if rows else 4 * TILE_COLUMNS, n)
    pairs = (m // TILE_ROWS, n // TILE_COLUMNS, 2 * TILE_ROWS, _LANES)
    tile = pl.BlockSpec(
        (high // TILE_ROWS, wide // TILE_COLUMNS, *pairs[2:]), lambda i, j: (i, j, 0, 0)
    )
    results: list[tuple[tuple[int, ...], Any]] = []
    specs = []
    for coding, counts, block in (
        (columns, (m // BLOCK, n), (high // BLOCK, wide)),
        (rows, (m, n // BLOCK), (high, wide // BLOCK)),
    ):
        if coding is not None and coding.values:
            results.append((pairs, jnp.bfloat16))
            specs.append(tile)
        elif coding is not None:
            results += [((m, n), jnp.uint8), (counts, jnp.uint8)]
            specs += [pl.BlockSpec(size, lambda i, j: (i, j)) for size in ((high, wide), block)]
    scratch = [pltpu.VMEM((high // BLOCK, wide), jnp.uint32)]
    found = call_kernel(
        functools.partial(_kernel, columns=columns, rows=rows, interpret=interpret),
        x.reshape(m // 8, 8, n // 256, 2, 128).transpose(0, 2, 3, 1, 4).reshape(pairs),
        results=results,
        interpret=interpret,
        parallel=2,
        grid=(pl.cdiv(m, high), pl.cdiv(n, wide)),
        in_specs=[tile],
        out_specs=specs,
        scratch_shapes=scratch if columns is not None and not columns.values else [],
        vmem=56 << 20,
    )
    return [
        y.reshape(m // 8, n // 256, 2, 8, 128).transpose(0, 3, 1, 2, 4).reshape(m, n)
        if y.ndim == 4
        else y
        for y in found
    ]


@dataclasses.dataclass(frozen=True)
class _Registers:
    """A matrix in pairs of tiles, as words of eight rows by two tiles."""

    ref: Any
    interpret: bool

    def read(self, row: Any, pair: Any) -> jax.Array:
        if self.interpret:  # which knows no other type of a reference
            return words(self.ref[row, pair])
        return self.ref.bitcast(jnp.uint32)[row, pair]

    def write(self, row: Any, pair: Any, w: jax.Array) -> None:
        if self.interpret:
            self.ref[row, pair] = numbers(w)
        else:
            self.ref.bitcast(jnp.uint32)[row, pair] = w


def _kernel(
    x_ref: Any, *refs: Any, columns: Coding | None, rows: Coding | None, interpret: bool
) -> None:
    left, x = list(refs), _Registers(x_ref, interpret)
    of_columns, of_rows = (
        [] if coding is None else [left.pop(0) for _ in range(2 - coding.values)]
        for coding in (columns, rows)
    )
    if columns is not None:
        _cast_columns(x, of_columns, left, columns)
    if rows is not None:
        _cast_rows(x, of_rows, rows)


def _put(
    result: Any, strip: Any, pair: Any, found: list[jax.Array], coding: Coding, interpret: bool
) -> None:
    """Store what 32 rows of a pair of tiles become."""
    if coding.values:
        for row, w in enumerate(found):
            _Registers(result, interpret).write(strip * _STRIP + row, pair, w)
        return
    rows = pl.ds(pl.multiple_of(strip * BLOCK, BLOCK), BLOCK)
    for tile in range(2):
        start = pl.multiple_of(pair * TILE_COLUMNS + tile * _LANES, _LANES)
        halves = [lax.slice_in_dim(w, 4 * tile, 4 * tile + 4) for w in found]
        codes = lax.concatenate(halves, 0)
        result[rows, pl.ds(start, _LANES)] = as_bytes(codes)


def _in_turn(count: int, cast: Callable[[Any, bool], jax.Array]) -> None:
    """Cast parts of a tile: `cast(part, exact)` tells where a block needs to be cast exactly; if
    any does, all are."""

    def add(part: jax.Array, odd: jax.Array) -> jax.Array:
        return bitwise_or(odd, cast(part, False))

    count = np.int32(count)
    odd = lax.fori_loop(_FIRST, count, add, jnp.zeros((_SUBLANES, _LANES), jnp.int32))

    @pl.when(jnp.any(odd != 0))
    def _() -> None:
        def cast_exactly(part: jax.Array, _: None) -> None:
            cast(part, True)

        lax.fori_loop(_FIRST, count, cast_exactly, None)


def _each(count: int, step: Callable[[Any], None], exact: bool) -> None:
    """All steps at once, or in a loop, which compiles sooner."""
    if exact:
        lax.fori_loop(_FIRST, np.int32(count), lambda i, _: step(i), None)
    else:
        for i in range(count):
            step(i)


def _cast_columns(x: _Registers, results: Any, scratch: Any, coding: Coding) -> None:
    tall, pairs = x.ref.shape[:2]
    sublane = lax.broadcasted_iota(jnp.int32, (_SUBLANES, _LANES), 0)

    def cast_piece(step: Any, exact: bool) -> jax.Array:
        """256 rows of a pair of tiles."""
        above, pair = lax.div(step, np.int32(pairs)), lax.rem(step, np.int32(pairs))
        # Of each strip in a sublane, for both tiles.
        largest = [jnp.zeros((_SUBLANES, _LANES), jnp.uint32)] * 2

        def cast_strip(own: Any) -> None:
            strip = above * _SUBLANES + own
            read = [x.read(strip * _STRIP + row, pair) for row in range(_STRIP)]
            top = _largest_of_rows(read, sublane)
            fact = top if exact else coding.reciprocals(top)
            how = coding.exact_results if exact else coding.results
            _put(results[0], strip, pair, [how(w, fact) for w in read], coding, x.interpret)
            if not exact:
                other = pltpu.roll(top, 4, 0)
                for tile, halves in enumerate(((top, other), (other, top))):
                    spread = select(lt(sublane, 4), *halves)
                    largest[tile] = select(eq(sublane, own), spread, largest[tile])

        _each(_SUBLANES, cast_strip, exact)
        stored, odd = zip(*map(coding.scales, largest), strict=True)
        if scratch and not exact:
            count = pl.ds(pl.multiple_of(above * _SUBLANES, _SUBLANES), _SUBLANES)
            for tile, scales in enumerate(stored):
                start = pl.multiple_of(pair * TILE_COLUMNS + tile * _LANES, _LANES)
                scratch[0][count, pl.ds(start, _LANES)] = scales
        return lax.bitwise_or(*odd)

    _in_turn(tall // _STRIP // _SUBLANES * pairs, cast_piece)
    if scratch:
        scales = pltpu.bitcast(bitwise_and(scratch[0][...], 0xFF), jnp.int32)
        results[1][...] = lax.convert_element_type(scales, jnp.uint8)


def _largest_of_rows(read: list[jax.Array], sublane: jax.Array) -> jax.Array:
    """The largest of the rows of a pair of tiles, in all halves and sublanes of each tile."""
    top = functools.reduce(larger, map(magnitudes, read))
    for step in (2, 1):
        before, behind = pltpu.roll(top, step, 0), pltpu.roll(top, _SUBLANES - step, 0)
        top = larger(top, select(gt(bitwise_and(sublane, step), 0), before, behind))
    return larger(top, bitwise_or(shift_left(top, 16), down(top, 16)))


def _cast_rows(x: _Registers, results: Any, coding: Coding) -> None:
    tall, pairs = x.ref.shape[:2]
    # As many of a strip's registers as have their largest magnitudes in one.
    together = next(size for size in (4, 2, 1) if size * pairs <= BLOCK)
    slots = BLOCK // together
    lane = lax.broadcasted_iota(jnp.int32, (_SUBLANES, _LANES), 1)
    tile = shift_right(lane, 5)

    def cast_strip(strip: Any, exact: bool) -> jax.Array:
        """32 rows of all tiles."""

        def leaf(first: int, slot: int) -> jax.Array | None:
            row, pair = first + slot // slots, slot % slots
            return magnitudes(x.read(strip * _STRIP + row, pair)) if pair < pairs else None

        largest = [
            _largest_of_lanes(functools.partial(leaf, first), 0, BLOCK)
            for first in range(0, _STRIP, together)
        ]

        def gathered(facts: Any, row: int, place: Any, block: jax.Array) -> jax.Array:
            """Of a row of registers: what stands for blocks of each lane's tile."""
            slot = (row % together) * slots + place
            source = bitwise_or(shift_left(block, 5), BLOCK - 1 - _reversed(slot))
            return jnp.take_along_axis(
                facts[row // together], source, axis=1, mode="promise_in_bounds"
            )

        facts = largest if exact else [*map(coding.reciprocals, largest)]
        how = coding.exact_results if exact else coding.results

        def cast_pair(pair: Any) -> None:
            found = [
                how(x.read(strip * _STRIP + row, pair), gathered(facts, row, pair, tile))
                for row in range(_STRIP)
            ]
            _put(results[0], strip, pair, found, coding, x.interpret)

        _each(pairs, cast_pair, exact)
        stored, odd = zip(*map(coding.scales, largest), strict=True)
        if not coding.values and not exact:
            # Lane 4 t + j of a row: block j of tile t, which lies in one half of the sublanes.
            found = []
            for row in range(_STRIP):
                first = gathered(stored, row, shift_right(lane, 3), bitwise_and(lane, 3))
                second = pltpu.roll(first, 4, 0)
                found.append(select(gt(bitwise_and(lane, 4), 0), second, first)[:4])
            rows = pl.ds(pl.multiple_of(strip * BLOCK, BLOCK), BLOCK)
            results[1][rows, :] = as_bytes(jnp.concatenate(found))[:, : results[1].shape[1]]
        return functools.reduce(lax.bitwise_or, odd)

    _in_turn(tall // _STRIP, cast_strip)


def _reversed(slot: Any) -> Any:
    """The five binary digits of a number in the other order."""
    return sum(((slot >> digit) & 1) << (4 - digit) for digit in range(5))


def _largest_of_lanes(
    leaf: Callable[[int], jax.Array | None], first: int, count: int
) -> jax.Array | None:
    """The largest of each 32 lanes of up to 32 registers, all in one.

    Lane `32 j + 31 - _reversed(slot)` has it of lanes `32 j` to `32 j + 31` of a slot. After each
    step half of the lanes say nothing new, so that two go on as one: two rolls for each pair.
    """
    if count == 1:
        return leaf(first)
    half, shift = count // 2, BLOCK // count
    low = _largest_of_lanes(leaf, first, half)
    if low is None:
        return None
    high = _largest_of_lanes(leaf, first + half, half)
    lane = lax.broadcasted_iota(jnp.int32, low.shape, 1)
    before = larger(low, pltpu.roll(low, shift, 1))
    high = low if high is None else high
    behind = larger(high, pltpu.roll(high, _LANES - shift, 1))
    return select(gt(bitwise_and(lane, shift), 0), before, behind)
