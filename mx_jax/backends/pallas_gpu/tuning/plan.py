"""Which tiles a product takes."""

import dataclasses
from collections.abc import Iterator

from mx_jax.backends.pallas_gpu.architecture import Architecture
from mx_jax.backends.pallas_gpu.kernels import Kernel
from mx_jax.backends.pallas_gpu.tuning.table import tuned
from mx_jax.backends.pallas_gpu.tuning.tiles import Tiles

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
    """The table's tiles, with as many splits as still help.

    Args:
      architecture: the machine.
      kernel: one of its own.
      code_bits: 4, 6 or 8.
      batch: number of products.
      m: rows of activations.
      n: rows of weights, padded.
      k: contracted length, padded.

    Returns:
      Tiles whose `k * splits` divides k. The entry's splits are an upper bound: few programs are
      split until they fill the machine, none into fewer than four steps.

    Raises:
      ValueError: if none fit: the row's memory is smaller than its kernel can do with.
    """
    buckets = tuned(architecture, kernel, code_bits).tiles
    entry = next(tiles for limit, tiles in buckets if m <= limit)
    fitting = (
        tiles
        for tiles in _smaller(entry)
        if n % tiles.n == k % tiles.k == 0 and architecture.possible(kernel, code_bits, tiles)
    )
    tiles = next(fitting, None)
    if tiles is None:
        raise ValueError(
            f"pallas_gpu: no tiles of {kernel} for {code_bits} bits fit {architecture}: n={n}, "
            f"k={k}, shared_memory={architecture.shared_memory}, nor any smaller than {entry}"
        )
    steps = k // tiles.k
    programs = batch * -(-m // tiles.m) * -(-n // tiles.n)
    to_fill = max(1, architecture.at_once(kernel) // programs)
    wanted = min(tiles.splits, to_fill, max(1, steps // _MIN_STEPS))
    splits = max(count for count in range(1, wanted + 1) if steps % count == 0)
    return dataclasses.replace(tiles, splits=splits)


def _smaller(tiles: Tiles) -> Iterator[Tiles]:
    """Tiles, and what stands in for them where they do not divide an operand or do not fit."""
    for shape in _shapes(tiles):
        for stages in range(shape.stages, min(shape.stages, 2) - 1, -1):
            yield dataclasses.replace(shape, stages=stages)


def _shapes(tiles: Tiles) -> Iterator[Tiles]:
    yield tiles
    yield dataclasses.replace(tiles, n=128)
    if tiles.parts > 1:
        yield dataclasses.replace(tiles, k=256, parts=min(tiles.parts, 2))
    for m in (tiles.m, tiles.m // 2, tiles.m // 4, 16):
        for n in (tiles.n, 128) if tiles.parts == 1 else (128,):
            yield dataclasses.replace(tiles, k=128, m=m, n=n, parts=1)
