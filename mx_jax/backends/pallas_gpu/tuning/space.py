"""Which tiles are worth measuring."""

import dataclasses
import itertools
from collections.abc import Iterator

from mx_jax.backends.pallas_gpu.architecture import Architecture
from mx_jax.backends.pallas_gpu.kernels import Kernel
from mx_jax.backends.pallas_gpu.tuning.tiles import Tiles


def keeps_busy(architecture: Architecture, kernel: Kernel, tiles: Tiles, *, m: int, n: int) -> bool:
    """Whether a product of these sizes fills the machine at least half, and not many times over."""
    programs = -(-m // tiles.m) * -(-n // tiles.n) * tiles.splits * tiles.ctas
    full = architecture.at_once(kernel)
    if tiles.programs:
        # With one tile for each program nothing is left to be stored beneath.
        return programs > full
    return programs * 2 >= full and (tiles.splits == 1 or programs <= 4 * full)


def candidates(
    architecture: Architecture, kernel: Kernel, code_bits: int, rows: int
) -> Iterator[Tiles]:
    """Tiles worth measuring for a number of rows: of each shape one or two pipelines.

    Those of fewer rows only where memory has no room for as many.
    """
    m = min(128, max(kernel.min_rows, 1 << (rows - 1).bit_length()))
    found = list(_of_rows(architecture, kernel, code_bits, m))
    while not found and m > kernel.min_rows:
        m //= 2
        found = list(_of_rows(architecture, kernel, code_bits, m))
    yield from found
    if rows >= 128:
        yield from _persistent(architecture, kernel, code_bits)


def _persistent(architecture: Architecture, kernel: Kernel, code_bits: int) -> Iterator[Tiles]:
    """Of programs that stay, as many as there are processors for."""
    for m, n, ctas in kernel.persistent:
        for k in (128, 256):
            programs = architecture.num_sms // ctas
            one = Tiles(m=m, n=n, k=k, ctas=ctas, programs=programs)
            depths = (dataclasses.replace(one, stages=depth) for depth in range(8, 1, -1))
            fits = (tiles for tiles in depths if architecture.possible(kernel, code_bits, tiles))
            yield from itertools.islice(fits, 1)


def _of_rows(architecture: Architecture, kernel: Kernel, code_bits: int, m: int) -> Iterator[Tiles]:
    for n, parts in kernel.shapes:
        for k in (128, 256, 512):
            one = Tiles(m=m, n=n, k=k, parts=parts)
            depths = (dataclasses.replace(one, stages=depth * parts) for depth in range(8, 1, -1))
            fitting = (tiles for tiles in depths if architecture.possible(kernel, code_bits, tiles))
            for tiles in _worth_measuring(list(fitting)):
                for splits in (1, 2, 4, 8, 16):
                    yield dataclasses.replace(tiles, splits=splits)


def _worth_measuring(depths: list[Tiles]) -> Iterator[Tiles]:
    """Of the same tiles, the deepest pipeline, and the deepest of a power of two.

    Which stage a step has is then a mask of its number, and no remainder.
    """
    powers = [tiles for tiles in depths if tiles.stages & (tiles.stages - 1) == 0]
    yield from dict.fromkeys([*depths[:1], *powers[:1]])
