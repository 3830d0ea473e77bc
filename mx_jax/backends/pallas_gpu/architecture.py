"""GPUs and the kernels that multiply on their tensor cores, a row each; tiles that products take.

Hopper's tiles for up to 16 rows were chosen by measurement on an H200. All others follow from the
sizes of shared memory and of the register file, and from the number of processors to fill.
"""

import dataclasses
import importlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from mx_jax.backends.calls import Call, MatmulCall, RaggedCall
from mx_jax.backends.pallas_gpu.layouts import PAD_K, PAD_N, meet, stored_bits
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
      decodes: whether weights are decoded to bfloat16; otherwise both operands are taken as is.
      takes: whether it multiplies operands of two formats, None for high precision.
      load: imports Mosaic GPU, which older versions of JAX lack, and gives its function.
      groups: whether it takes rows in groups.
      load_group_sums: gives the function for sums over the rows of each group; None: it has none.
      possible: whether it can be compiled with tiles for codes of so many stored bits.
      shared_memory: bytes of it that the stages and a tile of the result take, barriers left out.
      resident: programs that one processor holds at a time, by their registers.
      tuning: (stored bits of a code; tiles and crossover).
      clips: whether tiles may reach beyond the operands.
    """

    name: str
    decodes: bool
    takes: Callable[[BlockFormat | None, BlockFormat | None], bool]
    load: Callable[[], Callable[..., jax.Array]]
    possible: Callable[[int, Tiles], bool]
    shared_memory: Callable[[int, Tiles], int]
    resident: int
    tuning: tuple[tuple[int, Tuning], ...]
    groups: bool = False
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
    tuning=tuple((bits, _FEW_ON_AMPERE) for bits in (4, 8)),
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


def _tuning_wgmma(few: Sequence[tuple[int, Tiles]], stages: int, many: int) -> Tuning:
    """Tiles of few rows; stages for up to 32 rows, and for 64: what memory has room for."""
    # At 32 rows, long steps take more registers than there are.
    tiles = (
        *((m, dataclasses.replace(tiles, m=m, splits=16)) for m, tiles in few),
        (32, Tiles(m=32, n=256, stages=stages, splits=16)),
        (64, Tiles(m=64, stages=many, splits=8)),
        (_ANY, Tiles(m=128, stages=3, splits=4)),
    )
    return Tuning(tiles=tiles, crossover=1024)


# Measured on an H200, weights of 8192 x 8192: without splits nothing is left to be added.
_FEW_OF_4_BITS = (
    (8, Tiles(m=8, n=64, k=512, stages=4)),
    (8, Tiles(m=8, n=64, k=256, stages=8)),
    (8, Tiles(m=8, n=256, k=256, stages=4)),
    (16, Tiles(m=16, n=128, k=512, stages=3)),
    (16, Tiles(m=16, n=64, k=256, stages=6)),
    (16, Tiles(m=16, n=256, k=256, stages=4)),
)
_FEW_OF_8_BITS = tuple(
    (m, tiles)
    for m in (8, 16)
    for tiles in (Tiles(m=m, n=64, k=256, stages=5), Tiles(m=m, n=256, stages=5))
)

WGMMA = Kernel(
    name="wgmma",
    decodes=True,
    takes=lambda lhs, rhs: True,
    load=_function("wgmma", "multiply"),
    groups=True,
    load_group_sums=_function("wgmma", "group_sums"),
    possible=_possible_wgmma,
    shared_memory=lambda bits, tiles: _stages(tiles, 16, bits) + tiles.n * tiles.m * 4,
    resident=1,
    tuning=(
        (4, _tuning_wgmma(_FEW_OF_4_BITS, 6, 7)),
        (8, _tuning_wgmma(_FEW_OF_8_BITS, 4, 5)),
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
    groups=True,
    possible=lambda bits, tiles: (
        tiles.m == 128 and tiles.n in (128, 256) and tiles.k * bits % 1024 == 0
    ),
    shared_memory=lambda bits, tiles: _stages(tiles, bits + 1, bits) + 2 * tiles.m * 128,
    resident=1,
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
      converts_float8: whether one instruction converts to float8, on all of these GPUs.
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
    converts_float8: bool
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
    converts_float8=False,
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
    converts_float8=True,
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
    """Let a row serve its compute capabilities from now on; what was traced is not traced again."""
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
    """Why there is no kernel for a call that `jit` may split between devices, or None."""
    # XLA would gather a kernel's operands, and each device do all of the work.
    if target.num_devices == 1:
        return None
    return (
        "runs on one device or below jax.shard_map: jit does not split a kernel, got "
        f"num_devices={target.num_devices}; only_backend('pallas_gpu') insists"
    )


# Which tiles a product takes ----------------------------------------------------------------------

# A pipeline shorter than this has no steady state.
_MIN_STEPS = 4


def choose(
    architecture: Architecture,
    kernel: Kernel,
    code_bits: int,
    *,
    batch: int,
    m: int,
    n: int,
    k: int,
) -> Tiles:
    """The table's tiles, shared by as many programs as still help.

    Of several entries for as many rows, the one that leaves the busiest processor the fewest
    weights to read. The entry's splits are an upper bound: few programs are split until they fill
    the machine, none into very few steps.

    Raises:
      ValueError: if none fit: the row's memory is smaller than its kernel can do with.
    """
    table = kernel.tuning_of(code_bits).tiles
    most_rows = next(limit for limit, _ in table if m <= limit)
    entries = [tiles for limit, tiles in table if limit == most_rows]
    n, k = n + -n % PAD_N, k + -k % PAD_K
    at_once = architecture.at_once(kernel)

    def fits(tiles: Tiles) -> bool:
        whole = tiles.n <= n if kernel.clips else n % tiles.n == k % tiles.k == 0
        return whole and architecture.possible(kernel, code_bits, tiles)

    def shared(tiles: Tiles) -> Tiles:
        idle, most = at_once // programs(tiles), -(-k // tiles.k) // _MIN_STEPS
        return dataclasses.replace(tiles, splits=max(1, min(tiles.splits, idle, most)))

    def programs(tiles: Tiles) -> int:
        return batch * -(-m // tiles.m) * -(-n // tiles.n)

    def read(tiles: Tiles) -> float:
        return -(-programs(tiles) * tiles.splits // at_once) * tiles.n * k / tiles.splits

    found = (next(filter(fits, _smaller(entry)), None) for entry in entries)
    best = min((shared(tiles) for tiles in found if tiles is not None), key=read, default=None)
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


def own_tiles(call: Call, target: Target, architecture: Architecture | None = None) -> Tiles | None:
    """Tiles that a product's kernel takes by the table; None of what has no tiles to choose."""
    row = architecture or architecture_of(target.compute_capability)
    # Sums over the rows of groups have tiles of one shape.
    if not isinstance(call, MatmulCall | RaggedCall) or row is None:
        return None
    if isinstance(call, RaggedCall) and call.contracts_rows:
        return None
    kernel = row.kernel(call.lhs.format, call.rhs.format)
    bits, sizes = _sizes(call, kernel)
    return choose(row, kernel, bits, **sizes)


def _sizes(call: MatmulCall | RaggedCall, kernel: Kernel) -> tuple[int, dict[str, int]]:
    """Bits of a code, and a product's sizes as tiles see them: of a group on average."""
    activations, weights = call.lhs, call.rhs
    if weights.format is None:
        activations, weights = weights, activations
    assert weights.format is not None
    element = weights.format.element
    groups = max(1, min(call.num_groups, call.lhs.rows)) if isinstance(call, RaggedCall) else 1
    return stored_bits(element) if kernel.decodes else element.bits, {
        "batch": groups,
        "m": -(-activations.rows // groups),
        "n": weights.rows,
        "k": math.prod(weights.shape[axis] for axis in weights.axes.contracting),
    }
