"""Which tiles a GPU product gets."""

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
    choose,
)
from mx_jax.backends.pallas_gpu.tiles import (
    COPYING_REGISTERS,
    Tiles,
    launch_registers,
    multiplying_registers,
)

# An architecture, one of its kernels, bits of a code.
Key = tuple[Architecture, Kernel, int]
KEYS = [
    (architecture, kernel, bits)
    for architecture in ARCHITECTURES
    for kernel in architecture.kernels
    for bits, _ in kernel.tuning
]


@pytest.mark.parametrize("key", KEYS, ids=str)
def test_tiles_are_possible(key: Key):
    _, kernel, bits = key
    buckets = kernel.tuning_of(bits).tiles
    limits = [limit for limit, _ in buckets]
    assert limits == sorted(limits) and limits[-1] == np.inf
    for limit, tiles in buckets:
        assert Architecture.possible(*key, tiles)
        assert tiles.m <= max(limit, buckets[0][1].m)


@pytest.mark.parametrize(
    ("architecture", "kernel", "tiles"),
    [
        (SM80, MMA, Tiles(m=8, n=64, k=128)),
        (SM80, MMA, Tiles(m=8, n=128, k=256)),
        (SM89, MMA, Tiles(m=64, n=64, k=256, stages=4)),
        (SM90, WGMMA, Tiles(m=12)),
        (SM90, WGMMA, Tiles(m=8, n=320)),
        (SM90, WGMMA, Tiles(m=8, n=256, k=512, stages=4)),
        (SM90, WGMMA, Tiles(m=128, n=256, k=128, stages=2)),
        (SM90, WGMMA, Tiles(m=8, n=64, k=128, stages=36)),
        (SM90, WGMMA, Tiles(m=8, k=192)),
        (SM90, WGMMA, Tiles(m=128, k=256)),
        (SM100, TCGEN05, Tiles(m=64, k=256)),
        (SM100, TCGEN05, Tiles(m=128, n=256, k=256, stages=5)),
        (SM100, MMA, Tiles(m=8, n=128, k=256)),
    ],
)
def test_impossible_tiles(architecture: Architecture, kernel: Kernel, tiles: Tiles):
    assert not architecture.possible(kernel, 4, tiles)


@pytest.mark.parametrize("bits", [4, 8])
def test_no_tile_asks_for_more_registers_than_it_starts_with(bits: int):
    """`setmaxnreg` waits until as many are free: for more than there are it would for ever."""
    found = {tiles for _, tiles in WGMMA.tuning_of(bits).tiles}
    for warpgroups in {tiles.n // 64 for tiles in found}:
        asked = multiplying_registers(warpgroups)
        assert 24 <= asked <= 256 and asked % 8 == 0
        started = launch_registers(warpgroups + 1) * (warpgroups + 1)
        assert COPYING_REGISTERS + warpgroups * asked <= started <= 65536 // 128


def test_registers():
    """As ptxas reports them of three warpgroups, and of five."""
    assert [launch_registers(count) for count in (2, 3, 4, 5)] == [256, 168, 128, 96]
    assert [multiplying_registers(count) for count in (1, 2, 3, 4)] == [256, 232, 152, 104]


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


@pytest.mark.parametrize(("bits", "stored"), [(4, 4.5), (8, 8.5)])
def test_enough_is_on_its_way_for_few_rows(bits: int, stored: float):
    """About what an H200 reads in a microsecond, beside what each processor multiplies."""
    wanted = 0.95 * 4.8e12 * 1e-6 / SM90.num_sms
    for limit, tiles in WGMMA.tuning_of(bits).tiles:
        waiting = (tiles.stages - 1) * tiles.k * tiles.n * stored / 8
        assert limit > 64 or waiting >= wanted, tiles


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
