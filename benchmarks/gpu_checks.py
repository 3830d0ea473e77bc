"""Whether what a GPU computes is right, on fresh random operands.

Products, against the reference's in float32. Just before each, an array of NaN as large as the
result is allocated and dropped, so that a tile which nobody writes is likely to show; and each is
repeated, because a race shows as other bits. Casts, of random bit patterns, against the reference
on a CPU, bit for bit: the plain code too, since XLA compiles it anew for a GPU.
"""

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks import report
from mx_jax.backends.base import Backend, Target
from mx_jax.backends.calls import Operand, QuantizeCall
from mx_jax.backends.cudnn import CUDNN
from mx_jax.backends.pallas_gpu import PALLAS_GPU
from mx_jax.backends.pallas_gpu.architecture import Architecture
from mx_jax.backends.reference import REFERENCE
from mx_jax.formats import MX_FORMATS, MXFP4, MXFP8_E4M3, MXFP8_E5M2, NVFP4, NVFP4_ONE_LEVEL
from mx_jax.mxarray import MXArray
from mx_jax.reference.matmul import scaled_matmul
from mx_jax.testing.cases import MatmulCase, QuantizeCase
from mx_jax.testing.quantize_check import QuantizeBothCase

FORMATS = {format.name: format for format in (*MX_FORMATS, NVFP4)}

_SIZES: tuple[dict[str, Any], ...] = (
    dict(m=(1,), n=(1000,), k=(2080,)),
    dict(m=(17,), n=(256,), k=(4096,)),
    dict(m=(40,), n=(384,), k=(1024,), rhs_k_first=True),
    dict(batch=(3,), m=(64,), n=(130,), k=(512,)),
    dict(m=(300,), n=(1024,), k=(1024,)),
)
_WEIGHTS = (
    *(
        MatmulCase(lhs=None, rhs=format, dtype="bfloat16", out_dtype="bfloat16", **sizes)
        for format in (MXFP4, MXFP8_E4M3)
        for sizes in _SIZES
    ),
    *(
        MatmulCase(lhs=None, rhs=format, dtype="float16", out_dtype="float32", **_SIZES[0])
        for format in FORMATS.values()
    ),
    MatmulCase(lhs=MXFP8_E4M3, rhs=MXFP4, m=(70,), n=(300,), k=(640,)),
    MatmulCase(lhs=NVFP4, rhs=None, dtype="bfloat16", m=(70,), n=(300,), k=(640,)),
)
_SCALED = (
    *(
        MatmulCase(lhs=format, rhs=format, out_dtype="bfloat16", **sizes)
        for format in (MXFP8_E4M3, MXFP4, NVFP4)
        for sizes in _SIZES
    ),
    MatmulCase(lhs=MXFP8_E5M2, rhs=MXFP8_E4M3, **_SIZES[0]),
    MatmulCase(lhs=MXFP4.with_block(16), rhs=MXFP4.with_block(16), **_SIZES[0]),
)
# Casts that are checked everywhere: all bit patterns are drawn, NaN, Inf and subnormals too.
CASTS = tuple(
    QuantizeCase(format=format, shape=(96, 1024), axis=axis, dtype=dtype)
    for format in (*MX_FORMATS, NVFP4_ONE_LEVEL)
    for axis, dtype in ((-1, "bfloat16"), (-2, "float32"))
)
# Casts along both axes in one call, in whole tiles and not, for who takes them.
BOTH = tuple(
    QuantizeBothCase(
        first=QuantizeCase(format=format, shape=shape, dtype=dtype),
        second=QuantizeCase(format=format, shape=shape, dtype=dtype, axis=-2),
    )
    for format in (MXFP8_E4M3, MXFP4)
    for shape, dtype in (((256, 1024), "bfloat16"), ((2, 70, 600), "float32"))
)
# How often a product is repeated: sums are added in a fixed order, so nothing may change.
_REPEATS = 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Check:
    """One thing that can be wrong.

    Attributes:
      name: what tables call it.
      run: the largest error over what is allowed, of fresh random operands; 0 if only the same bits
        are right and they are, infinity if they are not.
    """

    name: str
    run: Callable[[np.random.Generator], float]


def products_of(architecture: Architecture) -> tuple[MatmulCase, ...]:
    """Products that are checked, of each of its kernels."""
    as_they_are = architecture.kernel(MXFP4, MXFP4) != architecture.decoding
    return (*_WEIGHTS, *(_SCALED if as_they_are else ()))


def checks(target: Target, architecture: Architecture) -> Iterator[Check]:
    """Everything that this machine can be asked."""
    for backend in (PALLAS_GPU, CUDNN):
        for case in products_of(architecture):
            if backend.rejects(case.call, target) is None:
                name = f"{backend.name}, {case}"
                yield Check(name=name, run=functools.partial(product_error, backend, case))
    for case in CASTS:
        for backend in (REFERENCE, PALLAS_GPU):
            if backend.rejects(case.call, target) is None:
                name = f"{backend.name}, {case}"
                yield Check(name=name, run=functools.partial(cast_error, backend, case))

    for case in BOTH:
        backend = PALLAS_GPU
        if backend.rejects(case.call, target) is None:
            name = f"{backend.name}, {case}"
            yield Check(name=name, run=functools.partial(both_error, backend, case))


