"""Which tiles a GPU product gets, from the table or from a file."""

from collections.abc import Iterator
from pathlib import Path

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
from mx_jax.backends.pallas_gpu.products.decoded import crossover
from mx_jax.backends.pallas_gpu.tuning import table
from mx_jax.backends.pallas_gpu.tuning.plan import choose
from mx_jax.backends.pallas_gpu.tuning.space import candidates, keeps_busy
from mx_jax.backends.pallas_gpu.tuning.table import Entry
from mx_jax.backends.pallas_gpu.tuning.tiles import Tiles, Tuning
from mx_jax.formats import MXFP4, MXFP8_E4M3

# An architecture, one of its kernels, bits of a code.
Key = tuple[Architecture, Kernel, int]
KEYS = [
    (architecture, kernel, bits)
    for architecture in ARCHITECTURES
    for kernel in architecture.kernels
    for bits, _ in kernel.tuning
]
# One entry of a file.
HOPPER = Entry("sm90", "wgmma", 4)


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
        (SM90, WGMMA, Tiles(m=8, n=64, k=128, parts=2)),
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


@pytest.mark.parametrize("key", KEYS, ids=str)
def test_candidates_are_many_and_fit_the_rows(key: Key):
    for rows in (1, 16, 64, 4096):
        found = set(candidates(*key, rows))
        assert len(found) > 4 and all(Architecture.possible(*key, tiles) for tiles in found)
        assert {tiles.m for tiles in found} == {min(128, max(key[1].min_rows, rows))}


@pytest.fixture
def tuned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "tiles.json"
    monkeypatch.setenv(table.TILES_VARIABLE, str(path))
    table.table.cache_clear()
    yield path
    table.table.cache_clear()


def test_a_file_replaces_entries(tuned: Path):
    mine = Tiles(m=16, n=64, k=128, stages=3, splits=2)
    tuned.write_text(table.as_json({HOPPER: Tuning(tiles=((np.inf, mine),), crossover=77)}))
    assert choose(SM90, WGMMA, 4, batch=1, m=1, n=128, k=1024) == mine
    assert choose(SM90, WGMMA, 8, batch=1, m=1, n=128, k=1024) != mine
    assert crossover(SM90, MXFP4) == 77
    assert crossover(SM90, MXFP8_E4M3) == 1024


def test_every_entry_survives_its_file(tuned: Path):
    every = {Entry(a.name, kernel.name, bits): kernel.tuning_of(bits) for a, kernel, bits in KEYS}
    tuned.write_text(table.as_json(every))
    assert table.table() == every


@pytest.mark.parametrize(
    ("name", "entry"),
    [
        ("sm90, 4 bits", HOPPER),
        ("sm100, 8 bits", Entry("sm100", "mma", 8)),
        ("tcgen05, 4 bits", Entry("sm100", "tcgen05", 4)),
    ],
)
def test_a_file_of_before_kernels_had_names(name: str, entry: Entry, tuned: Path):
    (kernel,) = (k for a, k, bits in KEYS if (a.name, k.name, bits) == entry)
    found = kernel.tuning_of(entry.bits)
    tuned.write_text(table.as_json({entry: found}).replace(str(entry), name))
    assert table.table() == {entry: found}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[]", "needs a table as `python -m benchmarks.gpu_tune` writes it, got path="),
        ('{"sm90": {}}', "needs a table as .* got path="),
        ('{"sm70, 4 bits": {"crossover": 1, "tiles": []}}', "knows no kernel of this name"),
        ('{"sm90, 4 bits": {"crossover": 1}}', "KeyError..tiles"),
        (
            '{"sm90, 4 bits": {"crossover": 1, "tiles": [{"rows": null, "m": 12}]}}',
            r"possible tiles .*='sm90', kernel='wgmma', bits=4, .* impossible=.Tiles.m=12",
        ),
        (
            '{"sm90, 4 bits": {"crossover": 1, "tiles": [{"rows": 8, "m": 8}]}}',
            r"ascending rows, up to any number, got .* rows=.8., impossible=..",
        ),
    ],
)
def test_a_wrong_file(text: str, reason: str, tuned: Path):
    tuned.write_text(text)
    with pytest.raises(ValueError, match=f"MX_JAX_GPU_TILES: .*{reason}"):
        choose(SM90, WGMMA, 4, batch=1, m=1, n=128, k=1024)


@pytest.mark.parametrize(
    ("m", "n", "k", "tile_m", "splits"),
    [
        (1, 8192, 8192, 8, 1),
        (1, 4096, 8192, 8, 2),
        (64, 8192, 8192, 64, 2),
        (65, 8192, 8192, 128, 2),
        (4096, 8192, 8192, 128, 1),
        (1, 128, 128, 8, 1),
        (1, 128, 128 * 7, 8, 1),
    ],
)
def test_choice(m: int, n: int, k: int, tile_m: int, splits: int):
    tiles = choose(SM90, WGMMA, 8, batch=1, m=m, n=n, k=k)
    assert (tiles.m, tiles.splits) == (tile_m, splits)
    assert k % (tiles.k * tiles.splits) == 0


def test_parts_give_way_where_k_is_short(tuned: Path):
    mine = Tiles(m=8, n=64, k=512, stages=4, parts=4)
    tuned.write_text(table.as_json({HOPPER: Tuning(tiles=((np.inf, mine),))}))
    shapes = {
        k: (t.n, t.k, t.parts)
        for k in (1024, 768, 640)
        for t in [choose(SM90, WGMMA, 4, batch=1, m=1, n=128, k=k)]
    }
    assert shapes == {1024: (64, 512, 4), 768: (64, 256, 2), 640: (128, 128, 1)}


def test_busy():
    few, many = Tiles(m=8, n=64, parts=4), Tiles(m=8, n=128, splits=16)
    assert keeps_busy(SM90, WGMMA, few, m=1, n=8192)
    assert not keeps_busy(SM90, WGMMA, few, m=1, n=1024)
    assert not keeps_busy(SM90, WGMMA, many, m=1, n=8192)


@pytest.mark.parametrize(("m", "n"), [(3, 256), (300, 128), (300, 384)])
def test_every_choice_divides_the_operands(m: int, n: int):
    for k in range(256, 256 * 20, 128):
        for key in KEYS:
            k -= k % 256 if key[1] is TCGEN05 else 0
            tiles = choose(*key, batch=1, m=m, n=n, k=k)
            assert n % tiles.n == k % (tiles.k * tiles.splits) == 0
            assert Architecture.possible(*key, tiles)
