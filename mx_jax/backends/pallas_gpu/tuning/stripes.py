"""How the steps of a product's tiles are dealt to programs: evenly, whatever their numbers."""

import dataclasses
import math
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mx_jax.backends.pallas_gpu.tuning.tiles import Tiles


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stripes:
    """Every step of every tile, tile after tile, cut into as many equal pieces as programs.

    Pieces differ by one step at most. Where programs are a multiple of tiles, none crosses a tile.
    Program p has the steps from `floor(p tiles steps / programs)` up to the next one's.

    Attributes:
      tiles: of the whole product.
      steps: along k, of each tile.
      programs: at most as many as there are steps.
    """

    tiles: int
    steps: int
    programs: int

    @classmethod
    def of(cls, sizes: Tiles, tiles: int, steps: int) -> Self:
        """What tiles of some sizes ask for, but no program without a step."""
        programs = sizes.stripes or sizes.splits * tiles
        return cls(tiles=tiles, steps=steps, programs=min(programs, tiles * steps))

    @property
    def _ratio(self) -> tuple[int, int]:
        """Steps for each program, as a fraction in lowest terms: products then fit 32 bits."""
        total = self.tiles * self.steps
        common = math.gcd(total, self.programs)
        return total // common, self.programs // common

    @property
    def within_tiles(self) -> bool:
        """Whether no program has steps of two tiles."""
        return self.programs % self.tiles == 0

    @property
    def longest(self) -> int:
        """Steps of the program that has most."""
        return -(-self.tiles * self.steps // self.programs)

    @property
    def shares(self) -> int:
        """Programs that the tile with most of them has."""
        tile = np.arange(self.tiles)
        return int(np.max(self.num_shares(tile)))

    def first(self, program: Any) -> Any:
        """A program's first step, or with `programs` the end."""
        steps, programs = self._ratio
        return _divide(program * steps, programs)

    def program_of(self, step: Any) -> Any:
        """Who has a step."""
        steps, programs = self._ratio
        return _divide((step + 1) * programs - 1, steps)

    def share(self, program: Any, tile: Any) -> Any:
        """Which of a tile's programs one is, from 0."""
        return program - self.program_of(tile * self.steps)

    def num_shares(self, tile: Any) -> Any:
        """How many programs a tile has."""
        return self.share(self.program_of((tile + 1) * self.steps - 1), tile) + 1

    def segments(self, program: Any, run: Any, carry: Any) -> Any:
        """Call `carry = run(tile, first step, steps, carry)` for each tile of a program, in order.

        Device code. Both numbers of steps are a tile's own; they are static where they can be.
        """
        if self.programs == self.tiles:
            return run(program, 0, self.steps, carry)
        first, end = self.first(program), self.first(program + 1)

        def segment(tile: Any, carry: Any) -> Any:
            begin = lax.max(first, tile * self.steps)
            count = lax.min(end, (tile + 1) * self.steps) - begin
            return run(tile, begin - tile * self.steps, count, carry)

        tile = _divide(first, self.steps)
        if self.within_tiles:
            return segment(tile, carry)
        return lax.fori_loop(tile, _divide(end - 1, self.steps) + 1, segment, carry)


def add_shares(sums: jax.Array, stripes: Stripes, tile: tuple[int, int]) -> jax.Array:
    """The product of what programs summed: `[shares, batch, m, n]` to `[batch, m, n]`, in order.

    Args:
      sums: float32; shares that a tile does not have are anything.
      stripes: whose tiles are numbered by batch, then along n, then along m.
      tile: rows and columns of one.
    """
    if sums.shape[0] == 1:
        return sums[0]
    _, batch, m, n = sums.shape
    along = -(-m // tile[0]), -(-n // tile[1])
    index = jnp.arange(batch, dtype=jnp.int32)[:, None, None] * along[1]
    index = index + jnp.arange(n, dtype=jnp.int32) // tile[1]
    index = index * along[0] + jnp.arange(m, dtype=jnp.int32)[:, None] // tile[0]
    count = stripes.num_shares(index)
    total = sums[0]
    for share in range(1, sums.shape[0]):
        total = total + jnp.where(share < count, sums[share], 0)
    return total


def _divide(x: Any, by: int) -> Any:
    """`x // by` of what is not negative, without a GPU's care for signs."""
    return lax.div(x, jnp.int32(by)) if isinstance(x, jax.Array) else x // by
