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
from mx_jax.backends.calls import AttendCall, MatmulCall, QuantizeCall, RaggedCall
from mx_jax.backends.cpu_ffi import CPU_FFI, library
from mx_jax.backends.reference import REFERENCE
from mx_jax.backends.select import BACKENDS
from mx_jax.backends.target import Backend, Target, current_target
from mx_jax.codecs.rounding import NEAREST
from mx_jax.formats import BLOCK_FORMATS, MX_FORMATS, MXFP8_E4M3, MXFP8_E5M2, WHOLE
from mx_jax.testing import backend_suite, cases
from mx_jax.testing.backend_suite import Promise
from mx_jax.testing.cases import AttendCase, RaggedCase
from tests.backends.altered import altered, answering

PLAIN = cases.QuantizeCase(format=formats.MXFP4, shape=(5, 64))
STOCHASTIC = dataclasses.replace(PLAIN, rounding="stochastic")
NVFP4 = cases.QuantizeCase(format=formats.NVFP4, shape=(5, 64))
PRODUCT = cases.MatmulCase(lhs=formats.MXFP8_E4M3, rhs=formats.MXFP8_E4M3)
CPU = Target(platform="cpu")


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


# A library that is the same on every Python.
@pytest.mark.slow(but=5, where=lambda params: params["backend"] is CPU_FFI and "case" in params)
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
        is_taken = backend_suite.check_answer(
            backend, PROMISES[backend.name], call, current_target(1)
        )
        # The reference defines the bits that others are compared with.
        if is_taken and not (backend is REFERENCE and isinstance(case, cases.QuantizeCase)):
            check(backend, case)


# Backends that lie --------------------------------------------------------------------------------


def refusing(reason: Any = "not today") -> Backend:
    return answering(REFERENCE, lambda call, target: reason)


def everything(call, target):
    return True


def nothing(call, target):
    return False


def test_an_answer_is_a_reason_or_nothing():
    assert backend_suite.check_answer(REFERENCE, everything, PLAIN.call, CPU)
    assert not backend_suite.check_answer(refusing(), nothing, PLAIN.call, CPU)


@pytest.mark.parametrize("reason", ["", True, NotImplementedError("x")], ids=repr)
def test_a_refusal_without_a_reason_is_noticed(reason: Any):
    with pytest.raises(AssertionError, match=r"reference rejects QuantizeCall\(.* with"):
        backend_suite.check_answer(refusing(reason), nothing, PLAIN.call, CPU)


def test_shrinking_support_is_noticed():
    with pytest.raises(AssertionError, match=r"reference must take MatmulCall\(.*: not today"):
        backend_suite.check_answer(refusing(), everything, PRODUCT.call, CPU)


def one_code_off(x, random_bits, tensor_scale, call):
    result = REFERENCE.run(call, x, random_bits, tensor_scale)
    return dataclasses.replace(result, codes=result.codes.at[0, 0].add(1))


def one_scale_off(x, random_bits, tensor_scale, call):
    result = REFERENCE.run(call, x, random_bits, tensor_scale)
    return dataclasses.replace(result, scales=result.scales.at[-1, -1].add(1))


def other_dtype(x, random_bits, tensor_scale, call):
    result = REFERENCE.run(call, x, random_bits, tensor_scale)
    return dataclasses.replace(result, dtype=jnp.dtype("bfloat16"))


def never_random(x, random_bits, tensor_scale, call):
    return REFERENCE.run(dataclasses.replace(call, rounding=NEAREST), x, None, tensor_scale)


def own_tensor_scale(x, random_bits, tensor_scale, call):
    return REFERENCE.run(call, x, random_bits, None)


