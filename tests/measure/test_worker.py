"""What one case's process does, on a CPU: wrong kernels are caught, right ones are timed."""

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mx_jax
from mx_jax.backends import evidence
from mx_jax.backends.calls import MatmulCall, PackCall, RaggedCall
from mx_jax.backends.pallas_gpu import PALLAS_GPU, backend_for
from mx_jax.backends.pallas_gpu.architecture import SM90
from mx_jax.backends.primitive import choose
from mx_jax.backends.reference import REFERENCE
from mx_jax.backends.target import Backend, Target, use_target
from mx_jax.backends.xla_scaled import XLA_SCALED
from mx_jax.measure import worker
from mx_jax.measure.cases import (
    FORMATS,
    ROWS,
    SIZES,
    Case,
    Wanted,
    all_cases,
    cases,
    copy_bits,
    default_path,
    one_of_each,
    rank,
)
from mx_jax.measure.worker import Way, copies_beyond_cache, speeds, subject, uneven
from mx_jax.ops import ragged_dot as ops
from tests.backends.altered import altered
from tests.backends.mosaic import interpreter, needs_mosaic, with_any_jax
from tests.needs import needs_library

PLANTED = dataclasses.replace(REFERENCE, name="planted", source=lambda: (Path(__file__),))
PRODUCT = Case(backend="planted", kind="product", formats=(None, "mxfp4"), shape=(2, 64, 64))
RAGGED = dataclasses.replace(PRODUCT, kind="ragged product", shape=(24, 64, 64), groups=3)
SUMS = dataclasses.replace(RAGGED, kind="ragged sums", formats=("mxfp4", "mxfp4"))


def found(case: Case, backend: Backend, checks: int | None = None) -> dict[str, Any]:
    """What is reported last, of few copies."""
    said: list[dict[str, Any]] = []
    worker.measure(case, backend, said.append, copies=2, checks=checks, seconds=0.0)
    return json.loads(json.dumps(said[-1], allow_nan=False))


@pytest.mark.parametrize("case", [PRODUCT, RAGGED], ids=lambda case: case.kind)
def test_a_right_kernel_is_timed(case: Case):
    answer = found(case, PLANTED, checks=1)
    assert 0 <= answer["error"] <= 1
    assert set(answer["microseconds"]) == {"kernel", "plain path", "bfloat16"}
    assert answer["clock"] == "wall"
    assert answer["over_plain"] > 0 and answer["over_bfloat16"] > 0
    assert answer["over_unpacking"] is None


def test_groups_are_of_any_length():
    sizes = np.asarray(uneven(RAGGED))
    assert sizes.sum() == 23 and len(set(sizes)) > 1


def _right(lhs: Any, rhs: Any, call: MatmulCall) -> jax.Array:
    return REFERENCE.run(call, lhs, rhs)


def _in_groups(lhs: Any, rhs: Any, sizes: jax.Array, call: RaggedCall) -> jax.Array:
    return REFERENCE.run(call, lhs, rhs, sizes)


WRONG = {
    "one entry": (PRODUCT, lambda *given: _right(*given).at[-1, -1].add(0.5)),
    "NaN": (PRODUCT, lambda *given: _right(*given).at[0, 0].set(jnp.nan)),
    # Right for the rows that are timed, wrong at the end of their bucket.
    "more rows": (PRODUCT, lambda x, w, call: _right(x, w, call) + (x.shape[0] == 8)),
    # For sizes that no tile divides.
    "odd sizes": (PRODUCT, lambda x, w, call: _right(x, w, call) + (w.shape[0] % 64 != 0)),
    "another group": (RAGGED, lambda x, w, sizes, call: _in_groups(x, w, jnp.roll(sizes, 1), call)),
    "no group": (RAGGED, lambda x, w, sizes, call: _in_groups(x, w, sizes.at[-1].add(1), call)),
    "one group": (
        RAGGED,
        lambda x, w, sizes, call: _in_groups(x, w, sizes, call) + (sizes[-1] == x.shape[0]),
    ),
    "odd lengths": (
        RAGGED,
        lambda x, w, sizes, call: _in_groups(x, w, sizes, call) + (x.shape[0] % 8 != 0),
    ),
    "sums of another group": (
        SUMS,
        lambda x, w, sizes, call: _in_groups(x, w, jnp.roll(sizes, 1), call),
    ),
    # Rows of a group's last block are left out.
    "a block too few": (
        SUMS,
        lambda x, w, sizes, call: _in_groups(x, w, sizes.at[0].add(-32), call),
    ),
    # Memory that nobody wrote, where a group has no rows.
    "sums of no group": (
        SUMS,
        lambda x, w, sizes, call: _in_groups(x, w, sizes, call) + (sizes.sum() == 0),
    ),
    "odd columns": (
        SUMS,
        lambda x, w, sizes, call: _in_groups(x, w, sizes, call) + (x.shape[1] % 64 != 0),
    ),
}


