"""Which tiles a GPU product gets."""

import math

import pytest

from mx_jax.backends.pallas_gpu.tiles import TILES, Tiles, choose
from tests.backends.mosaic import needs_mosaic

# A program of an H200 may ask for so much; barriers take a KiB more.
MEMORY = 226 * 1024


def shared_memory(bits: int, tiles: Tiles) -> int:
    """Bytes of the steps in flight, at worst with 16 codes to a scale of two bytes, and sums."""
    step = tiles.k * (tiles.m * 16 + tiles.n * (bits + 1)) // 8
    return tiles.stages * step + 4 * tiles.n * tiles.m


def is_possible(bits: int, tiles: Tiles) -> bool:
    """At most four warpgroups, registers and memory for them; barriers' phases fill one word."""
    shape = tiles.m in range(8, 129, 8) and tiles.n in range(64, 257, 64) and tiles.k % 128 == 0
    fits = tiles.m * tiles.n <= 256 * 64 and shared_memory(bits, tiles) <= MEMORY
    return shape and fits and tiles.stages <= 32


@pytest.mark.parametrize("bits", TILES)
def test_tiles_are_possible(bits: int):
    limits = [limit for limit, _ in TILES[bits]]
    assert limits == sorted(limits) and limits[-1] == math.inf
    for limit, tiles in TILES[bits]:
        assert is_possible(bits, tiles) and tiles.m <= limit


@needs_mosaic
def test_no_tile_asks_for_more_registers_than_it_starts_with():
    """`setmaxnreg` waits until as many are free: for more than there are it would for ever.

    Registers as ptxas reports them.
    """
    from mx_jax.backends.pallas_gpu.wgmma import (
        COPYING_REGISTERS,
        launch_registers,
        multiplying_registers,
    )

    assert [launch_registers(count) for count in (2, 3, 4, 5)] == [256, 168, 128, 96]
    assert [multiplying_registers(count) for count in (1, 2, 3, 4)] == [256, 232, 152, 104]
    for warpgroups in {tiles.n // 64 for table in TILES.values() for _, tiles in table}:
        wanted = multiplying_registers(warpgroups)
        assert 24 <= wanted <= 256 and wanted % 8 == 0
        started = launch_registers(warpgroups + 1) * (warpgroups + 1)
        assert COPYING_REGISTERS + warpgroups * wanted <= started <= 65536 // 128


@pytest.mark.parametrize(
    ("m", "n", "k", "expected"),
    [
        # Of two entries the one whose busiest processor reads fewer weights.
        (1, 8192, 8192, {"n": 64, "k": 256}),
        (1, 10240, 8192, {"n": 256, "splits": 3}),
        # Until all processors have a program, or programs few steps.
        (1, 2880, 2880, {"n": 64, "k": 256, "splits": 2}),
        (64, 8192, 8192, {"m": 64, "splits": 2}),
        (65, 8192, 8192, {"m": 128, "splits": 2}),
        (4096, 8192, 8192, {"m": 128}),
        (1, 128, 128 * 7, {"n": 64, "k": 256}),
    ],
)
def test_choice(m: int, n: int, k: int, expected: dict[str, int]):
    tiles = choose(8, batch=1, m=m, n=n, k=k)
    expected = {"m": 8, "n": 128, "k": 128, "splits": 1} | expected
    assert {name: getattr(tiles, name) for name in expected} == expected
    assert is_possible(8, tiles)


@pytest.mark.parametrize("bits", TILES)
@pytest.mark.parametrize(("m", "n"), [(3, 256), (20, 128), (300, 128), (300, 384)])
def test_every_choice_is_possible(m: int, n: int, bits: int):
    for k in range(256, 256 * 20, 128):
        tiles = choose(bits, batch=1, m=m, n=n, k=k)
        assert is_possible(bits, tiles) and tiles.n <= n
        assert 1 <= tiles.splits <= max(1, k // tiles.k)
