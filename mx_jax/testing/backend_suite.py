"""What every backend must take and give, stated once and asked of each.

A test file asks all of them with one line:

    class TestBackends(BackendSuite): ...

A new backend joins with one line in `PROMISES`: the calls that it must take. Whatever it does not
promise it may refuse, with a reason. So support can grow quietly, but never shrink. What it takes
is compared with the reference, codes and scales bit for bit, and with products in float64.
"""

import math
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mx_jax.backends.base import (
    Backend,
    Call,
    MatmulCall,
    Operand,
    QuantizeBothCall,
    QuantizeCall,
    Target,
)
from mx_jax.backends.cpu_ffi import library
from mx_jax.backends.select import current_target
from mx_jax.backends.table import BACKENDS
from mx_jax.codecs.blocks import block_extent
from mx_jax.codecs.rounding import NEAREST
from mx_jax.formats import BLOCK_FORMATS, MX_FORMATS, MXFP4, MXFP8_E4M3, MXFP8_E5M2, NVFP4, WHOLE
from mx_jax.mxarray import MXArray
from mx_jax.testing.cases import (
    LARGE_MATMUL_CASES,
    LARGE_QUANTIZE_CASES,
    MATMUL_CASES,
    QUANTIZE_CASES,
    MatmulCase,
    QuantizeCase,
)
from mx_jax.testing.dequantize_check import DEQUANTIZE_CASES, check_dequantize, dequantize_call
from mx_jax.testing.quantize_check import (
    QUANTIZE_BOTH_CASES,
    QuantizeBothCase,
    check_quantize,
    check_quantize_both,
)

Promise = Callable[[Call, Target], bool]


def _every_single_call(call: Call, target: Target) -> bool:
    return not isinstance(call, QuantizeBothCall)


def _whole_axis_float8_on_gpu(call: Call, target: Target) -> bool:
    capability = target.compute_capability
    if target.platform != "rocm" and (capability is None or capability < (8, 9)):
        return False
    whole = [format for format in BLOCK_FORMATS if format.block[1] is WHOLE]
    return isinstance(call, MatmulCall) and call.lhs_format in whole and call.rhs_format in whole


def _what_the_handlers_compute(call: Call, target: Target) -> bool:
    # Where nothing was built, nothing is promised.
    if target.platform != "cpu" or isinstance(library.load(), str):
        return False
    if isinstance(call, MatmulCall):
        given = (call.lhs_format, call.rhs_format)
        small = max((*call.lhs_shape, *call.rhs_shape)) <= 1024
        return small and all(f is None or not f.scale.is_float32 for f in given)
    if isinstance(call, QuantizeBothCall):
        return True
    if isinstance(call, QuantizeCall) and call.scale_rule.reads_values:
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
    if not isinstance(call, MatmulCall) or call.num_contracting > 1:
        return False
    values = call.lhs_format in MX_FORMATS or call.lhs_dtype == jnp.bfloat16
    return values and call.rhs_format in (MXFP4, MXFP8_E4M3, MXFP8_E5M2)


def _mxfp8_and_nvfp4_on_blackwell(call: Call, target: Target) -> bool:
    if target.compute_capability != (10, 0) or not isinstance(call, MatmulCall):
        return False
    pairs = ((MXFP8_E4M3, MXFP8_E4M3), (MXFP8_E4M3, MXFP8_E5M2), (NVFP4, NVFP4))
    return call.num_contracting == 1 and (call.lhs_format, call.rhs_format) in pairs


