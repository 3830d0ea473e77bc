"""The GPU that the kernel is for, and the tiles that products take.

Tiles for up to 16 rows were chosen by measurement on an H200. All others follow from the sizes of
shared memory and of the register file, and from the number of processors to fill.
"""

import dataclasses
import math

from mx_jax.backends.pallas_gpu.layouts import PAD_K, PAD_N

# Hopper's; and the first version of JAX for which the kernel has been compiled.
CAPABILITY = (9, 0)
MIN_JAX: tuple[int, ...] = (0, 12, 0)
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
