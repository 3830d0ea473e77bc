"""The GPU that the kernel is for, what it takes there, and the tiles that products take.

Tiles for up to 16 rows were chosen by measurement on an H200. All others follow from the sizes of
shared memory and of the register file, and from the number of processors to fill.
"""

import dataclasses
import math
from collections.abc import Iterable

import jax
import jax.numpy as jnp

from mx_jax.backends.calls import MatmulCall, PackCall, RaggedCall
from mx_jax.backends.pallas_gpu.layouts import MIN_BLOCK, PAD_K, PAD_N, ROWS, stored_bits
from mx_jax.backends.sums import rejects_parts_of_blocks, rejects_scale_axes
from mx_jax.backends.target import Target
from mx_jax.formats import BlockFormat

# Hopper's; and the first version of JAX for which the kernel has been compiled.
CAPABILITY = (9, 0)
MIN_JAX: tuple[int, ...] = (0, 12, 0)
_OUTPUTS = tuple(map(jnp.dtype, ("float32", "bfloat16", "float16")))
# Significant bits of a bfloat16.
_SIGNIFICANT = 8
# Kernels count elements in 32 bits; a grid's second axis has 16, in tiles of at least 64 rows.
_MAX_ELEMENTS = 2**31 - 1
_MAX_ROWS = 65535 * ROWS


def rejects_machine(target: Target) -> str | None:
    """Why there is no kernel for a machine, or None."""
    if target.platform != "cuda":
        return f"runs on platform=cuda, got platform={target.platform}"
    if (got := target.compute_capability) != CAPABILITY:
        shown = None if got is None else _dotted(got)
        return f"has a kernel for CUDA compute capability {_dotted(CAPABILITY)}, got {shown}"
    if jax.__version_info__ < MIN_JAX:
        return f"needs jax>={_dotted(MIN_JAX)}, got jax=={_dotted(jax.__version_info__)}"
    return None


def _dotted(numbers: Iterable[int]) -> str:
    return ".".join(map(str, numbers))


# Products -----------------------------------------------------------------------------------------


def rejects(call: MatmulCall, target: Target) -> str | None:
    """Why no kernel takes a call on a machine, or None."""
    reason = rejects_machine(target) or _rejects_product(call)
    if reason := reason or rejects_scale_axes(call, batch=False):
        return reason
    for side, operand in call.sides:
        if math.prod(operand.shape) > _MAX_ELEMENTS:
            return f"needs at most {_MAX_ELEMENTS} elements, got {side}_shape={operand.shape}"
        if operand.rows > _MAX_ROWS:
            return f"needs at most {_MAX_ROWS} rows, got {side}_shape={operand.shape}"
    return rejects_parts_of_blocks(call)


def rejects_groups(call: RaggedCall, target: Target) -> str | None:
    """Why no kernel takes a product of rows in groups on a machine, or None."""
    if reason := rejects_machine(target) or _rejects_product(call):
        return reason
    lhs, rhs = call.lhs, call.rhs
    if lhs.scale_axes:
        return (
            "needs one tensor scale of all rows, got one for each position of "
            f"axes={lhs.scale_axes} of lhs"
        )
    assert rhs.format is not None
    if math.prod(rhs.shape) // (32 // stored_bits(rhs.format.element)) > _MAX_ELEMENTS:
        return f"needs at most {_MAX_ELEMENTS} words of codes, got rhs_shape={rhs.shape}"
    if rhs.rows > _MAX_ROWS:
        return f"needs at most {_MAX_ROWS} columns of a matrix, got rhs_shape={rhs.shape}"
    if math.prod(lhs.shape) > _MAX_ELEMENTS:
        return f"needs at most {_MAX_ELEMENTS} elements, got lhs_shape={lhs.shape}"
    return None


def _rejects_product(call: MatmulCall | RaggedCall) -> str | None:
    """Why not: an operand or a result that kernels do not read or write."""
    lhs, rhs = call.lhs, call.rhs
    if call.out_dtype not in _OUTPUTS:
        return f"gives float32, bfloat16 or float16, got out_dtype={call.out_dtype}"
    if rhs.packed_by != "pallas_gpu":
        return (
            "multiplies by weights that mx_jax.pack_weights laid out for it, got "
            f"rhs={rhs.text}, packed_by={rhs.packed_by}"
        )
    if lhs.format is None and lhs.dtype != jnp.bfloat16:
        return f"needs activations in bfloat16, or quantized, got lhs_dtype={lhs.dtype}"
    if lhs.format is not None and not fits_bfloat16(lhs.format):
        return f"needs values that bfloat16 holds on both sides, got lhs={lhs.format.name}"
    return None


# Weights ------------------------------------------------------------------------------------------


