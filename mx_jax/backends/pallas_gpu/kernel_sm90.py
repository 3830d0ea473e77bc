"""Hopper's kernel: bfloat16 activations by block-scaled weights, decoded on their way to wgmma.

Device code only; `matmul.py` checks, pads and picks. A program computes the transposed product
`weights[n, k] x activations[m, k]`, because wgmma takes its left operand from registers: one
warpgroup copies tiles into shared memory, the others load codes and scales from there, decode them
to bfloat16 and multiply. Each waits for the other at barriers, one pair for a stage.

Imports Mosaic GPU, so the adapter imports this file only when it takes a call.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

from mx_jax.backends.pallas_gpu.tuning import Tiles
from mx_jax.backends.pallas_gpu.weights import BLOCK, ROWS
from mx_jax.formats import ElementFormat

# Its declared types differ between versions of JAX, and none fits its own use.
plgpu: Any = mosaic_gpu

# The memory warpgroup only issues copies: it gives the others its registers.
_MEMORY_REGISTERS = 40
# A stage's left operand in registers is one block wide: 32 bfloat16, 64 bytes.
_OPERAND_SWIZZLE = 64


def matmul(
    x: jax.Array,
    codes: jax.Array,
    scales: jax.Array,
    *,
    element: ElementFormat,
    batch: int,
    tiles: Tiles,
    out_dtype: Any,
    interpret: Any = None,
) -> jax.Array:
    """Partial products of padded operands; summed over `tiles.splits` they are the product.

    Args:
      x: bfloat16 `[batch * m, k]`; m a multiple of `tiles.m`.
      codes: uint8 `[batch * n, k / 2]` for FP4, `[batch * n, k]` otherwise, as `weights.pack`
        lays them out; n a multiple of `64 * tiles.warpgroups`, k of `tiles.k * tiles.splits`.
      scales: uint8 `[batch * k / 32, n]`, E8M0.
      element: format of the codes: a sign and up to 7 bits.
      batch: number of independent products.
      tiles: what one program computes, and how.
      out_dtype: bfloat16 or float32.
      interpret: parameters of Mosaic's interpreter, None to compile.

    Returns:
      `[splits * batch * m, n]`.
    """
    rows, n = x.shape[0], scales.shape[1]
    program = _Program(
        element=element,
        tiles=tiles,
        out_dtype=jnp.dtype(out_dtype),
        num_m=rows // batch // tiles.m,
        num_n=n // tiles.n,
        num_k=x.shape[1] // tiles.k,
        num_rows=rows // tiles.m,
        codes_per_byte=x.shape[1] // codes.shape[1],
        interpreted=interpret is not None,
    )
    return plgpu.kernel(
        program.body,
        out_type=jax.ShapeDtypeStruct((tiles.splits * rows, n), out_dtype),
        # The last axis runs fastest, so that programs which share weights run together; it is also
        # the only one that CUDA lets be long.
        grid=(tiles.splits, program.num_n, program.num_rows),
        grid_names=("split", "n", "row"),
        num_threads=tiles.warpgroups + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        scratch_types=program.scratch_types(),
        kernel_name=f"mx_jax_sm90_{element.name}",
        interpret=interpret,
    )(x, codes, scales)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Program:
    """What every warpgroup of the grid runs.

    Attributes:
      element: format of the codes.
      tiles: sizes.
      out_dtype: of the result.
      num_m: tiles along m of one product of the batch.
      num_n: tiles along n.
      num_k: steps along k, all splits together.
      num_rows: tiles along m of the whole batch.
      codes_per_byte: 2 for FP4.
      interpreted: whether stand-ins replace what the interpreter lacks.
    """

    element: ElementFormat
    tiles: Tiles
    out_dtype: Any
    num_m: int
    num_n: int
    num_k: int
    num_rows: int
    codes_per_byte: int
    interpreted: bool

    def scratch_types(self) -> list[Any]:
        """Shared memory besides the pipeline's: the result's tile, a stand-in's operand."""
        line = 128 // self.out_dtype.itemsize
        tile = (self.tiles.warpgroups, self.tiles.m, ROWS)
        scratch = [plgpu.SMEM(tile, self.out_dtype, transforms=_transforms(line, 128))]
        if self.interpreted:
            scratch.append(plgpu.SMEM((self.tiles.warpgroups, ROWS, BLOCK), jnp.bfloat16))
        return scratch

    def body(self, x_gmem, codes_gmem, scales_gmem, out_gmem, out_smem, *operand_smem):
        """Copy, decode, multiply; then one copy of the result's tile."""
        warpgroup = lax.axis_index("warpgroup")

        def compute(pipeline):
            shape = (ROWS, self.tiles.m)

            @functools.partial(pl.run_scoped, acc=plgpu.ACC(shape, jnp.float32))
            def _(acc):
                pipeline(acc)
                self._store(acc, out_smem.at[warpgroup], out_gmem, warpgroup)

        def step(_, x_smem, codes_smem, scales_smem, acc):
            rows = pl.ds(warpgroup * ROWS, ROWS)
            loaded: Any = None
            for block in range(self.tiles.k // BLOCK):
                # Both blocks of an FP4 pair lie in the same bytes: nothing moves between threads.
                index, nibble = divmod(block, self.codes_per_byte)
                if nibble == 0:
                    loaded = _load_bytes(codes_smem, rows, index)
                bits = loaded << 32 - self.element.bits * (nibble + 1)
                scale = plgpu.load(scales_smem.at[block, rows], layout=plgpu.Layout.WGMMA.reduce(1))
                operand = _decode(bits, scale, self.element)
                if self.interpreted:
                    operand = _through_smem(operand, operand_smem[0], warpgroup)
                plgpu.wgmma(acc, operand, x_smem.at[:, pl.ds(block * BLOCK, BLOCK)].T)
            plgpu.wgmma_wait(0)
            return acc

        plgpu.emit_pipeline_warp_specialized(
            step,
            grid=(self.num_k // self.tiles.splits,),
            memory_registers=_MEMORY_REGISTERS,
            wg_axis="warpgroup",
            num_compute_wgs=self.tiles.warpgroups,
            max_concurrent_steps=self.tiles.stages,
            compute_context=compute,
            in_specs=self._in_specs(),
        )(x_gmem, codes_gmem, scales_gmem)

    def _in_specs(self) -> list[Any]:
        """Where each step's activations, codes and scales lie."""
        tiles, n_index, row = self.tiles, lax.axis_index("n"), lax.axis_index("row")
        index = lax.div(row, self.num_m)
        first = lax.axis_index("split") * (self.num_k // tiles.splits)
        return [
            plgpu.BlockSpec(
                (tiles.m, tiles.k),
                lambda i: (row, first + i),
                transforms=_transforms(BLOCK, _OPERAND_SWIZZLE),
            ),
            plgpu.BlockSpec(
                (tiles.n, tiles.k // self.codes_per_byte),
                lambda i: (index * self.num_n + n_index, first + i),
                transforms=_transforms(BLOCK, BLOCK),
            ),
            plgpu.BlockSpec(
                (tiles.k // BLOCK, tiles.n),
                lambda i: (index * self.num_k + first + i, n_index),
            ),
        ]

    def _store(self, acc: Any, tile: Any, out_gmem: Any, warpgroup: Any) -> None:
        """The transposed sums, transposed again on their way through shared memory."""
        sums = acc[...].astype(self.out_dtype)
        tile.T[...] = plgpu.layout_cast(sums, plgpu.Layout.WGMMA_TRANSPOSED)
        plgpu.commit_smem()
        first = lax.axis_index("split") * self.num_rows + lax.axis_index("row")
        rows = pl.ds(first * self.tiles.m, self.tiles.m)
        columns = pl.ds(lax.axis_index("n") * self.tiles.n + warpgroup * ROWS, ROWS)
        plgpu.copy_smem_to_gmem(tile, out_gmem.at[rows, columns])
        plgpu.wait_smem_to_gmem(0)


def _transforms(columns: int, swizzle: int) -> tuple[Any, ...]:
    """Tiles of 8 rows, `swizzle` bytes wide, without bank conflicts."""
    return plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(swizzle)


def _load_bytes(codes_smem: Any, rows: Any, index: int) -> Any:
    """32 bytes of each of a warpgroup's 64 rows as int32, as wgmma takes its left operand."""
    packed = codes_smem.at[rows, pl.ds(index * BLOCK, BLOCK)]
    loaded = plgpu.load(packed, layout=plgpu.Layout.WGMMA_UPCAST_2X)
    return plgpu.layout_cast(loaded.astype(jnp.int16), plgpu.Layout.WGMMA).astype(jnp.int32)


def _decode(bits: Any, scale: Any, element: ElementFormat) -> Any:
    """`decode(code) * 2^(scale - 127)` in bfloat16.

    A code's exponent and mantissa, shifted to where float16 has them, are the element's value but
    for the difference of biases, and so are its subnormals. That difference joins the scale.

    Args:
      bits: codes in the highest bits of int32, anything below.
      scale: uint8, one a row.
      element: format of the codes.
    """
    # The sign stays in place: shifting copies it to the right, and the mask drops the copies.
    magnitude = element.sign_code - 1 << 26 - element.mantissa_bits
    shifted = lax.shift_right_arithmetic(bits, jnp.full_like(bits, 5 - element.exponent_bits))
    shifted = shifted & jnp.int32(magnitude - 2**31)
    half = lax.shift_right_logical(shifted, jnp.full_like(bits, 16)).astype(jnp.int16)
    values = lax.bitcast_convert_type(half, jnp.float16).astype(jnp.float32)
    if element.num_reserved_codes and not element.has_inf:
        # Inf and NaN of a format that has both are float16's own.
        largest = jnp.int32(element.max_code << 26 - element.mantissa_bits)
        values = jnp.where((shifted & jnp.int32(magnitude)) > largest, jnp.float32(jnp.nan), values)
    for factor in _scale_factors(scale, 15 - element.bias):
        values = values * lax.broadcast_in_dim(factor, values.shape, (0,))
    return values.astype(jnp.bfloat16)


def _scale_factors(scale: Any, exponent: int) -> tuple[Any, Any]:
    """Two normal float32 whose product is `2^(scale - 127 + exponent)`; NaN for byte 255.

    One alone would overflow from large scales, and be flushed, on some machines, from small ones.
    """
    biased = scale.astype(jnp.int32) + (127 + exponent)
    small, large = biased >> 1, (biased + 1) >> 1
    nan = jnp.where(scale.astype(jnp.int32) == 255, jnp.int32(0x7FC00000), small << 23)
    return (
        lax.bitcast_convert_type(nan, jnp.float32),
        lax.bitcast_convert_type(large << 23, jnp.float32),
    )


def _through_smem(operand: Any, operand_smem: Any, warpgroup: Any) -> Any:
    """For the interpreter, which lacks wgmma with a left operand in registers."""
    operand_smem[warpgroup] = operand
    plgpu.commit_smem()
    return operand_smem.at[warpgroup]
