"""Tiles that are measured for a product, and products with the tiles that a row says."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import mx_jax
from mx_jax import formats, recipes
from mx_jax.backends import evidence
from mx_jax.backends.base import Config, Target
from mx_jax.backends.calls import MatmulCall
from mx_jax.backends.evidence import Row, Work, source_of
from mx_jax.backends.pallas_gpu import PALLAS_GPU
from mx_jax.backends.pallas_gpu.architecture import MMA, SM90, SM100, WGMMA
from mx_jax.backends.pallas_gpu.tiles import Tiles
from mx_jax.backends.pallas_gpu.tuning import choose, configs, configured, tuned
from mx_jax.backends.select import select
from mx_jax.backends.table import BACKENDS
from mx_jax.measure.cases import Case
from mx_jax.testing.cases import MatmulCase, QuantizeCase
from tests.backends.altered import altered
from tests.backends.mosaic import with_any_jax

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


def test_what_a_kernel_is_told_is_for_it_alone():
    own = WGMMA.tuning_of(4), MMA.tuning_of(4)
    with configured("wgmma", MINE):
        told = tuned(WGMMA, 4)
        assert {tiles for _, tiles in told.tiles} == {Tiles(**dict(MINE))}
        assert told.crossover == float("inf")
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
    monkeypatch.setattr("mx_jax.backends.named.BACKENDS", table)

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
