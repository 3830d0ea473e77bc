"""Which tiles a GPU product gets."""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mx_jax
from mx_jax import recipes
from mx_jax.backends.pallas_gpu import architecture
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
from mx_jax.backends.pallas_gpu.rejections import rejects
from mx_jax.backends.pallas_gpu.tiles import (
    COPYING_REGISTERS,
    Tiles,
    launch_registers,
    multiplying_registers,
)
from mx_jax.backends.select import prefer_backends, select
from mx_jax.backends.target import Target
from mx_jax.formats import MXFP4, MXFP6_E2M3, MXFP8_E4M3
from mx_jax.testing.cases import MatmulCase
from tests.backends.mosaic import needs_mosaic

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


# GPUs and kernels as rows: a GPU that mx_jax does not know, registered from outside.


# A Hopper with the memory of an RTX and few processors.
SMALL_HOPPER = dataclasses.replace(
    SM90,
    name="sm99",
    capabilities=((9, 9),),
    min_jax=(0, 0),
    num_sms=24,
    shared_memory=98 * 1024,
)
TARGET = Target(platform="cuda", compute_capability=(9, 9))
CALL = MatmulCase(lhs=None, rhs=MXFP4, dtype="bfloat16").call


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What is registered ends with the test."""
    monkeypatch.setattr(architecture, "ARCHITECTURES", architecture.ARCHITECTURES)
    yield
    # What was traced for it must not serve another test.
    jax.clear_caches()


@pytest.fixture
def registered(clean: None) -> None:
    architecture.register(SMALL_HOPPER)


@pytest.mark.usefixtures("clean")
def test_nothing_runs_there_before():
    found = rejects(CALL, TARGET)
    assert found is not None and found.endswith("12.0, 12.1, got 9.9")
    architecture.register(SMALL_HOPPER)
    assert rejects(CALL, TARGET) is None
    elsewhere = rejects(CALL, dataclasses.replace(TARGET, compute_capability=(7, 5)))
    assert elsewhere is not None and "8.9, 9.0, 9.9, 10.0" in elsewhere


@pytest.mark.usefixtures("registered")
def test_selection_and_explain():
    assert select(CALL, TARGET).backend.name == "xla_bfloat16"
    with prefer_backends("pallas_gpu"):
        assert select(CALL, TARGET).backend.name == "pallas_gpu"
    text = mx_jax.inspect.explain(recipes.mxfp8(), 8, 64, 32, dtype="bfloat16", target=TARGET)
    assert text.count("pallas_gpu takes it if named") == 3


@pytest.mark.parametrize("bits", [4, 8])
def test_tiles_follow_from_its_memory(bits: int):
    """Those of a Hopper, less deep: the row has no tables of its own."""
    smaller = 0
    for m in (1, 16, 32, 64, 4096):
        for n, k in ((128, 128), (256, 640), (4096, 8192)):
            sizes = {"batch": 1, "m": m, "n": n, "k": k}
            tiles = choose(SMALL_HOPPER, WGMMA, bits, **sizes)
            assert SMALL_HOPPER.possible(WGMMA, bits, tiles)
            smaller += not SMALL_HOPPER.possible(WGMMA, bits, choose(SM90, WGMMA, bits, **sizes))
    assert smaller, "an H200's would not do"


def test_splits_follow_from_its_processors():
    splits = [
        choose(row, WGMMA, 8, batch=1, m=64, n=4096, k=8192).splits
        for row in (SM90, dataclasses.replace(SM90, num_sms=24))
    ]
    assert splits[0] > splits[1] == 1


def test_memory_that_no_tiles_fit():
    tiny = dataclasses.replace(SMALL_HOPPER, shared_memory=1024)
    with pytest.raises(ValueError, match="no tiles of wgmma for 4 bits fit sm99: n=128, k=25"):
        choose(tiny, WGMMA, 4, batch=1, m=8, n=128, k=256)


@needs_mosaic
@pytest.mark.usefixtures("registered")
def test_products_and_casts_lower_to_its_kernels():
    recipe = recipes.weight_only("mxfp4")
    x = jax.ShapeDtypeStruct((3, 1024), jnp.bfloat16)
    w = jax.eval_shape(lambda: mx_jax.quantize(jnp.ones((1024, 128)), "mxfp4", axis=0))

    def run(x: Any, w: Any) -> Any:
        return mx_jax.matmul(x, w, recipe=recipe), mx_jax.quantize(x, "mxfp8_e4m3")

    with mx_jax.testing.target("cuda", (9, 9)), prefer_backends("pallas_gpu"):
        packed = jax.eval_shape(mx_jax.pack_weights, w)
        text = jax.jit(run).trace(x, packed).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 2
    # Partial sums: an H200 would split k.
    splits = choose(SMALL_HOPPER, WGMMA, 4, batch=1, m=3, n=128, k=1024).splits
    assert f"tensor<{splits}x3x128xf32>" in text


class Asked(Exception):
    """What would have multiplied."""


@pytest.mark.usefixtures("clean")
def test_a_row_in_place_of_another_and_a_kernel_of_its_own():
    """A kernel for FP4 by FP6, which none of mx_jax takes as they are."""

    def takes(lhs: Any, rhs: Any) -> bool:
        return (lhs, rhs) == (MXFP4, MXFP6_E2M3)

    def load(name: str) -> Any:
        raise Asked(name)

    kernels = (
        dataclasses.replace(kernel, name=name, takes=takes, load=functools.partial(load, name))
        for kernel, takes, name in (
            (WGMMA, takes, "wgmma_fp6"),
            (TCGEN05, TCGEN05.takes, "tcgen05"),
            (MMA, MMA.takes, "mma"),
        )
    )
    row = dataclasses.replace(SM100, min_jax=(0, 0), capabilities=((10, 0),), kernels=(*kernels,))
    architecture.register(row)
    assert architecture.architecture_of((10, 0)) is row
    assert architecture.architecture_of((10, 3)) is SM100
    for rhs, name in ((MXFP6_E2M3, "wgmma_fp6"), (MXFP4, "tcgen05"), (MXFP8_E4M3, "mma")):
        assert row.kernel(MXFP4, rhs).name == name


@pytest.mark.parametrize("kernels", [(), (TCGEN05,), (MMA, TCGEN05)])
def test_the_last_kernel_decodes(kernels: Any):
    with pytest.raises(ValueError, match=r"last decodes weights, got kernels=\("):
        dataclasses.replace(SM100, kernels=kernels)
    assert isinstance(dataclasses.replace(SM100, kernels=(*kernels, MMA)), Architecture)
