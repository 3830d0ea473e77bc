"""What the kernels that decode weights have in common: a program's sizes, copies and operands.

Device code; imports Mosaic GPU, so only kernels import this file.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

from mx_jax.backends.pallas_gpu.casts.decode import Decoder
from mx_jax.backends.pallas_gpu.layouts.weights import CHUNK, ROWS
from mx_jax.backends.pallas_gpu.tuning.tiles import Tiles

# Its declared types differ between versions of JAX, and none fits its own use.
plgpu: Any = mosaic_gpu

# An operand in registers is 64 bfloat16 wide, 128 bytes, and so are the activations that meet it.
_SWIZZLE = 2 * CHUNK


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodingProgram:
    """What every warpgroup of a program runs.

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
    def num_warpgroups(self) -> int:
        """Warpgroups that multiply, 64 rows of weights each, or a part of their columns."""
        return self.row_tiles * self.tiles.parts

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
            ((tiles.m, tiles.k), jnp.bfloat16, transforms(CHUNK, _SWIZZLE)),
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


def transforms(columns: int, swizzle: int) -> tuple[Any, ...]:
    """Tiles of 8 rows, `swizzle` bytes wide, without bank conflicts."""
    return plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(swizzle)
