"""The shared suite, asked of every backend; and each of its checks fails on a backend that lies."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import pytest
from jax import lax

from mx_jax import formats
from mx_jax.backends.reference import ReferenceBackend
from mx_jax.codecs.rounding import NEAREST
from mx_jax.testing import backend_suite, cases
from mx_jax.testing.backend_suite import BackendSuite

PLAIN = cases.QuantizeCase(format=formats.MXFP4, shape=(5, 64))
STOCHASTIC = dataclasses.replace(PLAIN, rounding="stochastic")
NVFP4 = cases.QuantizeCase(format=formats.NVFP4, shape=(5, 64))
PRODUCT = cases.MatmulCase(lhs=formats.MXFP8_E4M3, rhs=formats.MXFP8_E4M3)
CPU = backend_suite.TARGETS[0]


class TestBackends(BackendSuite):
    """Every backend of the table."""


@dataclasses.dataclass(frozen=True)
class Refusing(ReferenceBackend):
    reason: Any = "not today"

    def rejects(self, call, target):
        return self.reason


def everything(call, target):
    return True


def nothing(call, target):
    return False


def test_an_answer_is_a_reason_or_nothing():
    assert backend_suite.check_answer(ReferenceBackend(), everything, PLAIN.call, CPU)
    assert not backend_suite.check_answer(Refusing(), nothing, PLAIN.call, CPU)


@pytest.mark.parametrize("reason", ["", True, NotImplementedError("x")], ids=repr)
def test_a_refusal_without_a_reason_is_noticed(reason: Any):
    with pytest.raises(AssertionError, match=r"reference rejects QuantizeCall\(.* with"):
        backend_suite.check_answer(Refusing(reason=reason), nothing, PLAIN.call, CPU)


def test_shrinking_support_is_noticed():
    with pytest.raises(AssertionError, match=r"reference must take MatmulCall\(.*: not today"):
        backend_suite.check_answer(Refusing(), everything, PRODUCT.call, CPU)


class OneCodeOff(ReferenceBackend):
    def quantize(self, x, call, random_bits, tensor_scale):
        result = super().quantize(x, call, random_bits, tensor_scale)
        return dataclasses.replace(result, codes=result.codes.at[0, 0].add(1))


class OneScaleOff(ReferenceBackend):
    def quantize(self, x, call, random_bits, tensor_scale):
        result = super().quantize(x, call, random_bits, tensor_scale)
        return dataclasses.replace(result, scales=result.scales.at[-1, -1].add(1))


class OtherDtype(ReferenceBackend):
    def quantize(self, x, call, random_bits, tensor_scale):
        result = super().quantize(x, call, random_bits, tensor_scale)
        return dataclasses.replace(result, dtype=jnp.dtype("bfloat16"))


class NeverRandom(ReferenceBackend):
    def quantize(self, x, call, random_bits, tensor_scale):
        call = dataclasses.replace(call, rounding=NEAREST)
        return super().quantize(x, call, None, tensor_scale)


class OwnTensorScale(ReferenceBackend):
    def quantize(self, x, call, random_bits, tensor_scale):
        return super().quantize(x, call, random_bits, None)


@pytest.mark.parametrize(
    ("backend", "case", "complaint"),
    [
        (OneCodeOff(), PLAIN, r"codes: 1 of 320 elements differ, the first at \[0, 0\]"),
        (OneScaleOff(), PLAIN, r"scales: 1 of 10 elements differ, the first at \[4, 1\]"),
        (OtherDtype(), PLAIN, "dtype"),
        (NeverRandom(), STOCHASTIC, "codes: "),
        (OwnTensorScale(), NVFP4, "codes: |scales: |tensor_scale: "),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, ReferenceBackend) else None,
)
def test_wrong_bits_are_noticed(
    backend: ReferenceBackend, case: cases.QuantizeCase, complaint: str
):
    with pytest.raises(AssertionError, match=complaint):
        backend_suite.check_quantize(backend, case)


class RoundedSum(ReferenceBackend):
    """A product as TF32 would round it once."""

    def scaled_matmul(self, lhs, rhs, call):
        return lax.reduce_precision(super().scaled_matmul(lhs, rhs, call), 8, 10)


class Transposed(ReferenceBackend):
    def scaled_matmul(self, lhs, rhs, call):
        return super().scaled_matmul(lhs, rhs, call).T


class WideResult(ReferenceBackend):
    def scaled_matmul(self, lhs, rhs, call):
        return super().scaled_matmul(lhs, rhs, call).astype(jnp.float16)


class OneBlockForgotten(ReferenceBackend):
    def scaled_matmul(self, lhs, rhs, call):
        lhs = dataclasses.replace(lhs, codes=lhs.codes.at[..., -26:].set(0))
        return super().scaled_matmul(lhs, rhs, call)


class ShortAccumulator(ReferenceBackend):
    """Adds blocks exactly, and then each block's sum to eight bits."""

    def scaled_matmul(self, lhs, rhs, call):
        left, right = lhs.dequantize(jnp.float32), rhs.dequantize(jnp.float32)
        left = left.reshape(left.shape[0], -1, 32)
        blocks = jnp.einsum("mbk,nbk->bmn", left, right.reshape(right.shape[0], -1, 32))

        def add(total, block):
            return lax.reduce_precision(total + block, 8, 7), None

        return lax.scan(add, jnp.zeros_like(blocks[0]), blocks)[0]


@pytest.mark.parametrize(
    "backend", [RoundedSum(), Transposed(), WideResult(), OneBlockForgotten()], ids=repr
)
def test_wrong_products_are_noticed(backend: ReferenceBackend):
    square = dataclasses.replace(PRODUCT, m=(7,), k=(90,))
    with pytest.raises(AssertionError):
        backend_suite.check_matmul(backend, square)


def test_a_short_accumulator_is_noticed():
    with pytest.raises(AssertionError, match="of 256 products are too far from the exact ones"):
        backend_suite.check_stagnating_sum(ShortAccumulator())
