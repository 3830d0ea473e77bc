"""cuDNN's product: what it takes, and how operands reach it, which runs on any platform."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import ClosedJaxpr  # pyright: ignore[reportPrivateImportUsage]

from mx_jax import formats
from mx_jax.backends.cudnn import CUDNN
from mx_jax.backends.target import Target
from mx_jax.testing.backend_suite import check_matmul
from mx_jax.testing.cases import MatmulCase, QuantizeCase

B200 = Target(platform="cuda", compute_capability=(10, 0))
E4M3, E5M2, NVFP4 = formats.MXFP8_E4M3, formats.MXFP8_E5M2, formats.NVFP4
CASES = (
    MatmulCase(lhs=E4M3, rhs=E4M3),
    MatmulCase(lhs=E5M2, rhs=E4M3, batch=(2,), m=(2, 3), n=(4,), k=(3, 64)),
    MatmulCase(lhs=E4M3, rhs=E5M2, lhs_k_first=True, k=(100,), out_dtype="bfloat16"),
    MatmulCase(lhs=NVFP4, rhs=NVFP4, rhs_k_first=True, k=(40,), out_dtype="float16"),
    MatmulCase(lhs=NVFP4, rhs=NVFP4, batch=(2, 2), m=(), k=(256,)),
)
needs_a_product_on_cpus = pytest.mark.skipif(
    jax.__version_info__ < (0, 12, 0),
    reason="jax.nn.scaled_matmul runs on CPUs from JAX 0.12",
)


@needs_a_product_on_cpus
@pytest.mark.parametrize("case", CASES, ids=str)
def test_products(case: MatmulCase):
    assert CUDNN.rejects(case.call, B200) is None
    check_matmul(CUDNN, case)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_xla_is_handed_whole_tiles_in_the_product_s_dtype(case: MatmulCase):
    lhs, rhs = case.operands(np.random.default_rng(0))
    run = jax.jit(lambda lhs, rhs: CUDNN.run(case.call, lhs, rhs))
    (call,) = (e for e in equations(jax.make_jaxpr(run)(lhs, rhs)) if "scaled_matmul" in e)
    block = case.lhs.block[1] if case.lhs is not None else None
    tile = {32: 128, 16: 64}[block]
    _, _, k = call["scaled_matmul"][0].shape
    assert k % tile == 0 and k - np.prod(case.k) < tile
    scaled = case.lhs is NVFP4
    assert call["dtype"] == (jnp.float32 if scaled else case.call.out_dtype)


def equations(closed):
    """Every block-scaled product's operands and dtype, wherever it is called."""
    for equation in closed.jaxpr.eqns:
        if "preferred_element_type" in equation.params and len(equation.invars) == 4:
            yield {
                "scaled_matmul": [v.aval for v in equation.invars],
                "dtype": equation.params["preferred_element_type"],
            }
        for inner in equation.params.values():
            if isinstance(inner, ClosedJaxpr):
                yield from equations(inner)


def test_empty_products_are_zeros():
    case = MatmulCase(lhs=E4M3, rhs=E4M3, k=(0,))
    out = CUDNN.run(case.call, *case.operands(np.random.default_rng(0)))
    np.testing.assert_array_equal(out, np.zeros((5, 7), np.float32))


@pytest.mark.parametrize(
    ("case", "target", "reason"),
    [
        (CASES[0], Target(platform="cpu"), "runs on platform=cuda, got platform=cpu"),
        (
            CASES[0],
            Target(platform="cuda", compute_capability=(12, 0)),
            "cuDNN multiplies by block on compute capability 10.x, got 12.0",
        ),
        (
            CASES[0],
            Target(platform="cuda"),
            "cuDNN multiplies by block on compute capability 10.x, got None",
        ),
        (
            MatmulCase(lhs=E5M2, rhs=E5M2),
            B200,
            "cuDNN multiplies MXFP8, but not E5M2 by E5M2, and NVFP4, got mxfp8_e5m2 by mxfp8_e5m2",
        ),
        (
            MatmulCase(lhs=None, rhs=E4M3),
            B200,
            "cuDNN multiplies MXFP8, but not E5M2 by E5M2, and NVFP4, got high precision by "
            "mxfp8_e4m3",
        ),
        (
            MatmulCase(lhs=E4M3, rhs=E4M3, k=(2, 48)),
            B200,
            "needs the last of several contracting axes in whole blocks of 32, got "
            "lhs_shape=(5, 2, 48), contracting=(1, 2)",
        ),
        (
            MatmulCase(lhs=E4M3, rhs=E4M3, out_dtype="float64"),
            B200,
            "gives float32, bfloat16 or float16, got out_dtype=float64",
        ),
        (
            QuantizeCase(format=E4M3, shape=(4, 32)),
            B200,
            "quantizes nothing: XLA fuses the reference's own code",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_reasons(case: MatmulCase | QuantizeCase, target: Target, reason: str):
    assert CUDNN.rejects(case.call, target) == reason
