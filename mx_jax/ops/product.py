"""The one differentiable product: every kind, dense or ragged, is a parameter of it.

An operand enters as the value that has a gradient, or as codes, or as both: codes that were made of
a value in the same trace multiply, and the value gets their cotangent. So each side has one.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, ParamSpec, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.extend.core import JaxprEqn, Primitive
from jax.interpreters import ad, batching, mlir, partial_eval

from mx_jax.axes import SIDES, Side
from mx_jax.backends.calls import AnyOperand
from mx_jax.codecs.explicit_axes import varying
from mx_jax.codecs.straight_through import no_derivative
from mx_jax.mxarray import MXArray, decode
from mx_jax.packed import Quantized, unpacked


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, kw_only=True)
class CotangentAval:
    """dtype of the cotangent of a value, and the shard_map axes along which it varies."""

    dtype: np.dtype
    varying: frozenset[str]

    @classmethod
    def of(cls, value: jax.Array | None) -> "CotangentAval | None":
        if value is None:
            return None
        return cls(dtype=np.dtype(value.dtype), varying=varying(value))


Extra = TypeVar("Extra", contravariant=True)
P = ParamSpec("P")
R = TypeVar("R")
Avals = tuple[CotangentAval | None, CotangentAval | None]
# Of both operands, avals of both cotangents, and what else the product depends on.
ProductResiduals = tuple[AnyOperand, AnyOperand, Avals, Extra]


class Product(Protocol[Extra]):
    """One kind of product: a frozen value, static under `jit`; kinds inherit from it."""

    # `extra` is whatever else it depends on: a key, group sizes.

    def forward(
        self, lhs: AnyOperand, rhs: AnyOperand, extra: Extra, stored: tuple[Side, ...] = ()
    ) -> jax.Array:
        """The product of operands as they came, or as `keep` gives them."""
        # `stored` names those that came quantized: weights could have come packed.
        ...

    def keep(self, lhs: AnyOperand, rhs: AnyOperand, extra: Extra) -> tuple[AnyOperand, AnyOperand]:
        """The operands as they are saved for the backward pass."""
        ...

    def cotangents(self, g: jax.Array, extra: Extra, both: bool) -> tuple[Any, Any]:
        """g as the products for lhs and rhs take it: by default as it is, for each to quantize."""
        del extra, both
        return g, g

    def gradient(
        self, side: Side, g: Any, other: AnyOperand, aval: CotangentAval, extra: Extra
    ) -> jax.Array:
        """The cotangent of one operand: the product of g and the other operand."""
        ...

    def in_high_precision(self) -> "Product[Any]":
        """The same product of values as they are, in float32."""
        ...


AnyProduct = Product[Any]


class Primal(NamedTuple):
    """An operand as it enters a product."""

    value: jax.Array | None  # what has a gradient; None if nothing has
    codes: Quantized | None  # what multiplies; None if the value does

    @classmethod
    def of(cls, operand: AnyOperand) -> "Primal":
        """Codes that were made of a value in the same trace pass their cotangent to that value."""
        if isinstance(operand, Quantized):
            value = operand.primal if isinstance(operand, MXArray) else None
            return cls(
                value, operand if value is None else dataclasses.replace(operand, primal=None)
            )
        return cls(operand, None)

    @property
    def whole(self) -> Any:
        """The operand that this is `of`."""
        if self.codes is None or self.value is None:
            return self.operand
        return dataclasses.replace(self.codes, primal=self.value)

    @property
    def operand(self) -> Any:
        return self.value if self.codes is None else self.codes


def one_program(*static: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorates what is computed by one `jit` of its own where nothing is traced."""
    # In a trace, a `jit` loses its equations' names (inlined) or takes many lines of the jaxpr.

    def decorate(compute: Callable[P, R]) -> Callable[P, R]:
        jitted = jax.jit(compute, static_argnames=static)

        @functools.wraps(compute)
        def run(*given: P.args, **named: P.kwargs) -> R:
            leaves = jax.tree.leaves((given, named))
            traced = any(isinstance(leaf, Tracer) for leaf in leaves)
            return (compute if traced else jitted)(*given, **named)

        return run

    return decorate


def stored_sides(lhs: Primal, rhs: Primal) -> tuple[Side, ...]:
    """Which operands came quantized; on the left not what this trace quantized: activations."""
    left: tuple[Side, ...] = ("lhs",) if lhs.codes is not None and lhs.value is None else ()
    return (*left, "rhs") if rhs.codes is not None else left


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def differentiable(product: Product[Extra], lhs: Primal, rhs: Primal, extra: Extra) -> jax.Array:
    """The result of `product.forward` with the product's own gradient, in `on_devices_of(...)`."""
    # Derivatives of the gradient are those of the product in float32, its casts being identities.
    return product.forward(lhs.operand, rhs.operand, extra, stored_sides(lhs, rhs))


def run_product(product: Product[Extra], lhs: Primal, rhs: Primal, extra: Extra) -> jax.Array:
    """`differentiable`; of concrete operands `forward` alone: custom_vjp costs more than it."""
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves((lhs, rhs, extra))):
        return differentiable(product, lhs, rhs, extra)
    return product.forward(lhs.operand, rhs.operand, extra, stored_sides(lhs, rhs))


