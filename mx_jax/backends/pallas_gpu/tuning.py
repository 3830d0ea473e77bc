"""Which tiles a product takes: data per architecture, width of the codes and number of rows.

An architecture's name stands for its kernel that decodes weights; Blackwell's other kernel, which
takes both operands as they are, has a name of its own.

No entry below has been measured on hardware: they follow from the sizes of shared memory and of the
register file, and from the number of processors to fill. `python -m benchmarks.gpu_tune` measures
on a GPU and writes a file; `MX_JAX_GPU_TILES` names a file to use instead of these entries.
"""

import dataclasses
import functools
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

# Names a JSON file with a table of tiles, read once.
TILES_VARIABLE = "MX_JAX_GPU_TILES"
# Blackwell's kernel for two block-scaled operands.
TCGEN05 = "tcgen05"

# Programs in flight that fill the machine once: SMs of an A100, L40S, H100 or H200, B200.
_NUM_SMS = {"sm80": 108, "sm89": 142, "sm90": 132, "sm100": 148, TCGEN05: 148}
_KIB = {"sm80": 163, "sm89": 99, "sm90": 227, "sm100": 227, TCGEN05: 227}
# Bytes that a program may ask for, a KiB left for barriers.
SHARED_MEMORY = {name: (size - 1) * 1024 for name, size in _KIB.items()}
# Those whose programs are one warpgroup that multiplies by mma.
MMA = ("sm80", "sm89", "sm100")
# Programs that one SM holds at a time, by their registers.
_RESIDENT = {"sm90": 1, TCGEN05: 1}
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
      parts: warpgroups of a program that share its rows, and add their sums in shared memory: each
        multiplies a part of every step's k. Only Hopper's kernel knows more than one.
    """

    m: int
    n: int = 128
    k: int = 128
    stages: int = 4
    splits: int = 1
    parts: int = 1


def shared_memory(architecture: str, code_bits: int, tiles: Tiles) -> int:
    """Bytes of shared memory that the stages and a tile of the result take, barriers left out."""
    # By tcgen05 both sides are codes. At worst, 16 of them share a scale of two bytes.
    both = architecture == TCGEN05
    lhs_bits = code_bits + 1 if both else 16
    step = tiles.k * (tiles.m * lhs_bits + tiles.n * (code_bits + 1)) // 8
    sums = tiles.n * tiles.m * 4
    results = sums if tiles.parts == 1 else (1 + tiles.parts) * sums
    result = {"sm90": results, TCGEN05: 2 * tiles.m * 128}
    return tiles.stages * step + result.get(architecture, 0)


def possible(architecture: str, code_bits: int, tiles: Tiles) -> bool:
    """Whether an architecture's kernel can be compiled with these tiles, and started."""
    if tiles.k % 128 or shared_memory(architecture, code_bits, tiles) > SHARED_MEMORY[architecture]:
        return False
    if architecture == TCGEN05:
        return tiles.m == 128 and tiles.n in (128, 256) and tiles.k * code_bits % 1024 == 0
    # A row of accumulators for every 8 activations.
    rows = tiles.m % 8 == 0 and tiles.m <= 128
    if architecture == "sm90":
        return rows and _possible_warpgroups(tiles)
    rows = rows and tiles.parts == 1
    # cp.async copies at least four tiles of 8 by 64 activations.
    return rows and tiles.n == 64 and tiles.m * tiles.k % (4 * 8 * 64) == 0


def _possible_warpgroups(tiles: Tiles) -> bool:
    """Whether a program of Hopper's kernel has at most four warpgroups, and registers for them."""
    # A group of codes, which one warpgroup decodes at a time, spans at most 128 columns.
    warpgroups, rest = divmod(tiles.n * tiles.parts, 64)
    parted = tiles.k % (128 * tiles.parts) == 0
    return not rest and parted and warpgroups <= 4 and warpgroups * tiles.m <= 256


