"""What a program of Blackwell's kernel for many tiles holds: sizes, memory, barriers.

Device code; imports Mosaic GPU, so only kernels import this file.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu

from mx_jax.backends.pallas_gpu.layouts.scaled import SCALE_COLUMNS, SCALE_ROWS
from mx_jax.backends.pallas_gpu.products.ring import Ring
from mx_jax.backends.pallas_gpu.products.tcgen05 import COPIES, SWIZZLE, transforms
from mx_jax.backends.pallas_gpu.tuning.tiles import Tiles

# Its declared types differ between versions of JAX, and none fits its own use.
plgpu: Any = mosaic_gpu

# Columns of 128 float32 that a processor's tensor memory has.
_TENSOR_MEMORY = 512
# A tile of 128 by 4 scales takes so many of them.
_SCALE_TILE = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class PersistentMemory:
    """Sizes of each program, and what follows from them.

    Attributes:
      block: codes that share a scale.
      tiles: sizes.
      out_dtype: of the result.
      num_m: tiles along m of one product of the batch.
      num_n: tiles along n.
      num_k: steps along k.
      batch: products.
      scaled: whether sums are multiplied by factors.
      interpreted: whether stand-ins replace what the interpreter lacks.
    """

    block: int
    tiles: Tiles
    out_dtype: Any
    num_m: int
    num_n: int
    num_k: int
    batch: int
    scaled: bool
    interpreted: bool

    @property
    def rows(self) -> int:
        """Rows of a tile that one program has."""
        return self.tiles.m // self.tiles.ctas

    @property
    def store(self) -> int:
        """Columns of the result that are written at once."""
        return SWIZZLE // self.out_dtype.itemsize

    @property
    def scale_tiles(self) -> int:
        """Tiles of scales along one step of k."""
        return self.tiles.k // (self.block * SCALE_COLUMNS)

    @property
    def overlap(self) -> int:
        """Columns that both places for sums share, where tensor memory has no room for two.

        They are stored first. Whole pieces of what is written at once.
        """
        scales = self.scale_tiles * _SCALE_TILE * (1 + -(-self.tiles.n // SCALE_ROWS))
        missing = 2 * self.tiles.n + scales - _TENSOR_MEMORY
        return max(0, -(-missing // 64) * 64)

    @property
    def behind(self) -> int:
        """How many tiles before a tile the sums lie whose columns it overwrites."""
        return 1 if self.overlap else 2

    @property
    def ring(self) -> Ring:
        """Stages of codes and scales."""
        return Ring(slots=self.tiles.stages, copies=COPIES, readers=1)

    @property
    def num_tiles(self) -> int:
        """Tiles of the whole result."""
        return self.batch * self.num_m * self.num_n

    def launch(self, *dtypes: Any) -> dict[str, Any]:
        """How many programs there are, and what they hold; for operands and scales of dtypes."""
        pair = {"cluster": (2,), "cluster_names": ("cta",)} if self.tiles.ctas == 2 else {}
        return {
            "grid": (min(self.tiles.programs, self.num_tiles),),
            "grid_names": ("program",),
            "num_threads": 2,
            "thread_name": "warpgroup",
            "compiler_params": plgpu.CompilerParams(
                lowering_semantics=plgpu.LoweringSemantics.Warpgroup
            ),
            "scratch_types": self.scratch_types(*dtypes),
        } | pair

    def scratch_types(self, lhs: Any, rhs: Any, lhs_scale: Any, rhs_scale: Any) -> dict[str, Any]:
        """Shared memory, tensor memory and barriers."""
        tiles, stages, pair = self.tiles, self.tiles.stages, self.tiles.ctas == 2
        # Each of two programs has half of the right operand's codes, and all of its scales.
        held = ((self.rows, self.rows, lhs, lhs_scale),)
        held += ((tiles.n // tiles.ctas, max(tiles.n, SCALE_ROWS), rhs, rhs_scale),)
        sums = 2 * tiles.n - self.overlap
        scratch = {
            "codes": tuple(
                plgpu.SMEM((stages, rows, tiles.k), dtype, transforms=transforms(dtype))
                for rows, _, dtype, _ in held
            ),
            "scales": tuple(
                plgpu.SMEM((stages, rows // SCALE_ROWS, self.scale_tiles, 32, 16), dtype)
                for _, rows, _, dtype in held
            ),
            "sums": plgpu.TMEM((self.rows, sums), jnp.float32, collective=pair),
            "tensor_scales": tuple(
                plgpu.TMEM(
                    (rows, tiles.k // self.block),
                    dtype,
                    layout=plgpu.TMEMLayout.SCALES_LAYOUT,
                    collective=pair,
                )
                for _, rows, _, dtype in held
            ),
            "out_smem": self.result((2, self.rows, self.store)),
            **self._barriers(),
        }
        if self.interpreted:
            scratch["values"] = tuple(
                plgpu.SMEM((stages, rows, tiles.k), jnp.float32) for rows, *_ in held
            )
        return scratch

    def _barriers(self) -> dict[str, Any]:
        """Of each stage, filled and free; of each place for sums, whole and free."""
        stages, ordered = self.tiles.stages, {"num_arrivals": 1, "orders_tensor_core": True}
        drained = {"num_barriers": 2} | ordered
        return {
            "full": plgpu.Barrier(num_arrivals=COPIES, num_barriers=stages),
            "empty": plgpu.Barrier(num_barriers=stages, **ordered),
            "done": plgpu.Barrier(num_barriers=2, **ordered),
            "drained": (
                plgpu.ClusterBarrier(collective_axes=("cta",), **drained)
                if self.tiles.ctas == 2
                else plgpu.Barrier(**drained)
            ),
        }

    def result(self, shape: tuple[int, ...]) -> Any:
        """Shared memory for pieces of the result, each copied as a whole."""
        return plgpu.SMEM(shape, self.out_dtype, transforms=transforms(self.out_dtype))
