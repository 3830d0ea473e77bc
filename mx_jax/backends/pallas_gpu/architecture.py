"""GPUs and the kernels that multiply on their tensor cores: a row each.

No entry of the kernels' tables has been measured on hardware: they follow from the sizes of shared
memory and of the register file, and from the number of processors to fill. `python -m mx_jax gpu`
measures others on a GPU, and keeps the best in its rows.
"""

import dataclasses
import importlib
import math
from collections.abc import Callable
from typing import Any

import jax

from mx_jax.backends.pallas_gpu.layouts import meet
from mx_jax.backends.pallas_gpu.tiles import Tiles, Tuning
from mx_jax.backends.target import Target, current_target
from mx_jax.formats import BlockFormat

Capability = tuple[int, int]
_KIB = 1024
_ANY = math.inf

# Kernels ----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Kernel:
    """One way to multiply.

    Attributes:
      name: the instruction that multiplies; its device code is `<name>.py`.
      decodes: whether weights are decoded to bfloat16 on their way, and meet bfloat16. Otherwise
        both operands are taken as they are.
      takes: whether it multiplies operands of two formats, None for high precision, of those that
        the backend does not reject.
      load: gives its function, whose file says what it takes. Mosaic GPU is imported then, which
        older versions of JAX lack.
      load_groups: gives the one for rows in groups; None: it has none.
      load_group_sums: likewise for sums over the rows of each group.
      possible: whether it can be compiled with tiles for codes of so many bits, as they lie in
        memory, shared memory aside.
      shared_memory: bytes of it that the stages and a tile of the result take, barriers left out.
      resident: programs that one processor holds at a time, by their registers.
      min_rows: of a tile, for few rows of the left operand.
      widths: rows of the right operand that are worth measuring.
      tuning: (bits of a code, as they lie in memory; tiles and crossover).
      clips: whether tiles may reach beyond the operands.
    """

    name: str
    decodes: bool
    takes: Callable[[BlockFormat | None, BlockFormat | None], bool]
    load: Callable[[], Callable[..., jax.Array]]
    possible: Callable[[int, Tiles], bool]
    shared_memory: Callable[[int, Tiles], int]
    resident: int
    min_rows: int
    widths: tuple[int, ...]
    tuning: tuple[tuple[int, Tuning], ...]
    load_groups: Callable[[], Callable[..., jax.Array]] | None = None
    load_group_sums: Callable[[], Callable[..., jax.Array]] | None = None
    clips: bool = False

    def __repr__(self) -> str:
        return self.name

    def tuning_of(self, code_bits: int) -> Tuning:
        """Its own tiles and crossover."""
        return dict(self.tuning)[code_bits]


def _function(module: str, name: str) -> Callable[[], Any]:
    """A function of device code, imported when it is asked for."""
    return lambda: getattr(importlib.import_module(f"{__package__}.{module}"), name)


def _stages(tiles: Tiles, lhs_bits: int, rhs_bits: int) -> int:
    """Bytes of the steps in flight. At worst, 16 codes share a scale of two bytes."""
    step = tiles.k * (tiles.m * lhs_bits + tiles.n * (rhs_bits + 1)) // 8
    return tiles.stages * step


# Ampere's, which also compiles for Ada and every Blackwell.


def _possible_mma(code_bits: int, tiles: Tiles) -> bool:
    # A row of accumulators for every 8 activations; cp.async copies at least four tiles of 8 by 64.
    rows = tiles.m % 8 == 0 and tiles.m <= 128
    return rows and tiles.n == 64 and tiles.m * tiles.k % (4 * 8 * 64) == 0


_FEW_ON_AMPERE = Tuning(
    tiles=(
        (8, Tiles(m=8, n=64, k=256, splits=16)),
        (16, Tiles(m=16, n=64, splits=16)),
        (32, Tiles(m=32, n=64, stages=3, splits=8)),
        (_ANY, Tiles(m=64, n=64, stages=3, splits=4)),
    ),
    crossover=256,
)
MMA = Kernel(
    name="mma",
    decodes=True,
    takes=lambda lhs, rhs: True,
    load=_function("mma", "multiply"),
    possible=_possible_mma,
    shared_memory=lambda code_bits, tiles: _stages(tiles, 16, code_bits),
    resident=2,
    min_rows=8,
    widths=(64,),
    tuning=tuple((bits, _FEW_ON_AMPERE) for bits in (4, 6, 8)),
)


