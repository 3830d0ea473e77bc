"""XLA's float8 dot: what it takes, why it does not, and its arithmetic, which runs anywhere."""

import dataclasses

import jax
import numpy as np
import pytest

from mx_jax import formats
from mx_jax.backends.calls import MatmulCall
from mx_jax.backends.target import Target
from mx_jax.backends.xla import XLA
from mx_jax.testing.backend_suite import check_matmul
from mx_jax.testing.cases import MatmulCase, QuantizeCase

ROWWISE, TENSORWISE = formats.FLOAT8_ROWWISE_E4M3, formats.FLOAT8_TENSORWISE_E5M2
CASES = (
    MatmulCase(lhs=ROWWISE, rhs=ROWWISE),
    MatmulCase(lhs=TENSORWISE, rhs=ROWWISE, out_dtype="bfloat16"),
    MatmulCase(lhs=ROWWISE, rhs=TENSORWISE, batch=(2,), m=(2, 3), n=(4,), k=(3, 16)),
)
H200 = Target(platform="cuda", compute_capability=(9, 0))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_products(case: MatmulCase):
    assert XLA.rejects(case.call, H200) is None
    check_matmul(XLA, case)


@pytest.mark.parametrize(
    ("case", "target", "reason"),
    [
        (
            CASES[0],
            Target(platform="cuda", compute_capability=(8, 0)),
            "needs CUDA compute capability >= (8, 9) for float8, got (8, 0)",
        ),
        (
            CASES[1],
            Target(platform="cuda"),
            "needs CUDA compute capability >= (8, 9) for float8, got None",
        ),
        (CASES[0], Target(platform="cpu"), "XLA has no native float8 dot on platform=cpu"),
        (
            MatmulCase(lhs=ROWWISE, rhs=None),
            H200,
            "needs two float8 operands, got rhs in high precision",
        ),
        (
            MatmulCase(lhs=formats.MXFP4, rhs=formats.MXFP4),
            H200,
            "needs float8 elements, got lhs=mxfp4",
        ),
        (
            MatmulCase(lhs=ROWWISE, rhs=formats.MXFP8_E4M3),
            H200,
            "needs one scale along the contracting axis, got rhs=mxfp8_e4m3",
        ),
        (
            QuantizeCase(format=ROWWISE, shape=(4, 4)),
            H200,
            "quantizes nothing: XLA fuses the reference's own code",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_reasons(case: MatmulCase | QuantizeCase, target: Target, reason: str):
    assert XLA.rejects(case.call, target) == reason


def test_fast_accumulation_asks_for_the_default_precision():
    call = CASES[0].call
    assert not call.fast_accumulation
    assert "HIGHEST" in lowered(call)
    assert "HIGHEST" not in lowered(dataclasses.replace(call, fast_accumulation=True))


def lowered(call: MatmulCall) -> str:
    operands = CASES[0].operands(np.random.default_rng(0))
    run = jax.jit(lambda lhs, rhs: XLA.run(call, lhs, rhs))
    return run.lower(*operands).as_text()