# What each backend of the table must take: the one line that a new backend adds.
PROMISES: Mapping[str, Promise] = {
    "xla": _whole_axis_float8_on_gpu,
    "cpu_ffi": _what_the_handlers_compute,
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

# Half a unit in the last place of float32, relative to the value.
_HALF_ULP = 2.0**-24

STAGNATING_CASE = MatmulCase(lhs=MXFP8_E4M3, rhs=MXFP8_E4M3, m=(16,), n=(16,), k=(1024,))

_ASKED_CASES = (
    *QUANTIZE_CASES,
    *QUANTIZE_BOTH_CASES,
    *MATMUL_CASES,
    *LARGE_QUANTIZE_CASES,
    *LARGE_MATMUL_CASES,
)


def check_answer(backend: Backend, promise: Promise, call: Call, target: Target) -> bool:
    """Whether the backend takes a call; fails if it breaks its promise or gives no reason."""
    reason = backend.rejects(call, target)
    if reason is None:
        return True
    assert isinstance(reason, str) and reason, f"{backend.name} rejects {call} with {reason!r}"
    assert not promise(call, target), f"{backend.name} must take {call} on {target}: {reason}"
    return False


def exact_values(operand: Operand) -> np.ndarray:
    """The values of an operand in float64, from the formats' tables alone, without codecs."""
    if not isinstance(operand, MXArray):
        return np.asarray(operand).astype(np.float64)
    element, scale = operand.format.element, operand.format.scale
    table = np.array([element.value(code) for code in range(1 << element.bits)])
    values = table[np.asarray(operand.codes)]
    scales = np.asarray(operand.scales)
    if not scale.is_float32:
        scales = np.array([scale.value(code) for code in range(256)])[scales]
    scales = scales.astype(np.float64)
    for axis, size in operand.blocks:
        length = operand.shape[axis]
        repeated = np.repeat(scales, block_extent(size, length), axis=axis)
        scales = np.take(repeated, range(length), axis=axis)
    if operand.tensor_scale is not None:
        scales = scales * np.asarray(operand.tensor_scale, np.float64)
    return values / scales if scale.kind == "divisor" else values * scales


def exact_product(call: MatmulCall, lhs: np.ndarray, rhs: np.ndarray) -> np.ndarray:
    """`[*batch, *m, *n]` of float64 values."""
    left, m = _as_matrices(lhs, call.num_batch, call.contracting_axes("lhs"))
    right, n = _as_matrices(rhs, call.num_batch, call.contracting_axes("rhs"))
    product = left @ np.swapaxes(right, -1, -2)
    return product.reshape(*lhs.shape[: call.num_batch], *m, *n)


def _as_matrices(
    x: np.ndarray, num_batch: int, contracting: tuple[int, ...]
) -> tuple[np.ndarray, tuple[int, ...]]:
    """`[batch, kept, k]`, and the lengths of the kept axes."""
    kept = [axis for axis in range(num_batch, x.ndim) if axis not in contracting]
    batch, lengths, ks = (
        [x.shape[axis] for axis in axes] for axes in (range(num_batch), kept, contracting)
    )
    moved = x.transpose(*range(num_batch), *kept, *contracting)
    sizes = (math.prod(batch), math.prod(lengths), math.prod(ks))
    return moved.reshape(sizes), tuple(lengths)


def check_matmul(backend: Backend, case: MatmulCase) -> None:
    """Compare products with float64's: codes of all kinds, and sums that nearly cancel.

    Rounding errors point either way here, so they stay within the backend's
    `epsilon_bound * 2^-24 * sqrt(k) * sum |a b|`, plus the rounding to the product's dtype.
    """
    call = case.call
    run = jax.jit(lambda lhs, rhs: backend.scaled_matmul(lhs, rhs, call))
    bound = backend.epsilon_bound * math.sqrt(max(case.num_products, 1)) * _HALF_ULP
    rng = np.random.default_rng(0)
    for lhs, rhs in (case.operands(rng), case.cancelling_operands(rng)):
        _compare_product(run(lhs, rhs), call, lhs, rhs, bound)


def check_stagnating_sum(backend: Backend) -> None:
    """The worst order of summands: one large, then many ones that a short accumulator loses.

    After 2^24, float32 loses them too: every rounding error points the same way and `sqrt(k)` does
    not hold. Nothing may exceed `2^-24 * k * sum |a b|`, which float32 additions in any order keep.
    """
    case = STAGNATING_CASE
    call = case.call
    run = jax.jit(lambda lhs, rhs: backend.scaled_matmul(lhs, rhs, call))
    ones = np.full(call.lhs_shape, 0x38, np.uint8)
    alone = ones.copy()
    alone[:, 1:32] = 0
    rhs = _mxfp8(ones, 0)
    for exponent in (8, 11, 14, 24):
        lhs = _mxfp8(alone, exponent)
        _compare_product(run(lhs, rhs), call, lhs, rhs, case.num_products * _HALF_ULP)


def _mxfp8(codes: np.ndarray, exponent: int) -> MXArray:
    """Codes under scales of one, but for 2^exponent over each row's first block."""
    scales = np.full((codes.shape[0], codes.shape[1] // 32), 127, np.uint8)
    scales[:, 0] += exponent
    return MXArray(
        codes=jnp.asarray(codes),
        scales=jnp.asarray(scales),
        format=MXFP8_E4M3,
        blocks=((-1, 32),),
        dtype=jnp.dtype("float32"),
    )


def _compare_product(
    product: jax.Array, call: MatmulCall, lhs: Operand, rhs: Operand, bound: float
) -> None:
    left, right = exact_values(lhs), exact_values(rhs)
    exact = exact_product(call, left, right)
    magnitude = exact_product(call, np.abs(left), np.abs(right))
    assert product.dtype == call.out_dtype and product.shape == exact.shape
    allowed = bound * magnitude
    if call.out_dtype != np.float32:
        info = jnp.finfo(call.out_dtype)
        allowed += float(info.eps) / 2 * (np.abs(exact) + allowed)
        allowed += float(info.smallest_normal)
    error = np.abs(np.asarray(product).astype(np.float64) - exact)
    excess = error > allowed
    assert not excess.any(), (
        f"{excess.sum()} of {exact.size} products are too far from the exact ones, "
        f"the worst by {np.max(error[excess] / allowed[excess])} times what is allowed"
    )


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
class BackendSuite:
    """Subclass it in a test file to ask every backend of the table."""

    def test_promise_is_stated(self, backend: Backend):
        assert backend.name in PROMISES, f"PROMISES lacks what {backend.name} must take"

    @pytest.mark.parametrize("target", TARGETS, ids=str)
    def test_answers(self, backend: Backend, target: Target):
        for case in _ASKED_CASES:
            check_answer(backend, PROMISES[backend.name], case.call, target)

    @pytest.mark.parametrize("case", QUANTIZE_CASES, ids=str)
    def test_quantize(self, backend: Backend, case: QuantizeCase):
        if check_answer(backend, PROMISES[backend.name], case.call, current_target(1)):
            check_quantize(backend, case)

    @pytest.mark.parametrize("case", QUANTIZE_BOTH_CASES, ids=str)
    def test_quantize_both(self, backend: Backend, case: QuantizeBothCase):
        if check_answer(backend, PROMISES[backend.name], case.call, current_target(1)):
            check_quantize_both(backend, case)

    @pytest.mark.parametrize("case", DEQUANTIZE_CASES, ids=str)
    def test_dequantize(self, backend: Backend, case: QuantizeCase):
        call = dequantize_call(case)
        if check_answer(backend, PROMISES[backend.name], call, current_target(1)):
            check_dequantize(backend, case)

    @pytest.mark.parametrize("case", MATMUL_CASES, ids=str)
    def test_matmul(self, backend: Backend, case: MatmulCase):
        if check_answer(backend, PROMISES[backend.name], case.call, current_target(1)):
            check_matmul(backend, case)

    def test_stagnating_sum(self, backend: Backend):
        call = STAGNATING_CASE.call
        if check_answer(backend, PROMISES[backend.name], call, current_target(1)):
            check_stagnating_sum(backend)
