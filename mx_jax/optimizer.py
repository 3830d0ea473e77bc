"""Optimizer states in 8 bits: the moments of optax's optimizers in MXFP8, right on average."""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn, Literal, Var, jaxpr_as_fun

from mx_jax.ops.arguments import check_is_key
from mx_jax.ops.quantize import step_moments
from mx_jax.reference.moments import Stored, decode, encode

T = TypeVar("T")
U = TypeVar("U")


class QuantizedState(NamedTuple):
    """What `quantize_state` keeps between two steps.

    All of it are arrays, in trees of the optimizer's own structure: whatever goes by that, as
    `optax.tree_map_params`, `nnx.Optimizer` and orbax do, finds what it knows.

    Attributes:
      key: uint32 data of the PRNG key that the next step draws from.
      scales: E8M0 bytes of the blocks, uint8; 0 of what is not quantized.
      state: the optimizer's state, with E4M3 codes, uint8, in place of large moments; those of
        squares, as `nu`, are codes of their roots.
    """

    key: jax.Array
    scales: Any
    state: Any


def quantize_state(
    optimizer: T,
    *,
    key: jax.Array | None = None,
    values: Sequence[str] = ("mu", "trace"),
    squares: Sequence[str] = ("nu",),
    min_size: int = 4096,
) -> T:
    """An optimizer that keeps its moments in MXFP8: 2.06 bytes a parameter where Adam has 8.

    Each step dequantizes the moments, updates them in float32, and quantizes them again, blocks of
    32 (E4M3, scales rounded up). A running mean moves by less than a code a step, so both round
    stochastically: `mu` as it is; of `nu` its root, which has half the octaves, up with odds
    `(nu - low^2) / (high^2 - low^2)` between the codes low and high, which keep its square right
    on average. A root below the smallest normal code of its block is stored as that, never as 0.

    On CPUs the C++ library reads, moves and rounds a moment in one pass, where it is a running mean
    `keep * moment + add * gradient`, or of squares, as in Adam, Lion and momentum.

    Blocks lie along the last axis that 32 divides. The state is sharded as the parameters, and
    takes their PartitionSpecs; where devices hold whole blocks, nothing more is communicated.

    Args:
      optimizer: an `optax.GradientTransformation`, as `optax.adamw(3e-4)`, chained or not.
      key: the PRNG key of the first step; default: `jax.random.key(0)`.
      values: fields of optax's states that hold means of gradients.
      squares: fields that hold means of squares; never negative. Where an optimizer subtracts
        moments, as centered RMSProp does, leave them out.
      min_size: arrays of fewer elements stay as they are.

    Returns:
      A transformation of the same type, with `QuantizedState` as its state.

    Raises:
      TypeError: the optimizer is no GradientTransformation.
      ValueError: from its `init`, if its state has large arrays, and none in such a field.

    Examples:
      >>> import jax.numpy as jnp, mx_jax, optax
      >>> optimizer = mx_jax.quantize_state(optax.adamw(3e-4))
      >>> params = {"kernel": jnp.ones((64, 64)), "bias": jnp.zeros(64)}
      >>> state = optimizer.init(params)
      >>> updates, state = optimizer.update(params, state, params)
      >>> mu, scales = state.state[0].mu, state.scales[0].mu
      >>> mu["kernel"].dtype, scales["kernel"].shape, mu["bias"].dtype
      (dtype('uint8'), (64, 2), dtype('float32'))
    """
    own: Any = optimizer
    if not all(callable(getattr(own, name, None)) for name in ("init", "update", "_replace")):
        raise TypeError(
            "quantize_state: needs an optax.GradientTransformation, got optimizer of type "
            f"{type(optimizer).__name__}; of optax.MultiSteps pass what its "
            "gradient_transformation() returns, or the optimizer inside it"
        )
    if key is not None:
        check_is_key(key, "quantize_state")
    implementation = jax.random.key_impl(jax.random.key(0) if key is None else key)
    fields = {**dict.fromkeys(values, False), **dict.fromkeys(squares, True)}

    def init(params: object) -> QuantizedState:
        start = jax.random.key(0) if key is None else key
        paths, tree = jax.tree.flatten_with_path(own.init(params))
        floats = (jnp.float64, jnp.float32, jnp.bfloat16, jnp.float16)
        large = [
            getattr(leaf, "dtype", None) in floats and leaf.ndim > 0 and leaf.size >= min_size
            for _, leaf in paths
        ]
        roots = [_squares(path, fields) for path, _ in paths]
        if any(large) and all(is_square is None for is_square in roots):
            raise ValueError(
                "quantize_state: needs a state with fields of these names, got "
                f"values={tuple(values)}, squares={tuple(squares)}, and none of them among "
                f"{sorted({name for path, _ in paths for name in _fields_of(path)})}; name the "
                "optimizer's own"
            )
        words = jnp.zeros(2, jnp.uint32)
        parts = [
            # Behind a barrier: XLA would fold the cast of zeros, element by element.
            encode(lax.optimization_barrier(leaf), words, root)
            if root is not None and quantizes
            else (leaf, jnp.uint8(0))
            for (_, leaf), quantizes, root in zip(paths, large, roots, strict=True)
        ]
        codes, scales = (jax.tree.unflatten(tree, [part[i] for part in parts]) for i in (0, 1))
        # A copy: a step may donate the state, the caller's key it may not.
        return QuantizedState(jnp.array(jax.random.key_data(start)), scales, codes)

    def update(
        updates: U, state: QuantizedState, params: object = None, **extra: object
    ) -> tuple[U, QuantizedState]:
        paths, tree = jax.tree.flatten_with_path(state.state)
        scales = tree.flatten_up_to(state.scales)
        roots = [
            _squares(path, fields) if scale.ndim else None
            for (path, _), scale in zip(paths, scales, strict=True)
        ]
        # The dtypes of moments, which codes do not have; without parameters, of float32 ones.
        like = _like(
            paths,
            jax.eval_shape(own.init, jax.tree.map(_wide, updates) if params is None else params),
        )
        before = [
            leaf if root is None else decode(leaf, scale, root, moment.dtype)
            for (_, leaf), scale, root, moment in zip(paths, scales, roots, like, strict=True)
        ]
        updates, after, means = _update_and_means(
            lambda moments: own.update(updates, tree.unflatten(moments), params, **extra),
            before,
            [number for number, root in enumerate(roots) if root is not None],
        )
        first, second = jax.random.split(jax.random.wrap_key_data(state.key, impl=implementation))
        words = jax.random.bits(first, (len(paths), 2), jnp.uint32)
        # Running means step in one pass, those of one gradient together.
        alike = collections.defaultdict[int, list[int]](list)
        for number, mean in means.items():
            alike[id(mean.added)].append(number)
        stepped: dict[int, Stored] = {}
        for numbers in alike.values():
            them = [means[number] for number in numbers]
            found = step_moments(
                [(paths[number][1], scales[number]) for number in numbers],
                them[0].added,
                [(mean.keep, mean.add) for mean in them],
                words[np.array(numbers)],
                is_root=[bool(roots[number]) for number in numbers],
                is_square=[mean.is_square for mean in them],
            )
            stepped |= dict(zip(numbers, found, strict=True))
        parts = [
            (leaf, scale)
            if root is None
            else stepped[number]
            if number in stepped
            else encode(leaf, words[number], root)
            for number, (leaf, scale, root) in enumerate(
                zip(tree.flatten_up_to(after), scales, roots, strict=True)
            )
        ]
        codes, scales = (jax.tree.unflatten(tree, [part[i] for part in parts]) for i in (0, 1))
        return updates, QuantizedState(jax.random.key_data(second), scales, codes)

    return own._replace(init=init, update=update)


