"""The shared suite, asked of every backend; and each of its checks fails on a backend that lies.

A new backend joins with one line in `PROMISES`: the calls that it must take. Whatever it does not
promise it may refuse, with a reason. So support can grow quietly, but never shrink.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import pytest
from jax import lax

from mx_jax import formats
from mx_jax.backends import calls
from mx_jax.backends.calls import AttendCall, Call, MatmulCall, QuantizeCall, RaggedCall
from mx_jax.backends.cpu_ffi import CPU_FFI, library
from mx_jax.backends.reference import REFERENCE
from mx_jax.backends.select import BACKENDS
from mx_jax.backends.target import Backend, Target, current_target
from mx_jax.codecs.rounding import NEAREST
from mx_jax.formats import BLOCK_FORMATS, MX_FORMATS, MXFP8_E4M3, MXFP8_E5M2, WHOLE
from mx_jax.mxarray import MXArray
from mx_jax.testing import backend_suite, cases
from mx_jax.testing.backend_suite import Promise
from mx_jax.testing.cases import AttendCase, RaggedCase
from tests.backends.altered import altered, answering

PLAIN = cases.QuantizeCase(format=formats.MXFP4, shape=(5, 64))
STOCHASTIC = dataclasses.replace(PLAIN, rounding="stochastic")
NVFP4 = cases.QuantizeCase(format=formats.NVFP4, shape=(5, 64))
PRODUCT = cases.MatmulCase(lhs=formats.MXFP8_E4M3, rhs=formats.MXFP8_E4M3)
CPU, BFLOAT16 = Target(platform="cpu"), jnp.dtype("bfloat16")


# What is promised -------------------------------------------------------------------------------


def _whole_axis_codes(call: calls.Call, target: Target) -> bool:
    capability = target.compute_capability or (0, 0)
    has = {
        "float": target.platform == "rocm" or capability >= (8, 9),
        "int": target.device_kind == "TPU v6 lite" or (8, 0) <= capability < (10, 0),
    }
    if not isinstance(call, calls.MatmulCall) or None in (call.lhs.format, call.rhs.format):
        return False
    formats = [operand.format for _, operand in call.sides if operand.format in BLOCK_FORMATS]
    kinds = {f.element.kind for f in formats if f.block[1] is WHOLE and f.element.bits == 8}
    whole = all(f.block[1] is WHOLE for f in formats) and len(formats) == 2
    return whole and len(kinds) == 1 and has[kinds.pop()]


def _what_bfloat16_holds_on_accelerators(call: calls.Call, target: Target) -> bool:
    if target.platform == "cpu" or not isinstance(call, calls.MatmulCall):
        return False

    def is_held(operand: calls.OperandType) -> bool:
        format = operand.format
        if format is None:
            return operand.dtype == jnp.bfloat16
        leaves_sums = not format.scale.is_float32 or format.block[1] is WHOLE
        return format in BLOCK_FORMATS and leaves_sums

    return all(is_held(operand) for _, operand in call.sides)


def _mxfp8_on_one_blackwell(call: calls.Call, target: Target) -> bool:
    capability = target.compute_capability
    if target.num_devices > 1 or capability is None or capability < (10, 0):
        return False
    if not isinstance(call, calls.MatmulCall) or len(call.lhs.axes.contracting) != 1:
        return False
    whole = all(0 not in operand.shape for _, operand in call.sides)
    (axis,) = call.lhs.axes.contracting
    k = call.lhs.shape[axis]
    operand_formats = (call.lhs.format, call.rhs.format)
    return whole and k % 32 == 0 and all(f in (MXFP8_E4M3, MXFP8_E5M2) for f in operand_formats)


def _what_the_handlers_compute(call: calls.Call, target: Target) -> bool:
    # Where nothing was built, nothing is promised.
    if target.platform != "cpu" or isinstance(library.load(), str):
        return False
    if isinstance(call, calls.MatmulCall):
        operand_formats = (call.lhs.format, call.rhs.format)
        return all(f is None or not f.scale.is_float32 for f in operand_formats)
    always = (calls.QuantizeBothCall, calls.RaggedCall, calls.RandomBitsCall, calls.TransformCall)
    if isinstance(call, always):
        return True
    if isinstance(call, calls.AttendCall):
        return call.tokens == 1 and set(call.dtypes) == {jnp.dtype(jnp.float32)}
    if isinstance(call, calls.QuantizeCall):
        rule = call.scale_rule
        if rule.reads_values:
            return False
    if isinstance(call, calls.ValuesCall):
        return False
    return len(call.blocks) == 1 or [axis for axis, _ in call.blocks] == [-2, -1]


def _whole_tiles_of_bfloat16_on_one_tpu(call: calls.Call, target: Target) -> bool:
    if target.platform != "tpu" or not isinstance(call, calls.QuantizeCall):
        return False
    plain = call.dtype == jnp.bfloat16 and call.rounding == NEAREST
    return plain and call.format in MX_FORMATS and call.shape == (4096, 4096)


# What each backend of the table must take: the one line that a new backend adds.
PROMISES: Mapping[str, Promise] = {
    "xla": _whole_axis_codes,
    "cpu_ffi": _what_the_handlers_compute,
    "xla_scaled": _mxfp8_on_one_blackwell,
    "pallas_tpu": _whole_tiles_of_bfloat16_on_one_tpu,
    "xla_bfloat16": _what_bfloat16_holds_on_accelerators,
    # Cases ask for the highest precision, which it does not have.
    "xla_rounded": lambda call, target: False,
    "reference": lambda call, target: not isinstance(call, calls.QuantizeBothCall),
    # No case has packed weights.
    "pallas_gpu": lambda call, target: False,
}

TARGETS: tuple[Target, ...] = (
    Target(platform="cpu"),
    Target(platform="cuda", compute_capability=(8, 0)),
    Target(platform="cuda", compute_capability=(9, 0)),
    Target(platform="cuda", compute_capability=(10, 0)),
    Target(platform="cuda", compute_capability=(12, 0)),
    Target(platform="rocm"),
    Target(platform="tpu"),
    Target(platform="tpu", device_kind="TPU v6 lite"),
)

_ASKED_CASES = (
    *cases.QUANTIZE_CASES,
    *cases.QUANTIZE_BOTH_CASES,
    *cases.MATMUL_CASES,
    *cases.RAGGED_CASES,
    *cases.LARGE_QUANTIZE_CASES,
    *cases.LARGE_MATMUL_CASES,
    *cases.ATTEND_CASES,
)


_CHECKS = tuple(
    pytest.param(check, case, id=f"{check.__name__.removeprefix('check_')}-{case}")
    for check, drawn in (
        (backend_suite.check_quantize, cases.QUANTIZE_CASES),
        (backend_suite.check_quantize_both, cases.QUANTIZE_BOTH_CASES),
        (backend_suite.check_dequantize, cases.DEQUANTIZE_CASES),
        (backend_suite.check_matmul, cases.MATMUL_CASES),
        (backend_suite.check_ragged, cases.RAGGED_CASES),
        (backend_suite.check_stagnating_sum, (cases.STAGNATING_CASE,)),
        (backend_suite.check_extremes, backend_suite.EXTREME_CASES),
        (backend_suite.check_attend, cases.ATTEND_CASES),
    )
    for case in drawn
)


# A library that is the same on every Python, and a reference under every instruction set.
@pytest.mark.slow(but=5, where=lambda params: params["backend"] is CPU_FFI and "case" in params)
@pytest.mark.slow(but=3, where=lambda params: params["backend"] is REFERENCE and "case" in params)
@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
class TestBackends:
    """Every backend of the table."""

    def test_promise_is_stated(self, backend: Backend):
        assert backend.name in PROMISES, f"PROMISES lacks what {backend.name} must take"

    @pytest.mark.parametrize("target", TARGETS, ids=str)
    def test_answers(self, backend: Backend, target: Target):
        for case in _ASKED_CASES:
            backend_suite.check_answer(backend, PROMISES[backend.name], case.call, target)

    @pytest.mark.parametrize(("check", "case"), _CHECKS)
    def test_results(self, backend: Backend, check: Callable[[Backend, Any], None], case: Any):
        call = cases.dequantize_call(case) if check is backend_suite.check_dequantize else case.call
        here = dataclasses.replace(current_target(), num_devices=1)
        is_taken = backend_suite.check_answer(backend, PROMISES[backend.name], call, here)
        # The reference defines the bits that others are compared with.
        if is_taken and not (backend is REFERENCE and isinstance(case, cases.QuantizeCase)):
            check(backend, case)


# Backends that lie --------------------------------------------------------------------------------


def refusing(reason: Any = "not today") -> Backend:
    return answering(REFERENCE, lambda call, target: reason)


def promise(call, target):
    """Products, and nothing else."""
    return isinstance(call, MatmulCall)


def test_answers():
    """None, or a reason for what was not promised."""
    assert backend_suite.check_answer(REFERENCE, promise, PRODUCT.call, CPU)
    assert not backend_suite.check_answer(refusing(), promise, PLAIN.call, CPU)
    for reason in ("", True, NotImplementedError("x")):
        with pytest.raises(AssertionError, match=r"reference rejects QuantizeCall\(.* with"):
            backend_suite.check_answer(refusing(reason), promise, PLAIN.call, CPU)
    with pytest.raises(AssertionError, match=r"reference must take MatmulCall\(.*: not today"):
        backend_suite.check_answer(refusing(), promise, PRODUCT.call, CPU)


def lying(
    call: type[Call],
    inputs: Callable[..., Any] = lambda *operands: operands,
    result: Callable[..., Any] = lambda result: result,
) -> Backend:
    """The reference, but for one kind of call, whose operands or results are changed."""

    def run(*operands: Any) -> Any:
        return result(REFERENCE.run(operands[-1], *inputs(*operands[:-1])))

    return altered(REFERENCE, call, run)


def with_code(q: MXArray) -> MXArray:
    return dataclasses.replace(q, codes=q.codes.at[0, 0].add(1))


def with_scale(q: MXArray) -> MXArray:
    return dataclasses.replace(q, scales=q.scales.at[-1, -1].add(1))


def without_a_block(lhs: MXArray, rhs: MXArray) -> Any:
    return dataclasses.replace(lhs, codes=lhs.codes.at[..., -26:].set(0)), rhs


ROUNDED = {"result": lambda y: lax.reduce_precision(y, 8, 10)}  # once, as TF32
CASTS: dict[str, tuple[dict[str, Any], cases.QuantizeCase, str]] = {
    "a code": ({"result": with_code}, PLAIN, r"codes: 1 of 320 .* differ, the first at \[0, 0\]"),
    "a scale": ({"result": with_scale}, PLAIN, r"scales: 1 of 10 .*, the first at \[4, 1\]"),
    "dtype": ({"result": lambda q: dataclasses.replace(q, dtype=BFLOAT16)}, PLAIN, "dtype"),
    "bits": ({"inputs": lambda x, bits, scale: (x, 0 * bits, scale)}, STOCHASTIC, "codes: "),
    "tensor scale": ({"inputs": lambda x, bits, scale: (x, bits, None)}, NVFP4, "codes: |scales: "),
}


@pytest.mark.parametrize(("change", "case", "complaint"), CASTS.values(), ids=CASTS)
def test_wrong_bits_are_noticed(change: Any, case: cases.QuantizeCase, complaint: str):
    with pytest.raises(AssertionError, match=complaint):
        backend_suite.check_quantize(lying(QuantizeCall, **change), case)


PRODUCTS: dict[str, dict[str, Any]] = {
    "rounded": ROUNDED,
    "transposed": {"result": lambda y: y.T},
    "dtype": {"result": lambda y: y.astype(jnp.float16)},
    "without a block": {"inputs": without_a_block},
    "NaN": {"result": lambda y: y.at[0, 0].set(jnp.nan)},
}


@pytest.mark.parametrize("change", PRODUCTS.values(), ids=PRODUCTS)
def test_wrong_products_are_noticed(change: Any):
    square = dataclasses.replace(PRODUCT, m=(7,), k=(90,))
    with pytest.raises(AssertionError):
        backend_suite.check_matmul(lying(MatmulCall, **change), square)


def test_a_short_accumulator_is_noticed():
    """It adds blocks exactly, and then each block's sum to eight bits."""

    def run(lhs, rhs, call):
        left, right = lhs.dequantize(jnp.float32), rhs.dequantize(jnp.float32)
        left = left.reshape(left.shape[0], -1, 32)
        blocks = jnp.einsum("mbk,nbk->bmn", left, right.reshape(right.shape[0], -1, 32))

        def add(total, block):
            return lax.reduce_precision(total + block, 8, 7), None

        return lax.scan(add, jnp.zeros_like(blocks[0]), blocks)[0]

    with pytest.raises(AssertionError, match="of 256 products are too far from the exact ones"):
        backend_suite.check_stagnating_sum(altered(REFERENCE, MatmulCall, run))