def product_fwd(
    product: Product[Extra], lhs: Primal, rhs: Primal, extra: Extra
) -> tuple[jax.Array, ProductResiduals[Extra]]:
    """The product, and what its gradient needs: operands, avals of cotangents, `extra`."""
    left, right = product.keep(lhs.operand, rhs.operand, extra)
    avals = CotangentAval.of(lhs.value), CotangentAval.of(rhs.value)
    result = product.forward(left, right, extra, stored_sides(lhs, rhs))
    operands = []
    for given, kept in ((lhs, left), (rhs, right)):
        if given.value is not None and isinstance(kept, Quantized):
            # The other operand's gradient multiplies what is kept: codes have no derivative.
            kept = no_derivative(given.value)
        operands.append(kept)
    static = product, np.dtype(result.dtype)
    result = with_derivative(result, exact_fwd, static, *operands, extra)
    return result, (left, right, avals, extra)


def exact_fwd(
    product: AnyProduct, dtype: np.dtype, lhs: AnyOperand, rhs: AnyOperand, extra: object
) -> jax.Array:
    """The product in float32, of operands as they came: `product_fwd` is differentiated as this."""
    return product.in_high_precision().forward(values(lhs), values(rhs), extra).astype(dtype)


def product_bwd(
    product: Product[Extra], residuals: ProductResiduals[Extra], g: jax.Array
) -> tuple[Primal, Primal, Any]:
    """The cotangents of what `differentiable` is given."""
    lhs, rhs, avals, extra = residuals
    both = product.cotangents(g, extra, None not in avals)
    found: list[jax.Array | None] = []
    for side, own_g, other, aval in zip(SIDES, both, (rhs, lhs), avals, strict=True):
        if aval is None:
            found.append(None)
            continue
        value = product.gradient(side, own_g, other, aval, extra)
        found.append(sum_over(value, aval.varying).astype(aval.dtype))
    static = product, avals
    lhs_ct, rhs_ct = with_derivative(found, exact_bwd, static, lhs, rhs, g, extra)
    return Primal(lhs_ct, None), Primal(rhs_ct, None), zero_cotangents(extra)


differentiable.defvjp(product_fwd, product_bwd)


def exact_bwd(
    product: AnyProduct, avals: Avals, lhs: AnyOperand, rhs: AnyOperand, g: jax.Array, extra: object
) -> list[jax.Array | None]:
    """The cotangents in float32: `product_bwd` is differentiated as this."""
    found: list[jax.Array | None] = []
    for side, other, aval in zip(SIDES, (rhs, lhs), avals, strict=True):
        if aval is None:
            found.append(None)
            continue
        wide = dataclasses.replace(aval, dtype=np.dtype(np.float32))
        value = product.in_high_precision().gradient(side, g, values(other), wide, extra)
        found.append(sum_over(value, aval.varying).astype(aval.dtype))
    return found


def zero_cotangents(tree: object) -> Any:
    """The cotangent of integers and keys."""
    return jax.tree.map(lambda x: np.zeros(x.shape, jax.dtypes.float0), tree)


def values(operand: AnyOperand) -> jax.Array:
    """What an operand stands for, in float32 if it is quantized."""
    if not isinstance(operand, Quantized):
        return operand
    operand = unpacked(operand)
    assert isinstance(operand, MXArray)
    return decode(operand, np.dtype(np.float32), saturates=True)


def sum_over(cotangent: jax.Array, own: frozenset[str]) -> jax.Array:
    """A cotangent summed over the shard_map axes along which its value did not vary."""
    extra = varying(cotangent) - own
    return lax.psum(cotangent, tuple(sorted(extra))) if extra else cotangent


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
    found, result_tree = jax.tree.flatten(results)
    leaves, tree = jax.tree.flatten(operands)
    of = _Derivative(function, static, tree, tuple(range(len(found))))
    return jax.tree.unflatten(result_tree, _linked.bind(*found, *leaves, of=of))


def _first(*values: jax.Array, of: _Derivative) -> list[jax.Array]:
    return list(values[: of.number])


def _jvp(
    primals: Sequence[jax.Array], tangents: Sequence[jax.Array | ad.Zero], *, of: _Derivative
) -> Any:
    leaves = primals[of.number :]
    slopes = map(ad.instantiate_zeros, tangents[of.number :])
    _, found = jax.jvp(of.compute, tuple(leaves), tuple(slopes))
    return _linked.bind(*primals, of=of), found


def _batch(values: Sequence[jax.Array], axes: Sequence[int | None], *, of: _Derivative) -> Any:
    size = next(x.shape[axis] for x, axis in zip(values, axes, strict=True) if axis is not None)
    results = [
        jnp.broadcast_to(x, (size, *x.shape)) if axis is None else jnp.moveaxis(x, axis, 0)
        for x, axis in zip(values[: of.number], axes, strict=False)
    ]
    own = tuple(None if axis is None else int(axis) for axis in axes[of.number :])
    wider = dataclasses.replace(of, batches=(*of.batches, own))
    found = _linked.bind(*results, *values[of.number :], of=wider)
    return found, [0] * of.number


def _without_unused(used: Sequence[bool], *others: Any) -> tuple[list[bool], JaxprEqn | None]:
    """A gradient that nobody asks for is not computed for the one that somebody does."""
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
