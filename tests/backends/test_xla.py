"""XLA's dot of 8 bits: what it takes, why it does not, and its arithmetic, which runs anywhere."""

import dataclasses
import functools
import re

import jax
import jax.export
import numpy as np
import pytest

import mx_jax
import mx_jax.testing
from mx_jax import formats
from mx_jax.backends.target import Target
from mx_jax.backends.xla import XLA
from mx_jax.codecs.lowering import Lowering, lowering
from mx_jax.formats import MXFP4, MXFP8_E4M3
from mx_jax.testing.backend_suite import check_matmul
from mx_jax.testing.cases import MatmulCase
from tests.quick import lowered

ROWWISE, TENSORWISE = formats.FLOAT8_ROWWISE_E4M3, formats.FLOAT8_TENSORWISE_E5M2
INT8 = formats.INT8_ROWWISE
CASES = (
    MatmulCase(lhs=ROWWISE, rhs=ROWWISE),
    MatmulCase(lhs=TENSORWISE, rhs=ROWWISE, out_dtype="bfloat16"),
    MatmulCase(lhs=ROWWISE, rhs=TENSORWISE, batch=(2,), m=(2, 3), n=(4,), k=(3, 16)),
    MatmulCase(lhs=INT8, rhs=INT8, rhs_k_first=True),
    MatmulCase(lhs=INT8, rhs=INT8, batch=(2,), m=(2, 3), k=(3, 16), out_dtype="bfloat16"),
)
LONG = MatmulCase(lhs=INT8, rhs=INT8, k=(2, 1 << 16))
A100, H200 = (Target(platform="cuda", compute_capability=(major, 0)) for major in (8, 9))
V4, V6E, TPU7X = (
    Target(platform="tpu", device_kind=f"TPU{kind}") for kind in (" v4", " v6 lite", "7x")
)
ROCM = Target(platform="rocm")
NONE, EIGHT = "XLA's dot has no native units for", "needs two operands in 8 bits"
OTHER = "multiplies elements of one kind, got lhs=int8_rowwise,"
WHOLE = "needs one scale along the contracting axis"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_products(case: MatmulCase):
    for target in (H200, *((V6E, A100) if case.lhs is INT8 else (TPU7X, ROCM))):
        assert XLA.rejects(case.call, target) is None
    with lowering(Lowering(on_one_device=True)):  # several may add up in the product's dtype
        check_matmul(XLA, case)


@pytest.mark.parametrize(
    ("case", "target", "reason"),
    [
        (CASES[0], A100, f"{NONE} float8 on platform=cuda, compute_capability=(8, 0)"),
        (CASES[1], Target(platform="cuda"), f"{NONE} 8 bits on platform=cuda"),
        (CASES[0], V4, f"{NONE} 8 bits on platform=tpu, device_kind=TPU v4"),
        (CASES[3], TPU7X, f"{NONE} int8 on platform=tpu, device_kind=TPU7x"),
        (MatmulCase(lhs=INT8, rhs=ROWWISE), H200, f"{OTHER} rhs=float8_rowwise_e4m3"),
        (LONG, V6E, "adds up at most 131071 products in int32, got k=[2, 65536]"),
        (MatmulCase(lhs=ROWWISE, rhs=None), H200, f"{EIGHT}, got rhs in high precision"),
        (MatmulCase(lhs=MXFP4, rhs=MXFP4), H200, "needs elements of 8 bits, got lhs=mxfp4"),
        (MatmulCase(lhs=ROWWISE, rhs=MXFP8_E4M3), H200, f"{WHOLE}, got rhs=mxfp8_e4m3"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_reasons(case: MatmulCase, target: Target, reason: str):
    assert XLA.rejects(case.call, target) == reason


def test_fast_accumulation_asks_for_the_default_precision():
    lhs, rhs = CASES[0].operands(np.random.default_rng(0))
    for fast in (False, True):
        call = dataclasses.replace(CASES[0].call, fast_accumulation=fast)
        text = jax.jit(functools.partial(XLA.run, call)).lower(lhs, rhs).as_text()
        assert ("HIGHEST" in text) == (not fast)


def gradients(recipe: str, platform: str) -> str:
    """A lowered program."""
    x, w = (jax.ShapeDtypeStruct(shape, "bfloat16") for shape in ((64, 32), (32, 128)))
    loss = lambda x, w: mx_jax.matmul(x, w, recipe=recipe).sum()  # noqa: E731
    return lowered(jax.grad(loss, (0, 1)), x, w, platform=platform)


def test_float8_is_brought_into_the_order_that_units_read():
    """Transposed before the dot, by what casts it: what XLA transposes takes longer."""
    with mx_jax.testing.target("cuda", (9, 0)):
        text = gradients("float8_rowwise", "cuda")
    dots = re.findall(r"dot_general.*contracting_dims = (.*?), .*f8E4M3FN", text)
    assert dots == ["[1] x [1]"] * len(dots) and len(dots) >= 2
    # Rows stay, whatever reads the transposed copy.
    assert text.count("stablehlo.transpose") * 2 == text.count("@LayoutConstraint") > 0


@pytest.mark.parametrize(
    ("recipe", "kind", "operands"),
    [
        ("int8_rowwise", "TPU v6 lite", "i8"),
        ("int8_rowwise", "TPU7x", "bf16"),
        ("float8_tensorwise", "TPU7x", "f8E4M3FN f8E5M2"),
        ("float8_rowwise", "TPU v6 lite", "bf16"),
    ],
)
def test_what_a_tpu_multiplies(recipe: str, kind: str, operands: str):
    with mx_jax.testing.target("tpu", device_kind=kind):
        text = gradients(recipe, "tpu")
    dots = re.findall(r"stablehlo.dot_general.* : \(tensor<\w+x(\w+)>, tensor<\w+x(\w+)>\)", text)
    assert len(dots) == 2 and set(sum(dots, ())) == set(operands.split())


def test_float8_of_a_symbolic_batch_is_exported_for_gpus():
    (rows,) = jax.export.symbolic_shape("b")
    shapes = [jax.ShapeDtypeStruct(shape, "bfloat16") for shape in ((rows, 32), (32, 16))]
    allowed = map(jax.export.DisabledSafetyCheck.custom_call, mx_jax.export_targets())
    step = jax.jit(
        jax.grad(lambda x, w: mx_jax.matmul(x, w, recipe="float8_rowwise").sum(), (0, 1))
    )
    with mx_jax.testing.target("cuda", (9, 0)):
        export = jax.export.export(step, platforms=("cuda",), disabled_checks=tuple(allowed))
        text = export(*shapes).mlir_module()
    assert "f8E4M3FN" in text and "@LayoutConstraint" in text
