"""Which tiles a product takes: data per architecture, width of the codes and number of rows.

No entry has been measured on hardware. They follow from the sizes of a Hopper SM: 227 KiB of shared
memory, 512 accumulator columns' worth of registers, and 132 SMs to fill.
"""

import dataclasses

# Rows of weights of one warpgroup: what wgmma takes.
_ROWS = 64
# Programs in flight that fill the machine once: SMs of an H100 or H200.
_NUM_SMS = 132
# A pipeline shorter than this has no steady state.
_MIN_STEPS = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiles:
    """What one program of the kernel computes.

    Attributes:
      m: rows of activations, a multiple of 8.
      k: length of one step along k, a multiple of 128.
      warpgroups: that multiply; each takes 64 rows of weights.
      stages: steps in flight.
      splits: programs that share a tile's k and add their sums.
    """

    m: int
    k: int = 128
    warpgroups: int = 2
    stages: int = 4
    splits: int = 1

    @property
    def n(self) -> int:
        """Rows of weights."""
        return _ROWS * self.warpgroups

    def shared_memory(self, code_bits: int, out_bytes: int) -> int:
        """Bytes of shared memory, barriers left out."""
        # At worst, 16 codes share a scale of two bytes.
        step = self.m * self.k * 2 + self.n * self.k * code_bits // 8 + self.n * self.k // 8
        return self.stages * step + self.n * self.m * out_bytes


# (architecture, bits of a code as it lies in memory) -> (largest number of rows, tiles), ascending.
TILES: dict[tuple[str, int], tuple[tuple[float, Tiles], ...]] = {
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
}


def choose(architecture: str, code_bits: int, *, batch: int, m: int, n: int, k: int) -> Tiles:
    """The table's tiles, with as many splits as still help.

    Args:
      architecture: `"sm90"`.
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
    wanted = min(tiles.splits, max(1, 2 * _NUM_SMS // programs), max(1, steps // _MIN_STEPS))
    splits = max(count for count in range(1, wanted + 1) if steps % count == 0)
    return dataclasses.replace(tiles, splits=splits)
