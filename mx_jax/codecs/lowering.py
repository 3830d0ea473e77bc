"""What codecs do inside of a program that is lowered for one platform.

JAX takes about 0.2 ms to trace and lower an equation of a new shape. So a function of scalars is
traced once, and its operations are emitted for arrays of any shape: about 0.01 ms each.
"""

import dataclasses
import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Primitive
from jax.extend.mlir.dialects import stablehlo as hlo
from jax.interpreters import batching, mlir

from mx_jax.codecs.explicit_axes import result_type

P = ParamSpec("P")
R = TypeVar("R")

# `lowered_for.value` is the platform while a call is lowered, else None.
lowered_for: Any = jax.make_user_context(default_value=None)


def platform_dependent(*operands: Any, default: Callable[..., R], **named: Callable[..., R]) -> R:
    """`lax.platform_dependent`, which traces one implementation where the platform is known."""
    if lowered_for.value is None:
        return lax.platform_dependent(*operands, default=default, **named)
    return named.get(lowered_for.value, default)(*operands)


def eager(primitive: Primitive, *operands: jax.Array, **params: Hashable) -> Any:
    """A primitive's implementation for concrete operands: a program of one equation."""
    with jax.disable_jit(False):  # else jit would come back here
        return _jitted(primitive, tuple(params.items()))(*operands)


@functools.lru_cache(maxsize=4096)
def _jitted(primitive: Primitive, params: tuple[tuple[str, Hashable], ...]) -> Any:
    run = functools.partial(primitive.bind, **dict(params))
    # As JAX marks its own, or jax_debug_nans would run it again, which comes back here.
    vars(run).update(_apply_primitive=True, __qualname__=primitive.name)
    return jax.jit(run)


def elementwise(function: Callable[P, R]) -> Callable[P, R]:
    """A function of scalars, called with arrays whose shapes broadcast, and with static values.

    While a call is lowered it is traced once, whatever the shapes are. What fails on scalars, or
    has an equation without a row in `_OPERATIONS`, is traced for each shape, as elsewhere.
    """

    @functools.wraps(function)
    def run(*given: P.args, **named: P.kwargs) -> R:
        operands = (*given, *named.values())
        arrays = [x for x in operands if isinstance(x, jax.Array)]
        if _is_emitted(*arrays) and all(map(_is_own, operands)):
            own = tuple(
                (True, x.dtype) if isinstance(x, jax.Array) else (False, x) for x in operands
            )
            body = _body(function, own, tuple(named), *_modes())
            if body is not None:
                return body.unflatten(_ELEMENTWISE.bind(*arrays, body=body, axis=None))
        return function(*given, **named)

    return run


