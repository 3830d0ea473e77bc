"""Products of rows in groups that are measured: the experts of a mixture, some of them idle."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mx_jax.backends.calls import RaggedCall
from mx_jax.backends.select import current_target
from mx_jax.backends.target import Backend
from mx_jax.formats import block_format
from mx_jax.measure.cases import Case
from mx_jax.measure.products import absolute, excess
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
from mx_jax.reference.ragged import scaled_ragged_dot


def subject(case: Case, backend: Backend, copies: int) -> Subject:
    """Rows in groups by as many sets of matrices as copies.

    Args:
      case: of kind `"ragged product"`.
      backend: whose kernel it is.
      copies: of the groups' matrices.
    """
    dense, weights, given = _matrices(case, backend, copies)
    call, unpacked = _call(case), _unpacked(case)
    run, plain = kernel_of(backend, call), plain_path(unpacked)
    assert plain is not None, "the reference takes every product"
    x = _rows(case), uneven(case)
    ways = {
        KERNEL: Way(one=lambda x, w: run(x[0], w, x[1], call), x=x, copies=given),
        PLAIN: Way(one=lambda x, w: plain.offer.run(x[0], w, x[1], unpacked), x=x, copies=weights),
        BFLOAT16: Way(
            one=lambda x, w: lax.ragged_dot(x[0], w, x[1], preferred_element_type=jnp.bfloat16),
            x=(dense_rows(case).astype(jnp.bfloat16), x[1]),
            copies=[w.astype(jnp.bfloat16) for w in dense],
        ),
    }
    if case.packed:
        ways[UNPACKING] = Way(
            one=lambda x, w: plain.offer.run(x[0], w.unpack(), x[1], unpacked), x=x, copies=given
        )

    def error(outs: list[Any]) -> float:
        return max(_error(out, x, w, case, backend) for out, w in zip(outs, weights, strict=True))

    def of(own: Case, sizes: jax.Array) -> float:
        matrices = (weights, given) if own == case else _matrices(own, backend, 1)[1:]
        call = _call(own)
        multiply, x = kernel_of(backend, call), (_rows(own), sizes)
        out = jax.jit(lambda x, w: multiply(x[0], w, x[1], call))(x, matrices[1][0])
        return _error(out, x, matrices[0][0], own, backend)

    return Subject(ways=ways, error=error, elsewhere=_elsewhere(case, backend, of))


def uneven(case: Case) -> jax.Array:
    """Rows of each group, int32 `[g]`: some have most, some have none, and some rows no group."""
    rng = np.random.default_rng(0)
    shares = rng.dirichlet(np.full(case.groups, 0.5))
    rows = case.shape[0] - case.shape[0] // 16
    sizes = rng.multinomial(rows, shares)
    return jnp.asarray(sizes, jnp.int32)


def _elsewhere(
    case: Case, backend: Backend, of: Callable[[Case, jax.Array], float]
) -> list[Callable[[], float]]:
    """Sizes are data: all rows in the last group, none in any; and lengths that no tile divides."""
    rows, n, k = case.shape
    last = jnp.zeros(case.groups, jnp.int32).at[-1].set(rows)
    found = [functools.partial(of, case, sizes) for sizes in (last, jnp.zeros_like(last))]
    shape = (rows + 5, min(n, 1024) - 24, min(k, 2048) + 32)
    odd = dataclasses.replace(case, shape=shape)
    if backend.rejects(_call(odd), current_target(1)) is None:
        found.append(functools.partial(of, odd, uneven(odd)))
    return found


def _call(case: Case) -> RaggedCall:
    call = case.call
    assert isinstance(call, RaggedCall)
    return call


def _unpacked(case: Case) -> RaggedCall:
    call = _call(case)
    return dataclasses.replace(call, rhs=dataclasses.replace(call.rhs, packed_by=None))


def _matrices(
    case: Case, backend: Backend, copies: int
) -> tuple[list[jax.Array], list[MXArray], list[Any]]:
    """Matrices `[g, k, n]`, the same quantized, and as the kernel reads them."""
    _, n, k = case.shape
    shape, format = (case.groups, k, n), block_format(case.formats[1] or "")
    draw = jax.jit(lambda key: jax.random.normal(key, shape, jnp.dtype(case.dtype)))
    dense = [draw(key) for key in jax.random.split(jax.random.key(0), copies)]
    cast = jax.jit(lambda w: quantize(w, format, axis=-2))
    weights = given = [cast(w) for w in dense]
    if case.packed:
        pack = kernel_of(backend, case.packing)
        lay_out = jax.jit(lambda w: pack(w, case.packing))
        given = [lay_out(w) for w in weights]
    return dense, weights, given


def dense_rows(case: Case) -> jax.Array:
    """`[rows, k]` in high precision."""
    rows, _, k = case.shape
    return jax.random.normal(jax.random.key(1), (rows, k), jnp.dtype(case.dtype))


def _rows(case: Case) -> Any:
    """`[rows, k]` as the product sees it: quantized, if the case says so."""
    x, name = dense_rows(case), case.formats[0]
    return x if name is None else jax.jit(lambda x: quantize(x, block_format(name)))(x)


def _error(out: jax.Array, x: Any, w: MXArray, case: Case, backend: Backend) -> float:
    return float(_jitted_error(out, x, w, case=case, bound=backend.epsilon_bound))


@functools.partial(jax.jit, static_argnames=("case", "bound"))
def _jitted_error(out: jax.Array, x: Any, w: MXArray, *, case: Case, bound: float) -> jax.Array:
    """The largest error over what is allowed, which in rows of no group is nothing."""
    rows, sizes = x

    def multiply(rows: Any, w: Any) -> jax.Array:
        contracting = _call(case).contracting
        highest = lax.Precision.HIGHEST
        return scaled_ragged_dot(rows, w, sizes, contracting, jnp.dtype("float32"), highest)

    expected, magnitude = multiply(rows, w), multiply(absolute(rows), absolute(w))
    return excess(out, expected, magnitude, bound * math.sqrt(case.shape[-1]))