# Hopper's. Any number of rows of activations that 8 divides, 64 rows of weights for each
# warpgroup: four of them where few rows multiply, two for many.

# Mosaic keeps the phases of a pipeline's barriers in the bits of one word.
_MAX_STAGES = 32


def _possible_wgmma(code_bits: int, tiles: Tiles) -> bool:
    """At most four warpgroups, and registers for them."""
    warpgroups, rest = divmod(tiles.n, 64)
    rows = tiles.m % 8 == 0 and tiles.m <= 128 and warpgroups * tiles.m <= 256
    return rows and not rest and warpgroups <= 4 and tiles.stages <= _MAX_STAGES


def _tuning_wgmma(k: int, few: tuple[int, int, int], many: int) -> Tuning:
    """Stages for up to 8, 16 and 32 rows, in steps of k, and for 64: what memory has room for.

    An H200 has about 36 KB on their way to each processor (4.8 TB/s in 1 us). At 32 rows, long
    steps take more registers than there are.
    """
    rows = zip((8, 16, 32), (k, k, 128), few, strict=True)
    tiles = (
        *((m, Tiles(m=m, n=256, k=k, stages=stages, splits=16)) for m, k, stages in rows),
        (64, Tiles(m=64, stages=many, splits=8)),
        (_ANY, Tiles(m=128, stages=3, splits=4)),
    )
    return Tuning(tiles=tiles, crossover=1024)


WGMMA = Kernel(
    name="wgmma",
    decodes=True,
    takes=lambda lhs, rhs: True,
    load=_function("wgmma", "multiply"),
    load_groups=_function("wgmma", "grouped_products"),
    load_group_sums=_function("wgmma", "group_sums"),
    possible=_possible_wgmma,
    shared_memory=lambda bits, tiles: _stages(tiles, 16, bits) + tiles.n * tiles.m * 4,
    resident=1,
    min_rows=8,
    widths=(128, 256),
    tuning=(
        (4, _tuning_wgmma(256, (4, 4, 6), 7)),
        (6, _tuning_wgmma(128, (7, 6, 5), 6)),
        (8, _tuning_wgmma(128, (5, 5, 4), 5)),
    ),
    clips=True,
)


# Blackwell's: 128 by 128 or 256, with steps of 128 bytes.


def _tuning_tcgen05(few: Tiles, many: Tiles) -> Tuning:
    return Tuning(tiles=((256, few), (_ANY, many)))


TCGEN05 = Kernel(
    name="tcgen05",
    decodes=False,
    takes=meet,
    load=_function("tcgen05", "multiply"),
    load_groups=_function("tcgen05", "grouped_products"),
    possible=lambda bits, tiles: (
        tiles.m == 128 and tiles.n in (128, 256) and tiles.k * bits % 1024 == 0
    ),
    shared_memory=lambda bits, tiles: _stages(tiles, bits + 1, bits) + 2 * tiles.m * 128,
    resident=1,
    min_rows=128,
    widths=(128, 256),
    tuning=(
        (
            4,
            _tuning_tcgen05(
                Tiles(m=128, k=256, stages=4, splits=8),
                Tiles(m=128, n=256, k=256, stages=3, splits=2),
            ),
        ),
        (
            8,
            _tuning_tcgen05(
                Tiles(m=128, k=256, stages=2, splits=8),
                Tiles(m=128, n=256, k=128, stages=3, splits=2),
            ),
        ),
    ),
)