# (architecture, bits of a code as it lies in memory) -> (largest number of rows, tiles), ascending.
# sm90: any number of rows of activations that 8 divides. Few: four warpgroups decode the same 64
# rows of weights, so that some work while others wait, and no sums leave a program where k need not
# be split. Many: 64 rows of weights for each of two warpgroups. tcgen05: 128 by 128 or 256, with
# steps of 128 bytes.
TILES: dict[tuple[str, int], tuple[tuple[float, Tiles], ...]] = {
    **{
        (architecture, bits): (
            (8, Tiles(m=8, n=64, k=256, splits=16)),
            (16, Tiles(m=16, n=64, splits=16)),
            (32, Tiles(m=32, n=64, stages=3, splits=8)),
            (float("inf"), Tiles(m=64, n=64, stages=3, splits=4)),
        )
        for architecture in MMA
        for bits in (4, 6, 8)
    },
    **{
        ("sm90", bits): (
            (8, Tiles(m=8, n=64, k=512, stages=5, splits=16, parts=4)),
            (16, Tiles(m=16, n=64, k=512, stages=4, splits=16, parts=4)),
            (32, Tiles(m=32, n=64, k=512, stages=3, splits=16, parts=4)),
            (64, Tiles(m=64, splits=8)),
            (float("inf"), Tiles(m=128, stages=3, splits=4)),
        )
        for bits in (4, 6)
    },
    ("sm90", 8): (
        (8, Tiles(m=8, n=64, k=512, stages=4, splits=16, parts=4)),
        (16, Tiles(m=16, n=64, k=512, stages=3, splits=16, parts=4)),
        (32, Tiles(m=32, splits=16)),
        (64, Tiles(m=64, splits=8)),
        (float("inf"), Tiles(m=128, stages=3, splits=4)),
    ),
    (TCGEN05, 4): (
        (256, Tiles(m=128, k=256, stages=4, splits=8)),
        (float("inf"), Tiles(m=128, n=256, k=256, stages=3, splits=2)),
    ),
    (TCGEN05, 8): (
        (256, Tiles(m=128, k=256, stages=2, splits=8)),
        (float("inf"), Tiles(m=128, n=256, k=128, stages=3, splits=2)),
    ),
}

