"""The kernels that multiply on tensor cores: one row each, named after its instruction.

No entry of their tables has been measured on hardware: they follow from the sizes of shared memory
and of the register file, and from the number of processors to fill. `python -m mx_jax gpu` measures
others on a GPU, and keeps the best in its rows.
"""

import dataclasses
import math
from collections.abc import Callable

import jax

from mx_jax.backends.pallas_gpu.layouts.scaled import ScaledOperand, meet
from mx_jax.backends.pallas_gpu.layouts.weights import PackedWeights
from mx_jax.backends.pallas_gpu.tuning.tiles import Tiles, Tuning
from mx_jax.formats import BlockFormat

Run = Callable[..., jax.Array]
_ANY = math.inf


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Kernel:
    """One way to multiply.

    Attributes:
      name: the instruction that multiplies; its device code is `products/<name>.py`.
      layout: how the right operand lies. PackedWeights: they are decoded to bfloat16 on their way,
        and meet bfloat16. ScaledOperand: both operands lie so, and are taken as they are.
      takes: whether it multiplies operands of two formats, None for high precision, of those that
        the backend does not reject.
      load: gives its function, whose file says what it takes. Mosaic GPU is imported
        then, which older versions of JAX lack.
      possible: whether it can be compiled with tiles for codes of so many bits, as they lie in
        memory, shared memory aside.
      shared_memory: bytes of it that the stages and a tile of the result take, barriers left out.
      resident: programs that one processor holds at a time, by their registers.
      min_rows: of a tile, for few rows of the left operand.
      shapes: (n, parts) of tiles that are worth measuring.
      tuning: (bits of a code, as they lie in memory; tiles and crossover).
      load_groups: gives its `grouped_products`, for rows in groups; None: it has none.
      load_group_sums: likewise its `group_sums`, over the rows of each group.
      clips: whether tiles may reach beyond the operands, and programs have steps of several.
      uneven: whether programs that share a tile may differ by a step.
      load_persistent: gives its `products`, for tiles with `programs`; None: it has none.
      persistent: (m, n, ctas) of such tiles that are worth measuring.
    """

    name: str
    layout: type[PackedWeights] | type[ScaledOperand]
    takes: Callable[[BlockFormat | None, BlockFormat | None], bool]
    load: Callable[[], Run]
    possible: Callable[[int, Tiles], bool]
    shared_memory: Callable[[int, Tiles], int]
    resident: int
    min_rows: int
    shapes: tuple[tuple[int, int], ...]
    tuning: tuple[tuple[int, Tuning], ...]
    load_groups: Callable[[], Run] | None = None
    load_group_sums: Callable[[], Run] | None = None
    clips: bool = False
    uneven: bool = False
    load_persistent: Callable[[], Run] | None = None
    persistent: tuple[tuple[int, int, int], ...] = ()

    def __repr__(self) -> str:
        return self.name

    def tuning_of(self, code_bits: int) -> Tuning:
        """Its own tiles and crossover."""
        return dict(self.tuning)[code_bits]


def _anything(lhs: BlockFormat | None, rhs: BlockFormat | None) -> bool:
    """What is decoded has no format left."""
    return True


def _stages(tiles: Tiles, lhs_bits: int, rhs_bits: int) -> int:
    """Bytes of the steps in flight. At worst, 16 codes share a scale of two bytes."""
    step = tiles.k * (tiles.m * lhs_bits + tiles.n * (rhs_bits + 1)) // 8
    return tiles.stages * step


# Ampere's, which also compiles for Ada and every Blackwell.


def _load_mma() -> Run:
    from mx_jax.backends.pallas_gpu.products import mma

    return mma.multiply


def _possible_mma(code_bits: int, tiles: Tiles) -> bool:
    # A row of accumulators for every 8 activations.
    rows = tiles.m % 8 == 0 and tiles.m <= 128 and tiles.parts == 1
    # cp.async copies at least four tiles of 8 by 64 activations.
    return rows and tiles.n == 64 and tiles.m * tiles.k % (4 * 8 * 64) == 0


MMA = Kernel(
    name="mma",
    layout=PackedWeights,
    takes=_anything,
    load=_load_mma,
    possible=_possible_mma,
    shared_memory=lambda code_bits, tiles: _stages(tiles, 16, code_bits),
    resident=2,
    min_rows=8,
    shapes=((64, 1),),
    tuning=tuple(
        (
            bits,
            Tuning(
                tiles=(
                    (8, Tiles(m=8, n=64, k=256, splits=16)),
                    (16, Tiles(m=16, n=64, splits=16)),
                    (32, Tiles(m=32, n=64, stages=3, splits=8)),
                    (_ANY, Tiles(m=64, n=64, stages=3, splits=4)),
                ),
                crossover=256,
            ),
        )
        for bits in (4, 6, 8)
    ),
    uneven=True,
)


# Hopper's. Any number of rows of activations that 8 divides. Few: four warpgroups take turns at 64
# rows of weights, so that some work while others wait. Many: 64 rows of weights for each of two
# warpgroups.

# Mosaic keeps the phases of a pipeline's barriers in the bits of one word.
_MAX_STAGES = 32


