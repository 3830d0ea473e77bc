"""What the kernels that decode weights have in common: a program's sizes, copies and operands.

Device code; imports Mosaic GPU, so only kernels import this file.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

from mx_jax.backends.pallas_gpu.casts.decode import Decoder
from mx_jax.backends.pallas_gpu.layouts.weights import CHUNK, ROWS
from mx_jax.backends.pallas_gpu.tuning.tiles import Tiles
from mx_jax.formats import BlockFormat

# Its declared types differ between versions of JAX, and none fits its own use.
plgpu: Any = mosaic_gpu

# An operand in registers is 64 bfloat16 wide, 128 bytes, and so are the activations that meet it.
_SWIZZLE = 2 * CHUNK


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodingProgram:
    """What every warpgroup of a grid `(split, n, row)` runs.

    The grid's last axis runs fastest, so that programs which share weights run together; it is also
    the only one that CUDA lets be long.

    Attributes:
      decoder: of the weights.
      tiles: sizes.
      out_dtype: of the result.
      num_m: tiles along m of one product of the batch.
      num_n: tiles along n.
      num_k: steps along k, all splits together.
      num_rows: tiles along m of the whole batch.
    """

    decoder: Decoder
    tiles: Tiles
    out_dtype: Any
    num_m: int
    num_n: int
    num_k: int
    num_rows: int

    @classmethod
    def of(
        cls,
        x: jax.Array,
        codes: jax.Array,
        *,
        format: BlockFormat,
        batch: int,
        tiles: Tiles,
        out_dtype: Any,
        interpret: Any,
    ) -> Self:
        """The program for padded operands, as `wgmma.partial_products` takes them."""
        rows, k = x.shape
        return cls(
            decoder=Decoder(format=format, interpreted=interpret is not None),
            tiles=tiles,
            out_dtype=jnp.dtype(out_dtype),
            num_m=rows // batch // tiles.m,
            num_n=codes.shape[0] // batch * ROWS // tiles.n,
            num_k=k // tiles.k,
            num_rows=rows // tiles.m,
        )

    @property
    def grid(self) -> dict[str, tuple[Any, ...]]:
        """How many programs there are along each axis."""
        sizes = (self.tiles.splits, self.num_n, self.num_rows)
        return {"grid": sizes, "grid_names": ("split", "n", "row")}

    @property
    def num_warpgroups(self) -> int:
        """Warpgroups that multiply, 64 rows of weights each, or a part of their columns."""
        return self.tiles.n // ROWS * self.tiles.parts

    def in_specs(self, row: Any = None, matrix: Any = None) -> list[Any]:
        """Where each step's activations, codes and scales lie.

        cp.async takes what has no tiling for one piece of memory, and says nothing if it is not:
        codes and scales of one tile of rows are.

        Args:
          row: which tile of activations; None: the grid's.
          matrix: which matrix of weights; None: that of the batch that the tile is of.
        """
        tiles, decoder, row_tiles = self.tiles, self.decoder, self.tiles.n // ROWS
        row = lax.axis_index("row") if row is None else row
        matrix = lax.div(row, self.num_m) if matrix is None else matrix
        tile = matrix * self.num_n + lax.axis_index("n")
        first = lax.axis_index("split") * (self.num_k // tiles.splits)
        stored = decoder.storage
        codes = (row_tiles, tiles.k // stored.group * stored.planes, ROWS, stored.words)
        scales = (row_tiles, tiles.k // (2 * decoder.granularity), ROWS)
        blocks = (
            ((tiles.m, tiles.k), lambda i: (row, first + i), transforms(CHUNK, _SWIZZLE)),
            (codes, lambda i: (tile, first + i, 0, 0), ()),
            (scales, lambda i: (tile, first + i, 0), ()),
        )
        return [plgpu.BlockSpec(shape, at, transforms=how) for shape, at, how in blocks]

    def operands(
        self, codes_smem: Any, scales_smem: Any, warpgroup: Any, layout: Any
    ) -> Iterator[tuple[Any, Any]]:
        """One warpgroup's operands `[64, 64]` of a step, each with its columns of the step.

        Warpgroups that share rows take one part of the step's columns after the other.
        """
        decoder, parts = self.decoder, self.tiles.parts
        planes = decoder.storage.planes
        rows = lax.div(warpgroup, parts) if parts > 1 else warpgroup
        groups = self.tiles.k // decoder.group // parts
        first = lax.rem(warpgroup, parts) * groups if parts > 1 else 0
        for i in range(groups):
            group = first + i
            operands = decoder.operands(
                codes_smem.at[rows, pl.ds(group * planes, planes)],
                scales_smem.at[rows, pl.ds(group * decoder.pairs, decoder.pairs)],
                layout,
            )
            for chunk, operand in enumerate(operands):
                yield operand, pl.ds(group * decoder.group + chunk * CHUNK, CHUNK)


def transforms(columns: int, swizzle: int) -> tuple[Any, ...]:
    """Tiles of 8 rows, `swizzle` bytes wide, without bank conflicts."""
    return plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(swizzle)
