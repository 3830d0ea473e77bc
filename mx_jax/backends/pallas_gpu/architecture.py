"""GPUs and the kernels that multiply on their tensor cores, a row each; tiles that products take.

Hopper's tiles for up to 16 rows were chosen by measurement on an H200. All others follow from the
sizes of shared memory and of the register file, and from the number of processors to fill.
"""

import dataclasses
import importlib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from mx_jax.backends.pallas_gpu.layouts import PAD_K, PAD_N
from mx_jax.backends.target import current_target

Capability = tuple[int, int]
# The first version of JAX for which the kernels have been compiled.
MIN_JAX: tuple[int, ...] = (0, 12, 0)
_KIB = 1024
_ANY = math.inf


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiles:
    """What one program of a kernel computes.

    Attributes:
      m: rows of activations.
      n: rows of weights.
      k: length of one step along k.
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

# Kernels ----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class Kernel:
    """One way to decode weights to bfloat16 and multiply.

    Attributes:
      name: the instruction that multiplies; its device code is `<name>.py`.
      tiles: what programs compute, by stored bits of a code.
      possible: whether it can be compiled with tiles for codes of so many stored bits.
      shared_memory: bytes of it that the stages and a tile of the result take, barriers left out.
      resident: programs that one processor holds at a time, by their registers.
      crossover: rows from which weights are dequantized once and XLA multiplies in bfloat16: a
        kernel decodes the same weights again for every tile of rows.
      clips: whether tiles may reach beyond the operands.
      groups: whether it takes rows in groups.
    """

    name: str
    tiles: Mapping[int, Table]
    possible: Callable[[int, Tiles], bool]
    shared_memory: Callable[[int, Tiles], int]
    resident: int
    crossover: float = math.inf
    clips: bool = False
    groups: bool = False

    def __repr__(self) -> str:
        return self.name

    def load(self) -> Callable[..., jax.Array]:
        """Its device code: imports Mosaic GPU, which older versions of JAX lack."""
        return importlib.import_module(f"{__package__}.{self.name}").multiply


def _stages(tiles: Tiles, lhs_bits: int, rhs_bits: int) -> int:
    """Bytes of the steps in flight. At worst, 16 codes share a scale of two bytes."""
    step = tiles.k * (tiles.m * lhs_bits + tiles.n * (rhs_bits + 1)) // 8
    return tiles.stages * step


# Ampere's, which also compiles for Ada and every Blackwell.

_FEW_ON_AMPERE: Table = (
    (8, Tiles(m=8, n=64, k=256, splits=16)),
    (16, Tiles(m=16, n=64, splits=16)),
    (32, Tiles(m=32, n=64, stages=3, splits=8)),
    (_ANY, Tiles(m=64, n=64, stages=3, splits=4)),
)
MMA = Kernel(
    name="mma",
    tiles={4: _FEW_ON_AMPERE, 8: _FEW_ON_AMPERE},
    # A row of accumulators for every 8 activations; cp.async copies at least four tiles of 8 by 64.
    possible=lambda bits, tiles: (
        tiles.m in range(8, 129, 8) and tiles.n == 64 and tiles.m * tiles.k % (4 * 8 * 64) == 0
    ),
    shared_memory=lambda bits, tiles: _stages(tiles, 16, bits),
    resident=2,
    crossover=256,
)


# Hopper's. Any number of rows of activations that 8 divides, 64 rows of weights for each
# warpgroup: four of them where few rows multiply, two for many.

# Mosaic keeps the phases of a pipeline's barriers in the bits of one word.
_MAX_STAGES = 32


def _tiles_of_wgmma(few: tuple[Tiles, ...], stages: int, many: int) -> Table:
    """Tiles of few rows; stages for up to 32 rows, and for 64: what memory has room for."""
    # At 32 rows, long steps take more registers than there are.
    return (
        *((tiles.m, dataclasses.replace(tiles, splits=16)) for tiles in few),
        (32, Tiles(m=32, n=256, stages=stages, splits=16)),
        (64, Tiles(m=64, stages=many, splits=8)),
        (_ANY, Tiles(m=128, stages=3, splits=4)),
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

WGMMA = Kernel(
    name="wgmma",
    tiles={4: _tiles_of_wgmma(_FEW_OF_4_BITS, 6, 7), 8: _tiles_of_wgmma(_FEW_OF_8_BITS, 4, 5)},
    # At most four warpgroups, and registers for them.
    possible=lambda bits, tiles: (
        tiles.m in range(8, 129, 8)
        and tiles.n in range(64, 257, 64)
        and tiles.m * tiles.n <= 256 * 64
        and tiles.stages <= _MAX_STAGES
    ),
    shared_memory=lambda bits, tiles: _stages(tiles, 16, bits) + tiles.n * tiles.m * 4,
    resident=1,
    crossover=1024,
    clips=True,
    groups=True,
)


# GPUs -------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Architecture:
    """What the kernels have to know of a GPU.

    Attributes:
      name: as ptxas calls the first of them.
      capabilities: CUDA's compute capabilities that it stands for.
      num_sms: of the GPU whose processors tiles are to fill.
      shared_memory: bytes that a program may ask for, a KiB of it left for barriers.
      kernel: what multiplies.
      interpret: parameters of Mosaic's interpreter, for tests on a CPU; None compiles.
    """

    name: str
    capabilities: tuple[Capability, ...]
    num_sms: int
    shared_memory: int
    kernel: Kernel
    interpret: Any = None

    def __repr__(self) -> str:
        return self.name

    def possible(self, code_bits: int, tiles: Tiles) -> bool:
        """Whether the kernel can be compiled with these tiles, and started here."""
        fits = self.kernel.shared_memory(code_bits, tiles) <= self.shared_memory
        return tiles.k % 128 == 0 and fits and self.kernel.possible(code_bits, tiles)


SM80 = Architecture(
    name="sm80",
    capabilities=((8, 0), (8, 7)),
    num_sms=108,  # A100
    shared_memory=162 * _KIB,
    kernel=MMA,
)
# 12.x has the memory of 8.9.
SM89 = dataclasses.replace(
    SM80,
    name="sm89",
    capabilities=((8, 6), (8, 9), (12, 0), (12, 1)),
    num_sms=142,  # L40S
    shared_memory=98 * _KIB,
)
SM90 = Architecture(
    name="sm90",
    capabilities=((9, 0),),
    num_sms=132,  # H100, H200
    shared_memory=226 * _KIB,
    kernel=WGMMA,
)
SM100 = dataclasses.replace(
    SM90,
    name="sm100",
    capabilities=((10, 0), (10, 3), (11, 0)),
    num_sms=148,  # B200
    kernel=MMA,
)

ARCHITECTURES = (SM80, SM89, SM90, SM100)


def architecture_of(capability: Capability | None) -> Architecture | None:
    """The row that serves a compute capability."""
    return next((row for row in ARCHITECTURES if capability in row.capabilities), None)


def current_architecture() -> Architecture:
    """The row of the machine that a call is for."""
    capability = current_target(1).compute_capability
    row = architecture_of(capability)
    if row is None:
        raise ValueError(
            f"pallas_gpu: has no kernels for compute_capability={capability}; see "
            "mx_jax.inspect.explain for what takes a call here"
        )
    return row


# Which tiles a product takes ----------------------------------------------------------------------

# A pipeline shorter than this has no steady state.
_MIN_STEPS = 4


def choose(
    architecture: Architecture, code_bits: int, *, batch: int, m: int, n: int, k: int
) -> Tiles:
    """The table's tiles, shared by as many programs as still help.

    Of several entries for as many rows, the one that leaves the busiest processor the fewest
    weights to read. The entry's splits are an upper bound: few programs are split until they fill
    the machine, none into very few steps.

    Raises:
      ValueError: if none fit: the row's memory is smaller than its kernel can do with.
    """
    kernel = architecture.kernel
    table = kernel.tiles[code_bits]
    most_rows = next(limit for limit, _ in table if m <= limit)
    entries = [tiles for limit, tiles in table if limit == most_rows]
    n, k = n + -n % PAD_N, k + -k % PAD_K
    at_once = kernel.resident * architecture.num_sms

    def fits(tiles: Tiles) -> bool:
        whole = tiles.n <= n if kernel.clips else n % tiles.n == k % tiles.k == 0
        return whole and architecture.possible(code_bits, tiles)

    def shared(tiles: Tiles) -> Tiles:
        idle, most = at_once // programs(tiles), -(-k // tiles.k) // _MIN_STEPS
        return dataclasses.replace(tiles, splits=max(1, min(tiles.splits, idle, most)))

    def programs(tiles: Tiles) -> int:
        return batch * -(-m // tiles.m) * -(-n // tiles.n)

    def read(tiles: Tiles) -> float:
        return -(-programs(tiles) * tiles.splits // at_once) * tiles.n * k / tiles.splits

    fitting = (next(filter(fits, _smaller(entry)), None) for entry in entries)
    best = min((shared(tiles) for tiles in fitting if tiles is not None), key=read, default=None)
    if best is None:
        raise ValueError(
            f"pallas_gpu: no tiles of {kernel} for {code_bits} bits fit {architecture}: n={n}, "
            f"k={k}, shared_memory={architecture.shared_memory}, nor any smaller than {entries[0]}"
        )
    return best


def _smaller(tiles: Tiles) -> Iterator[Tiles]:
    """Tiles, and what stands in for them where they do not divide an operand or do not fit."""
    shapes = [tiles, dataclasses.replace(tiles, n=128)]
    for m, n in itertools.product((tiles.m, tiles.m // 2, tiles.m // 4, 16), (tiles.n, 128)):
        stages = min(tiles.stages, 4)
        shapes.append(dataclasses.replace(tiles, k=128, m=m, n=n, stages=stages))
    for shape in shapes:
        for stages in range(shape.stages, min(shape.stages, 2) - 1, -1):
            yield dataclasses.replace(shape, stages=stages)
