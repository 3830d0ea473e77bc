"""Casts of a bfloat16 matrix along columns, along rows, or both, from one read.

XLA lays bfloat16 out in tiles of 8 rows by 128 columns, half a register each, one beside the other.
Kernels are handed pairs of them, `[m / 8, n / 256, 16, 128]`, which is the same memory: as words, a
register has four pairs of rows of one tile in its first sublanes, and of the next in its last.

Along columns a block is four registers, whose sublanes are compared. Along rows it is 32 lanes,
where rolls count: 62 of them find the largest of 128 blocks in each sublane.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from mx_jax.backends.pallas_tpu.words import (
    Coding,
    as_bytes,
    call_kernel,
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

# A reference has no type to a type checker.
Ref = Any
Index = Any  # an int, or a traced one

BLOCK, TILE_ROWS, TILE_COLUMNS = 32, 8, 256
_LANES, _SUBLANES = 128, 8
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
    arrays = call_kernel(
        functools.partial(_kernel, columns=columns, rows=rows, interpret=interpret),
        x.reshape(m // 8, 8, n // 256, 2, 128).transpose(0, 2, 3, 1, 4).reshape(pairs),
        results=results,
        interpret=interpret,
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
        for y in arrays
    ]


def _read(ref: Ref, rows: Any, pairs: Any, interpret: bool) -> jax.Array:
    """Registers of some rows and pairs of tiles, `[rows, pairs, 8, 128]` words."""
    if not interpret:
        return ref.bitcast(jnp.uint32)[rows, pairs]
    return words(ref[rows, pairs])  # the interpreter knows no other type of a reference


def _put(
    result: Ref, strip: Index, pair: Index, cast_words: jax.Array, values: bool, interpret: bool
) -> None:
    """Store what 32 rows of a pair of tiles become, `[4, 8, 128]` words."""
    if values:
        rows = pl.ds(strip * _STRIP, _STRIP)
        if interpret:
            result[rows, pair] = numbers(cast_words)
        else:
            result.bitcast(jnp.uint32)[rows, pair] = cast_words
        return
    rows = pl.ds(pl.multiple_of(strip * BLOCK, BLOCK), BLOCK)
    for tile in range(2):
        start = pl.multiple_of(pair * TILE_COLUMNS + tile * _LANES, _LANES)
        half = lax.slice_in_dim(cast_words, 4 * tile, 4 * tile + 4, axis=1)
        codes = lax.concatenate([_part(half, row) for row in range(_STRIP)], 0)
        result[rows, pl.ds(start, _LANES)] = as_bytes(codes)


def _part(x: jax.Array, index: int) -> jax.Array:
    return lax.index_in_dim(x, index, keepdims=False)


def _kernel(
    x_ref: Ref, *refs: Ref, columns: Coding | None, rows: Coding | None, interpret: bool
) -> None:
    left = list(refs)
    of_columns, of_rows = (
        [] if coding is None else [left.pop(0) for _ in range(2 - coding.values)]
        for coding in (columns, rows)
    )
    if columns is not None:
        _cast_columns(x_ref, of_columns, left, columns, interpret)
    if rows is not None:
        _cast_rows(x_ref, of_rows, rows, interpret)


def _in_turn(count: int, cast: Callable[[Any, bool], Any]) -> None:
    """Cast parts of a tile: `cast(part, exact)` tells where a block needs to be cast exactly; if
    any does, all are."""

    def add(part: jax.Array, odd: jax.Array) -> jax.Array:
        return bitwise_or(odd, cast(part, False))

    zero = jnp.zeros((_SUBLANES, _LANES), jnp.int32)
    odd = lax.fori_loop(np.int32(0), np.int32(count), add, zero)

    # Not `jnp.any`, which Pallas lowers by float64 under `jax_enable_x64`.
    @pl.when(lax.gt(jnp.max(lax.convert_element_type(odd, jnp.float32)), np.float32(0)))
    def _() -> None:
        _in_a_loop(count, lambda part: cast(part, True))


def _in_a_loop(count: int, step: Callable[[Any], Any]) -> None:
    """For what is rare: it compiles sooner."""
    # Python's numbers are 64 bits wide under `jax_enable_x64`.
    lax.fori_loop(np.int32(0), np.int32(count), lambda i, _: (step(i), None)[1], None)


def _cast_columns(
    x: Ref, results: Sequence[Ref], scratch: Sequence[Ref], coding: Coding, interpret: bool
) -> None:
    tall, pairs = x.shape[:2]
    sublane = lax.broadcasted_iota(jnp.int32, (_SUBLANES, _LANES), 0)

    def cast_piece(step: Index, exact: bool) -> Any:
        """256 rows of a pair of tiles."""
        above, pair = lax.div(step, np.int32(pairs)), lax.rem(step, np.int32(pairs))
        # Of the first strips and of the last: in a sublane of either tile one strip's.
        largest = [jnp.zeros((_SUBLANES, _LANES), jnp.uint32)] * 2

        def cast_strip(index: Index) -> jax.Array:
            strip = above * _SUBLANES + index
            w = _read(x, pl.ds(strip * _STRIP, _STRIP), pl.ds(pair, 1), interpret)
            w = lax.squeeze(w, (1,))
            top = _largest_of_rows(w, sublane)
            fact = lax.broadcast(top if exact else coding.reciprocals(top), (_STRIP,))
            cast_words = (coding.exact_results if exact else coding.results)(w, fact)
            _put(results[0], strip, pair, cast_words, coding.values, interpret)
            return top

        if exact:
            return _in_a_loop(_SUBLANES, cast_strip)
        for index in range(_SUBLANES):
            top = cast_strip(index)
            half, place = divmod(index, 4)
            here = eq(bitwise_and(sublane, 3), place)
            largest[half] = select(here, top, largest[half])
        (first, last), odd = zip(*map(coding.scales, largest), strict=True)
        if scratch:
            count = pl.ds(pl.multiple_of(above * _SUBLANES, _SUBLANES), _SUBLANES)
            tiles = (first, pltpu.roll(last, 4, 0)), (pltpu.roll(first, 4, 0), last)
            for tile, halves in enumerate(tiles):
                start = pl.multiple_of(pair * TILE_COLUMNS + tile * _LANES, _LANES)
                scratch[0][count, pl.ds(start, _LANES)] = select(lt(sublane, 4), *halves)
        return bitwise_or(*odd)

    _in_turn(tall // _STRIP // _SUBLANES * pairs, cast_piece)
    if scratch:
        scales = pltpu.bitcast(bitwise_and(scratch[0][...], 0xFF), jnp.int32)
        results[1][...] = lax.convert_element_type(scales, jnp.uint8)


def _largest_of_rows(w: jax.Array, sublane: jax.Array) -> jax.Array:
    """The largest of the rows of a pair of tiles, in all halves and sublanes of each tile."""
    top = functools.reduce(larger, (_part(magnitudes(w), row) for row in range(_STRIP)))
    for step in (2, 1):
        before, behind = pltpu.roll(top, step, 0), pltpu.roll(top, _SUBLANES - step, 0)
        top = larger(top, select(gt(bitwise_and(sublane, step), 0), before, behind))
    return larger(top, bitwise_or(shift_left(top, 16), down(top, 16)))


def _cast_rows(x: Ref, results: Sequence[Ref], coding: Coding, interpret: bool) -> None:
    tall, pairs = x.shape[:2]
    # As many of a strip's registers as have their largest magnitudes in one.
    together = next(size for size in (4, 2, 1) if size * pairs <= BLOCK)
    slots = BLOCK // together
    lane = lax.broadcasted_iota(jnp.int32, (_SUBLANES, _LANES), 1)

    def cast_strip(strip: Index, exact: bool) -> Any:
        """32 rows of all tiles."""
        w = _read(x, pl.ds(strip * _STRIP, _STRIP), slice(None), interpret)
        largest = [
            _largest_of_lanes(lax.slice_in_dim(magnitudes(w), first, first + together), slots)
            for first in range(0, _STRIP, together)
        ]

        def gathered(
            facts: Sequence[jax.Array], row: int, place: Index, block: jax.Array
        ) -> jax.Array:
            """Of a row of registers: what stands for blocks of each lane's tile."""
            slot = (row % together) * slots + place
            source = bitwise_or(shift_left(block, 5), BLOCK - 1 - _reversed(slot))
            return jnp.take_along_axis(
                facts[row // together], source, axis=1, mode="promise_in_bounds"
            )

        facts = largest if exact else [*map(coding.reciprocals, largest)]
        tile, how = shift_right(lane, 5), coding.exact_results if exact else coding.results

        def cast_pair(pair: Index, tiles: jax.Array) -> None:
            spread = [
                lax.expand_dims(gathered(facts, row, pair, tile), (0,)) for row in range(_STRIP)
            ]
            parts = how(tiles, lax.concatenate(spread, 0))
            _put(results[0], strip, pair, parts, coding.values, interpret)

        if exact:
            where = pl.ds(strip * _STRIP, _STRIP)
            return _in_a_loop(
                pairs,
                lambda pair: cast_pair(
                    pair, lax.squeeze(_read(x, where, pl.ds(pair, 1), interpret), (1,))
                ),
            )
        for pair in range(pairs):
            cast_pair(pair, lax.index_in_dim(w, pair, axis=1, keepdims=False))
        stored, odd = zip(*map(coding.scales, largest), strict=True)
        if not coding.values:
            # Lane 4 t + j of a row: block j of tile t, which lies in one half of the sublanes.
            parts = []
            for row in range(_STRIP):
                first = gathered(stored, row, shift_right(lane, 3), bitwise_and(lane, 3))
                second = pltpu.roll(first, 4, 0)
                parts.append(select(gt(bitwise_and(lane, 4), 0), second, first)[:4])
            rows = pl.ds(pl.multiple_of(strip * BLOCK, BLOCK), BLOCK)
            scales = as_bytes(lax.concatenate(parts, 0))
            results[1][rows, :] = scales[:, : results[1].shape[1]]
        return functools.reduce(bitwise_or, odd)

    _in_turn(tall // _STRIP, cast_strip)


def _reversed(slot: Index) -> Any:
    """The five binary digits of a number in the other order."""
    return sum(((slot >> digit) & 1) << (4 - digit) for digit in range(5))


def _largest_of_lanes(w: jax.Array, slots: int) -> jax.Array:
    """The largest of each 32 lanes of 32 registers, all in one; `[rows, pairs, 8, 128]`.

    Lane `32 j + 31 - _reversed(slot)` has it of lanes `32 j` to `32 j + 31` of a slot, of which a
    row has `slots`. After each step half of the lanes say nothing new, so that two registers go on
    as one: two rolls for each pair.
    """
    rows, pairs = w.shape[:2]
    zero = jnp.zeros((_SUBLANES, _LANES), jnp.uint32)
    level = [
        lax.squeeze(lax.slice(w, (row, pair, 0, 0), (row + 1, pair + 1, 8, 128)), (0, 1))
        if pair < pairs
        else zero
        for row in range(rows)
        for pair in range(slots)
    ]
    top = lax.concatenate([lax.expand_dims(x, (0,)) for x in level], 0)
    while (shift := top.shape[0] // 2) > 0:
        pair = top.reshape(shift, 2, _SUBLANES, _LANES)
        low, high = (lax.index_in_dim(pair, i, axis=1, keepdims=False) for i in range(2))
        before = larger(low, pltpu.roll(low, shift, 2))
        behind = larger(high, pltpu.roll(high, _LANES - shift, 2))
        lane = lax.broadcasted_iota(jnp.int32, low.shape, 2)
        top = select(gt(bitwise_and(lane, shift), 0), before, behind)
    return lax.squeeze(top, (0,))
