"""Which tiles a GPU product gets, from the table or from a file."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from mx_jax.backends.pallas_gpu import matmul, tuning
from mx_jax.backends.pallas_gpu.tuning import TILES, Tiles, choose
from mx_jax.formats import MXFP4, MXFP8_E4M3


@pytest.mark.parametrize("key", TILES, ids=str)
def test_tiles_are_possible(key: tuple[str, int]):
    limits = [limit for limit, _ in TILES[key]]
    assert limits == sorted(limits) and limits[-1] == np.inf
    for limit, tiles in TILES[key]:
        assert tuning.possible(*key, tiles)
        assert tiles.m <= limit or key[0] == "tcgen05"


@pytest.mark.parametrize(
    ("architecture", "tiles"),
    [
        ("sm80", Tiles(m=8, n=64, k=128)),
        ("sm80", Tiles(m=8, n=128, k=256)),
        ("sm89", Tiles(m=64, n=64, k=256, stages=4)),
        ("sm90", Tiles(m=12)),
        ("sm90", Tiles(m=8, n=320)),
        ("sm90", Tiles(m=8, n=128, k=512, parts=4)),
        ("sm90", Tiles(m=8, n=64, k=128, parts=2)),
        ("sm90", Tiles(m=128, n=64, k=512, stages=2, parts=4)),
        ("sm80", Tiles(m=8, n=64, k=256, parts=2)),
        ("sm90", Tiles(m=8, k=192)),
        ("sm90", Tiles(m=128, k=256)),
        ("tcgen05", Tiles(m=64, k=256)),
        ("tcgen05", Tiles(m=128, n=256, k=256, stages=5)),
        ("sm100", Tiles(m=8, n=128, k=256)),
    ],
)
def test_impossible_tiles(architecture: str, tiles: Tiles):
    assert not tuning.possible(architecture, 4, tiles)


@pytest.mark.parametrize(("architecture", "bits"), TILES)
def test_candidates_are_many_and_fit_the_rows(architecture: str, bits: int):
    for rows in (1, 16, 64, 4096):
        found = set(tuning.candidates(architecture, bits, rows))
        assert len(found) > 4 and all(tuning.possible(architecture, bits, t) for t in found)
        assert architecture == "tcgen05" or {t.m for t in found} == {min(128, max(8, rows))}


@pytest.fixture
def tuned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "tiles.json"
    monkeypatch.setenv(tuning.TILES_VARIABLE, str(path))
    tuning.table.cache_clear()
    yield path
    tuning.table.cache_clear()


def test_a_file_replaces_entries(tuned: Path):
    mine = Tiles(m=16, n=64, k=128, stages=3, splits=2)
    found = tuning.Table(tiles={("sm90", 4): ((np.inf, mine),)}, crossover={("sm90", 4): 77})
    tuned.write_text(tuning.as_json(found))
    assert choose("sm90", 4, batch=1, m=1, n=128, k=1024) == mine
    assert choose("sm90", 8, batch=1, m=1, n=128, k=1024) != mine
    assert matmul.crossover("sm90", MXFP4) == 77
    assert matmul.crossover("sm90", MXFP8_E4M3) == 1024


def test_the_table_survives_its_file(tuned: Path):
    table = tuning.Table(tiles=TILES, crossover=tuning.CROSSOVER | {("tcgen05", 4): np.inf})
    tuned.write_text(tuning.as_json(table))
    assert tuning.table().tiles == TILES
    assert tuning.table().crossover == table.crossover | {("tcgen05", 8): np.inf}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[]", "needs a table as `python -m benchmarks.gpu_tune` writes it, got path="),
        ('{"sm90": {}}', "needs a table as .* got path="),
        ('{"sm90, 4 bits": {"crossover": 1}}', "KeyError..tiles"),
        (
            '{"sm90, 4 bits": {"crossover": 1, "tiles": [{"rows": null, "m": 12}]}}',
            r"needs possible tiles .* architecture='sm90', bits=4, .* impossible=.Tiles.m=12",
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
        choose("sm90", 4, batch=1, m=1, n=128, k=1024)


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
    tiles = choose("sm90", 8, batch=1, m=m, n=n, k=k)
    assert (tiles.m, tiles.splits) == (tile_m, splits)
    assert k % (tiles.k * tiles.splits) == 0


def test_parts_give_way_where_k_is_short(tuned: Path):
    mine = Tiles(m=8, n=64, k=512, stages=4, parts=4)
    found = tuning.Table(tiles={("sm90", 4): ((np.inf, mine),)}, crossover={})
    tuned.write_text(tuning.as_json(tuning.Table(tiles=found.tiles, crossover={})))
    shapes = {
        k: (t.n, t.k, t.parts)
        for k in (1024, 768, 640)
        for t in [choose("sm90", 4, batch=1, m=1, n=128, k=k)]
    }
    assert shapes == {1024: (64, 512, 4), 768: (64, 256, 2), 640: (128, 128, 1)}


def test_busy():
    few, many = Tiles(m=8, n=64, parts=4), Tiles(m=8, n=128, splits=16)
    assert tuning.keeps_busy("sm90", few, m=1, n=8192)
    assert not tuning.keeps_busy("sm90", few, m=1, n=1024)
    assert not tuning.keeps_busy("sm90", many, m=1, n=8192)


def test_every_choice_divides_k():
    for k in range(256, 256 * 20, 128):
        for architecture, bits in TILES:
            k -= k % 256 if architecture == "tcgen05" else 0
            tiles = choose(architecture, bits, batch=1, m=3, n=256, k=k)
            assert k % (tiles.k * tiles.splits) == 0
            assert tuning.possible(architecture, bits, tiles)
