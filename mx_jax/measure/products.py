"""Products that are measured: operands, what they are compared with, and their error."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mx_jax.backends.calls import MatmulCall
from mx_jax.backends.select import current_target
from mx_jax.backends.target import Backend
from mx_jax.formats import block_format
from mx_jax.measure.cases import Case, packing_of
from mx_jax.measure.subject import (
    BFLOAT16,
    KERNEL,
    PLAIN,
    UNPACKING,
    Subject,
    kernel_of,
    plain_path,
)
from mx_jax.measure.timing import Way
from mx_jax.mxarray import MXArray
from mx_jax.ops.quantize import quantize
from mx_jax.reference.matmul import scaled_matmul
from mx_jax.testing.cases import MatmulCase


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Operands:
    """The arrays of a case.

    Attributes:
      dense: weights `[n, k]`, one of each copy.
      weights: the same, quantized.
      given: the same as the kernel reads them: packed, if the case says so.
    """

    dense: list[jax.Array]
    weights: list[MXArray]
    given: list[Any]

    @classmethod
    def of(cls, case: Case, backend: Backend, copies: int) -> "_Operands":
        _, n, k = case.shape
        draw = jax.jit(lambda key: jax.random.normal(key, (n, k), jnp.dtype(case.dtype)))
        dense = [draw(key) for key in jax.random.split(jax.random.key(0), copies)]
        cast = jax.jit(lambda w: quantize(w, _formats(case)[1]))
        weights = given = [cast(w) for w in dense]
        if case.packed:
            pack = kernel_of(backend, case.packing)
            lay_out = jax.jit(lambda w: pack(w, case.packing))
            given = [lay_out(w) for w in weights]
        return cls(dense=dense, weights=weights, given=given)


def subject(case: Case, backend: Backend, copies: int) -> Subject:
    """A product of x by as many weights as copies, quantized before, and packed if the case says.

    Args:
      case: of kind `"product"`.
      backend: whose kernel it is.
      copies: of weights.
    """
    operands = _Operands.of(case, backend, copies)
    excess = jax.jit(functools.partial(_excess, call=_unpacked(case), bound=backend.epsilon_bound))
    x = _activations(case, case.shape[0])

    def error(outs: list[Any]) -> float:
        pairs = zip(outs, operands.weights, strict=True)
        return max(float(excess(out, x, w)) for out, w in pairs)

    def of_rows(rows: int) -> float:
        x, call = _activations(case, rows), case.product(rows)
        multiply = kernel_of(backend, call)
        out = jax.jit(lambda x, w: multiply(x, w, call))(x, operands.given[0])
        return float(excess(out, x, operands.weights[0]))

    ends = {case.work.lowest_rows, case.work.rows} - {case.shape[0], math.inf}
    of_ends = [functools.partial(of_rows, int(end)) for end in sorted(ends)]
    return Subject(
        ways=_ways(case, backend, operands),
        error=error,
        elsewhere=[*of_ends, *_of_odd_sizes(case, backend)],
    )


def _of_odd_sizes(case: Case, backend: Backend) -> list[Callable[[], float]]:
    """A row stands for sizes that no tile divides too, and for weights that lie either way."""
    rows, n, k = case.shape
    lhs, rhs = _formats(case)
    found = []
    for over, k_first in ((32, True), (40, False)):
        own = MatmulCase(
            lhs=lhs,
            rhs=rhs,
            m=(rows,),
            n=(min(n, 1024) - 24,),
            k=(min(k, 2048) + over,),
            dtype=case.dtype,
            out_dtype=case.dtype,
            rhs_k_first=k_first,
        )
        unpacked = dataclasses.replace(own.call, precision=None)
        call = case.given(unpacked)
        reasons = [backend.rejects(call, current_target(1))]
        if case.packed:
            reasons.append(backend.rejects(packing_of(call), current_target(1)))
        if not any(reasons):
            found.append(functools.partial(_odd, own, unpacked, call, backend))
    return found


def _odd(own: MatmulCase, unpacked: MatmulCall, call: MatmulCall, backend: Backend) -> float:
    """The error of a product of fresh operands."""
    x, w = own.operands(np.random.default_rng(0))
    given: Any = w
    if call.rhs.packed_by is not None:
        pack = packing_of(call)
        given = jax.jit(lambda w: kernel_of(backend, pack)(w, pack))(w)
    multiply = kernel_of(backend, call)
    out = jax.jit(lambda x, w: multiply(x, w, call))(x, given)
    excess = jax.jit(functools.partial(_excess, call=unpacked, bound=backend.epsilon_bound))
    return float(excess(out, x, w))


def _ways(case: Case, backend: Backend, operands: _Operands) -> dict[str, Way]:
    """The kernel, the plain path, for packed weights also after unpacking, and bfloat16."""
    call, unpacked = case.product(case.shape[0]), _unpacked(case)
    run, plain = kernel_of(backend, call), plain_path(unpacked)
    assert plain is not None, "the reference takes every product"
    x = _activations(case, case.shape[0])
    ways = {
        KERNEL: Way(one=lambda x, w: run(x, w, call), x=x, copies=operands.given),
        PLAIN: Way(one=lambda x, w: plain.offer.run(x, w, unpacked), x=x, copies=operands.weights),
        BFLOAT16: Way(
            one=_bfloat16_dot,
            x=_dense(case, case.shape[0]).astype(jnp.bfloat16),
            copies=[w.astype(jnp.bfloat16) for w in operands.dense],
        ),
    }
    if case.packed:
        ways[UNPACKING] = Way(
            one=lambda x, w: plain.offer.run(x, w.unpack(), unpacked), x=x, copies=operands.given
        )
    return ways


def _formats(case: Case) -> tuple[Any, ...]:
    return tuple(None if name is None else block_format(name) for name in case.formats)


def _unpacked(case: Case) -> MatmulCall:
    """The product by the weights that were packed."""
    call = case.product(case.shape[0])
    return dataclasses.replace(call, rhs=dataclasses.replace(call.rhs, packed_by=None))


def _dense(case: Case, rows: int) -> jax.Array:
    shape = (rows, case.shape[-1])
    return jax.random.normal(jax.random.key(1), shape, jnp.dtype(case.dtype))


def _activations(case: Case, rows: int) -> Any:
    """x `[rows, k]` as the product sees it: quantized, if the case says so."""
    x, format = _dense(case, rows), _formats(case)[0]
    return x if format is None else jax.jit(lambda x: quantize(x, format))(x)


def _bfloat16_dot(x: jax.Array, w: jax.Array) -> jax.Array:
    return lax.dot_general(x, w, (((1,), (1,)), ((), ())), preferred_element_type=jnp.bfloat16)


def _excess(out: jax.Array, x: Any, w: MXArray, *, call: MatmulCall, bound: float) -> jax.Array:
    """The largest error over what a backend's bound, and one rounding to the dtype, allow."""
    multiply = functools.partial(
        scaled_matmul,
        dimension_numbers=call.dimension_numbers,
        out_dtype=jnp.dtype("float32"),
        precision=lax.Precision.HIGHEST,
    )
    num_products = math.prod(call.rhs.shape[axis] for axis in call.rhs.axes.contracting)
    expected, magnitude = multiply(x, w), multiply(absolute(x), absolute(w))
    return excess(out, expected, magnitude, bound * math.sqrt(num_products))


def excess(out: jax.Array, expected: jax.Array, magnitude: jax.Array, halves: float) -> jax.Array:
    """The largest error over what is allowed.

    Args:
      out: what is checked.
      expected: the reference's, in float32.
      magnitude: sums of the products' magnitudes.
      halves: that a sum may be off, over its magnitude, in halves of float32's last place.
    """
    # Twice: the reference has an error of its own.
    allowed = 2 * halves * 2.0**-24 * magnitude
    info = jnp.finfo(out.dtype)
    allowed += float(info.eps) / 2 * (jnp.abs(expected) + allowed) + float(info.smallest_normal)
    actual = out.astype(jnp.float32)
    error = jnp.where(actual == expected, 0.0, jnp.abs(actual - expected) / allowed)
    # What is NaN on one side only is wrong by any measure.
    return jnp.max(jnp.where(jnp.isnan(error), jnp.inf, error))


def absolute(operand: Any) -> jax.Array:
    """Magnitudes of an operand's values, in float32."""
    dense = operand.dequantize(jnp.float32) if isinstance(operand, MXArray) else operand
    return jnp.abs(dense.astype(jnp.float32))
