"""Sums over the rows of each group that are measured: gradients of the experts' matrices."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from mx_jax.backends.calls import RaggedCall
from mx_jax.backends.select import current_target
from mx_jax.backends.target import Backend
from mx_jax.formats import block_format
from mx_jax.measure.cases import Case
from mx_jax.measure.products import absolute, excess
from mx_jax.measure.ragged import dense_rows, uneven
from mx_jax.measure.subject import BFLOAT16, KERNEL, PLAIN, Subject, kernel_of, plain_path
from mx_jax.measure.timing import Way
from mx_jax.mxarray import MXArray
from mx_jax.ops.quantize import quantize
from mx_jax.reference.ragged import RaggedRows, grouped_dot, ragged_rows, scaled_ragged_dot

_ROWS = (-2, -2)


def subject(case: Case, backend: Backend, copies: int) -> Subject:
    """Rows of activations by as many sets of rows of gradients as copies, summed in each group.

    Args:
      case: of kind `"ragged sums"`.
      backend: whose kernel it is.
      copies: of the gradients.
    """
    sizes = uneven(case)
    rows, call = _layout(case, sizes), _call(case)
    dense = _gradients(case, copies)
    x, given = _cast(case, rows, dense_rows(case)), [_cast(case, rows, g) for g in dense]
    run, plain = kernel_of(backend, call), plain_path(call)
    assert plain is not None, "the reference takes every product"
    ways = {
        KERNEL: Way(one=lambda x, g: run(x[0], g, x[1], call), x=(x, rows.sizes), copies=given),
        PLAIN: Way(
            one=lambda x, g: plain.offer.run(x[0], g, x[1], call), x=(x, rows.sizes), copies=given
        ),
        # Its rows need no padding.
        BFLOAT16: Way(
            one=lambda x, g: grouped_dot(x[0], g, x[1], _ROWS, None, jnp.bfloat16),
            x=(dense_rows(case).astype(jnp.bfloat16), sizes),
            copies=[g.astype(jnp.bfloat16) for g in dense],
        ),
    }

    def error(outs: list[Any]) -> float:
        pairs = zip(outs, given, strict=True)
        return max(_error(out, x, g, rows.sizes, backend) for out, g in pairs)

    return Subject(ways=ways, error=error, elsewhere=_elsewhere(case, backend))


def _elsewhere(case: Case, backend: Backend) -> list[Callable[[], float]]:
    """All rows in the last group, none in any; and columns that no tile divides."""
    rows, n, k = case.shape
    last = jnp.zeros(case.groups, jnp.int32).at[-1].set(rows)
    found = [(case, last), (case, jnp.zeros_like(last))]
    odd = dataclasses.replace(case, shape=(rows + 5, min(n, 1024) - 24, min(k, 2048) + 32))
    if backend.rejects(_call(odd), current_target(1)) is None:
        found.append((odd, uneven(odd)))
    return [functools.partial(_of, own, sizes, backend) for own, sizes in found]


def _of(case: Case, sizes: jax.Array, backend: Backend) -> float:
    """The error of fresh operands in groups of these sizes."""
    rows, call = _layout(case, sizes), _call(case)
    (g,) = _gradients(case, 1)
    x, given = _cast(case, rows, dense_rows(case)), _cast(case, rows, g)
    run = kernel_of(backend, call)
    out = jax.jit(lambda x, g, sizes: run(x, g, sizes, call))(x, given, rows.sizes)
    return _error(out, x, given, rows.sizes, backend)


def _call(case: Case) -> RaggedCall:
    call = case.call
    assert isinstance(call, RaggedCall)
    return call


def _layout(case: Case, sizes: jax.Array) -> RaggedRows:
    return ragged_rows(sizes, case.shape[0], case.unit)


def _gradients(case: Case, copies: int) -> list[jax.Array]:
    """`[rows, n]` of each copy."""
    shape = case.shape[:2]
    keys = jax.random.split(jax.random.key(0), copies)
    return [jax.random.normal(key, shape, jnp.dtype(case.dtype)) for key in keys]


def _cast(case: Case, rows: RaggedRows, x: jax.Array) -> MXArray:
    """Along the rows, in the layout, as a training step casts them."""
    format = block_format(case.formats[0] or "")
    return jax.jit(lambda x: quantize(rows.place(x), format, axis=-2))(x)


def _error(out: jax.Array, x: MXArray, g: MXArray, sizes: jax.Array, backend: Backend) -> float:
    return float(_jitted_error(out, x, g, sizes, bound=backend.epsilon_bound))


@functools.partial(jax.jit, static_argnames=("bound",))
def _jitted_error(
    out: jax.Array, x: MXArray, g: MXArray, sizes: jax.Array, *, bound: float
) -> jax.Array:
    """The largest error over what is allowed, which in a group without rows is nothing."""

    def multiply(x: Any, g: Any) -> jax.Array:
        highest = lax.Precision.HIGHEST
        return scaled_ragged_dot(x, g, sizes, _ROWS, jnp.dtype("float32"), highest)

    expected, magnitude = multiply(x, g), multiply(absolute(x), absolute(g))
    return excess(out, expected, magnitude, bound * math.sqrt(x.shape[0]))
