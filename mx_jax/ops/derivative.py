"""The primitive `mx_derivative`: results that are differentiated as those of another function."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn, Primitive
from jax.interpreters import ad, batching, mlir, partial_eval

R = TypeVar("R")


@dataclasses.dataclass(frozen=True, repr=False)
class _Derivative:
    """The static parameter: a function and its first, static arguments; the tree of the others,
    which of the values it gives are used, and `vmap`s."""

    function: Callable[..., Any]
    static: tuple[Any, ...]
    tree: Any
    used: tuple[int, ...]
    batches: tuple[tuple[int | None, ...], ...] = ()

    def __repr__(self) -> str:
        return self.function.__name__

    @property
    def number(self) -> int:
        return len(self.used)

    def compute(self, *leaves: jax.Array) -> list[jax.Array]:
        def compute(*leaves: jax.Array) -> list[jax.Array]:
            operands = jax.tree.unflatten(self.tree, leaves)
            values = jax.tree.leaves(self.function(*self.static, *operands))
            return [values[i] for i in self.used]

        for axes in self.batches:
            compute = jax.vmap(compute, axes)
        return compute(*leaves)


def with_derivative(
    results: R, function: Callable[..., Any], static: tuple[Any, ...], *operands: object
) -> R:
    """`results` with the derivative of `function(*static, *operands)`, which runs where one is
    taken."""
    values, result_tree = jax.tree.flatten(results)
    leaves, tree = jax.tree.flatten(operands)
    of = _Derivative(function, static, tree, tuple(range(len(values))))
    return jax.tree.unflatten(result_tree, _linked.bind(*values, *leaves, of=of))


def _first(*values: jax.Array, of: _Derivative) -> list[jax.Array]:
    return list(values[: of.number])


def _jvp(
    primals: Sequence[jax.Array], tangents: Sequence[jax.Array | ad.Zero], *, of: _Derivative
) -> Any:
    leaves = primals[of.number :]
    slopes = map(ad.instantiate_zeros, tangents[of.number :])
    _, tangents_out = jax.jvp(of.compute, tuple(leaves), tuple(slopes))
    return _linked.bind(*primals, of=of), tangents_out


def _batch(values: Sequence[jax.Array], axes: Sequence[int | None], *, of: _Derivative) -> Any:
    size = next(x.shape[axis] for x, axis in zip(values, axes, strict=True) if axis is not None)
    results = [
        jnp.broadcast_to(x, (size, *x.shape)) if axis is None else jnp.moveaxis(x, axis, 0)
        for x, axis in zip(values[: of.number], axes, strict=False)
    ]
    leaf_axes = tuple(None if axis is None else int(axis) for axis in axes[of.number :])
    wider = dataclasses.replace(of, batches=(*of.batches, leaf_axes))
    batched = _linked.bind(*results, *values[of.number :], of=wider)
    return batched, [0] * of.number


def _without_unused(used: Sequence[bool], *others: Any) -> tuple[list[bool], JaxprEqn | None]:
    """The equation without results that nothing reads: an unused gradient is not computed."""
    # JAX 0.12 says something of inputs before the equation.
    eqn: JaxprEqn = others[-1]
    if not any(used):
        return [False] * len(eqn.invars), None
    of: _Derivative = eqn.params["of"]
    read = [*used, *[True] * (len(eqn.invars) - of.number)]
    narrower = dataclasses.replace(of, used=tuple(itertools.compress(of.used, used)))
    invars, outvars = itertools.compress(eqn.invars, read), itertools.compress(eqn.outvars, used)
    return read, eqn.replace(invars=[*invars], outvars=[*outvars], params={"of": narrower})


_linked: Any = Primitive("mx_derivative")
_linked.multiple_results = True
_linked.is_high = lambda *types, **params: False
_linked.def_abstract_eval(_first)
_linked.def_impl(functools.partial(_first))
ad.primitive_jvps[_linked] = _jvp
batching.primitive_batchers[_linked] = _batch
partial_eval.dce_rules[_linked] = _without_unused
mlir.register_lowering(_linked, lambda ctx, *values, of: list(values[: of.number]))