@pytest.mark.parametrize(("case", "run"), WRONG.values(), ids=WRONG)
def test_a_wrong_kernel_is_caught_and_not_timed(case: Case, run: Any):
    answer = found(case, altered(PLANTED, type(case.call), run))
    assert answer["error"] > 1 and math.isfinite(answer["error"])
    assert "microseconds" not in answer and "over_plain" not in answer


def test_a_race_is_caught():
    """Each call of the compiled program gives other bits, all of them within the bound."""
    calls = []

    def unsteady(x):
        calls.append(x)
        return x + 1e-6 * len(calls)

    def multiply(lhs, rhs, call):
        out = REFERENCE.run(dataclasses.replace(call, out_dtype=jnp.dtype("float32")), lhs, rhs)
        return jax.pure_callback(unsteady, out, out).astype(call.out_dtype)

    case = dataclasses.replace(PRODUCT, dtype="float32")
    assert found(case, altered(PLANTED, MatmulCall, multiply), checks=0)["error"] > 1


@needs_library
def test_packed_weights_are_compared_with_unpacking():
    from mx_jax.backends.cpu_ffi import CPU_FFI

    case = dataclasses.replace(PRODUCT, backend="cpu_ffi", packed=True)
    answer = found(case, CPU_FFI)
    assert answer["error"] <= 1 and answer["over_unpacking"] > 0
    assert "unpacking first" in answer["microseconds"]


@pytest.fixture
def answer(capsys: pytest.CaptureFixture[str]) -> Callable[[Any], dict[str, Any]]:
    """What a process says last that is asked for a case."""

    def ask(case: Case, **changes: Any) -> dict[str, Any]:
        facts = dataclasses.asdict(dataclasses.replace(case, **changes))
        assert worker.answer(json.dumps(facts)) == 0
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    return ask


def test_what_fails_says_so(answer: Any, monkeypatch: pytest.MonkeyPatch):
    assert (
        "gpu: knows no backend of this name, got backend='none'"
        in answer(PRODUCT, backend="none")["failed"]
    )
    said = answer(PRODUCT, backend="pallas_gpu")["failed"]
    assert "pallas_gpu does not take this on Target(platform='cpu'" in said
    # What has no room in memory.
    said = answer(PRODUCT, backend="reference", shape=(1, 2**20, 2**22))["failed"]
    assert "Out of memory allocating" in said

    def refuse(case: Case, backend: Backend, copies: int) -> None:
        raise RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS\nmore")

    monkeypatch.setattr(worker, "subject", refuse)
    found = answer(PRODUCT, backend="reference")
    assert found["failed"] == "RuntimeError: CUDA_ERROR_ILLEGAL_ADDRESS\nmore"
    assert "in refuse" in found["traceback"]


def test_the_machine(capsys: pytest.CaptureFixture[str]):
    worker.answer('"machine"')
    assert json.loads(capsys.readouterr().out) == {
        "platform": "cpu",
        "compute_capability": None,
        "device_kind": None,
    }