def _like(paths: Sequence[tuple[jax.tree_util.KeyPath, object]], state: object) -> list[Any]:
    """The leaves of a state of parameters as they are, where those of `init` are kept."""
    leaves = jax.tree.leaves_with_path(state)
    kept, new = ([jax.tree_util.keystr(path) for path, _ in own] for own in (paths, leaves))
    if kept != new:
        raise ValueError(
            "quantize_state: update needs the tree that init was given, got another: "
            f"missing={sorted({*kept} - {*new})[:4]}, new={sorted({*new} - {*kept})[:4]} among "
            f"{len(new)} leaves of the state; init again for other parameters"
        )
    return [leaf for _, leaf in leaves]


def _squares(path: jax.tree_util.KeyPath, fields: dict[str, bool]) -> bool | None:
    """Whether a leaf is of squares; None if it is in none of the fields.

    The outermost counts: names further in are those of the parameters.
    """
    return next((fields[name] for name in _fields_of(path) if name in fields), None)


def _fields_of(path: jax.tree_util.KeyPath) -> list[str]:
    return [key.name for key in path if isinstance(key, jax.tree_util.GetAttrKey)]


# Running means -----------------------------------------------------------------------------------
#
# Where a new moment is `keep * moment + add * added`, one kernel reads the codes, moves the moment
# and writes codes. What is so is read from the jaxpr of the optimizer, not from its name.


