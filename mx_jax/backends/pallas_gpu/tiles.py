"""What one program of a kernel computes: its sizes and, of rows in groups, whose rows those are."""

import dataclasses
import math

import jax
import jax.numpy as jnp

# The copying warpgroup only issues copies: it gives the others its registers.
COPYING_REGISTERS = 40
_PROCESSOR_REGISTERS, _MOST_REGISTERS = 65536, 256


def launch_registers(warpgroups: int) -> int:
    """Registers that a thread of so many warpgroups starts with: what ptxas gives, in eights."""
    return min(_PROCESSOR_REGISTERS // (128 * warpgroups) // 8 * 8, _MOST_REGISTERS)


def multiplying_registers(warpgroups: int) -> int:
    """What a thread of each multiplying warpgroup asks for, beside one warpgroup that copies."""
    # All together at most what they were launched with: `setmaxnreg` waits until there are as many
    # registers, so for more it would wait for ever.
    all_registers = launch_registers(warpgroups + 1) * (warpgroups + 1)
    return min((all_registers - COPYING_REGISTERS) // warpgroups // 8 * 8, _MOST_REGISTERS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiles:
    """What one program of a kernel computes.

    Attributes:
      m: rows of activations, or of the left operand.
      n: rows of weights, or of the right operand.
      k: length of one step along k.
      stages: steps in flight.
      splits: programs that share a tile's k, and whose sums are added.
    """

    m: int
    n: int = 128
    k: int = 128
    stages: int = 4
    splits: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tuning:
    """What a kernel does with codes of one width.

    Attributes:
      tiles: (largest number of rows, tiles), ascending, several for one number; the last for any.
      crossover: rows from which weights are dequantized once and XLA multiplies in bfloat16: a
        kernel decodes the same weights again for every tile of rows.
    """

    tiles: tuple[tuple[float, Tiles], ...]
    crossover: float = math.inf


# Rows in groups ---------------------------------------------------------------------------------

# What a copy of activations or of sums begins at: a tile of shared memory has so many rows.
CHUNK_ROWS = 8
# Numbers that a program reads: group, first row to copy, first and last row that are its own.
FIELDS = 4


def num_visits(num_rows: int, num_groups: int, tile_rows: int) -> int:
    """The most tiles that groups of any sizes take: one for each group beyond those of all rows."""
    chunks = -(-num_rows // CHUNK_ROWS)
    return -(-chunks * CHUNK_ROWS // tile_rows) + min(num_groups, num_rows - 1)


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
    visit = jnp.arange(num_visits(num_rows, sizes.shape[0], tile_rows), dtype=jnp.int32)
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
