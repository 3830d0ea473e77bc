"""The shared suite, asked of every backend; and each of its checks fails on a backend that lies."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import pytest
from jax import lax

from mx_jax import formats
from mx_jax.backends.calls import AttendCall, MatmulCall, QuantizeCall, RaggedCall
from mx_jax.backends.cpu_ffi import CPU_FFI
from mx_jax.backends.reference import REFERENCE
from mx_jax.backends.target import Backend
from mx_jax.codecs.rounding import NEAREST
from mx_jax.testing import backend_suite, cases
from mx_jax.testing.backend_suite import BackendSuite
from mx_jax.testing.cases import AttendCase, RaggedCase
from tests.backends.altered import altered, answering

PLAIN = cases.QuantizeCase(format=formats.MXFP4, shape=(5, 64))
STOCHASTIC = dataclasses.replace(PLAIN, rounding="stochastic")
NVFP4 = cases.QuantizeCase(format=formats.NVFP4, shape=(5, 64))
PRODUCT = cases.MatmulCase(lhs=formats.MXFP8_E4M3, rhs=formats.MXFP8_E4M3)
CPU = backend_suite.TARGETS[0]


# A library that is the same on every Python.
@pytest.mark.slow(but=5, where=lambda params: params["backend"] is CPU_FFI and "case" in params)
class TestBackends(BackendSuite):
    """Every backend of the table."""


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
