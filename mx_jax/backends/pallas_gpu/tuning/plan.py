"""Which tiles a product takes."""

import dataclasses
from collections.abc import Iterator

from mx_jax.backends.pallas_gpu.architecture import Architecture
from mx_jax.backends.pallas_gpu.kernels import Kernel
from mx_jax.backends.pallas_gpu.layouts.weights import PAD_K, PAD_N
from mx_jax.backends.pallas_gpu.tuning.stripes import Stripes
from mx_jax.backends.pallas_gpu.tuning.tiles import Tiles
from mx_jax.backends.pallas_gpu.tuning.tuned import tuned

# A pipeline shorter than this has no steady state.
_MIN_STEPS = 4
# Turns of each warpgroup, or steps, of a program that shares a tile, at least.
_MIN_TURNS = 2
# What fills the machine so nearly as well as the best is taken before it, if it adds fewer sums.
_NEARLY = 0.95


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """A product's sizes.

    Attributes:
      batch: number of products.
      m: rows of activations.
      n: rows of weights.
      k: contracted length.
    """

    batch: int
    m: int
    n: int
    k: int

    def stripes(self, tiles: Tiles) -> Stripes:
        """How the steps of its tiles are dealt to programs."""
        count = self.batch * -(-self.m // tiles.m) * -(-self.n // tiles.n)
        return Stripes.of(tiles, count, -(-self.k // tiles.k))

    def filling(self, tiles: Tiles, at_once: int) -> float:
        """The share of the machine's time that goes to codes of the weights, by count of steps.

        Programs run `at_once` at a time, and each wave takes as long as its longest program. Codes
        of tiles and steps that reach beyond the weights do not count.
        """
        stripes = self.stripes(tiles)
        waves = -(-stripes.programs // at_once)
        codes = self.batch * -(-self.m // tiles.m) * self.n * self.k
        return codes / (waves * at_once * stripes.longest * tiles.k * tiles.n)


def choose(
    architecture: Architecture,
    kernel: Kernel,
    code_bits: int,
    *,
    batch: int,
    m: int,
    n: int,
    k: int,
    stripes: bool = True,
) -> Tiles:
    """The table's tiles, shared by as many programs as still help.

    Args:
      architecture: the machine.
      kernel: one of its own.
      code_bits: 4, 6 or 8.
      batch: number of products.
      m: rows of activations.
      n: rows of weights.
      k: contracted length.
      stripes: whether a program may have steps of several tiles.

    Returns:
      Tiles. The entry's splits are an upper bound: few programs are split until they fill the
      machine, none into very few steps. `k * splits` divides k, padded, unless the kernel clips or
      shares steps unevenly.

    Raises:
      ValueError: if none fit: the row's memory is smaller than its kernel can do with.
    """
    sizes = Sizes(batch=batch, m=m, n=n, k=k)
    buckets = tuned(kernel, code_bits).tiles
    entry = next(tiles for limit, tiles in buckets if m <= limit)
    possible = (t for t in _smaller(entry) if architecture.possible(kernel, code_bits, t))
    if kernel.clips:
        fitting = possible
    else:
        n, k = n + -n % PAD_N, k + -k % PAD_K
        fitting = (t for t in possible if n % t.n == k % t.k == 0 and _has_rows(t, m))
    tiles = next(fitting, None)
    if tiles is None:
        raise ValueError(
            f"pallas_gpu: no tiles of {kernel} for {code_bits} bits fit {architecture}: n={n}, "
            f"k={k}, shared_memory={architecture.shared_memory}, nor any smaller than {entry}"
        )
    at_once = architecture.at_once(kernel)
    if kernel.clips:
        return _fullest(sizes, tiles, at_once, stripes)
    steps = k // tiles.k
    programs = batch * -(-m // tiles.m) * -(-n // tiles.n)
    if tiles.programs:
        return dataclasses.replace(tiles, splits=1, programs=min(tiles.programs, programs))
    if kernel.uneven:
        return _soonest(sizes, tiles, at_once, code_bits)
    wanted = min(tiles.splits, max(1, at_once // programs), max(1, steps // _MIN_STEPS))
    splits = max(count for count in range(1, wanted + 1) if steps % count == 0)
    return dataclasses.replace(tiles, splits=splits)


def _soonest(sizes: Sizes, tiles: Tiles, at_once: int, code_bits: int) -> Tiles:
    """Tiles shared by as many programs as are done first, by count: of codes, and of their sums."""
    most = max(1, min(tiles.splits, -(-sizes.k // tiles.k) // _MIN_TURNS))

    def speed(way: Tiles) -> float:
        # Float32 sums of a row of weights, written and read, beside its codes.
        sums = 0 if way.whole else 2 * 4 * way.splits * way.m
        return sizes.filling(way, at_once) / (1 + sums / (sizes.k * code_bits / 8))

    ways = (dataclasses.replace(tiles, splits=splits) for splits in range(1, most + 1))
    return max(ways, key=speed)


def _fullest(sizes: Sizes, tiles: Tiles, at_once: int, stripes: bool) -> Tiles:
    """Of the ways to share the tiles' steps, the one with fewest sums that nearly fills most."""
    found = (way for way in _ways(sizes, tiles, at_once) if stripes or not way.stripes)
    ways = [(way, sizes.filling(way, at_once)) for way in found]
    best = max(filling for _, filling in ways)
    return next(way for way, filling in ways if filling >= _NEARLY * best)


def _ways(sizes: Sizes, tiles: Tiles, at_once: int) -> Iterator[Tiles]:
    """Whole tiles, each split, or all dealt to as many programs as run at once; by shares."""
    yield dataclasses.replace(tiles, splits=1)
    for k in (tiles.k, 128):
        # As much in flight, and every warpgroup keeps stages of its own.
        stages = min(tiles.stages * (tiles.k // k), 32 // tiles.parts * tiles.parts)
        narrow = dataclasses.replace(tiles, k=k, stages=stages)
        ways = [dataclasses.replace(narrow, splits=splits) for splits in range(2, tiles.splits + 1)]
        ways.append(dataclasses.replace(narrow, splits=1, stripes=at_once))
        for way in ways:
            stripes = sizes.stripes(way)
            short = stripes.longest < _MIN_TURNS * tiles.parts
            if not short and stripes.programs <= at_once and stripes.shares <= tiles.splits:
                yield way


def _smaller(tiles: Tiles) -> Iterator[Tiles]:
    """Tiles, and what stands in for them where they do not divide an operand or do not fit."""
    for shape in _shapes(tiles):
        least = min(shape.stages, 2 * shape.parts)
        for stages in range(shape.stages, least - 1, -shape.parts):
            yield dataclasses.replace(shape, stages=stages)


def _has_rows(tiles: Tiles, m: int) -> bool:
    """Whether rows, padded as few or many are, make whole tiles of programs that stay."""
    return not tiles.programs or (m >= PAD_N and (m + -m % PAD_N) % tiles.m == 0)


def _shapes(tiles: Tiles) -> Iterator[Tiles]:
    yield tiles
    yield dataclasses.replace(tiles, n=128)
    if tiles.ctas > 1:
        single = {"m": tiles.m // tiles.ctas, "ctas": 1, "programs": tiles.programs * tiles.ctas}
        yield from _shapes(dataclasses.replace(tiles, **single))
        return
    if tiles.programs:
        yield from _shapes(dataclasses.replace(tiles, programs=0))
        return
    if tiles.parts > 1:
        yield dataclasses.replace(tiles, k=128)
    for m in (tiles.m, tiles.m // 2, tiles.m // 4, 16):
        for n in (tiles.n, 128) if tiles.parts == 1 else (128,):
            yield dataclasses.replace(tiles, k=128, m=m, n=n, parts=1, stages=min(tiles.stages, 4))
