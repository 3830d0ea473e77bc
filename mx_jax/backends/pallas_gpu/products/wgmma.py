"""Hopper's kernel: bfloat16 activations by block-scaled weights, decoded on their way to wgmma.

Device code only; `decoded.py` picks. A program computes tiles of the transposed product
`weights[n, k] x activations[m, k]`, because wgmma takes its left operand from registers: one warp
copies into shared memory, step after step along k; warpgroups load codes and scales from there,
decode them to bfloat16 and multiply. Those that share rows of weights take turns at the steps.

Imports Mosaic GPU, so the adapter imports this file only when it takes a call.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

from mx_jax.backends.pallas_gpu.casts.decode import Decoder
from mx_jax.backends.pallas_gpu.layouts.weights import CHUNK, ROWS
from mx_jax.backends.pallas_gpu.products.program import DecodingProgram, transforms
from mx_jax.backends.pallas_gpu.products.ring import Ring, loop, on_one_warp
from mx_jax.backends.pallas_gpu.tuning.stripes import Stripes, add_shares
from mx_jax.backends.pallas_gpu.tuning.tiles import (
    COPYING_REGISTERS,
    Tiles,
    multiplying_registers,
)
from mx_jax.formats import BlockFormat

# Its declared types differ between versions of JAX, and none fits its own use.
plgpu: Any = mosaic_gpu

# Bytes that a row in memory is a multiple of, and that a row of a tile in shared memory has.
_LINE, _SWIZZLE = 16, 128


def multiply(
    x: jax.Array,
    codes: jax.Array,
    scales: jax.Array,
    *,
    n: int,
    format: BlockFormat,
    tiles: Tiles,
    out_dtype: Any,
    interpret: Any = None,
) -> jax.Array:
    """The product `[batch, m, n]`, of weights without their tensor scale.

    Args:
      x: bfloat16 `[batch, m, k]`; none of them is empty.
      codes: int32 `[batch, n' / 64, k' / group, 64, 16]`, as `PackedWeights` has them.
      scales: int32 `[batch, n' / 64, k' / (2 * granularity), 64]`.
      n: rows of weights, at most n'.
      format: of the weights; a tensor scale is left out.
      tiles: what one program computes, and how.
      out_dtype: bfloat16 or float32; float32 where programs share tiles.
      interpret: parameters of Mosaic's interpreter, None to compile.
    """
    batch, m, k = x.shape
    rows = _copyable(m, 8, 1)
    x = jnp.pad(x, ((0, 0), (0, rows - m), (0, _copyable(k, CHUNK, _LINE // 2) - k)))
    decoder = Decoder(format=format, interpreted=interpret is not None)
    program = WgmmaProgram.of(x, codes, n, decoder=decoder, tiles=tiles, out_dtype=out_dtype)
    stripes = program.stripes
    itemsize = program.out_dtype.itemsize
    columns = _copyable(n, _SWIZZLE // itemsize, _LINE // itemsize)
    out = plgpu.kernel(
        program.body,
        out_type=jax.ShapeDtypeStruct((stripes.shares * batch, rows, columns), out_dtype),
        grid=(stripes.programs,),
        grid_names=("program",),
        num_threads=program.num_warpgroups + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        scratch_types=program.scratch_types(),
        kernel_name=f"mx_jax_wgmma_{format.name}",
        interpret=interpret,
    )(x, codes.reshape(-1, *codes.shape[2:]), scales.reshape(-1, *scales.shape[2:]))
    out = out.reshape(stripes.shares, batch, rows, columns)[:, :, :m, :n]
    return add_shares(out, stripes, (tiles.m, tiles.n))


def _copyable(size: int, tile: int, line: int) -> int:
    """What an axis is padded to for TMA, which fills and clips what a tile has beyond it."""
    to = tile if size > tile else line
    return size + -size % to


class WgmmaProgram(DecodingProgram):
    """One warp copies, warpgroups decode and multiply."""

    @property
    def stripes(self) -> Stripes:
        """Which steps of which tiles each program has."""
        return Stripes.of(self.tiles, self.batch * self.num_n * self.num_m, self.num_k)

    @property
    def ring(self) -> Ring:
        """Slots of shared memory, one for each step in flight."""
        return Ring(slots=self.tiles.stages, copies=3, readers=self.row_tiles)

    def scratch_types(self) -> list[Any]:
        """Shared memory: slots, their barriers, result, partial sums, a stand-in's operand."""
        tiles, ring = self.tiles, self.ring
        slots = tuple(
            plgpu.SMEM((ring.slots, *shape), dtype, transforms=how)
            for shape, dtype, how in self.blocks
        )
        scratch = [slots, ring.barriers(), self.result((self.row_tiles, tiles.m, ROWS))]
        others = self.row_tiles * (tiles.parts - 1)
        if others:
            sums = plgpu.SMEM((self.row_tiles, tiles.parts - 1, ROWS, tiles.m), jnp.float32)
            barriers = (plgpu.Barrier(num_arrivals=count) for count in (others, self.row_tiles))
            scratch.append((sums, *barriers))
        if self.decoder.interpreted:
            scratch.append(plgpu.SMEM((self.num_warpgroups, ROWS, CHUNK), jnp.bfloat16))
        return scratch

    def result(self, shape: tuple[int, ...]) -> Any:
        """Shared memory for the result, of which whole tiles are copied."""
        line = _SWIZZLE // self.out_dtype.itemsize
        return plgpu.SMEM(shape, self.out_dtype, transforms=transforms(line, _SWIZZLE))

    def body(self, x_gmem, codes_gmem, scales_gmem, out_gmem, slots, barriers, out_smem, *scratch):
        """Copy, decode, multiply; then one copy of each tile of the result."""
        program, sizes = lax.axis_index("program"), self.tiles

        def place(tile: Any) -> tuple[Any, Any, Any]:
            num_m, num_n = jnp.int32(self.num_m), jnp.int32(self.num_n)
            m, rest = lax.rem(tile, num_m), lax.div(tile, num_m)
            return lax.div(rest, num_n), lax.rem(rest, num_n), m

        def at(tile: Any, step: Any) -> tuple[Any, ...]:
            matrix, n, m = place(tile)
            x = x_gmem.at[matrix, pl.ds(m * sizes.m, sizes.m), pl.ds(step * sizes.k, sizes.k)]
            return x, *self.weights_at(codes_gmem, scales_gmem, matrix, n, step)

        def store(tile: Any, sums: Any, row_tile: Any) -> None:
            matrix, n, m = place(tile)
            share = self.stripes.share(program, tile)
            rows = pl.ds(m * sizes.m, sizes.m)
            columns = pl.ds(n * sizes.n + row_tile * ROWS, ROWS)
            out_smem.at[row_tile].T[...] = self.transposed(sums)
            plgpu.commit_smem()
            to = out_gmem.at[share * self.batch + matrix, rows, columns]
            plgpu.copy_smem_to_gmem(out_smem.at[row_tile], to)
            plgpu.wait_smem_to_gmem(0)

        segments = functools.partial(self.stripes.segments, program)
        self.multiply(segments, at, store, slots, barriers, scratch)

    def multiply(
        self,
        segments: Callable[[Any, Any], Any],
        at: Callable[[Any, Any], tuple[Any, ...]],
        store: Callable[[Any, Any, Any], None],
        slots: tuple[Any, ...],
        barriers: tuple[Any, Any],
        scratch: tuple[Any, ...],
    ) -> None:
        """Copy, decode and multiply along k, one tile after the other; store each one's sums.

        Args:
          segments: `(run, carry)`: calls `carry = run(tile, first step, steps, carry)` for each.
          at: `(tile, step)`: activations, codes and scales in memory.
          store: given a tile, its transposed sums `[64, m]` and which 64 of its rows they are.
          slots: of the ring, for the same three.
          barriers: of the ring.
          scratch: partial sums and their barriers, a stand-in's operand.
        """
        warpgroup = lax.axis_index("warpgroup")

        @pl.when(warpgroup == self.num_warpgroups)
        def _():
            plgpu.set_max_registers(COPYING_REGISTERS, action="decrease")
            on_one_warp(lambda: self._copy(segments, at, slots, barriers))

        @pl.when(warpgroup < self.num_warpgroups)
        def _():
            registers = multiplying_registers(self.num_warpgroups)
            plgpu.set_max_registers(registers, action="increase")
            self._decode(segments, store, slots, barriers, scratch)

    def _copy(self, segments: Any, at: Any, slots: Any, barriers: Any) -> None:
        """The copying warp: every step, a slot after the other."""
        filled, freed = barriers

        def segment(tile: Any, first: Any, count: Any, carry: Any) -> Any:
            def step(i: Any, carry: Any) -> Any:
                done, slot = carry

                def copy(slot: Any) -> None:
                    for gmem, smem in zip(at(tile, first + i), slots, strict=True):
                        plgpu.copy_gmem_to_smem(gmem, smem.at[slot], filled.at[slot])

                return done + 1, self.ring.fill(done, slot, freed, copy)

            return loop(count, step, carry)

        done, slot = segments(segment, (jnp.int32(0), jnp.int32(0)))
        self.ring.drain(done, slot, freed)

    def _decode(self, segments: Any, store: Any, slots: Any, barriers: Any, scratch: Any) -> None:
        """A multiplying warpgroup: its turns of every tile's steps."""
        (filled, freed), parts = barriers, self.tiles.parts
        warpgroup = lax.axis_index("warpgroup")
        row_tile, turn = self._share(warpgroup)
        x_smem, *weights = slots

        def segment(tile: Any, _: Any, count: Any, carry: Any) -> Any:
            ahead, slot = carry
            turns = lax.div(lax.max(count + (parts - 1) - ahead, jnp.int32(0)), jnp.int32(parts))

            def body(acc: Any) -> Any:
                def step(_: Any, slot: Any) -> Any:
                    plgpu.barrier_wait(filled.at[slot])
                    codes_smem, scales_smem = (ref.at[slot] for ref in weights)
                    layout = plgpu.Layout.WGMMA
                    for operand, columns in self.operands(
                        codes_smem, scales_smem, row_tile, layout
                    ):
                        if self.decoder.interpreted:
                            operand = _through_smem(operand, scratch[-1], warpgroup)
                        plgpu.wgmma(acc, operand, x_smem.at[slot, :, columns].T)
                    plgpu.wgmma_wait(0)
                    plgpu.barrier_arrive(freed.at[slot])
                    return self.ring.after(slot, parts)

                after = loop(turns, step, slot)
                self._add_parts(acc[...], functools.partial(store, tile), scratch)
                return after

            after = pl.run_scoped(body, plgpu.ACC((ROWS, self.tiles.m), jnp.float32))
            return ahead + turns * parts - count, after

        if parts > 1:
            # Before there are sums to overwrite.
            pl.when(turn == 0)(lambda: plgpu.barrier_arrive(scratch[0][2]))
        segments(segment, (turn, turn))
        if parts > 1:
            pl.when(turn > 0)(lambda: plgpu.barrier_wait(scratch[0][2]))

    def _share(self, warpgroup: Any) -> tuple[Any, Any]:
        """Which rows of weights a warpgroup has, and which of those that share them it is."""
        # As `loop` does: in 32 bits whatever JAX's default is.
        parts = jnp.int32(self.tiles.parts)
        return lax.div(warpgroup, parts), lax.rem(warpgroup, parts)

    def _add_parts(self, sums: Any, store: Callable[[Any, Any], None], scratch: Any) -> None:
        """The sums of the warpgroups that share rows, added in their order by the first of them."""
        parts, warpgroup = self.tiles.parts, lax.axis_index("warpgroup")
        if parts == 1:
            return store(sums, warpgroup)
        sums_smem, written, read = scratch[0]
        row_tile, turn = self._share(warpgroup)

        @pl.when(turn > 0)
        def _():
            plgpu.barrier_wait(read)
            sums_smem[row_tile, turn - 1] = sums
            plgpu.barrier_arrive(written)

        @pl.when(turn == 0)
        def _():
            plgpu.barrier_wait(written)
            total = sums
            for part in range(parts - 1):
                layout = plgpu.Layout.WGMMA
                total += plgpu.load(sums_smem.at[row_tile, part], layout=layout)
            plgpu.barrier_arrive(read)
            store(total, row_tile)

    def transposed(self, sums: Any) -> Any:
        """The result's numbers, so that shared memory takes them transposed once more."""
        return plgpu.layout_cast(sums.astype(self.out_dtype), plgpu.Layout.WGMMA_TRANSPOSED)


def _through_smem(operand: Any, operand_smem: Any, warpgroup: Any) -> Any:
    """For the interpreter, which lacks wgmma with a left operand in registers."""
    operand_smem[warpgroup] = operand
    plgpu.commit_smem()
    return operand_smem.at[warpgroup]
