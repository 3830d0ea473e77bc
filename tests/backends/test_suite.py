"""The shared suite, asked of every backend; and each of its checks fails on a backend that lies.

Whatever a backend does not promise (`PROMISES`) it may refuse, with a reason. So support can grow
quietly, but never shrink.
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


# What each backend that runs here must take. Of accelerators' backends their tests say it, with the
# shapes and machines that they are for.
PROMISES: Mapping[str, Promise] = {
    "cpu_ffi": _what_the_handlers_compute,
    "reference": lambda call, target: not isinstance(call, calls.QuantizeBothCall),
}


def check_answer(backend: Backend, call: Call, target: Target) -> bool:
    promised = PROMISES.get(backend.name, lambda call, target: False)
    return backend_suite.check_answer(backend, promised, call, target)


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


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_answers_of_all_backends(backend: Backend, target: Target):
    for case in _ASKED_CASES:
        check_answer(backend, case.call, target)


# A library that is the same on every Python, and a reference under every instruction set.
@pytest.mark.slow(but=5, where=lambda params: params["backend"] is CPU_FFI)
@pytest.mark.slow(but=3, where=lambda params: params["backend"] is REFERENCE)
@pytest.mark.parametrize("backend", [CPU_FFI, REFERENCE], ids=lambda backend: backend.name)
@pytest.mark.parametrize(("check", "case"), _CHECKS)
def test_results(backend: Backend, check: Callable[[Backend, Any], None], case: Any):
    call = cases.dequantize_call(case) if check is backend_suite.check_dequantize else case.call
    is_taken = check_answer(backend, call, dataclasses.replace(current_target(), num_devices=1))
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
