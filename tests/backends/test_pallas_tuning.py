"""Which tiles a GPU product gets."""

import dataclasses
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mx_jax.backends.pallas_gpu.architecture import (
    ARCHITECTURES,
    SM80,
    SM89,
    SM90,
    SM100,
    Architecture,
)
from mx_jax.backends.pallas_gpu.kernels import MMA, TCGEN05, WGMMA, Kernel
from mx_jax.backends.pallas_gpu.tuning.measured import configured
from mx_jax.backends.pallas_gpu.tuning.plan import Sizes, choose
from mx_jax.backends.pallas_gpu.tuning.space import candidates, keeps_busy
from mx_jax.backends.pallas_gpu.tuning.stripes import Stripes, add_shares
from mx_jax.backends.pallas_gpu.tuning.tiles import (
    COPYING_REGISTERS,
    Tiles,
    launch_registers,
    multiplying_registers,
)
from mx_jax.measure.cases import SIZES

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
        assert tiles.m <= max(limit, kernel.min_rows)


@pytest.mark.parametrize(
    ("architecture", "kernel", "tiles"),
    [
        (SM80, MMA, Tiles(m=8, n=64, k=128)),
        (SM80, MMA, Tiles(m=8, n=128, k=256)),
        (SM89, MMA, Tiles(m=64, n=64, k=256, stages=4)),
        (SM90, WGMMA, Tiles(m=12)),
        (SM90, WGMMA, Tiles(m=8, n=320)),
        (SM90, WGMMA, Tiles(m=8, n=128, k=512, parts=4)),
        (SM90, WGMMA, Tiles(m=8, n=64, k=128, parts=4, stages=6)),
        (SM90, WGMMA, Tiles(m=8, n=64, k=128, parts=4, stages=36)),
        (SM90, WGMMA, Tiles(m=128, n=64, k=512, stages=2, parts=4)),
        (SM80, MMA, Tiles(m=8, n=64, k=256, parts=2)),
        (SM90, WGMMA, Tiles(m=8, k=192)),
        (SM90, WGMMA, Tiles(m=128, k=256)),
        (SM100, TCGEN05, Tiles(m=64, k=256)),
        (SM100, TCGEN05, Tiles(m=128, n=256, k=256, stages=5)),
        (SM100, MMA, Tiles(m=8, n=128, k=256)),
    ],
)
def test_impossible_tiles(architecture: Architecture, kernel: Kernel, tiles: Tiles):
    assert not architecture.possible(kernel, 4, tiles)