def _load_wgmma() -> Run:
    from mx_jax.backends.pallas_gpu.products import wgmma

    return wgmma.multiply


def _load_grouped_wgmma() -> Run:
    from mx_jax.backends.pallas_gpu.grouped import wgmma

    return wgmma.grouped_products


def _load_group_sums() -> Run:
    from mx_jax.backends.pallas_gpu.grouped import sums

    return sums.group_sums


def _possible_wgmma(code_bits: int, tiles: Tiles) -> bool:
    """At most four warpgroups, and registers for them; each with stages of its own."""
    warpgroups, rest = divmod(tiles.n * tiles.parts, 64)
    staged = tiles.stages % tiles.parts == 0 and tiles.stages <= _MAX_STAGES
    rows = tiles.m % 8 == 0 and tiles.m <= 128
    return rows and not rest and staged and warpgroups <= 4 and warpgroups * tiles.m <= 256


def _shared_by_wgmma(code_bits: int, tiles: Tiles) -> int:
    # The result, and the sums of all but one of those that share rows.
    return _stages(tiles, 16, code_bits) + tiles.parts * tiles.n * tiles.m * 4


def _tuning_wgmma(stages: tuple[int, int, int, int]) -> Tuning:
    """Stages for 8, 16, 32 and 64 rows: what memory has room for.

    An H200 has about 36 KB on their way to each processor (4.8 TB/s in 1 us); of 64 rows' tiles
    four stages, one of them being multiplied, would be 28 KB of FP4.
    """
    few = tuple(
        (m, Tiles(m=m, n=64, k=256 if m < 32 else 128, stages=depth, splits=16, parts=4))
        for m, depth in zip((8, 16, 32), stages, strict=False)
    )
    many = (64, Tiles(m=64, stages=stages[-1], splits=8)), (_ANY, Tiles(m=128, stages=3, splits=4))
    return Tuning(tiles=(*few, *many), crossover=1024)


WGMMA = Kernel(
    name="wgmma",
    layout=PackedWeights,
    takes=_anything,
    load=_load_wgmma,
    load_groups=_load_grouped_wgmma,
    load_group_sums=_load_group_sums,
    possible=_possible_wgmma,
    shared_memory=_shared_by_wgmma,
    resident=1,
    min_rows=8,
    shapes=((64, 2), (64, 4), (128, 1), (128, 2), (256, 1)),
    tuning=(
        (4, _tuning_wgmma((12, 8, 12, 7))),
        (6, _tuning_wgmma((12, 8, 12, 6))),
        (8, _tuning_wgmma((8, 8, 8, 5))),
    ),
    clips=True,
)


# Blackwell's: 128 by 128 or 256, with steps of 128 bytes. Programs that stay may be pairs, of 256
# rows by 128 or 256: no measurement says yet that they are faster, so the table has none.


def _load_tcgen05() -> Run:
    from mx_jax.backends.pallas_gpu.products import tcgen05

    return tcgen05.partial_products


def _load_grouped_tcgen05() -> Run:
    from mx_jax.backends.pallas_gpu.grouped import tcgen05

    return tcgen05.grouped_products


def _load_persistent_tcgen05() -> Run:
    from mx_jax.backends.pallas_gpu.products import tcgen05_persistent

    return tcgen05_persistent.products


def _possible_tcgen05(code_bits: int, tiles: Tiles) -> bool:
    whole = tiles.m == 128 * tiles.ctas and tiles.n in (128, 256)
    pairs = tiles.ctas == 1 or (tiles.ctas == 2 and tiles.programs > 0)
    return whole and pairs and tiles.k * code_bits % 1024 == 0


def _shared_by_tcgen05(code_bits: int, tiles: Tiles) -> int:
    # Two programs have half of the codes each, and both all scales of the right operand.
    halves = dataclasses.replace(tiles, m=tiles.m // tiles.ctas, n=tiles.n // tiles.ctas)
    scales = tiles.stages * tiles.k * (tiles.n - halves.n) // 8
    return _stages(halves, code_bits + 1, code_bits) + scales + 2 * halves.m * 128


TCGEN05 = Kernel(
    name="tcgen05",
    layout=ScaledOperand,
    takes=meet,
    load=_load_tcgen05,
    load_groups=_load_grouped_tcgen05,
    load_persistent=_load_persistent_tcgen05,
    persistent=((256, 256, 2), (128, 256, 1), (256, 128, 2), (128, 128, 1)),
    possible=_possible_tcgen05,
    shared_memory=_shared_by_tcgen05,
    resident=1,
    min_rows=128,
    shapes=((128, 1), (256, 1)),
    tuning=(
        (
            4,
            Tuning(
                tiles=(
                    (256, Tiles(m=128, k=256, stages=4, splits=8)),
                    (_ANY, Tiles(m=128, n=256, k=256, stages=3, splits=2)),
                )
            ),
        ),
        (
            8,
            Tuning(
                tiles=(
                    (256, Tiles(m=128, k=256, stages=2, splits=8)),
                    (_ANY, Tiles(m=128, n=256, k=128, stages=3, splits=2)),
                )
            ),
        ),
    ),
)