def test_the_most_useful_comes_first(monkeypatch: pytest.MonkeyPatch):
    with_any_jax(monkeypatch)
    target = Target(platform="cuda", compute_capability=(9, 0), device_kind="NVIDIA H200")
    found = cases([PALLAS_GPU], target)
    first = Case(
        backend="pallas_gpu",
        kind="product",
        formats=(None, "mxfp4"),
        shape=(1, 8192, 8192),
        packed=True,
    )
    assert found[:2] == [first, dataclasses.replace(first, shape=(16, 8192, 8192))]
    assert len(set(found)) == len(found)
    assert [rank(case) for case in found] == sorted(rank(case) for case in found)
    assert {case.formats[0] is None for case in found[:40]} == {True, False}
    places = {(case.work, case.shape) for case in found}
    assert len(places) == len(found)


@pytest.mark.parametrize(
    ("capability", "packs", "groups_by"),
    [((10, 0), True, "xla_scaled"), ((9, 0), False, "xla_scaled"), ((7, 5), False, "xla_bfloat16")],
    ids=["Blackwell", "Hopper", "Turing"],
)
def test_the_default_path_has_a_case_of_each_family(
    capability: tuple[int, int], packs: bool, groups_by: str
):
    target = Target(platform="cuda", compute_capability=capability, device_kind="planted")
    found = default_path(target, Wanted(formats=["mxfp8_e4m3"], sizes=[(4096, 4096)]))
    products = {case.formats[0] is None: case for case in found if case.kind == "product"}
    by = "xla_scaled" if packs else "xla_bfloat16"
    assert {case.backend for case in products.values()} == {by}
    # Weights of a decoder as `pack_weights` lays them out, of a training step as they come.
    assert (products[True].packed, products[False].packed) == (packs, False)
    others = {(case.kind, case.backend) for case in found if case.kind != "product"}
    ragged = {("ragged product", groups_by), ("ragged sums", "xla_bfloat16")}
    assert others == ragged
    assert one_of_each([*found, *found]) == found and len(found) == 5


def test_the_plain_path_packs_weights_for_the_composite(monkeypatch: pytest.MonkeyPatch):
    """XLA's scaled dot of weights in its own layout is what a kernel's packed weights must beat."""
    with_any_jax(monkeypatch)
    target = Target(platform="cuda", compute_capability=(10, 0), device_kind="NVIDIA B200")
    facts = {"formats": (None, "mxfp8_e4m3"), "packed": True, "backend": "pallas_gpu"}
    case = dataclasses.replace(PRODUCT, **facts)
    with use_target(target):
        made = subject(case, PALLAS_GPU, 1)
        plain, unpacking = made.ways["plain path"], made.ways["unpacking first"]
        assert made.plain == plain.copies[0].layout.backend == "xla_scaled"
        assert unpacking.copies[0].layout.backend == "pallas_gpu"
        outs = [jax.jit(way.one)(way.x, way.copies[0]) for way in (plain, unpacking)]
        assert made.error(outs[:1]) <= 1 and made.error(outs[1:]) <= 1
        # Of the plain path itself nothing else computes the same.
        own = subject(dataclasses.replace(case, backend="xla_scaled"), XLA_SCALED, 1)
        assert set(own.ways) == {"kernel", "unpacking first", "bfloat16"}


def test_cases_are_what_backends_are_asked():
    few = Wanted(formats=FORMATS[:2], sizes=SIZES[:1], rows=ROWS[:2], ragged_rows=(64,))
    for case in all_cases(PALLAS_GPU, few):
        assert Case.from_json(json.loads(json.dumps(dataclasses.asdict(case)))) == case
        assert case.work.packed == case.packed
        if case.packed:
            assert isinstance(case.packing, PackCall) and case.work.serves(case.packing)


def test_copies_are_beyond_the_cache():
    small = dataclasses.replace(PRODUCT, shape=(1, 2880, 2880))
    large = dataclasses.replace(PRODUCT, shape=(1, 8192, 8192))
    few, many = (copies_beyond_cache(copy_bits(case)) for case in (large, small))
    assert few * copy_bits(large) / 8 >= 384 << 20
    assert 2 <= few < many == 48
    assert copy_bits(large) == 8192**2 * 4.25


