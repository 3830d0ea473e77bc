"""Hopper's kernels: by weights that are decoded on their way to wgmma, and sums over groups' rows.

A program computes a tile of the transposed product `weights[n, k] x activations[m, k]`, because
wgmma takes its left operand from registers: warpgroups load codes and scales from shared memory,
decode them to bfloat16 and multiply, 64 rows of weights each.

Device code; imports Mosaic GPU, so the adapter imports this file only when it takes a call.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from mx_jax.backends.pallas_gpu.architecture import Tiles
from mx_jax.backends.pallas_gpu.decode import Decoder
from mx_jax.backends.pallas_gpu.device import (
    SWIZZLE,
    Place,
    Program,
    copy_steps,
    copyable,
    plgpu,
    staged_loop,
    transforms,
)
from mx_jax.backends.pallas_gpu.layouts import CHUNK, CHUNK_ROWS, ROWS
from mx_jax.formats import BlockFormat

# Activations, codes and scales.
_COPIES = 3
# Rows of a step of wgmma, the least that a group has more than another where rows are summed.
UNIT = 16
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


def multiply(
    x: jax.Array,
    codes: jax.Array,
    scales: jax.Array,
    visits: jax.Array | None = None,
    factors: jax.Array | None = None,
    *,
    n: int,
    format: BlockFormat,
    tiles: Tiles,
    out_dtype: jnp.dtype,
    interpret: object = None,
) -> jax.Array:
    """The product `[batch, m, n]`, or `[1, rows, n]` of rows in groups; see `tcgen05.multiply`.

    Args:
      x: bfloat16 `[batch, m, k]`, or `[1, rows, k]`; no axis is empty.
      codes: int32 `[batch, n' / 64, k' / group, 64, 16]`, as `PackedWeights` has them.
      scales: int32 `[batch, n' / 64, k' / (2 * granularity), 64]`.
      visits: as `layouts.visits` gives them, of rows in groups.
      factors: float32 `[2 * groups]`: what each group's sums are multiplied by first, and by which
        then; None for none.
      n: rows of weights, at most n'.
      format: of the weights; a tensor scale is left out.
      tiles: what one program computes, and how.
      out_dtype: bfloat16 or float32; float32 where programs share tiles.
      interpret: parameters of Mosaic's interpreter, None to compile.
    """
    _, m, k = x.shape
    rows = copyable(m, CHUNK_ROWS, 1 if visits is None else CHUNK_ROWS)
    x = jnp.pad(x, ((0, 0), (0, rows - m), (0, copyable(k, CHUNK, 8) - k)))
    program = WgmmaProgram(
        decoder=Decoder(format=format, interpreted=interpret is not None),
        tiles=tiles,
        out_dtype=jnp.dtype(out_dtype),
        batch=codes.shape[0],
        num_k=-(-k // tiles.k),
        in_groups=visits is not None,
        weight_tiles=codes.shape[1],
    )
    operands = (x, codes.reshape(-1, *codes.shape[2:]), scales.reshape(-1, *scales.shape[2:]))
    lists = tuple(each for each in (visits, factors) if each is not None)
    name = f"mx_jax_{'' if visits is None else 'grouped_'}wgmma_{format.name}"
    return program.run(name, operands, lists, n, interpret)[:, :m, :n]


@dataclasses.dataclass(frozen=True, kw_only=True)
class WgmmaProgram(Program):
    """Warpgroups that decode and multiply 64 rows of weights each, and one that copies.

    A matrix of weights has `weight_tiles` tiles of 64 rows.
    """

    decoder: Decoder
    weight_tiles: int

    @property
    def row_tiles(self) -> int:
        """Tiles of 64 rows of weights, and warpgroups that multiply them."""
        return self.tiles.n // ROWS

    def launch(self, operands: tuple[jax.Array, ...]) -> dict[str, Any]:
        """Stages, barriers, the result of each warpgroup, a stand-in's operand."""
        stages, shape = self.tiles.stages, (self.row_tiles, self.tiles.m, ROWS)
        # Whole tiles are copied, or any row by itself.
        how = transforms(SWIZZLE // self.out_dtype.itemsize)
        how = (plgpu.TilingTransform((1, ROWS)),) if self.in_groups else how
        scratch = {
            "smem": tuple(
                plgpu.SMEM((stages, *shape), dtype, transforms=how)
                for shape, dtype, how in self.decoder.blocks(self.tiles)
            ),
            "full": plgpu.Barrier(num_arrivals=_COPIES, num_barriers=stages),
            "empty": plgpu.Barrier(num_arrivals=self.row_tiles, num_barriers=stages),
            "out_smem": plgpu.SMEM(shape, self.out_dtype, transforms=how),
        }
        if self.decoder.interpreted:
            scratch["operand"] = plgpu.SMEM((self.row_tiles, ROWS, CHUNK), jnp.bfloat16)
        return {"num_threads": self.row_tiles + 1, "scratch_types": scratch}

    def sources(self, operands: tuple[Any, ...], place: Place, step: jax.Array) -> tuple[Any, ...]:
        """Activations, codes and scales of a step."""
        x, *weights = operands
        rows, along_k = pl.ds(place.row, self.tiles.m), pl.ds(step * self.tiles.k, self.tiles.k)
        n = lax.axis_index("n")
        first = place.matrix * self.weight_tiles + n * self.row_tiles
        parts = [x.at[place.lead, rows, along_k]]
        for ref, (shape, _, _) in zip(weights, self.decoder.blocks(self.tiles)[1:], strict=True):
            count, pieces = shape[:2]
            parts.append(ref.at[pl.ds(first, count), pl.ds(step * pieces, pieces)])
        return tuple(parts)

    def staged(self, values: jax.Array, piece: Any) -> tuple[Any, Any]:
        """Transposed once more, as shared memory takes them."""
        return plgpu.layout_cast(values, plgpu.Layout.WGMMA_TRANSPOSED), piece.T

    def multiply(
        self,
        place: Place,
        sources: Any,
        keep: Any,
        *,
        smem: tuple[Any, ...],
        full: Any,
        empty: Any,
        out_smem: Any,
        operand: Any = None,
    ) -> None:
        """A warp of the last warpgroup copies, each of the others sums up its rows of weights."""
        warpgroup, stages = lax.axis_index("warpgroup"), self.tiles.stages

        def step(acc: Any, stage: jax.Array) -> None:
            index = lax.axis_index("warpgroup")
            plgpu.barrier_wait(full.at[stage])
            x, codes, scales = smem
            weights = codes.at[stage], scales.at[stage], index
            for left, columns in self.decoder.step(*weights, self.tiles.k, plgpu.Layout.WGMMA):
                if operand is not None:
                    # For the interpreter, which lacks wgmma with a left operand in registers.
                    operand[index] = left
                    plgpu.commit_smem()
                    left = operand.at[index]
                plgpu.wgmma(acc, left, x.at[stage, :, columns].T)
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(empty.at[stage])

        @pl.when(warpgroup == self.row_tiles)
        def _():
            plgpu.set_max_registers(COPYING_REGISTERS, action="decrease")

            @plgpu.warp_map
            def _(warp):
                @pl.when(warp == 0)
                def _():
                    copy_steps(place.steps, stages, sources, smem, full, empty)

        @pl.when(warpgroup < self.row_tiles)
        def _():
            plgpu.set_max_registers(multiplying_registers(self.row_tiles), action="increase")

            def sum_up(acc: Any) -> Any:
                staged_loop(place.steps, stages, lambda _, stage: step(acc, stage))
                return acc[...]

            sums = pl.run_scoped(sum_up, plgpu.ACC((ROWS, self.tiles.m), jnp.float32))
            columns = lax.axis_index("n") * self.tiles.n + warpgroup * ROWS
            keep(sums, out_smem.at[warpgroup], pl.ds(columns, ROWS))
            plgpu.wait_smem_to_gmem(0)


# Sums over the rows of each group -----------------------------------------------------------------


def group_sums(
    lhs: jax.Array,
    rhs: jax.Array,
    rows: jax.Array,
    factors: jax.Array,
    *,
    out_dtype: jnp.dtype,
    tiles: Tiles | None = None,
    interpret: object = None,
) -> jax.Array:
    """`lhs[rows of j]^T rhs[rows of j]` of each group j: the gradient of groups' matrices.

    A program computes a tile of one group's sum: one warpgroup copies rows of both operands into
    shared memory some steps ahead and multiplies them from there. Groups begin and end at multiples
    of 16 rows, as blocks along the rows do, and so do its steps: 64 rows at a time, then 16. So no
    row of another group is ever read.

    Args:
      lhs: bfloat16 `[p, m]`; p a multiple of 8, m of 64.
      rhs: bfloat16 `[p, n]`; n a multiple of 64.
      rows: int32 `[2 * g]`: where groups begin, and how many rows they have, multiples of `UNIT`.
      factors: float32 `[2]`, of the sums, one after the other.
      out_dtype: bfloat16 or float32.
      tiles: m and n of a tile, k rows a step, steps in flight; None: at most 128, 128, 64 and 4.
      interpret: parameters of Mosaic's interpreter, None to compile.
    """
    groups, (_, m), (_, n) = rows.shape[0] // 2, lhs.shape, rhs.shape
    tiles = tiles or Tiles(m=min(m, 128), n=min(n, 128), k=64, stages=4)

    def body(lhs_gmem, rhs_gmem, rows_gmem, factors_gmem, out_gmem):
        group = lax.axis_index("group")
        begin, size = pl.multiple_of(rows_gmem[group], UNIT), rows_gmem[groups + group]
        whole = lax.div(size, jnp.int32(tiles.k))
        rest = lax.div(size - whole * tiles.k, jnp.int32(UNIT))
        operands = lhs_gmem, rhs_gmem

        def multiply(acc):
            _add_steps(acc, operands, begin, whole, tiles, tiles.k, tiles.stages)
            after = pl.multiple_of(begin + whole * tiles.k, UNIT)
            _add_steps(acc, operands, after, rest, tiles, UNIT, 2)
            return acc[...]

        sums = pl.run_scoped(multiply, plgpu.ACC((tiles.m, tiles.n), jnp.float32))
        sums = (sums * factors_gmem[0] * factors_gmem[1]).astype(out_dtype)
        how = transforms(SWIZZLE // jnp.dtype(out_dtype).itemsize)
        tile = plgpu.SMEM((tiles.m, tiles.n), jnp.dtype(out_dtype), transforms=how)

        @functools.partial(pl.run_scoped, out_smem=tile)
        def _(out_smem):
            out_smem[...] = sums
            plgpu.commit_smem()
            rows = pl.ds(lax.axis_index("m") * tiles.m, tiles.m)
            columns = pl.ds(lax.axis_index("n") * tiles.n, tiles.n)
            plgpu.copy_smem_to_gmem(out_smem, out_gmem.at[group, rows, columns])
            plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((groups, m, n), out_dtype),
        grid=(groups, -(-n // tiles.n), -(-m // tiles.m)),
        grid_names=("group", "n", "m"),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        kernel_name="mx_jax_group_sums",
        interpret=interpret,
    )(lhs, rhs, rows, factors)


def _add_steps(
    acc: Any,
    operands: tuple[Any, ...],
    begin: jax.Array,
    steps: jax.Array,
    tiles: Tiles,
    rows: int,
    stages: int,
) -> None:
    """The products of so many steps of so many rows."""
    # Mosaic takes as many rows for one product as numbers are swizzled together.
    swizzle = min(SWIZZLE, 2 * rows)
    how = transforms(swizzle // 2, swizzle)

    def spec(columns: int, axis: str) -> Any:
        at = lax.axis_index(axis)
        block = rows, columns
        return plgpu.BlockSpec(block, lambda i: (i, at), transforms=how, delay_release=1)

    def step(_, lhs_smem, rhs_smem):
        plgpu.wgmma(acc, lhs_smem.T, rhs_smem)
        plgpu.wgmma_wait(1)

    plgpu.emit_pipeline(
        step,
        grid=(steps,),
        in_specs=[spec(tiles.m, "m"), spec(tiles.n, "n")],
        max_concurrent_steps=stages,
    )(*(gmem.at[pl.ds(begin, gmem.shape[0])] for gmem in operands))
    # What comes next overwrites the last steps' operands.
    plgpu.wgmma_wait(0)
