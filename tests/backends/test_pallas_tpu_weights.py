"""Few rows by weights of few bits on TPUs: in Pallas' interpreter, and which are taken."""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mx_jax
from mx_jax.backends.calls import Call, MatmulCall, OperandType, PackCall
from mx_jax.backends.pallas_tpu import PALLAS_TPU, backend_for
from mx_jax.backends.target import Target, use_target
from mx_jax.formats import MXFP4, MXFP8_E4M3, MXFP8_E5M2, MXINT8, NVFP4, BlockFormat
from mx_jax.testing import backend_suite
from mx_jax.testing.cases import MatmulCase
from mx_jax.testing.compare import exact_values
from tests.backends.altered import altered
from tests.quick import lowered

TPU, V4, V7 = (Target(platform="tpu", device_kind=kind) for kind in (None, "TPU v4", "TPU7x"))
INTERPRETED = backend_for(interpret=True)


def case(rhs: BlockFormat = MXFP4, **facts: Any) -> MatmulCase:
    return MatmulCase(**{"lhs": None, "rhs": rhs, "dtype": "bfloat16", "rhs_k_first": True} | facts)


def packing(weights: OperandType, **facts: Any) -> PackCall:
    return PackCall(weights=weights, blocks=weights.axes.blocks(weights.format or MXFP4), **facts)


def by_packed(lhs: jax.Array, rhs: Any, call: MatmulCall) -> jax.Array:
    packed = INTERPRETED.run(packing(call.rhs), rhs)
    call = dataclasses.replace(call, rhs=OperandType.of(packed, call.rhs.axes))
    assert PALLAS_TPU.rejects(call, TPU) is None
    again = packed.unpack()
    # NaN if what is unpacked differs.
    same = (again.codes == rhs.codes).all() & (again.scales == rhs.scales).all()
    return jnp.where(same, INTERPRETED.run(call, lhs, packed), jnp.nan)


PRODUCTS = (
    case(m=(1,), rhs_k_first=False),
    case(MXFP8_E4M3, m=(1,), n=(130,), k=(2, 640), out_dtype="bfloat16"),
    case(MXINT8, m=(2, 3), n=(2, 5), k=(1056,)),
    case(NVFP4, batch=(2,), m=(9,), n=(3, 5), k=(64,)),
)


@pytest.mark.parametrize("product", PRODUCTS, ids=str)
def test_products(product: MatmulCase):
    backend_suite.check_matmul(altered(INTERPRETED, MatmulCall, by_packed), product)


CODES = (
    (MXFP4, 9, TPU),
    (MXFP8_E4M3, 1, TPU),
    (MXFP8_E4M3, 9, V7),
    (MXINT8, 1, TPU),
    (NVFP4, 1, TPU),
)


@pytest.mark.parametrize(("format", "rows", "target"), CODES, ids=str)
def test_every_code_under_scales_of_every_kind(format: BlockFormat, rows: int, target: Target):
    """Rows of the identity give values: subnormals, NaN, -0, under 2^-127 and 2^127 too."""
    kinds, shape = np.array([0, 1, 2, 7, 120, 127, 253, 254, 255], np.uint8), (1024, 9 * 256)
    call = case(format, m=(rows,), n=shape[1:], k=shape[:1]).call
    w = mx_jax.quantize(jnp.zeros(shape, jnp.bfloat16), format, axis=0)
    codes = np.arange(shape[1]) % (1 << format.element.bits) * np.ones((rows, 1))
    scales = np.broadcast_to(np.repeat(kinds, 256), w.scales.shape)
    codes, scales = w.codes.at[:rows].set(codes.astype(np.uint8)), jnp.asarray(scales)
    w = dataclasses.replace(w, codes=codes, scales=scales, primal=None)
    with use_target(target):
        # Elements of a byte where they are stored.
        run = by_packed if format.element.bits == 4 else INTERPRETED.offers[MatmulCall].run
        product = run(jnp.eye(rows, shape[0], dtype=jnp.bfloat16), w, call)
    # Of 2^127 half a unit in the last place is missing; what is below 2^-124 may be zero.
    product, expected = (
        np.clip(values, -3.4e38, 3.4e38) for values in (product, exact_values(w)[:rows])
    )
    np.testing.assert_allclose(product, expected, 2.0**-23, backend_suite.FLUSHED)


REFUSED: list[tuple[Call, Target, str]] = [
    (case(MXFP8_E5M2).call, TPU, "reads e2m1 under e8m0, e2m1 under e4m3, .*, got mxfp8_e5m2"),
    (case().call, V4, "needs a TPU from v5 on, which multiplies float8, got TPU v4"),
    (case(dtype="float32").call, TPU, "multiplies bfloat16 to itself or float32, got float32"),
    (case(m=(33,)).call, TPU, "is faster for 1 to 32 rows by mxfp4 .*, got rows=33"),
    (case(k=(1024,), n=(128,)).call, TPU, "reads elements of a byte, .*, got mxfp4, .*pack_weigh"),
    (case(MXFP8_E4M3, n=(128,)).call, TPU, r"k % 1024 == 0 before .*, shape=\(96, 128\)"),
    (packing(case().call.rhs, lhs_format=MXFP4), TPU, "packs for activations in high precision"),
    (packing(case().call.rhs), dataclasses.replace(TPU, program_devices=4), "got devices=4"),
]


@pytest.mark.parametrize(("call", "target", "reason"), REFUSED, ids=[row[2] for row in REFUSED])
def test_reasons(call: Call, target: Target, reason: str):
    assert re.search(reason, PALLAS_TPU.rejects(call, target) or "nothing")


def test_a_user_on_a_tpu():
    recipe, x = mx_jax.recipes.weight_only("mxfp4"), jnp.ones((3, 2, 96), jnp.bfloat16)
    multiply = jax.vmap(lambda x, w: mx_jax.matmul(x, w, recipe=recipe), (0, None))
    with mx_jax.testing.target("tpu"), jax.enable_x64(True):
        w = mx_jax.pack_weights(mx_jax.quantize(jnp.ones((96, 8), x.dtype), "mxfp4", axis=0))
        report = str(mx_jax.inspect.explain(mx_jax.matmul, x[0], w, recipe=recipe))
        text = lowered(multiply, x, w, platform="tpu")
    assert "-> pallas_tpu (faster by libtpu's schedule, not run)" in report
    assert text.count("@tpu_custom_call") == 1