def by_halves(function: Callable[..., jax.Array], x: jax.Array, axis: int) -> jax.Array:
    """A function of the two halves of an axis, and so on until its length is 1.

    Args:
      function: as `elementwise` takes it, of two numbers; of an odd length the one in the middle
        counts twice.
      x: any array.
      axis: of a length above 0.
    """
    if _is_emitted(x):
        body = _body(function, ((True, x.dtype),) * 2, (), *_modes())
        if body is not None:
            return _ELEMENTWISE.bind(x, body=body, axis=axis)[0]
    while (length := x.shape[axis]) > 1:
        ends = (0, (length + 1) // 2), (length // 2, length)
        x = function(*(lax.slice_in_dim(x, *end, axis=axis) for end in ends))
    return x


def _is_emitted(*arrays: jax.Array) -> bool:
    """Symbolic lengths are left to JAX's own rules."""
    lengths = (length for x in arrays for length in x.shape)
    return lowered_for.value is not None and all(isinstance(length, int) for length in lengths)


def _is_own(value: object) -> bool:
    """Whether a value is data or a function of this library: another's may ask for shapes."""
    if isinstance(value, jax.Array):
        return True
    parts = vars(value).values() if dataclasses.is_dataclass(value) else ()
    module: str = getattr(getattr(value, "func", value), "__module__", None) or ""
    is_own = not callable(value) or module.startswith(("mx_jax.", "jax."))
    return is_own and all(_is_own(part) for part in parts if callable(part))


def _modes() -> tuple[object, ...]:
    """What a function of scalars depends on besides."""
    return lowered_for.value, jax.config.jax_enable_x64, jax.config.jax_numpy_dtype_promotion


class _Body:
    """The equations of a function of scalars; hashed by identity."""

    def __init__(self, function: Callable[..., Any], jaxpr: Jaxpr, results: Any):
        self.name, self.jaxpr = getattr(function, "__name__", "function"), jaxpr
        self.unflatten = jax.tree.structure(results).unflatten

    def __repr__(self) -> str:
        return self.name


@functools.lru_cache(maxsize=4096)
def _body(
    function: Callable[..., Any], own: tuple[Any, ...], names: tuple[str, ...], *modes: object
) -> _Body | None:
    del modes  # they decide what the function does

    def of_scalars(*scalars: jax.Array) -> Any:
        left = iter(scalars)
        given = [next(left) if is_array else x for is_array, x in own]
        count = len(given) - len(names)
        return function(*given[:count], **dict(zip(names, given[count:], strict=True)))

    scalars = [jax.ShapeDtypeStruct((), x) for is_array, x in own if is_array]
    try:
        jaxpr, results = jax.make_jaxpr(of_scalars, return_shape=True)(*scalars)
    except (IndexError, TypeError, ValueError):
        return None
    known = not jaxpr.effects and not jaxpr.consts and _is_known(jaxpr.jaxpr)
    return _Body(function, jaxpr.jaxpr, results) if known else None


def _is_known(jaxpr: Jaxpr) -> bool:
    return all(
        e.primitive.name in _OPERATIONS if (inner := _called(e)) is None else _is_known(inner)
        for e in jaxpr.eqns
    )


def _called(equation: JaxprEqn) -> Any:
    """The jaxpr that an equation calls."""
    if equation.primitive is _ELEMENTWISE:
        return equation.params["body"].jaxpr
    return equation.params["jaxpr"].jaxpr if equation.primitive.name == "jit" else None


def _types(*types: Any, body: _Body, axis: int | None) -> list[Any]:
    shape = np.broadcast_shapes(*(own.shape for own in types))
    if axis is not None:
        shape = (*shape[:axis], 1, *shape[axis + 1 :])
    results: Any = [x.aval for x in body.jaxpr.outvars]
    return [result_type(types[0], shape, own.dtype) for own in results]


def _batch(
    operands: Sequence[Any], axes: Sequence[int | None], *, body: _Body, axis: int | None
) -> Any:
    pairs = list(zip(operands, axes, strict=True))
    wide = [x[None] if place is None else jnp.moveaxis(x, place, 0) for x, place in pairs]
    # Numbers, too, have the batch as their first axis.
    rank = max(x.ndim for x in wide)
    wide = [jnp.expand_dims(x, tuple(range(1, 1 + rank - x.ndim))) for x in wide]
    results = _ELEMENTWISE.bind(*wide, body=body, axis=None if axis is None else axis + 1)
    return results, [0] * len(results)


def _lower(ctx: Any, *operands: Any, body: _Body, axis: int | None) -> list[Any]:
    given = [(x, own.shape) for x, own in zip(operands, ctx.avals_in, strict=True)]
    if axis is None:
        results = _emit(body.jaxpr, given)
        return [
            _like(*result, own.shape) for result, own in zip(results, ctx.avals_out, strict=True)
        ]
    ((x, shape),) = given
    while (length := shape[axis]) > 1:
        ends = (0, (length + 1) // 2), (length // 2, length)
        starts, limits = ([0] * len(shape), [0] * len(shape)), (list(shape), list(shape))
        for (start, limit), own_starts, own_limits in zip(ends, starts, limits, strict=True):
            own_starts[axis], own_limits[axis] = start, limit
        attributes = [list(map(mlir.dense_int_array, each)) for each in (starts, limits)]
        ones = mlir.dense_int_array([1] * len(shape))
        shape = (*shape[:axis], (length + 1) // 2, *shape[axis + 1 :])
        halves = [(hlo.slice(x, *both, ones), shape) for both in zip(*attributes, strict=True)]
        ((x, shape),) = _emit(body.jaxpr, halves)
    return [x]


Emitted = tuple[Any, tuple[int, ...]]


def _like(x: mlir.ir.Value | Literal, shape: tuple[int, ...], wanted: tuple[int, ...]) -> Any:
    """A value, or a number of the jaxpr, in a shape that it broadcasts to."""
    if isinstance(x, Literal):
        own: Any = x.aval
        dtype = np.dtype(own.dtype)
        element = mlir.dtype_to_ir_type(dtype)
        is_float = jnp.issubdtype(dtype, jnp.floating)
        number = mlir.ir.FloatAttr.get if is_float else mlir.ir.IntegerAttr.get
        value = number(element, float(x.val) if is_float else int(x.val))
        kind = mlir.ir.RankedTensorType.get(wanted, element)
        return hlo.constant(mlir.ir.DenseElementsAttr.get_splat(kind, value))
    if shape == wanted:
        return x
    axes = range(len(wanted) - len(shape), len(wanted))
    kind = mlir.ir.RankedTensorType.get(wanted, x.type.element_type)
    return hlo.broadcast_in_dim(kind, x, mlir.dense_int_array(list(axes)))


def _emit(jaxpr: Jaxpr, operands: list[Emitted]) -> list[Emitted]:
    """Operations of equations of scalars, each in the shape that its operands broadcast to."""
    env = dict(zip(jaxpr.invars, operands, strict=True))

    def read(x: Any) -> Emitted:
        return (x, ()) if isinstance(x, Literal) else env[x]

    for equation in jaxpr.eqns:
        values = list(map(read, equation.invars))
        if (inner := _called(equation)) is not None:
            results = _emit(inner, values)
        else:
            shape = np.broadcast_shapes(*(own for _, own in values))
            arguments = [_like(x, own, shape) for x, own in values]
            operation = _OPERATIONS[equation.primitive.name]
            results = [(x, shape) for x in operation(equation, shape, *arguments)]
        env.update(zip(equation.outvars, results, strict=True))
    return list(map(read, jaxpr.outvars))


def _plain(operation: Callable[..., Any]) -> Callable[..., Any]:
    return lambda equation, shape, *x: [operation(*x)]


def _to_dtype(operation: Callable[..., Any]) -> Callable[..., Any]:
    def emit(equation: JaxprEqn, shape: tuple[int, ...], x: mlir.ir.Value) -> list[Any]:
        own: Any = equation.outvars[0].aval
        element = mlir.dtype_to_ir_type(np.dtype(own.dtype))
        return [operation(mlir.ir.RankedTensorType.get(shape, element), x)]

    return emit


def _comparison(direction: str) -> Callable[..., Any]:
    def emit(
        equation: JaxprEqn, shape: tuple[int, ...], left: mlir.ir.Value, right: mlir.ir.Value
    ) -> list[Any]:
        own: Any = equation.invars[0].aval
        kind = np.dtype(own.dtype).kind
        how = {"i": "SIGNED", "u": "UNSIGNED", "b": "UNSIGNED"}.get(kind, "FLOAT")
        which = hlo.ComparisonDirectionAttr.get(direction)
        how = hlo.ComparisonTypeAttr.get(how)
        return [hlo.compare(left, right, which, compare_type=how)]

    return emit


_OPERATIONS: dict[str, Callable[..., list[Any]]] = {
    "add": _plain(hlo.add),
    "sub": _plain(hlo.subtract),
    "mul": _plain(hlo.multiply),
    "div": _plain(hlo.divide),
    "neg": _plain(hlo.negate),
    "max": _plain(hlo.maximum),
    "min": _plain(hlo.minimum),
    "clamp": _plain(hlo.clamp),
    "and": _plain(hlo.and_),
    "or": _plain(hlo.or_),
    "xor": _plain(hlo.xor),
    "not": _plain(hlo.not_),
    "shift_left": _plain(hlo.shift_left),
    "shift_right_arithmetic": _plain(hlo.shift_right_arithmetic),
    "shift_right_logical": _plain(hlo.shift_right_logical),
    "select_n": lambda equation, shape, which, no, yes: [hlo.select(which, yes, no)],
    "convert_element_type": _to_dtype(hlo.convert),
    "bitcast_convert_type": _to_dtype(hlo.bitcast_convert),
    "reduce_precision": lambda equation, shape, x: [
        hlo.reduce_precision(
            x,
            mlir.i32_attr(equation.params["exponent_bits"]),
            mlir.i32_attr(equation.params["mantissa_bits"]),
        )
    ],
    # Of scalars, to scalars.
    "broadcast_in_dim": _plain(lambda x: x),
    **{name: _comparison(name.upper()) for name in ("eq", "ne", "lt", "le", "gt", "ge")},
}

_ELEMENTWISE = Primitive("mx_elementwise")
_ELEMENTWISE.multiple_results = True
_ELEMENTWISE.is_high = lambda *types, **params: False
_ELEMENTWISE.def_abstract_eval(_types)
_ELEMENTWISE.def_impl(functools.partial(eager, _ELEMENTWISE))
batching.primitive_batchers[_ELEMENTWISE] = _batch
mlir.register_lowering(_ELEMENTWISE, _lower)
