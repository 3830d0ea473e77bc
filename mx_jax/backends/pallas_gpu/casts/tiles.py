"""What a program of the quantizing kernel takes at a time, and who holds what of it."""

import dataclasses
import math

Shape = tuple[int, ...]

LANES = 32
WARPS = 4
# What a thread loads at a time, and what a warp reads of a row, where rows are longer.
_VECTOR_BYTES = 16
_LINE_BYTES = 128
# Values that a thread holds of a tile of rows.
_PER_THREAD = 32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tile:
    """What one program quantizes of a view, and how its warps, their lanes and registers share it.

    Each size below divides the one before, axis by axis; the view has as many axes.

    Attributes:
      axes: along each of these a block lies, whole.
      shape: the tile.
      all_warps: what four warps hold in their first registers.
      warp: what a warp holds of that.
      lanes: what its lanes hold in one vector each.
      vector: what one lane loads at a time.
      scales_order: axes of the scales as the kernel stores them; empty: as they are.
    """

    axes: tuple[int, ...]
    shape: Shape
    all_warps: Shape
    warp: Shape
    lanes: Shape
    vector: Shape
    scales_order: Shape = ()

    def in_words(self) -> "Tile":
        """The same tile where two elements are one word."""
        names = ("shape", "all_warps", "warp", "lanes", "vector")
        sizes = {name: getattr(self, name) for name in names}
        halved = {name: (*size[:-1], size[-1] // 2) for name, size in sizes.items()}
        return dataclasses.replace(self, **halved)

    def padded(self, shape: Shape) -> Shape:
        """The smallest view of whole tiles."""
        return tuple(n + -n % tile for n, tile in zip(shape, self.shape, strict=True))

    def counts(self, shape: Shape) -> Shape:
        """Tiles along each axis of a view."""
        return tuple(n // tile for n, tile in zip(shape, self.shape, strict=True))


def along_rows(num_blocks: int, block: int, itemsize: int) -> Tile:
    """Of a view `[blocks, block]`: whole blocks one after another in memory."""
    vector = _VECTOR_BYTES // itemsize
    rows = LANES * vector // block
    repeats = _PER_THREAD // vector
    while num_blocks % (WARPS * rows * repeats) and repeats > 1:
        repeats //= 2
    return Tile(
        axes=(1,),
        shape=(WARPS * rows * repeats, block),
        all_warps=(WARPS * rows, block),
        warp=(rows, block),
        lanes=(rows, block),
        vector=(1, vector),
    )


def along_columns(shape: Shape, block: int, itemsize: int) -> Tile:
    """Of a view `[blocks, block, inner]`: lines of 128 bytes under each other."""
    vector = _VECTOR_BYTES // itemsize
    line = _LINE_BYTES // itemsize
    down, across = _share((shape[0], shape[2]), (1, line))
    all_warps = (down, block, across * line)
    return Tile(
        axes=(1,),
        shape=all_warps,
        all_warps=all_warps,
        warp=(1, block, line),
        lanes=(1, LANES * vector // line, line),
        vector=(1, 1, vector),
    )


def along_both(shape: Shape, block: int, itemsize: int) -> Tile:
    """Of a view `[blocks, block, blocks', block]`: as `along_columns`.

    The first axis is that of columns, along the second; the other is that of rows.
    """
    vector = _VECTOR_BYTES // itemsize
    line = _LINE_BYTES // itemsize
    down, across = _share((shape[0], shape[2]), (1, line // block))
    all_warps = (down, block, across * (line // block), block)
    return Tile(
        axes=(1, 3),
        shape=all_warps,
        all_warps=all_warps,
        warp=(1, block, line // block, block),
        lanes=(1, LANES * vector // line, line // block, block),
        vector=(1, 1, 1, vector),
    )


def along_rows_of_tiles(block: int, itemsize: int) -> Tile:
    """Of a view `[rows / 128, 4, 32, k / (4 * block), 4, block]`: as `along_rows`, but scales lie
    as Blackwell's tensor cores read them, in `[rows / 128, k / (4 * block), 32, 4, 4]`."""
    vector = _VECTOR_BYTES // itemsize
    rows = LANES * vector // (4 * block) or 1
    columns = min(LANES * vector // block, 4)
    repeats = _PER_THREAD // vector
    warp = (1, 1, rows, 1, columns, block)
    return Tile(
        axes=(5,),
        shape=(1, WARPS, rows * repeats * columns // 4, 1, 4, block),
        all_warps=(1, WARPS, rows, 1, columns, block),
        warp=warp,
        lanes=warp,
        vector=(1, 1, 1, 1, 1, vector),
        scales_order=(0, 3, 2, 1, 4),
    )


def _share(lengths: tuple[int, int], sizes: tuple[int, int]) -> tuple[int, int]:
    """How many warps lie down and across: the way that pads least, and the widest of those."""

    def area(way: tuple[int, int]) -> int:
        tiles = (size * warps for size, warps in zip(sizes, way, strict=True))
        return math.prod(n + -n % tile for n, tile in zip(lengths, tiles, strict=True))

    return min(((1, WARPS), (2, WARPS // 2), (WARPS, 1)), key=area)
