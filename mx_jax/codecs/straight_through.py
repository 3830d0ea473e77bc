"""Gradients of what is rounded: straight through to the source, or an error, and never zero.

Codes are integers, which carry no derivative. What has one is the value that they were made of:
an MXArray holds both while it is traced, and here is what they are to each other.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir


@jax.custom_jvp
def straight_through(values: jax.Array, primal: jax.Array) -> jax.Array:
    """`values`, with the gradient of `primal`: the rounding counts as the identity."""
    return values


@straight_through.defjvp
def _straight_through_jvp(
    primals: tuple[jax.Array, ...], tangents: tuple[jax.Array, ...]
) -> tuple[jax.Array, jax.Array]:
    values, primal = primals
    return straight_through(values, primal), tangents[1].astype(values.dtype)


def no_derivative(x: jax.Array) -> jax.Array:
    """x, of which a product makes codes: a derivative by it is an error, for it would be zero."""
    return _watched.bind(x, x, met=_refuse_again)


def parted_codes(x: Any) -> jax.Array:
    """An MXArray's codes where they part from the value that they were made of: a derivative by
    that is an error."""
    if x.primal is None:
        return x.codes
    return _watched.bind(x.codes, x.primal, met=_refuse_parted)


def refuse_derivative(x: jax.Array, refuse: Callable[[jax.Array], None]) -> jax.Array:
    """x; where a derivative by it is taken, `refuse` is called with it."""
    return _watched.bind(x, x, met=refuse)


def is_differentiated(x: jax.Array) -> bool:
    """Whether a derivative by x is taken at this moment; of what `jit` or `scan` trace before it is
    differentiated, that is not known."""
    answer = _Answer()
    _watched.bind(x, x, met=answer)
    return answer.met


# Who meets a derivative ---------------------------------------------------------------------------


class _Answer:
    met = False

    def __call__(self, source: jax.Array) -> None:
        self.met = True


def _refuse(source: jax.Array, remedy: str) -> None:
    raise ValueError(
        f"quantize: codes have no derivative, got one by x of shape={source.shape}, "
        f"dtype={source.dtype}; {remedy}"
    )


_refuse_again = functools.partial(
    _refuse,
    remedy="a product's gradient can be differentiated again if its recipe keeps the operands as "
    "they came: dataclasses.replace(recipe, residuals='primal'); elsewhere write "
    "lax.stop_gradient around x",
)
_refuse_parted = functools.partial(
    _refuse,
    remedy="they left the jit, scan, cond, checkpoint or other transformation in which they were "
    "made, entered one as an argument, or were packed: hand on x, and quantize it where its codes "
    "are used; if no gradient is wanted, write quantize(lax.stop_gradient(x), ...)",
)


def _jvp(
    primals: Sequence[jax.Array], tangents: object, *, met: Callable[[jax.Array], None]
) -> Any:
    result, source = primals
    met(source)
    return result, ad.Zero(jax.typeof(result).to_tangent_aval())


def _batch(
    values: Sequence[jax.Array], axes: Sequence[int | None], *, met: Callable[[jax.Array], None]
) -> Any:
    return _watched.bind(*values, met=met), axes[0]


# The first of two arrays; `met` is called with the second where a derivative by it is taken.
_watched: Any = Primitive("mx_no_derivative")
_watched.is_high = lambda *types, **params: False
_watched.def_abstract_eval(lambda result, source, met: result)
_watched.def_impl(lambda result, source, met: result)
ad.primitive_jvps[_watched] = _jvp
batching.primitive_batchers[_watched] = _batch
mlir.register_lowering(_watched, lambda ctx, result, source, met: [result])