@pytest.mark.parametrize(
    ("quantize", "case", "complaint"),
    [
        (one_code_off, PLAIN, r"codes: 1 of 320 elements differ, the first at \[0, 0\]"),
        (one_scale_off, PLAIN, r"scales: 1 of 10 elements differ, the first at \[4, 1\]"),
        (other_dtype, PLAIN, "dtype"),
        (never_random, STOCHASTIC, "codes: "),
        (own_tensor_scale, NVFP4, "codes: |scales: |tensor_scale: "),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_wrong_bits_are_noticed(quantize: Any, case: cases.QuantizeCase, complaint: str):
    with pytest.raises(AssertionError, match=complaint):
        backend_suite.check_quantize(altered(REFERENCE, QuantizeCall, quantize), case)


def rounded_sum(lhs, rhs, call):
    """A product as TF32 would round it once."""
    return lax.reduce_precision(REFERENCE.run(call, lhs, rhs), 8, 10)


def transposed(lhs, rhs, call):
    return REFERENCE.run(call, lhs, rhs).T


def wide_result(lhs, rhs, call):
    return REFERENCE.run(call, lhs, rhs).astype(jnp.float16)


def one_block_forgotten(lhs, rhs, call):
    lhs = dataclasses.replace(lhs, codes=lhs.codes.at[..., -26:].set(0))
    return REFERENCE.run(call, lhs, rhs)


def one_without_a_number(lhs, rhs, call):
    return REFERENCE.run(call, lhs, rhs).at[0, 0].set(jnp.nan)


def short_accumulator(lhs, rhs, call):
    """Adds blocks exactly, and then each block's sum to eight bits."""
    left, right = lhs.dequantize(jnp.float32), rhs.dequantize(jnp.float32)
    left = left.reshape(left.shape[0], -1, 32)
    blocks = jnp.einsum("mbk,nbk->bmn", left, right.reshape(right.shape[0], -1, 32))

    def add(total, block):
        return lax.reduce_precision(total + block, 8, 7), None

    return lax.scan(add, jnp.zeros_like(blocks[0]), blocks)[0]


@pytest.mark.parametrize(
    "multiply", [rounded_sum, transposed, wide_result, one_block_forgotten, one_without_a_number]
)
def test_wrong_products_are_noticed(multiply: Any):
    square = dataclasses.replace(PRODUCT, m=(7,), k=(90,))
    with pytest.raises(AssertionError):
        backend_suite.check_matmul(altered(REFERENCE, MatmulCall, multiply), square)


def test_a_short_accumulator_is_noticed():
    with pytest.raises(AssertionError, match="of 256 products are too far from the exact ones"):
        backend_suite.check_stagnating_sum(altered(REFERENCE, MatmulCall, short_accumulator))


def groups_out_of_order(lhs, rhs, sizes, call):
    return REFERENCE.run(call, lhs, rhs, sizes[::-1])


def rest_of_the_last_group(lhs, rhs, sizes, call):
    return REFERENCE.run(call, lhs, rhs, sizes.at[-1].set(call.lhs.shape[0]))


@pytest.mark.parametrize("multiply", [groups_out_of_order, rest_of_the_last_group])
def test_wrong_ragged_products_are_noticed(multiply: Any):
    case = RaggedCase(lhs=None, rhs=formats.MXFP4, sizes=(1, 7), rows=16)
    with pytest.raises(AssertionError):
        backend_suite.check_ragged(altered(REFERENCE, RaggedCall, multiply), case)


def one_row_too_far(queries, keys, values, position, call):
    return REFERENCE.run(call, queries, keys, values, position + 1)


def scores_as_they_are(queries, keys, values, position, call):
    return REFERENCE.run(call, queries * queries.shape[-1] ** 0.5, keys, values, position)


def rounded_output(queries, keys, values, position, call):
    return lax.reduce_precision(REFERENCE.run(call, queries, keys, values, position), 8, 10)


@pytest.mark.parametrize("attend", [one_row_too_far, scores_as_they_are, rounded_output])
@pytest.mark.parametrize("format", [None, formats.MXFP4], ids=["float32", "mxfp4"])
def test_wrong_attention_is_noticed(attend: Any, format: Any):
    with pytest.raises(AssertionError, match="of 384 are too far from the exact ones"):
        backend_suite.check_attend(
            altered(REFERENCE, AttendCall, attend), AttendCase(format=format)
        )