# GPUs -------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Architecture:
    """What the kernels have to know of a GPU.

    Attributes:
      name: as ptxas calls the first of them; files of tiles name it so.
      capabilities: CUDA's compute capabilities that it stands for.
      min_jax: the first version of JAX for which the kernels have been compiled.
      num_sms: of the GPU whose processors tiles are to fill.
      shared_memory: bytes that a program may ask for, a KiB of it left for barriers.
      copies_by_tma: whether kernels write through its tensor memory accelerator.
      converts_float8: whether one instruction converts to float8, on all of these GPUs. Others have
        so much less bandwidth that memory is the bound without; so too of the next.
      compares_pairs: whether one instruction compares two 16-bit integers with two others.
      kernels: those that multiply, the preferred first. The last decodes weights, so it takes every
        product that a kernel takes.

    Raises:
      ValueError: if the last kernel does not decode weights.
    """

    name: str
    capabilities: tuple[Capability, ...]
    min_jax: tuple[int, ...]
    num_sms: int
    shared_memory: int
    copies_by_tma: bool
    converts_float8: bool
    compares_pairs: bool
    kernels: tuple[Kernel, ...]

    def __post_init__(self):
        if not self.kernels or not self.decoding.decodes:
            raise ValueError(
                "Architecture: needs kernels of which the last decodes weights, got "
                f"kernels={self.kernels}"
            )

    def __repr__(self) -> str:
        return self.name

    @property
    def decoding(self) -> Kernel:
        """The kernel that decodes weights."""
        return self.kernels[-1]

    def kernel(self, lhs: BlockFormat | None, rhs: BlockFormat | None) -> Kernel:
        """The first that takes operands of two formats."""
        return next(kernel for kernel in self.kernels if kernel.takes(lhs, rhs))

    def possible(self, kernel: Kernel, code_bits: int, tiles: Tiles) -> bool:
        """Whether a kernel can be compiled with these tiles, and started here."""
        fits = kernel.shared_memory(code_bits, tiles) <= self.shared_memory
        return tiles.k % 128 == 0 and fits and kernel.possible(code_bits, tiles)

    def at_once(self, kernel: Kernel) -> int:
        """Programs in flight that fill the machine once."""
        return kernel.resident * self.num_sms


SM80 = Architecture(
    name="sm80",
    capabilities=((8, 0), (8, 7)),
    min_jax=(0, 12, 0),
    num_sms=108,  # A100
    shared_memory=162 * _KIB,
    copies_by_tma=False,
    converts_float8=False,
    compares_pairs=False,
    kernels=(MMA,),
)
# 12.x has other instructions for block-scaled operands than 10.x, and the memory of 8.9.
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
    min_jax=(0, 11, 2),
    num_sms=132,  # H100, H200
    shared_memory=226 * _KIB,
    copies_by_tma=True,
    converts_float8=True,
    compares_pairs=True,
    kernels=(WGMMA,),
)
SM100 = dataclasses.replace(
    SM90,
    name="sm100",
    capabilities=((10, 0), (10, 3), (11, 0)),
    min_jax=(0, 12, 0),
    num_sms=148,  # B200
    kernels=(TCGEN05, MMA),
)

ARCHITECTURES: tuple[Architecture, ...] = (SM80, SM89, SM90, SM100)


def register(row: Architecture) -> None:
    """Let the kernels run on more GPUs, or on some of these by another row.

    What was traced before is not traced again.

    Args:
      row: it serves its compute capabilities from now on, whatever served them before.
    """
    global ARCHITECTURES
    ARCHITECTURES = (row, *ARCHITECTURES)


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


def capabilities() -> list[Capability]:
    """Compute capabilities with kernels, ascending."""
    return sorted({capability for row in ARCHITECTURES for capability in row.capabilities})


def rejects_machine(
    target: Target, jax_version: tuple[int, ...] = jax.__version_info__
) -> str | None:
    """Why there is no kernel for a machine, or None."""
    if target.platform != "cuda":
        return f"runs on platform=cuda, got platform={target.platform}"
    row = architecture_of(target.compute_capability)
    if row is None:
        known = ", ".join(f"{major}.{minor}" for major, minor in capabilities())
        got = target.compute_capability
        shown = None if got is None else ".".join(map(str, got))
        return f"has kernels for CUDA compute capability {known}, got {shown}"
    if jax_version < row.min_jax:
        needed, got = (".".join(map(str, version)) for version in (row.min_jax, jax_version))
        return f"needs jax>={needed}, got jax=={got}"
    return None


def rejects_devices(target: Target) -> str | None:
    """Why there is no kernel for a call that `jit` may split between devices, or None.

    XLA does not split a kernel: it would gather its operands, and each device do all of the work.
    """
    if target.num_devices == 1:
        return None
    return (
        "runs on one device or below jax.shard_map: jit does not split a kernel, got "
        f"num_devices={target.num_devices}; only_backend('pallas_gpu') insists"
    )