class _Mean(NamedTuple):
    """What becomes of a moment: `keep * moment + add * added`, or of `added` squared.

    Attributes:
      keep: a scalar; a variable or number of a jaxpr, or its value.
      add: likewise.
      added: likewise, of the moment's shape.
      is_square: whether the square of `added` is added.
    """

    keep: Any
    add: Any
    added: Any
    is_square: bool


def _wide(x: jax.typing.ArrayLike) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(jnp.shape(x), jnp.promote_types(jnp.result_type(x), jnp.float32))


def _update_and_means(
    update: Callable[[list[Any]], tuple[U, Any]], before: list[Any], moments: list[int]
) -> tuple[U, Any, dict[int, _Mean]]:
    """What an update of the leaves of a state gives, and which of its moments are running means."""

    def of_moments(given: list[jax.Array]) -> tuple[U, Any]:
        leaves = list(before)
        for number, moment in zip(moments, given, strict=True):
            leaves[number] = moment
        return update(leaves)

    given = [before[number] for number in moments]
    try:
        closed, shapes = jax.make_jaxpr(of_moments, return_shape=True)(given)
    except (jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError):
        # It asks for values, which it has outside of jit.
        return *of_moments(given), {}
    jaxpr, num_updates = closed.jaxpr, len(jax.tree.leaves(shapes[0]))
    made = {var: equation for equation in jaxpr.eqns for var in equation.outvars}
    means = {}
    for number, moment in zip(moments, jaxpr.invars, strict=True):
        if before[number].dtype != jnp.float32:
            continue
        mean = _mean_of(made, jaxpr.outvars[num_updates + number], moment)
        if mean is not None:
            means[number] = mean
    wanted = [x for mean in means.values() for x in mean[:3] if isinstance(x, Var)]
    wider = closed.replace(jaxpr=jaxpr.replace(outvars=[*jaxpr.outvars, *wanted]))
    found = jaxpr_as_fun(wider)(*given)
    values = dict(zip(wanted, found[len(jaxpr.outvars) :], strict=True))
    for number, mean in means.items():
        keep, add, added = (x.val if isinstance(x, Literal) else values.get(x, x) for x in mean[:3])
        means[number] = _Mean(keep, add, added, mean.is_square)
    updates, after = jax.tree.unflatten(jax.tree.structure(shapes), found[: len(jaxpr.outvars)])
    return updates, after, means


def _mean_of(made: dict[Var, JaxprEqn], after: object, moment: Var) -> _Mean | None:
    """How a moment becomes another, if that is a running mean."""

    def equation_of(x: object, *names: str) -> JaxprEqn | None:
        found = made.get(x) if isinstance(x, Var) else None
        return found if found is not None and found.primitive.name in names else None

    def scaled(x: object) -> tuple[object, object]:
        product = equation_of(x, "mul")
        for scale, other in () if product is None else _both_ways(product.invars):
            if scale.aval.shape == () != other.aval.shape:
                return scale, other
        return 1.0, x

    total = equation_of(after, "add")
    for kept, new in () if total is None else _both_ways(total.invars):
        (keep, old), (add, added) = scaled(kept), scaled(new)
        is_square = False
        while (power := equation_of(added, "integer_pow", "square")) is not None:
            exponent = power.params.get("y", 2)
            if exponent not in (1, 2) or is_square:
                break
            added, is_square = power.invars[0], exponent == 2
        alike = isinstance(added, Var) and added is not moment and added.aval == moment.aval
        if old is moment and alike:
            return _Mean(keep, add, added, is_square)
    return None


def _both_ways(pair: Sequence[Any]) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    left, right = pair
    return (left, right), (right, left)