def test_a_chain_computes_each_and_lowers_one():
    way = Way(
        one=lambda x, w: x @ w, x=jnp.ones((2, 3)), copies=[jnp.full((3, 4), i) for i in (1.0, 2.0)]
    )
    outs = way.chain()(way.x, way.copies)
    assert [float(out[0, 0]) for out in outs] == [3.0, 6.0]
    chain: Any = way.chain()
    text = chain.lower(way.x, way.copies).as_text()
    assert text.count("stablehlo.dot_general") == 1
    assert text.count("optimization_barrier") == 1


def test_ratios_are_taken_within_a_round():
    samples = {"kernel": [1.0, 10.0, 1.0], "plain path": [2.0, 20.0, 4.0]}
    found = speeds(samples)
    assert found == {"over_plain": 2.0, "over_unpacking": None, "over_bfloat16": None}


def test_what_fails_later_leaves_what_was_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS")

    monkeypatch.setattr(worker, "on_device", fail)
    monkeypatch.setattr(worker, "copies_beyond_cache", lambda bits: 2)
    monkeypatch.setattr(worker, "microseconds", lambda runs, *_: {key: [1.0] for key in runs})
    monkeypatch.setattr(worker, "known_backends", lambda: [PLANTED])
    assert worker.answer(json.dumps(dataclasses.asdict(PRODUCT))) == 1
    said = capsys.readouterr()
    assert json.loads(said.out.splitlines()[-1])["over_plain"] == 1
    assert "CUDA_ERROR_ILLEGAL_ADDRESS" in said.err


# Gradients of experts' matrices -------------------------------------------------------------------

H200 = Target(platform="cuda", compute_capability=(9, 0), device_kind="NVIDIA H200")


@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp4", "nvfp4"])
def test_a_case_is_what_a_training_step_asks(recipe: str, monkeypatch: pytest.MonkeyPatch):
    asked: list[RaggedCall] = []
    monkeypatch.setattr(ops, "choose", lambda call: asked.append(call) or choose(call))
    x, w = jnp.zeros((100, 64), jnp.bfloat16), jnp.zeros((3, 64, 128), jnp.bfloat16)

    def loss(w: jax.Array) -> jax.Array:
        return mx_jax.ragged_dot(x, w, np.array([7, 0, 60]), recipe=recipe).sum()

    jax.eval_shape(jax.grad(loss), w)
    (call,) = [call for call in asked if call.contracts_rows]
    assert call.lhs.format is not None
    formats = (call.lhs.format.name,) * 2
    facts = {"backend": "pallas_gpu", "formats": formats, "shape": (100, 128, 64)}
    case = dataclasses.replace(SUMS, **facts)
    assert case.call == dataclasses.replace(call, precision=None)
    assert case.work == evidence.Work.of(call, "pallas_gpu")


@needs_mosaic
def test_they_are_measured_on_hopper_alone():
    of_hopper = [case for case in cases([PALLAS_GPU], H200) if case.kind == "ragged sums"]
    assert {case.formats[0] for case in of_hopper} == set(Wanted().formats)
    # What comes out of each copy is in memory twice while bits are compared.
    for case in of_hopper:
        *_, n, k = case.shape
        assert 4 * copies_beyond_cache(copy_bits(case)) * case.groups * n * k <= 8 << 30
    b200 = dataclasses.replace(H200, compute_capability=(10, 0))
    assert not [case for case in cases([PALLAS_GPU], b200) if case.kind == "ragged sums"]


@pytest.mark.slow
@needs_mosaic
def test_interpreted():
    """The interpreted kernel is right and timed; with another group's rows it is caught."""
    own = backend_for(SM90, interpret=interpreter())
    case = dataclasses.replace(SUMS, backend="pallas_gpu", shape=(8, 64, 64), groups=2)

    def shifted(lhs: Any, rhs: Any, sizes: jax.Array, call: RaggedCall) -> jax.Array:
        return own.offers[RaggedCall].run(lhs, rhs, jnp.roll(sizes, 1), call)

    with use_target(H200):
        answer = found(case, own, checks=1)
        wrong = found(case, altered(own, RaggedCall, shifted))
    assert 0 < answer["error"] <= 1 and answer["over_plain"] > 0 and answer["kernel"] == "wgmma"
    assert wrong["error"] > 1 and "over_plain" not in wrong
