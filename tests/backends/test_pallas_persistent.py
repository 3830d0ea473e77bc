"""Blackwell's kernel for many tiles: numbers in Mosaic's interpreter, races detected.

Pairs of programs (cta_group::2) the interpreter lacks: `tests/gpu` compiles them.
"""

import dataclasses
from typing import Any

import jax
import pytest

from mx_jax.backends.pallas_gpu.architecture import SM100
from mx_jax.backends.pallas_gpu.kernels import TCGEN05
from mx_jax.backends.pallas_gpu.products import matmul
from mx_jax.backends.pallas_gpu.tuning.measured import configs, configured
from mx_jax.backends.pallas_gpu.tuning.plan import choose
from mx_jax.backends.pallas_gpu.tuning.space import candidates
from mx_jax.backends.pallas_gpu.tuning.tiles import Tiles
from mx_jax.backends.target import Target
from mx_jax.formats import MXFP4, MXFP8_E4M3, MXFP8_E5M2, NVFP4
from mx_jax.reference.matmul import scaled_matmul
from mx_jax.testing.cases import MatmulCase
from mx_jax.testing.compare import assert_bitwise_equal
from tests.backends.mosaic import few_octaves, interpreter, needs_newer_mosaic, race_of

# One program with an odd number of tiles; two with different numbers. Of 256 columns, two places
# for sums share some; of 128 they do not.
NARROW = Tiles(m=128, n=128, k=128, stages=2, programs=1)
WIDE = Tiles(m=128, n=256, k=256, stages=2, programs=2)


def product(case: MatmulCase, tiles: Tiles, rng: Any) -> tuple[jax.Array, jax.Array]:
    """By the kernel, and by the reference; of few octaves, so that sums are exact in any order."""
    lhs, rhs = (few_octaves(rng, x) for x in case.operands(rng, octaves=1))
    how = {"architecture": SM100, "interpret": interpreter()}
    config = tuple(sorted(dataclasses.asdict(tiles).items()))
    with configured("tcgen05", config):
        run = jax.jit(lambda lhs, rhs: matmul.scaled_matmul(lhs, rhs, case.call, **how))
        assert "tcgen05_persistent" in str(run.trace(lhs, rhs).jaxpr)
        out = run(lhs, rhs)
    return out, scaled_matmul(lhs, rhs, case.call.dimension_numbers, case.call.out_dtype)


@needs_newer_mosaic
@pytest.mark.parametrize(
    ("case", "tiles"),
    [
        pytest.param(
            MatmulCase(lhs=MXFP8_E4M3, rhs=MXFP8_E5M2, m=(384,), n=(100,), k=(300,)),
            NARROW,
            id="one place after the other",
        ),
        pytest.param(
            MatmulCase(lhs=NVFP4, rhs=NVFP4, m=(130,), n=(512,), k=(256,), out_dtype="bfloat16"),
            dataclasses.replace(WIDE, programs=1),
            id="places that share columns, tensor scales",
        ),
        pytest.param(
            MatmulCase(lhs=MXFP4, rhs=MXFP4, batch=(2,), m=(256,), n=(512,), k=(512,)),
            dataclasses.replace(WIDE, programs=3),
            id="batches, float32",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            MatmulCase(
                lhs=NVFP4, rhs=NVFP4, batch=(3,), m=(128,), n=(130,), k=(40,), out_dtype="float16"
            ),
            dataclasses.replace(NARROW, k=256, programs=2),
            id="batches, float16",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_is_the_reference_after_rounding(case: MatmulCase, tiles: Tiles, rng: Any):
    out, expected = product(case, tiles, rng)
    assert_bitwise_equal(out, expected, what="product")


@needs_newer_mosaic
@pytest.mark.parametrize(
    ("dropped", "tiles"),
    [
        pytest.param("free stages", NARROW, marks=pytest.mark.slow),
        pytest.param("free sums", NARROW, marks=pytest.mark.slow),
        ("free sums", dataclasses.replace(WIDE, programs=1)),
        pytest.param("copied tiles", NARROW, marks=pytest.mark.slow),
        pytest.param("the sums", NARROW, marks=pytest.mark.slow),
    ],
)
def test_a_missing_wait_is_a_race(
    dropped: str,
    tiles: Tiles,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    rng: Any,
):
    from jax.experimental.pallas import mosaic_gpu

    case = MatmulCase(lhs=MXFP4, rhs=MXFP4, m=(512,), n=(256,), k=(512,))
    tiles = dataclasses.replace(tiles, k=256)
    # In the order in which they are traced.
    order = ("free stages", "free sums", "copied tiles", "the sums")
    waits, wait = iter(order), mosaic_gpu.barrier_wait
    traced: list[str] = []

    def some(*args: Any, **kwargs: Any) -> None:
        if not traced or traced[-1] != order[-1]:
            traced.append(next(waits))
        if traced[-1] != dropped:
            wait(*args, **kwargs)

    monkeypatch.setattr(mosaic_gpu, "barrier_wait", some)
    assert race_of(lambda: product(case, tiles, rng)[0], capfd)
    assert traced == list(order)


PAIR = Tiles(m=256, n=256, k=256, stages=4, programs=74, ctas=2)
SIZES = {"batch": 1, "m": 4096, "n": 4096, "k": 8192}


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, {}),
        ({"m": 512}, {"programs": 32}),
        # Rows that are padded to a multiple of 256, and to one of 128.
        ({"m": 4000}, {}),
        ({"m": 129}, {"programs": 16}),
        ({"m": 4096 + 100}, {"m": 128, "ctas": 1, "programs": 148}),
        ({"n": 4096 + 128}, {"n": 128}),
        ({"m": 64}, {"m": 128, "ctas": 1, "programs": 0}),
    ],
)
def test_what_becomes_of_tiles_of_pairs(changed: dict[str, int], expected: dict[str, int]):
    with configured("tcgen05", tuple(sorted(dataclasses.asdict(PAIR).items()))):
        tiles = choose(SM100, TCGEN05, 4, **SIZES | changed)
    wanted = {"m": 256, "n": 256, "ctas": 2, "programs": 74} | expected
    assert {name: getattr(tiles, name) for name in wanted} == wanted
    assert SM100.possible(TCGEN05, 4, tiles)


@pytest.mark.parametrize(
    "tiles",
    [
        dataclasses.replace(PAIR, programs=0),
        dataclasses.replace(PAIR, m=128),
        dataclasses.replace(PAIR, stages=8),
        dataclasses.replace(PAIR, ctas=4, m=512),
    ],
)
def test_impossible_pairs(tiles: Tiles):
    assert not SM100.possible(TCGEN05, 4, tiles)


def test_the_table_has_none_and_the_tuner_tries_them():
    """Until a measurement says that they are faster."""
    for _, tuning in TCGEN05.tuning:
        assert not any(tiles.programs for _, tiles in tuning.tiles)
    for bits in (4, 8):
        found = {tiles for tiles in candidates(SM100, TCGEN05, bits, 4096) if tiles.programs}
        assert {(t.m, t.n, t.ctas) for t in found} == set(TCGEN05.persistent)
        assert {t.programs * t.ctas for t in found} == {148}
        assert not any(t.programs for t in candidates(SM100, TCGEN05, bits, 16))
    call = MatmulCase(lhs=MXFP8_E4M3, rhs=MXFP8_E4M3, m=(4096,), n=(8192,), k=(8192,)).call
    target = Target(platform="cuda", compute_capability=(10, 0))
    first = [dict(config) for config in configs(call, target)][:6]
    assert any(config["programs"] for config in first), "one of the nearest to the table's own"