RAGGED = {
    "groups out of order": lambda lhs, rhs, sizes: (lhs, rhs, sizes[::-1]),
    "rows of no group": lambda lhs, rhs, sizes: (lhs, rhs, sizes.at[-1].set(16)),
}


@pytest.mark.parametrize("inputs", RAGGED.values(), ids=RAGGED)
def test_wrong_ragged_products_are_noticed(inputs: Any):
    case = RaggedCase(lhs=None, rhs=formats.MXFP4, sizes=(1, 7), rows=16)
    with pytest.raises(AssertionError):
        backend_suite.check_ragged(lying(RaggedCall, inputs), case)


ATTENTION: dict[str, dict[str, Any]] = {
    "a row too far": {"inputs": lambda q, k, v, position: (q, k, v, position + 1)},
    "scores": {"inputs": lambda q, k, v, position: (q * q.shape[-1] ** 0.5, k, v, position)},
    "rounded": ROUNDED,
}


@pytest.mark.parametrize("change", ATTENTION.values(), ids=ATTENTION)
@pytest.mark.parametrize("format", [None, formats.MXFP4], ids=["float32", "mxfp4"])
def test_wrong_attention_is_noticed(change: Any, format: Any):
    with pytest.raises(AssertionError, match="of 384 are too far from the exact ones"):
        backend_suite.check_attend(lying(AttendCall, **change), AttendCase(format=format))