def product_error(backend: Backend, case: MatmulCase, rng: np.random.Generator) -> float:
    """The largest error of a product, over what the backend's bound and one rounding allow."""
    call = case.call
    lhs, rhs = case.operands(rng)
    exact = dataclasses.replace(call, out_dtype=jnp.dtype("float32"))
    reference = jax.jit(
        lambda lhs, rhs: scaled_matmul(
            lhs, rhs, exact.dimension_numbers, exact.out_dtype, lax.Precision.HIGHEST
        )
    )
    expected = np.asarray(reference(lhs, rhs), np.float64)
    magnitude = np.asarray(reference(_absolute(lhs), _absolute(rhs)), np.float64)
    run = jax.jit(lambda lhs, rhs: backend.run(call, lhs, rhs)).lower(lhs, rhs).compile()
    jax.block_until_ready(jnp.full(expected.shape, jnp.nan, call.out_dtype))
    actual, *again = (np.asarray(run(lhs, rhs)) for _ in range(_REPEATS))
    if any(actual.tobytes() != other.tobytes() for other in again):
        return math.inf
    # Twice: the reference has an error of its own.
    allowed = 2 * backend.epsilon_bound * 2.0**-24 * np.sqrt(case.num_products) * magnitude
    info = jnp.finfo(call.out_dtype)
    allowed += float(info.eps) / 2 * (np.abs(expected) + allowed) + float(info.smallest_normal)
    actual = actual.astype(np.float64)
    with np.errstate(invalid="ignore"):
        error = np.where(actual == expected, 0.0, np.abs(actual - expected) / allowed)
    # What is NaN on one side only is wrong by any measure.
    return float(np.max(np.where(np.isnan(error), np.inf, error)))


def _absolute(operand: Operand) -> jax.Array:
    values = operand.dequantize(jnp.float32) if isinstance(operand, MXArray) else operand
    return jnp.abs(values)


def cast_error(backend: Backend, case: QuantizeCase, rng: np.random.Generator) -> float:
    """0 if a cast of random bits has the reference's codes and scales of a CPU, else infinity."""
    call, x = case.call, _any_bits(rng, case)
    actual = jax.jit(lambda x: backend.run(call, x, None, None))(jnp.asarray(x))
    return 0.0 if _as_on_a_cpu(actual, x, call) else math.inf


def both_error(backend: Backend, case: QuantizeBothCase, rng: np.random.Generator) -> float:
    """The same of two casts in one call."""
    call, x = case.call, _any_bits(rng, case.first)
    run = jax.jit(lambda x: backend.run(call, x, (None, None), None))
    pairs = zip(run(jnp.asarray(x)), (call.first, call.second), strict=True)
    return 0.0 if all(_as_on_a_cpu(actual, x, single) for actual, single in pairs) else math.inf


def _any_bits(rng: np.random.Generator, case: QuantizeCase) -> np.ndarray:
    dtype = case.call.dtype
    return rng.integers(0, 256, (*case.shape, dtype.itemsize), np.uint8).view(dtype)[..., 0]


def _as_on_a_cpu(actual: MXArray, x: np.ndarray, call: QuantizeCall) -> bool:
    """Whether codes and scales are the reference's."""
    with jax.default_device(jax.devices("cpu")[0]):
        expected = jax.jit(lambda x: REFERENCE.run(call, x, None, None))(x)
    arrays = ((expected.codes, actual.codes), (expected.scales, actual.scales))
    return all(np.array_equal(np.asarray(e), np.asarray(a)) for e, a in arrays)


def run_all(found: Sequence[Check], seed: int, deadline: float) -> list[dict[str, Any]]:
    """One row of JSON for each check: its error, or why there is none.

    Args:
      found: the checks.
      seed: of the operands.
      deadline: of `time.monotonic()`; what has not begun then is left out, which its row says.
    """
    rng = np.random.default_rng(seed)
    rows: list[dict[str, Any]] = []
    with report.progress(len(found)) as step:
        for check in found:
            step(check.name)
            if time.monotonic() > deadline:
                rows.append({"case": check.name, "failed": "left out: no time left"})
                continue
            # One kernel that does not compile must not cost the answers of the others.
            try:
                rows.append({"case": check.name, "error_over_allowed": check.run(rng)})
            except Exception as error:
                rows.append({"case": check.name, "failed": report.first_line(error)})
    return rows


def wrong(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The checks that did not pass."""
    return [row["case"] for row in rows if not row.get("error_over_allowed", math.inf) <= 1]
