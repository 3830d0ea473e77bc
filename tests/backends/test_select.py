"""Selection is a pure function of call and target; overrides are part of jit's cache key."""

import dataclasses
import re
import typing

import jax
import jax.numpy as jnp
import pytest

import mx_jax
from mx_jax import formats
from mx_jax.backends.calls import Call, MatmulCall
from mx_jax.backends.cpu_ffi import CPU_FFI
from mx_jax.backends.pallas_gpu.tiles import rejects_machine
from mx_jax.backends.reference import REFERENCE
from mx_jax.backends.select import (
    BACKENDS,
    find,
    only_backend,
    prefer_backends,
    select,
)
from mx_jax.backends.target import ASKS, Backend, Target
from mx_jax.testing.cases import QUANTIZE_BOTH_CASES, MatmulCase
from tests.backends.altered import answering
from tests.backends.mosaic import with_any_jax

CPU = Target(platform="cpu")
H200 = Target(platform="cuda", compute_capability=(9, 0))


def hopper_only(call, target):
    """Takes k % 128 == 0 on compute capability 9.0, and says why it takes nothing else."""
    if target != H200:
        return f"needs compute capability 9.0, got {target.platform}"
    if call.lhs.shape[-1] % 128:
        return f"needs k % 128 == 0, got k={call.lhs.shape[-1]}"
    return None


def not_built(call, target):
    return "not built: pip install . with a C++ compiler"


def call_of(k: int) -> MatmulCall:
    return MatmulCase(lhs=formats.MXFP4, rhs=formats.MXFP4, k=(k,)).call


HOPPER = answering(REFERENCE, hopper_only, name="hopper")
NOT_BUILT = answering(REFERENCE, not_built, name="ffi")
FFI_REASON = ("ffi", "not built: pip install . with a C++ compiler")
HOPPER_REASON = ("hopper", "needs k % 128 == 0, got k=96")


@pytest.fixture(autouse=True, name="table")
def _table(monkeypatch: pytest.MonkeyPatch):
    """Sets the table of backends, which has three at first."""

    def know(*backends: Backend) -> None:
        monkeypatch.setattr("mx_jax.backends.select.BACKENDS", backends)

    know(NOT_BUILT, HOPPER, REFERENCE)
    return know


@pytest.mark.parametrize(
    ("k", "target", "backend", "rejections"),
    [
        (128, H200, HOPPER, (FFI_REASON,)),
        (96, H200, REFERENCE, (FFI_REASON, HOPPER_REASON)),
        (128, CPU, REFERENCE, (FFI_REASON, ("hopper", "needs compute capability 9.0, got cpu"))),
    ],
)
def test_the_first_that_accepts_is_chosen(k, target, backend, rejections):
    choice = select(call_of(k), target)
    assert choice.backend is backend
    assert choice.rejections == rejections


def test_all_reject(table):
    table(NOT_BUILT, HOPPER, answering(REFERENCE, not_built))
    with pytest.raises(ValueError) as error:
        select(call_of(96), H200)
    text = str(error.value)
    assert text.startswith("no backend takes MatmulCall(lhs=OperandType(shape=(5, 96)")
    assert "platform='cuda', compute_capability=(9, 0)" in text
    assert "ffi: not built: pip install . with a C++ compiler" in text
    assert "hopper: needs k % 128 == 0, got k=96" in text


def test_only_backend_asks_only_it():
    reason = "not asked: only_backend('reference')"
    with only_backend("reference"):
        choice = select(call_of(128), H200)
        with (
            only_backend("ffi"),
            pytest.raises(ValueError, match=r"hopper: not asked: only_backen"),
        ):
            select(call_of(128), H200)
        with only_backend(None):
            assert select(call_of(128), H200).backend is HOPPER
    assert choice.backend is REFERENCE
    assert choice.rejections == (("ffi", reason), ("hopper", reason))
    assert select(call_of(128), H200).backend is HOPPER


@pytest.mark.parametrize("choose", [only_backend, prefer_backends])
def test_unknown_names(choose):
    message = "unknown backend name='hoper' (did you mean 'hopper'?); known: ffi, hopper, reference"
    with pytest.raises(ValueError, match=re.escape(f"{choose.__name__}: {message}")):
        choose("hoper")


def test_preferred_backends_come_first(table):
    table(REFERENCE, NOT_BUILT, HOPPER)
    with prefer_backends("hopper", "ffi"):
        assert select(call_of(128), H200).backend is HOPPER
        choice = select(call_of(96), H200)
        with prefer_backends():
            assert select(call_of(128), H200).backend is REFERENCE
        with only_backend("reference"):
            assert select(call_of(128), H200).backend is REFERENCE
    assert choice.backend is REFERENCE
    assert choice.rejections == (HOPPER_REASON, FFI_REASON)
    assert select(call_of(128), H200).backend is REFERENCE


@pytest.mark.parametrize("choose", [only_backend, prefer_backends])
def test_a_choice_enters_the_cache_key(choose):
    traces = []

    @jax.jit
    def quantize(x):
        traces.append(x)
        return mx_jax.quantize(x, "mxfp4").codes

    x = jnp.ones((2, 32))
    quantize(x)
    with choose("reference"):
        quantize(x)
        quantize(x)
    quantize(x)
    assert len(traces) == 2


def test_names_of_backends_differ():
    names = [backend.name for backend in BACKENDS]
    assert len(set(names)) == len(names)
    # The one that takes everything; behind it, only what has not been measured yet.
    assert names[names.index(REFERENCE.name) :] == ["reference", "pallas_gpu"]


# Not proved on hardware: it stands behind the reference.
TAKES_ALL = answering(CPU_FFI, lambda call, target: None, name="pallas_gpu")
BOTH = QUANTIZE_BOTH_CASES[0].call


@pytest.mark.parametrize("num_devices", [1, 8])
def test_backends_behind_the_reference_wait_for_their_name(num_devices: int, table):
    """Not even for a call that the reference refuses, which two casts stand in for."""
    target = dataclasses.replace(H200, num_devices=num_devices)
    table(NOT_BUILT, REFERENCE, TAKES_ALL)
    assert find(BOTH, target) is None
    for named in (prefer_backends, only_backend):
        with named("pallas_gpu"):
            choice = find(BOTH, target)
        assert choice is not None and choice.backend == TAKES_ALL
    why = "nothing was measured of this on this machine"
    if num_devices > 1:
        why = "not measured on several devices, got num_devices=8"
    message = (
        f"reference: does not cast along both axes at once; pallas_gpu: not asked: {why}; "
        "prefer_backends('pallas_gpu') asks it"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        select(BOTH, target)


def test_no_gpu_kernel_is_reached_by_default(table, monkeypatch: pytest.MonkeyPatch):
    """Whichever version of JAX is there."""
    table(*BACKENDS)
    with_any_jax(monkeypatch)
    target = Target(platform="cuda", compute_capability=(9, 0))
    call = MatmulCase(lhs=None, rhs=formats.MXFP4, dtype="bfloat16", out_dtype="bfloat16").call
    call = dataclasses.replace(call, rhs=dataclasses.replace(call.rhs, packed_by="pallas_gpu"))
    assert rejects_machine(target) is None
    assert select(call, target).backend.name != "pallas_gpu"
    with prefer_backends("pallas_gpu"):
        assert select(call, target).backend.name == "pallas_gpu"


def test_every_kind_of_call_has_words_for_users():
    assert set(ASKS) == set(typing.get_args(Call))
