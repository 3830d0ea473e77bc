"""What every backend must take and give, stated once and asked of each.

A test file asks all of them with one line:

    class TestBackends(BackendSuite): ...

A new backend joins with one line in `PROMISES`: the calls that it must take. Whatever it does not
promise it may refuse, with a reason. So support can grow quietly, but never shrink. What it takes
is compared with the reference, codes and scales bit for bit, and with products in float64.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from mx_jax.backends.calls import (
    AttendCall,
    Call,
    MatmulCall,
    QuantizeBothCall,
    QuantizeCall,
    RaggedCall,
    RandomBitsCall,
    TransformCall,
)
from mx_jax.backends.cpu_ffi import library
from mx_jax.backends.select import BACKENDS, current_target
from mx_jax.backends.target import Backend, Target
from mx_jax.codecs.rounding import NEAREST
from mx_jax.formats import BLOCK_FORMATS, MX_FORMATS, MXFP4, MXFP8_E4M3, MXFP8_E5M2, NVFP4, WHOLE
from mx_jax.testing.cases import (
    ATTEND_CASES,
    DEQUANTIZE_CASES,
    LARGE_MATMUL_CASES,
    LARGE_QUANTIZE_CASES,
    MATMUL_CASES,
    QUANTIZE_BOTH_CASES,
    QUANTIZE_CASES,
    RAGGED_CASES,
    dequantize_call,
)
from mx_jax.testing.cases import STAGNATING_CASE as STAGNATING_CASE
from mx_jax.testing.checks import EXTREME_CASES as EXTREME_CASES
from mx_jax.testing.checks import ExtremeCase as ExtremeCase
from mx_jax.testing.checks import check_attend as check_attend
from mx_jax.testing.checks import check_dequantize, check_quantize, check_quantize_both
from mx_jax.testing.checks import check_extremes as check_extremes
from mx_jax.testing.checks import check_matmul as check_matmul
from mx_jax.testing.checks import check_ragged as check_ragged
from mx_jax.testing.checks import check_stagnating_sum as check_stagnating_sum
from mx_jax.testing.compare import exact_product as exact_product
from mx_jax.testing.compare import exact_values as exact_values

Promise = Callable[[Call, Target], bool]


def _every_single_call(call: Call, target: Target) -> bool:
    return not isinstance(call, QuantizeBothCall)


def _whole_axis_float8_on_gpu(call: Call, target: Target) -> bool:
    capability = target.compute_capability
    if target.platform != "rocm" and (capability is None or capability < (8, 9)):
        return False
    whole = [format for format in BLOCK_FORMATS if format.block[1] is WHOLE]
    return isinstance(call, MatmulCall) and call.lhs.format in whole and call.rhs.format in whole


def _what_bfloat16_holds_on_accelerators(call: Call, target: Target) -> bool:
    if target.platform == "cpu" or not isinstance(call, MatmulCall):
        return False
    return all(own.format in BLOCK_FORMATS or own.dtype == jnp.bfloat16 for _, own in call.sides)


def _mxfp8_on_one_gpu_from_ada_on(call: Call, target: Target) -> bool:
    capability = target.compute_capability
    if target.num_devices > 1 or capability is None or capability < (8, 9):
        return False
    if not isinstance(call, MatmulCall) or len(call.lhs.axes.contracting) != 1:
        return False
    whole = all(0 not in own.shape for _, own in call.sides)
    (axis,) = call.lhs.axes.contracting
    k = call.lhs.shape[axis]
    given = (call.lhs.format, call.rhs.format)
    return whole and k % 32 == 0 and all(f in (MXFP8_E4M3, MXFP8_E5M2) for f in given)


def _what_the_handlers_compute(call: Call, target: Target) -> bool:
    # Where nothing was built, nothing is promised.
    if target.platform != "cpu" or isinstance(library.load(), str):
        return False
    if isinstance(call, MatmulCall):
        given = (call.lhs.format, call.rhs.format)
        small = max((*call.lhs.shape, *call.rhs.shape)) <= 1024
        return small and all(f is None or not f.scale.is_float32 for f in given)
    if isinstance(call, QuantizeBothCall | RaggedCall | RandomBitsCall | TransformCall):
        return True
    if isinstance(call, AttendCall):
        return call.tokens == 1 and set(call.dtypes) == {jnp.dtype(jnp.float32)}
    if isinstance(call, QuantizeCall):
        rule = call.scale_rule
        if rule.reads_values:
            return False
    return len(call.blocks) == 1 or [axis for axis, _ in call.blocks] == [-2, -1]


def _casts_and_few_bit_weights_from_ampere_on(call: Call, target: Target) -> bool:
    capability = target.compute_capability
    first = (0, 11, 2) if capability == (9, 0) else (0, 12, 0)
    if capability is None or capability < (8, 0) or jax.__version_info__ < first:
        return False
    if isinstance(call, QuantizeCall):
        plain = call.rounding == NEAREST and call.scale_rule.threshold is not None
        return plain and call.format in MX_FORMATS
    if not isinstance(call, MatmulCall) or len(call.lhs.axes.contracting) > 1:
        return False
    values = call.lhs.format in MX_FORMATS or call.lhs.dtype == jnp.bfloat16
    return values and call.rhs.format in (MXFP4, MXFP8_E4M3, MXFP8_E5M2)


def _mxfp8_and_nvfp4_on_blackwell(call: Call, target: Target) -> bool:
    if target.compute_capability != (10, 0) or not isinstance(call, MatmulCall):
        return False
    pairs = ((MXFP8_E4M3, MXFP8_E4M3), (MXFP8_E4M3, MXFP8_E5M2), (NVFP4, NVFP4))
    return len(call.lhs.axes.contracting) == 1 and (call.lhs.format, call.rhs.format) in pairs


# What each backend of the table must take: the one line that a new backend adds.
PROMISES: Mapping[str, Promise] = {
    "xla": _whole_axis_float8_on_gpu,
    "cpu_ffi": _what_the_handlers_compute,
    "xla_scaled": _mxfp8_on_one_gpu_from_ada_on,
    "xla_bfloat16": _what_bfloat16_holds_on_accelerators,
    "reference": _every_single_call,
    "pallas_gpu": _casts_and_few_bit_weights_from_ampere_on,
    "cudnn": _mxfp8_and_nvfp4_on_blackwell,
}

TARGETS: tuple[Target, ...] = (
    Target(platform="cpu"),
    Target(platform="cuda", compute_capability=(8, 0)),
    Target(platform="cuda", compute_capability=(9, 0)),
    Target(platform="cuda", compute_capability=(10, 0)),
    Target(platform="cuda", compute_capability=(12, 0)),
    Target(platform="rocm"),
    Target(platform="tpu"),
)

_ASKED_CASES = (
    *QUANTIZE_CASES,
    *QUANTIZE_BOTH_CASES,
    *MATMUL_CASES,
    *RAGGED_CASES,
    *LARGE_QUANTIZE_CASES,
    *LARGE_MATMUL_CASES,
    *ATTEND_CASES,
)


_CHECKS = tuple(
    pytest.param(check, case, id=f"{check.__name__.removeprefix('check_')}-{case}")
    for check, cases in (
        (check_quantize, QUANTIZE_CASES),
        (check_quantize_both, QUANTIZE_BOTH_CASES),
        (check_dequantize, DEQUANTIZE_CASES),
        (check_matmul, MATMUL_CASES),
        (check_ragged, RAGGED_CASES),
        (check_stagnating_sum, (STAGNATING_CASE,)),
        (check_extremes, EXTREME_CASES),
        (check_attend, ATTEND_CASES),
    )
    for case in cases
)


def check_answer(backend: Backend, promise: Promise, call: Call, target: Target) -> bool:
    """Whether the backend takes a call; fails if it breaks its promise or gives no reason."""
    reason = backend.rejects(call, target)
    if reason is None:
        return True
    assert isinstance(reason, str) and reason, f"{backend.name} rejects {call} with {reason!r}"
    assert not promise(call, target), f"{backend.name} must take {call} on {target}: {reason}"
    return False


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
class BackendSuite:
    """Subclass it in a test file to ask every backend of the table."""

    def test_promise_is_stated(self, backend: Backend):
        assert backend.name in PROMISES, f"PROMISES lacks what {backend.name} must take"

    @pytest.mark.parametrize("target", TARGETS, ids=str)
    def test_answers(self, backend: Backend, target: Target):
        for case in _ASKED_CASES:
            check_answer(backend, PROMISES[backend.name], case.call, target)

    @pytest.mark.parametrize(("check", "case"), _CHECKS)
    def test_results(self, backend: Backend, check: Callable[[Backend, Any], None], case: Any):
        call = dequantize_call(case) if check is check_dequantize else case.call
        if check_answer(backend, PROMISES[backend.name], call, current_target(1)):
            check(backend, case)