@pytest.mark.parametrize("bits", [4, 6, 8])
def test_no_tile_asks_for_more_registers_than_it_starts_with(bits: int):
    """`setmaxnreg` waits until as many are free: for more than there are it would for ever."""
    found = {tiles for _, tiles in WGMMA.tuning_of(bits).tiles}
    for rows in (1, 16, 64, 4096):
        found |= set(candidates(SM90, WGMMA, bits, rows))
    for warpgroups in {tiles.n * tiles.parts // 64 for tiles in found}:
        asked = multiplying_registers(warpgroups)
        assert 24 <= asked <= 256 and asked % 8 == 0
        started = launch_registers(warpgroups + 1) * (warpgroups + 1)
        assert COPYING_REGISTERS + warpgroups * asked <= started <= 65536 // 128


def test_registers():
    """As ptxas reports them of three warpgroups, and of five."""
    assert [launch_registers(count) for count in (2, 3, 4, 5)] == [256, 168, 128, 96]
    assert [multiplying_registers(count) for count in (1, 2, 3, 4)] == [256, 232, 152, 104]


@pytest.mark.parametrize("key", KEYS, ids=str)
def test_candidates_are_many_and_fit_the_rows(key: Key):
    for rows in (1, 16, 64, 4096):
        found = set(candidates(*key, rows))
        assert len(found) > 4 and all(Architecture.possible(*key, tiles) for tiles in found)
        assert {tiles.m // tiles.ctas for tiles in found} == {min(128, max(key[1].min_rows, rows))}


def test_candidates_have_pipelines_of_a_power_of_two():
    found = set(candidates(SM90, WGMMA, 4, 8))
    shapes: dict[Tiles, set[int]] = {}
    for tiles in found:
        shapes.setdefault(dataclasses.replace(tiles, stages=1), set()).add(tiles.stages)
    assert all(any(stages & (stages - 1) == 0 for stages in own) for own in shapes.values())
    assert max(len(own) for own in shapes.values()) == 2


@pytest.mark.parametrize(
    ("m", "n", "k", "expected"),
    [
        (1, 8192, 8192, {"m": 8, "k": 256}),
        (1, 4096, 8192, {"m": 8, "k": 256, "splits": 2}),
        (1, 5120, 5120, {"m": 8, "k": 256, "stripes": 132}),
        (1, 4096, 11008, {"m": 8, "k": 256, "splits": 2}),
        (1, 2880, 2880, {"m": 8, "k": 128, "stripes": 132}),
        (64, 8192, 8192, {"m": 64, "splits": 2}),
        (65, 8192, 8192, {"m": 128, "splits": 2}),
        (4096, 8192, 8192, {"m": 128}),
        (1, 128, 128, {"m": 8, "k": 256}),
        (1, 128, 128 * 7, {"m": 8, "k": 256}),
    ],
)
def test_choice(m: int, n: int, k: int, expected: dict[str, int]):
    tiles = choose(SM90, WGMMA, 8, batch=1, m=m, n=n, k=k)
    expected = {"k": 128, "splits": 1, "stripes": 0} | expected
    assert {name: getattr(tiles, name) for name in expected} == expected
    assert SM90.possible(WGMMA, 8, tiles)


@pytest.mark.parametrize("bits", [4, 6, 8])
@pytest.mark.parametrize("m", [1, 16])
def test_shapes_of_models_fill_the_machine(m: int, bits: int):
    """By count: the share of a step's time, of all processors, that goes to codes."""
    for n, k in SIZES:
        sizes = Sizes(batch=1, m=m, n=n, k=k)
        tiles = choose(SM90, WGMMA, bits, batch=1, m=m, n=n, k=k)
        assert sizes.filling(tiles, SM90.at_once(WGMMA)) >= 0.93, (n, k, tiles)


@pytest.mark.parametrize(
    ("architecture", "least"), [(SM80, 0.78), (SM89, 0.88), (SM100, 0.85)], ids=str
)
def test_shapes_of_models_fill_other_machines_at_one_row(architecture: Architecture, least: float):
    """In whole tiles, which programs share unevenly."""
    for n, k in SIZES:
        sizes = Sizes(batch=1, m=1, n=n, k=k)
        tiles = choose(architecture, MMA, 4, batch=1, m=1, n=n, k=k)
        assert sizes.filling(tiles, architecture.at_once(MMA)) >= least, (n, k, tiles)


def test_the_page_says_how_full_other_machines_are():
    page = (Path(__file__).parents[2] / "docs" / "gpu.md").read_text()
    for n, k in SIZES:
        sizes, told = Sizes(batch=1, m=1, n=n, k=k), []
        for own in (SM80, SM89, SM100):
            tiles = choose(own, MMA, 4, batch=1, m=1, n=n, k=k)
            told.append(rf"{100 * sizes.filling(tiles, own.at_once(MMA)):.0f} % \(\d+ %\)")
        line = r" \| ".join([f"{n} x {k}", *told])
        assert re.search(rf"\| {line} \|", page), line


def test_sums_that_take_longer_than_they_save_are_not_shared():
    """Seven programs for each tile would fill more, but 64 rows of sums outweigh the codes."""
    tiles = choose(SM100, MMA, 4, batch=1, m=64, n=11008, k=4096)
    assert tiles.splits == 1
    assert choose(SM100, MMA, 4, batch=1, m=1, n=11008, k=4096).splits == 8
    # No program with a single step, and none without one.
    assert choose(SM100, MMA, 4, batch=1, m=1, n=128, k=1024).splits == 2


@pytest.mark.parametrize(("bits", "stored"), [(4, 4.5), (6, 6.5), (8, 8.5)])
def test_enough_is_on_its_way_for_few_rows(bits: int, stored: float):
    """About what an H200 reads in a microsecond, beside what each processor multiplies."""
    wanted = 0.95 * 4.8e12 * 1e-6 / SM90.num_sms
    for limit, tiles in WGMMA.tuning_of(bits).tiles:
        waiting = (tiles.stages - tiles.parts) * tiles.k * tiles.n * stored / 8
        assert limit > 64 or waiting >= wanted, tiles


def test_filling():
    sizes, tiles = Sizes(batch=1, m=1, n=5120, k=5120), Tiles(m=8, n=64, k=512)
    # 80 tiles of 10 steps on 132 processors; dealt evenly, seven for some; 160 programs in 2 waves.
    assert sizes.filling(tiles, 132) == 80 / 132
    assert sizes.filling(dataclasses.replace(tiles, stripes=132), 132) == 800 / (132 * 7)
    assert sizes.filling(dataclasses.replace(tiles, splits=2), 132) == 800 / (2 * 132 * 5)
    # A step of which half lies beyond k.
    assert dataclasses.replace(sizes, k=256).filling(tiles, 80) == 0.5


@pytest.mark.parametrize(
    ("tiles", "steps", "programs", "shares"),
    [(5, 8, 5, 1), (5, 8, 15, 3), (5, 8, 4, 2), (3, 7, 21, 7), (45, 23, 132, 4), (1, 9, 1, 1)],
)
def test_stripes_cover_every_step_once(tiles: int, steps: int, programs: int, shares: int):
    stripes = Stripes(tiles=tiles, steps=steps, programs=programs)
    assert (stripes.shares, stripes.within_tiles) == (shares, programs % tiles == 0)
    found = []
    for program in range(programs):
        program = jnp.int32(program)

        def segment(tile, first, count, segments, program=program):
            return [
                *segments,
                (int(tile), int(first), int(count), int(stripes.share(program, tile))),
            ]

        with jax.disable_jit():
            found.append(stripes.segments(program, segment, []))
        assert 0 < sum(count for _, _, count, _ in found[-1]) <= stripes.longest
    walked = [segment for segments in found for segment in segments]
    every = [(t, s) for t, first, count, _ in walked for s in range(first, first + count)]
    assert every == [(t, s) for t in range(tiles) for s in range(steps)]
    for tile in range(tiles):
        of_tile = [share for t, _, _, share in walked if t == tile]
        assert of_tile == list(range(stripes.num_shares(tile)))


def test_shares_that_a_tile_has_not_are_not_added(rng: np.random.Generator):
    """Two products of 2 by 3 tiles, 4 by 8 each, at most; the last ones beyond the product."""
    stripes = Stripes(tiles=12, steps=5, programs=17)
    sums = rng.integers(0, 9, (stripes.shares, 2, 7, 20)).astype(np.float32)
    expected = np.zeros((2, 7, 20), np.float32)
    for batch, m, n in np.ndindex(2, 2, 3):
        tile = (batch * 3 + n) * 2 + m
        at = batch, slice(4 * m, 4 * m + 4), slice(8 * n, 8 * n + 8)
        count = stripes.num_shares(tile)
        expected[at] = sums[(slice(count), *at)].sum(0)
        sums[(slice(count, None), *at)] = np.nan
    np.testing.assert_array_equal(add_shares(jnp.asarray(sums), stripes, (4, 8)), expected)
    assert np.isnan(sums).any()


def test_less_deep_where_memory_is_small():
    mine = {"m": 8, "n": 64, "k": 256, "stages": 12, "parts": 4}
    machines = [dataclasses.replace(SM90, shared_memory=kib * 1024) for kib in (226, 140, 80, 50)]
    with configured("wgmma", tuple(mine.items())):
        found = [choose(row, WGMMA, 4, batch=1, m=1, n=128, k=1024) for row in machines]
    shapes = [(t.k, t.stages, t.parts) for t in found]
    assert shapes == [(256, 12, 4), (256, 8, 4), (128, 8, 4), (128, 3, 1)]


def test_busy():
    few, many = Tiles(m=8, n=64, parts=4), Tiles(m=8, n=128, splits=16)
    assert keeps_busy(SM90, WGMMA, few, m=1, n=8192)
    assert not keeps_busy(SM90, WGMMA, few, m=1, n=1024)
    assert not keeps_busy(SM90, WGMMA, many, m=1, n=8192)


@pytest.mark.parametrize(("m", "n"), [(3, 256), (300, 128), (300, 384)])
def test_every_choice_is_possible(m: int, n: int):
    for k in range(256, 256 * 20, 128):
        for key in KEYS:
            k -= k % 256 if key[1] is TCGEN05 else 0
            tiles = choose(*key, batch=1, m=m, n=n, k=k)
            steps, rest = divmod(k, tiles.k)
            assert key[1].clips or n % tiles.n == rest == 0
            assert key[1].clips or key[1].uneven or steps % tiles.splits == 0
            assert Architecture.possible(*key, tiles)