# (architecture, bits of a code) -> rows from which it is faster to dequantize the weights once and
# let XLA multiply in bfloat16. At so many rows the tensor cores are the bound for either, and a
# kernel decodes the same weights again for every tile of rows.
CROSSOVER: dict[tuple[str, int], int] = {
    **{(architecture, bits): 256 for architecture in MMA for bits in (4, 6, 8)},
    **{("sm90", bits): 1024 for bits in (4, 6, 8)},
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Table:
    """What tuning finds.

    Attributes:
      tiles: as `TILES`.
      crossover: as `CROSSOVER`.
    """

    tiles: Mapping[tuple[str, int], tuple[tuple[float, Tiles], ...]]
    crossover: Mapping[tuple[str, int], float]


def read(path: Path) -> Table:
    """The entries above, and those of a file in their place.

    Args:
      path: JSON: `{"sm90, 4 bits": {"crossover": 1024, "tiles": [{"rows": 8, "m": 8, "n": 128,
        "k": 256, "stages": 5, "splits": 16}, ...]}}`; rows ascend, null for any number.

    Raises:
      ValueError: if the file does not say this, or its tiles are impossible.
    """
    tiles, crossover = dict(TILES), dict[tuple[str, int], float](CROSSOVER)
    try:
        for name, entry in json.loads(path.read_text()).items():
            architecture, bits = name.removesuffix(" bits").split(", ")
            key = architecture, int(bits)
            tiles[key] = tuple(map(_bucket, entry["tiles"]))
            crossover[key] = math.inf if entry["crossover"] is None else entry["crossover"]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(
            f"{TILES_VARIABLE}: needs a table as `python -m benchmarks.gpu_tune` writes it, got "
            f"path={str(path)!r}: {error!r}"
        ) from None
    for (architecture, bits), buckets in tiles.items():
        rows = [limit for limit, _ in buckets]
        bad = [t for _, t in buckets if not possible(architecture, bits, t)]
        if bad or rows != sorted(rows) or rows[-1:] != [math.inf]:
            raise ValueError(
                f"{TILES_VARIABLE}: needs possible tiles for ascending rows, up to any number, got "
                f"path={str(path)!r}, architecture={architecture!r}, bits={bits}, rows={rows}, "
                f"impossible={bad}"
            )
    return Table(tiles=tiles, crossover=crossover)


def _bucket(entry: dict[str, Any]) -> tuple[float, Tiles]:
    sizes = {name: size for name, size in entry.items() if name != "rows"}
    return math.inf if entry["rows"] is None else entry["rows"], Tiles(**sizes)


def as_json(found: Table) -> str:
    """What `read` reads."""
    entries = {
        f"{architecture}, {bits} bits": {
            "crossover": _finite(found.crossover.get((architecture, bits), math.inf)),
            "tiles": [{"rows": _finite(rows)} | dataclasses.asdict(t) for rows, t in buckets],
        }
        for (architecture, bits), buckets in found.tiles.items()
    }
    return json.dumps(entries, indent=2) + "\n"


def _finite(number: float) -> float | None:
    return None if math.isinf(number) else number


@functools.cache
def table() -> Table:
    """The entries above, or those of the file that the environment names."""
    path = os.environ.get(TILES_VARIABLE)
    return Table(tiles=TILES, crossover=CROSSOVER) if path is None else read(Path(path))


# (n, parts) worth measuring.
_SHAPES = {
    "sm90": ((64, 2), (64, 4), (128, 1), (128, 2), (256, 1)),
    TCGEN05: ((128, 1), (256, 1)),
}


def candidates(architecture: str, code_bits: int, rows: int) -> Iterator[Tiles]:
    """Tiles worth measuring for a number of rows: of each shape the deepest pipeline."""
    m = 128 if architecture == TCGEN05 else min(128, max(8, 1 << (rows - 1).bit_length()))
    for n, parts in _SHAPES.get(architecture, ((64, 1),)):
        for k in (128, 256, 512):
            one = Tiles(m=m, n=n, k=k, parts=parts)
            depths = (dataclasses.replace(one, stages=stages) for stages in range(6, 1, -1))
            deepest = [tiles for tiles in depths if possible(architecture, code_bits, tiles)][:1]
            for tiles in deepest:
                for splits in (1, 2, 4, 8, 16):
                    yield dataclasses.replace(tiles, splits=splits)


def keeps_busy(architecture: str, tiles: Tiles, *, m: int, n: int) -> bool:
    """Whether a product of these sizes fills the machine at least half, and not many times over."""
    programs = -(-m // tiles.m) * -(-n // tiles.n) * tiles.splits
    at_once = _RESIDENT.get(architecture, 2) * _NUM_SMS[architecture]
    return programs * 2 >= at_once and (tiles.splits == 1 or programs <= 4 * at_once)


def choose(architecture: str, code_bits: int, *, batch: int, m: int, n: int, k: int) -> Tiles:
    """The table's tiles, with as many splits as still help.

    Args:
      architecture: e.g. `"sm90"`, or `TCGEN05`.
      code_bits: 4, 6 or 8.
      batch: number of products.
      m: rows of activations.
      n: rows of weights, padded.
      k: contracted length, padded.

    Returns:
      Tiles whose `k * splits` divides k. The entry's splits are an upper bound: few programs are
      split until they fill the machine, none into fewer than four steps.
    """
    buckets = table().tiles[architecture, code_bits]
    tiles = next(tiles for limit, tiles in buckets if m <= limit)
    fits = functools.partial(possible, architecture, code_bits)
    tiles = next(t for t in _smaller(tiles) if n % t.n == k % t.k == 0 and fits(t))
    steps = k // tiles.k
    programs = batch * -(-m // tiles.m) * -(-n // tiles.n)
    to_fill = max(1, _RESIDENT.get(architecture, 2) * _NUM_SMS[architecture] // programs)
    wanted = min(tiles.splits, to_fill, max(1, steps // _MIN_STEPS))
    splits = max(count for count in range(1, wanted + 1) if steps % count == 0)
    return dataclasses.replace(tiles, splits=splits)


def _smaller(tiles: Tiles) -> Iterator[Tiles]:
    """Tiles, and what stands in for them where they do not divide an operand."""
    yield tiles
    if tiles.parts > 1:
        yield dataclasses.replace(tiles, k=256, parts=min(tiles.parts, 2))
    for m in (tiles.m, 16):
        for n in (tiles.n, 128) if tiles.parts == 1 else (128,):
            yield dataclasses.replace(tiles, k=128, m=m, n=n, parts=1)
