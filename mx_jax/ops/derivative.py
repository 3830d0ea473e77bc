"""Values with the derivative of another function: one equation, which computes nothing.

What `jax.custom_jvp` does, but open to `jax.checkpoint`: what computes the values stays outside.
"""

import dataclasses
import functools
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir


class Function(Protocol):
    """A frozen value that computes what is differentiated."""

    def __call__(self, *operands: Any) -> Any:
        """A pytree of arrays like the values that get its derivative."""
        ...


@dataclasses.dataclass(frozen=True, repr=False)
class _Derivative:
    """The static parameter: the function, its operands' tree, how many values, and `vmap`s."""

    function: Function
    tree: Any
    number: int
    batches: tuple[tuple[int | None, ...], ...] = ()

    def __repr__(self) -> str:
        return type(self.function).__name__

    def compute(self, *leaves: jax.Array) -> list[jax.Array]:
        """What is differentiated."""

        def compute(*leaves: jax.Array) -> list[jax.Array]:
            return jax.tree.leaves(self.function(*jax.tree.unflatten(self.tree, leaves)))

        for axes in self.batches:
            compute = jax.vmap(compute, axes)
        return compute(*leaves)


def with_derivative(results: Any, function: Function, *operands: Any) -> Any:
    """`results`, whose derivative is that of `function(*operands)`; their own counts for nothing.

    Args:
      results: a pytree of arrays.
      function: a hashable value; called where something differentiates, and nowhere else.
      operands: pytrees that it takes.
    """
    found, result_tree = jax.tree.flatten(results)
    leaves, tree = jax.tree.flatten(operands)
    of = _Derivative(function, tree, len(found))
    return jax.tree.unflatten(result_tree, _linked.bind(*found, *leaves, of=of))


def _first(*values: Any, of: _Derivative) -> list[Any]:
    return list(values[: of.number])


def _jvp(primals: Any, tangents: Any, *, of: _Derivative) -> Any:
    leaves = primals[of.number :]
    slopes = map(ad.instantiate_zeros, tangents[of.number :])
    _, found = jax.jvp(of.compute, tuple(leaves), tuple(slopes))
    return _linked.bind(*primals, of=of), found


def _batch(values: Any, axes: Any, *, of: _Derivative) -> Any:
    size = next(x.shape[axis] for x, axis in zip(values, axes, strict=True) if axis is not None)
    results = [
        jnp.broadcast_to(x, (size, *x.shape)) if axis is None else jnp.moveaxis(x, axis, 0)
        for x, axis in zip(values[: of.number], axes, strict=False)
    ]
    own = tuple(None if axis is None else int(axis) for axis in axes[of.number :])
    wider = dataclasses.replace(of, batches=(*of.batches, own))
    found = _linked.bind(*results, *values[of.number :], of=wider)
    return found, [0] * of.number


def _lower(ctx: Any, *values: Any, of: _Derivative) -> list[Any]:
    return list(values[: of.number])


_linked: Any = Primitive("mx_with_derivative")
_linked.multiple_results = True
_linked.is_high = lambda *types, **params: False
_linked.def_abstract_eval(_first)
_linked.def_impl(functools.partial(_first))
ad.primitive_jvps[_linked] = _jvp
batching.primitive_batchers[_linked] = _batch
mlir.register_lowering(_linked, _lower)


def no_derivative(x: Any) -> jax.Array:
    """x, of which codes are made: a derivative by it is an error, for it would be zero."""
    return _without.bind(x)


def _refuse(primals: Any, tangents: Any) -> Any:
    (x,) = primals
    raise ValueError(
        f"quantize: codes have no derivative, got one by x of shape={x.shape}, dtype={x.dtype}; a "
        "product's gradient can be differentiated again if its recipe keeps the operands as they "
        "came: recipe.with_(residuals='primal'), no delayed scales; elsewhere write "
        "lax.stop_gradient around x"
    )


_without: Any = Primitive("mx_no_derivative")
_without.is_high = lambda *types, **params: False
_without.def_abstract_eval(lambda x: x)
_without.def_impl(lambda x: x)
ad.primitive_jvps[_without] = _refuse
batching.primitive_batchers[_without] = lambda values, axes: (_without.bind(*values), axes[0])
mlir.register_lowering(_without, lambda ctx, x: [x])