def fits_bfloat16(format: BlockFormat) -> bool:
    """Whether each element times its block's scale is a bfloat16, exponent aside."""
    element, bits = format.element, format.significand_bits
    signed = element.kind != "float" or element.has_negative_zero
    return format.is_known and signed and bits is not None and bits <= _SIGNIFICANT


def rejects_packing(call: PackCall, target: Target) -> str | None:
    """Why weights are not packed for a machine, or None."""
    reason = rejects_machine(target) or call.rejects_layout()
    if reason := reason or rejects_scale_axes(call, batch=False):
        return reason
    ((_, block),) = call.blocks
    if not isinstance(block, int):
        return f"packs blocks that end, got blocks={call.blocks}"
    format = call.format.with_block(block)
    if not fits_bfloat16(format):
        return f"packs values that bfloat16 holds, got {format.name}"
    if format.block[0] != 1 or block % MIN_BLOCK:
        return f"packs blocks of (1, a multiple of {MIN_BLOCK}), got {format.block}"
    if 0 in call.weights.shape:
        return f"packs weights that have elements, got shape={call.weights.shape}"
    return None


# Tiles --------------------------------------------------------------------------------------------

# Rows from which weights are dequantized once and XLA multiplies in bfloat16: the kernel decodes
# the same weights again for every tile of rows.
CROSSOVER = 1024
# Of an H200. One program runs on a processor at a time, by its registers.
_PROCESSORS = 132
# A pipeline shorter than this has no steady state.
_MIN_STEPS = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiles:
    """What one program computes.

    Attributes:
      m: rows of activations, a multiple of 8.
      n: rows of weights, 64 for each warpgroup: four of them where few rows multiply, two for many.
      k: length of one step along k, a multiple of 128.
      stages: steps in flight.
      splits: programs that share a tile's k, and whose sums are added.
    """

    m: int
    n: int = 128
    k: int = 128
    stages: int = 4
    splits: int = 1


# (largest number of rows, tiles), ascending, several for one number; the last for any.
Table = tuple[tuple[float, Tiles], ...]


def _table(few: tuple[Tiles, ...], stages: int, many: int) -> Table:
    """Tiles of few rows; stages for up to 32 rows, and for 64: what memory has room for."""
    # At 32 rows, long steps take more registers than there are.
    return (
        *((tiles.m, dataclasses.replace(tiles, splits=16)) for tiles in few),
        (32, Tiles(m=32, n=256, stages=stages, splits=16)),
        (64, Tiles(m=64, stages=many, splits=8)),
        (math.inf, Tiles(m=128, stages=3, splits=4)),
    )


# Measured on an H200, weights of 8192 x 8192: without splits nothing is left to be added.
_FEW_OF_4_BITS = (
    Tiles(m=8, n=64, k=512, stages=4),
    Tiles(m=8, n=64, k=256, stages=8),
    Tiles(m=8, n=256, k=256, stages=4),
    Tiles(m=16, n=128, k=512, stages=3),
    Tiles(m=16, n=64, k=256, stages=6),
    Tiles(m=16, n=256, k=256, stages=4),
)
_FEW_OF_8_BITS = tuple(
    tiles
    for m in (8, 16)
    for tiles in (Tiles(m=m, n=64, k=256, stages=5), Tiles(m=m, n=256, stages=5))
)

# By stored bits of a code.
TILES = {4: _table(_FEW_OF_4_BITS, 6, 7), 8: _table(_FEW_OF_8_BITS, 4, 5)}


def choose(code_bits: int, *, batch: int, m: int, n: int, k: int) -> Tiles:
    """The table's tiles, shared by as many programs as still help.

    Of several entries for as many rows, the one that leaves the busiest processor the fewest
    weights to read. The entry's splits are an upper bound: few programs are split until they fill
    the machine, none into very few steps.
    """
    table = TILES[code_bits]
    most_rows = next(limit for limit, _ in table if m <= limit)
    n, k = n + -n % PAD_N, k + -k % PAD_K

    def shared(tiles: Tiles) -> Tiles:
        idle, most = _PROCESSORS // programs(tiles), -(-k // tiles.k) // _MIN_STEPS
        return dataclasses.replace(tiles, splits=max(1, min(tiles.splits, idle, most)))

    def programs(tiles: Tiles) -> int:
        return batch * -(-m // tiles.m) * -(-n // tiles.n)

    def read(tiles: Tiles) -> float:
        return -(-programs(tiles) * tiles.splits // _PROCESSORS) * tiles.n * k / tiles.splits

    entries = (
        tiles if tiles.n <= n else dataclasses.replace(tiles, n=PAD_N)
        for limit, tiles in table
        if limit == most_rows
    )
    return min(map(shared, entries), key=read)
