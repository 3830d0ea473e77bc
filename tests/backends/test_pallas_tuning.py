"""Which tiles a GPU product gets."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mx_jax
from mx_jax import formats, recipes
from mx_jax.backends import evidence
from mx_jax.backends.calls import MatmulCall
from mx_jax.backends.evidence import Row, Work, source_of
from mx_jax.backends.pallas_gpu import PALLAS_GPU
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
    candidates,
    choose,
    configs,
    configured,
    tuned,
)
from mx_jax.backends.pallas_gpu.tiles import (
    COPYING_REGISTERS,
    Tiles,
    launch_registers,
    multiplying_registers,
)
from mx_jax.backends.select import BACKENDS, select
from mx_jax.backends.target import Config, Target
from mx_jax.measure.cases import Case
from mx_jax.testing.cases import MatmulCase, QuantizeCase
from tests.backends.altered import altered
from tests.backends.mosaic import with_any_jax

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
    for rows in (1, 16, 64, 4096):
        found |= set(candidates(SM90, WGMMA, bits, rows))
    for warpgroups in {tiles.n // 64 for tiles in found}:
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
        assert {tiles.m for tiles in found} == {min(128, max(key[1].min_rows, rows))}


@pytest.mark.parametrize(
    ("m", "n", "k", "expected"),
    [
        # Until all processors have a program, or programs few steps.
        (1, 8192, 8192, {"n": 256, "splits": 4}),
        (1, 2880, 2880, {"n": 256, "splits": 5}),
        (64, 8192, 8192, {"m": 64, "splits": 2}),
        (65, 8192, 8192, {"m": 128, "splits": 2}),
        (4096, 8192, 8192, {"m": 128}),
        (1, 128, 128 * 7, {}),
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


def test_less_deep_where_memory_is_small():
    mine = {"m": 8, "n": 256, "k": 256, "stages": 5}
    machines = [dataclasses.replace(SM90, shared_memory=kib * 1024) for kib in (240, 140, 80, 40)]
    with configured("wgmma", tuple(mine.items())):
        found = [choose(row, WGMMA, 4, batch=1, m=1, n=256, k=1024) for row in machines]
    shapes = [(t.n, t.k, t.stages) for t in found]
    assert shapes == [(256, 256, 5), (256, 256, 3), (128, 256, 3), (128, 128, 3)]


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


H200 = Target(platform="cuda", compute_capability=(9, 0), device_kind="NVIDIA H200")
B200 = Target(platform="cuda", compute_capability=(10, 0), device_kind="NVIDIA B200")
CASE = MatmulCase(
    lhs=None,
    rhs=formats.MXFP4,
    m=(1,),
    n=(8192,),
    k=(8192,),
    dtype="bfloat16",
    out_dtype="bfloat16",
)
MINE: Config = (("k", 128), ("m", 16), ("n", 128), ("splits", 2), ("stages", 3))


def of(**changes: Any) -> MatmulCall:
    return dataclasses.replace(CASE, **changes).call


@pytest.mark.parametrize("m", [1, 16, 64, 4096])
def test_what_is_tried_is_possible_and_comes_to_something_else(m: int):
    found = list(configs(of(m=(m,)), H200))
    tiles = [Tiles(**dict(config)) for config in found if "crossover" not in dict(config)]
    assert len(tiles) > 4 or m == 4096
    assert all(SM90.possible(WGMMA, 4, own) for own in tiles)
    sizes: dict[str, Any] = {"batch": 1, "m": m, "n": 8192, "k": 8192}
    resolved = [choose(SM90, WGMMA, 4, **sizes)]
    for own in tiles:
        with configured("wgmma", tuple(dataclasses.asdict(own).items())):
            resolved.append(choose(SM90, WGMMA, 4, **sizes))
    assert len(set(resolved)) == len(resolved)
    # Decoding first is for rows that fill a tile.
    assert ((("crossover", 1),) in found) == (m >= 64)


def test_what_has_no_tiles_is_not_tuned():
    cast = QuantizeCase(format=formats.MXFP4, shape=(64, 64), axis=-1).call
    assert list(configs(cast, H200)) == []
    assert list(configs(of(), Target(platform="cpu"))) == []


def test_products_of_rows_in_groups():
    case = Case(
        backend="pallas_gpu",
        kind="ragged product",
        formats=(None, "mxfp4"),
        shape=(512, 2048, 4096),
        groups=8,
    )
    found = list(configs(case.call, H200))
    assert len(found) > 2 and (("crossover", 1),) not in found
    assert {dict(config)["m"] for config in found} == {64}
    sums = dataclasses.replace(case, kind="ragged sums", formats=("mxfp4", "mxfp4"))
    assert list(configs(sums.call, H200)) == []


def test_kernels_that_take_operands_as_they_are():
    call = of(lhs=formats.MXFP8_E4M3, rhs=formats.MXFP8_E4M3, m=(256,))
    found = list(configs(call, B200))
    assert found and (("crossover", 1),) not in found
    assert all(SM100.possible(SM100.kernels[0], 8, Tiles(**dict(config))) for config in found)


def test_a_configuration_is_for_one_kernel_alone():
    own = WGMMA.tuning_of(4), MMA.tuning_of(4)
    with configured("wgmma", MINE):
        configured_tuning = tuned(WGMMA, 4)
        assert {tiles for _, tiles in configured_tuning.tiles} == {Tiles(**dict(MINE))}
        assert configured_tuning.crossover == float("inf")
        assert tuned(MMA, 4) == own[1]
    with configured("wgmma", (("crossover", 1),)):
        assert tuned(WGMMA, 4) == dataclasses.replace(own[0], crossover=1)
    assert tuned(WGMMA, 4) == own[0]


def row_of(call: MatmulCall, config: Config) -> Row:
    work = Work.of(call, "pallas_gpu")
    assert work is not None
    return Row(
        backend="pallas_gpu",
        kernel="wgmma",
        work=work,
        shape=(1, 8192, 8192),
        device_kind="NVIDIA H200",
        jax=jax.__version__,
        source=source_of(PALLAS_GPU) or "",
        config=config,
        error=0.1,
        over_plain=2.0,
        over_bfloat16=2.0,
        date="2026-11-20",
    )


def test_a_product_has_the_tiles_of_its_row(monkeypatch: pytest.MonkeyPatch):
    with_any_jax(monkeypatch)
    met: list[Tiles] = []

    def multiply(lhs, rhs, call):
        met.append(choose(SM90, WGMMA, 4, batch=1, m=call.lhs.rows, n=128, k=1024))
        return jnp.zeros((call.lhs.rows, call.rhs.rows), call.out_dtype)

    fake = altered(PALLAS_GPU, MatmulCall, multiply)
    table = tuple(fake if backend == PALLAS_GPU else backend for backend in BACKENDS)
    monkeypatch.setattr("mx_jax.backends.select.BACKENDS", table)

    @jax.jit
    def product(x, w):
        return mx_jax.matmul(x, w, recipe=recipes.weight_only("mxfp4"))

    x, w = jnp.zeros((16, 128), jnp.bfloat16), jnp.zeros((128, 64), jnp.bfloat16)
    call = of(m=(16,), n=(64,), k=(128,))
    own, mine = row_of(call, ()), row_of(call, MINE)
    assert own.choice != mine.choice and own.place == mine.place
    with mx_jax.testing.target("cuda", (9, 0), device_kind="NVIDIA H200"):
        for rows in ([own], [mine], [mine], [own]):
            with evidence.use(rows):
                product(x, w)
    # jit's key tells both apart.
    assert len(met) == 2
    assert met[1] == dataclasses.replace(Tiles(**dict(MINE)), splits=met[1].splits) != met[0]
    with evidence.use([mine]):
        choice = select(call, H200)
        assert choice.offer != PALLAS_GPU.offers[MatmulCall] and choice.offer == (
            select(call, H200).offer
        )
    assert str(mine).endswith("with k=128, m=16, n=128, splits=2, stages=3")
