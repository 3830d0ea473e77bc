"""Tiles of GPU products."""

import dataclasses

import numpy as np
import pytest

from mx_jax.backends.pallas_gpu.architecture import (
    ARCHITECTURES,
    MMA,
    SM80,
    SM89,
    SM90,
    SM100,
    TCGEN05,
    WGMMA,
    Architecture,
    Kernel,
    Tiles,
    choose,
)
from tests.backends.mosaic import needs_mosaic

# An architecture, one of its kernels, bits of a code.
Key = tuple[Architecture, Kernel, int]
KEYS = [
    (architecture, kernel, bits)
    for architecture in ARCHITECTURES
    for kernel in (architecture.decoding, architecture.direct)
    if kernel is not None
    for bits in kernel.tiles
]


@pytest.mark.parametrize("key", KEYS, ids=str)
def test_tiles_are_possible(key: Key):
    _, kernel, bits = key
    buckets = kernel.tiles[bits]
    limits = [limit for limit, _ in buckets]
    assert limits == sorted(limits) and limits[-1] == np.inf
    for limit, tiles in buckets:
        assert Architecture.possible(*key, tiles)
        assert tiles.m <= max(limit, buckets[0][1].m)


@pytest.mark.parametrize(
    ("architecture", "kernel", "tiles"),
    [
        (SM80, MMA, Tiles(m=8, n=64, k=128)),
        (SM89, MMA, Tiles(m=64, n=64, k=256, stages=4)),
        (SM90, WGMMA, Tiles(m=12)),
        (SM90, WGMMA, Tiles(m=8, n=256, k=512, stages=4)),
        (SM90, WGMMA, Tiles(m=128, n=256, k=128, stages=2)),
        (SM90, WGMMA, Tiles(m=8, n=64, k=128, stages=36)),
        (SM90, WGMMA, Tiles(m=128, k=256)),
        (SM100, TCGEN05, Tiles(m=64, k=256)),
        (SM100, TCGEN05, Tiles(m=128, n=256, k=256, stages=5)),
    ],
)
def test_impossible_tiles(architecture: Architecture, kernel: Kernel, tiles: Tiles):
    assert not architecture.possible(kernel, 4, tiles)


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
    counts = {tiles.n // 64 for table in WGMMA.tiles.values() for _, tiles in table}
    for warpgroups in counts:
        registers = multiplying_registers(warpgroups)
        assert 24 <= registers <= 256 and registers % 8 == 0
        started = launch_registers(warpgroups + 1) * (warpgroups + 1)
        assert COPYING_REGISTERS + warpgroups * registers <= started <= 65536 // 128


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
    tiles = choose(SM90, WGMMA, 8, batch=1, m=m, n=n, k=k)
    expected = {"m": 8, "n": 128, "k": 128, "splits": 1} | expected
    assert {name: getattr(tiles, name) for name in expected} == expected
    assert SM90.possible(WGMMA, 8, tiles)


@pytest.mark.parametrize(("m", "n"), [(3, 256), (300, 128), (300, 384)])
def test_every_choice_is_possible(m: int, n: int):
    for k in range(256, 256 * 20, 128):
        for key in KEYS:
            k -= k % 256 if key[1] is TCGEN05 else 0
            tiles = choose(*key, batch=1, m=m, n=n, k=k)
            steps, rest = divmod(k, tiles.k)
            assert key[1].clips or n % tiles.n == rest == 0
            assert 1 <= tiles.splits <= max(1, steps)
            assert Architecture.possible(*key, tiles)


def test_memory_that_no_tiles_fit():
    tiny = dataclasses.replace(SM90, shared_memory=1024)
    with pytest.raises(ValueError, match="no tiles of wgmma for 4 bits fit sm90: n=128, k=25"):
        choose(tiny, WGMMA, 4, batch=1, m=8, n=128, k=256)
