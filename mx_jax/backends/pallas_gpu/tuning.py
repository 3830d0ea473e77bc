"""Which tiles a product takes: data per architecture, width of the codes and number of rows.

No entry has been measured on hardware. They follow from the sizes of a Hopper SM: 227 KiB of shared
memory, 512 accumulator columns' worth of registers, and 132 SMs to fill.
"""

import dataclasses

# Programs in flight that fill the machine once: SMs of an H100 or H200, of a B200.
_NUM_SMS = {"sm80": 108, "sm89": 142, "sm90": 132, "sm100": 148}
# A pipeline shorter than this has no steady state.
_MIN_STEPS = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiles:
    """What one program of a kernel computes.

    Attributes:
      m: rows of activations, or of the left operand.
      n: rows of weights, or of the right operand.
      k: length of one step along k.
      stages: steps in flight.
      splits: programs that share a tile's k and add their sums.
    """

    m: int
    n: int = 128
    k: int = 128
    stages: int = 4
    splits: int = 1

    def shared_memory(self, lhs_bits: int, rhs_bits: int, out_bytes: int) -> int:
        """Bytes of shared memory that stages and a tile of the result take, barriers left out.

        Args:
          lhs_bits: bits of an activation or a code, as it lies in memory.
          rhs_bits: likewise, of the weights; at worst, 16 codes share a scale of two bytes.
          out_bytes: of a number of the result.
        """
        step = self.m * self.k * lhs_bits + self.n * self.k * (rhs_bits + 1)
        return self.stages * step // 8 + self.n * self.m * out_bytes


# (architecture, bits of a code as it lies in memory) -> (largest number of rows, tiles), ascending.
# sm90: any number of rows of activations that 8 divides, 64 rows of weights for each of two
# warpgroups. sm100: 128 by 128 or 256, with steps of 128 bytes.
TILES: dict[tuple[str, int], tuple[tuple[float, Tiles], ...]] = {
    **{
        (architecture, bits): (
            (8, Tiles(m=8, n=64, k=256, splits=16)),
            (16, Tiles(m=16, n=64, splits=16)),
            (32, Tiles(m=32, n=64, stages=3, splits=8)),
            (float("inf"), Tiles(m=64, n=64, stages=3, splits=4)),
        )
        for architecture in ("sm80", "sm89")
        for bits in (4, 8)
    },
    ("sm90", 4): (
        (8, Tiles(m=8, k=256, stages=5, splits=16)),
        (16, Tiles(m=16, k=256, stages=5, splits=16)),
        (32, Tiles(m=32, k=256, stages=4, splits=16)),
        (64, Tiles(m=64, splits=8)),
        (float("inf"), Tiles(m=128, stages=3, splits=4)),
    ),
    ("sm90", 8): (
        (8, Tiles(m=8, splits=16)),
        (16, Tiles(m=16, splits=16)),
        (32, Tiles(m=32, splits=16)),
        (64, Tiles(m=64, splits=8)),
        (float("inf"), Tiles(m=128, stages=3, splits=4)),
    ),
    ("sm100", 4): (
        (256, Tiles(m=128, k=256, stages=4, splits=8)),
        (float("inf"), Tiles(m=128, n=256, k=256, stages=3, splits=2)),
    ),
    ("sm100", 8): (
        (256, Tiles(m=128, k=256, stages=2, splits=8)),
        (float("inf"), Tiles(m=128, n=256, k=128, stages=3, splits=2)),
    ),
}

# (architecture, bits of a code) -> rows from which it is faster to dequantize the weights once and
# let XLA multiply in bfloat16. At so many rows the tensor cores are the bound for either, and a
# kernel decodes the same weights again for every tile of rows.
CROSSOVER: dict[tuple[str, int], int] = {
    **{(architecture, bits): 256 for architecture in ("sm80", "sm89") for bits in (4, 8)},
    ("sm90", 4): 1024,
    ("sm90", 8): 1024,
}


def choose(architecture: str, code_bits: int, *, batch: int, m: int, n: int, k: int) -> Tiles:
    """The table's tiles, with as many splits as still help.

    Args:
      architecture: `"sm90"` or `"sm100"`.
      code_bits: 4 or 8.
      batch: number of products.
      m: rows of activations.
      n: rows of weights, padded.
      k: contracted length, padded.

    Returns:
      Tiles whose `k * splits` divides k. The entry's splits are an upper bound: few programs are
      split until they fill the machine, none into fewer than four steps.
    """
    tiles = next(tiles for limit, tiles in TILES[architecture, code_bits] if m <= limit)
    if k % tiles.k:
        tiles = dataclasses.replace(tiles, k=128)
    steps = k // tiles.k
    programs = batch * -(-m // tiles.m) * -(-n // tiles.n)
    wanted = min(
        tiles.splits, max(1, 2 * _NUM_SMS[architecture] // programs), max(1, steps // _MIN_STEPS)
    )
    splits = max(count for count in range(1, wanted + 1) if steps % count == 0)
    return dataclasses.replace(tiles, splits=splits)
