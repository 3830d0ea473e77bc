"""Equations that run jaxprs, one row each: where their values come from, and how they run anew.

A jaxpr is public (`jax.extend.core`), the parameters of a primitive are not. Those read here are
the same in JAX 0.10 and 0.12, but scan's counts of operands: `_scan_counts` knows both.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr  # pyright: ignore[reportPrivateImportUsage]
from jax.extend.core.primitives import cond_p, jit_p, remat_p, scan_p, while_p
from jax.sharding import AbstractMesh, PartitionSpec

from mx_jax.ops.tags import iteration, watching

Key = jax.Array | None
Values = list[Any]
# Which results of a jaxpr come from data, by which of its operands do.
Flow = Callable[[Any, Sequence[bool]], list[bool]]


class Body(Protocol):
    """A body as a function of its operands and of a key, None where nothing in it draws."""

    def __call__(self, values: Sequence[Any], key: Key, /) -> Values:
        """The results."""
        ...

    def traced(self, values: Sequence[Any], key: Key, /) -> Any:
        """The jaxpr of the results, one for all equal calls."""
        ...


@dataclasses.dataclass(frozen=True)
class Region:
    """How equations of one primitive run their bodies.

    Attributes:
      bodies: from the parameters to the jaxprs.
      flow: from parameters, which operands come from data, and the flow through a jaxpr, to which
        operands of each body do, and which results.
      run: from parameters, operands, bodies and key to the results.
    """

    bodies: Callable[[dict[str, Any]], tuple[Any, ...]]
    flow: Callable[[dict[str, Any], list[bool], Flow], tuple[list[list[bool]], list[bool]]]
    run: Callable[[dict[str, Any], Values, Sequence[Body], Key], Values]


def closed(jaxpr: Any) -> ClosedJaxpr:
    """A jaxpr with its constants: some equations hold one without."""
    return jaxpr if hasattr(jaxpr, "consts") else ClosedJaxpr(jaxpr, ())


def folded(key: Key, number: Any) -> Key:
    """A key of its own for a number; None stays None."""
    return None if key is None else jax.random.fold_in(key, number)


def _only_body(params: dict[str, Any]) -> tuple[Any, ...]:
    return (closed(params["jaxpr"]),)


def _straight(
    params: dict[str, Any], data: list[bool], flow: Flow
) -> tuple[list[list[bool]], list[bool]]:
    """A body that takes the operands and gives the results."""
    (body,) = _only_body(params)
    return [data], flow(body, data)


def _settled(body: Any, data: list[bool], carry: slice, flow: Flow) -> tuple[list[bool], Any]:
    """A loop's operands once what comes from data has gone round; its results in that round."""
    data = list(data)
    while True:
        results = flow(body, data)
        after = [before or result for before, result in zip(data[carry], results, strict=False)]
        if after == data[carry]:
            return data, results
        data[carry] = after


def _scan_counts(params: dict[str, Any]) -> tuple[int, int]:
    """How many operands are constants, and how many are carried."""
    if "ft_in" in params:
        consts, carry, _ = params["ft_in"].unpack()
        return len(consts), len(carry)
    return params["num_consts"], params["num_carry"]


def _scan_flow(params: dict[str, Any], data: list[bool], flow: Flow):
    num_consts, num_carry = _scan_counts(params)
    carry = slice(num_consts, num_consts + num_carry)
    (body,) = _only_body(params)
    data, results = _settled(body, data, carry, flow)
    return [data], results


def _scan(params: dict[str, Any], values: Values, bodies: Sequence[Body], key: Key) -> Values:
    num_consts, num_carry = _scan_counts(params)
    consts, rest = values[:num_consts], values[num_consts:]
    index = jnp.arange(params["length"]) if key is not None or watching.value else None

    def step(carry: Values, given: tuple[Values, Any]) -> tuple[Values, Values]:
        own, i = given
        with iteration(i) if watching.value else contextlib.nullcontext():
            results = bodies[0]([*consts, *carry, *own], folded(key, i))
        return results[:num_carry], results[num_carry:]

    carry, stacked = lax.scan(
        step,
        rest[:num_carry],
        (rest[num_carry:], index),
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    return [*carry, *stacked]


def _while_bodies(params: dict[str, Any]) -> tuple[Any, ...]:
    return params["cond_jaxpr"], params["body_jaxpr"]


def _while_split(params: dict[str, Any], values: list[Any]) -> tuple[Any, Any, Any]:
    """Constants of the condition, those of the body, and what goes round."""
    first = params["cond_nconsts"]
    second = first + params["body_nconsts"]
    return values[:first], values[first:second], values[second:]


def _while_flow(params: dict[str, Any], data: list[bool], flow: Flow):
    asked, consts, start = _while_split(params, data)
    carry = slice(len(consts), None)
    inside, _ = _settled(params["body_jaxpr"], [*consts, *start], carry, flow)
    return [[*asked, *inside[carry]], inside], inside[carry]


def _while(params: dict[str, Any], values: Values, bodies: Sequence[Body], key: Key) -> Values:
    asked, consts, start = _while_split(params, values)
    condition, body = bodies

    def keys(i: Any) -> list[Key]:
        own = folded(key, i)
        return [folded(own, 0), folded(own, 1)]

    def goes_on(state: tuple[Any, Values]) -> Any:
        return condition([*asked, *state[1]], keys(state[0])[0])[0]

    def step(state: tuple[Any, Values]) -> tuple[Any, Values]:
        i, carry = state
        return None if i is None else i + 1, body([*consts, *carry], keys(i)[1])

    first = None if key is None else jnp.uint32(0)
    return lax.while_loop(goes_on, step, (first, start))[1]


def _cond_flow(params: dict[str, Any], data: list[bool], flow: Flow):
    operands = data[1:]
    results = [flow(branch, operands) for branch in params["branches"]]
    return [operands for _ in results], [any(own) for own in zip(*results, strict=True)]


def _cond(params: dict[str, Any], values: Values, bodies: Sequence[Body], key: Key) -> Values:
    index, *operands = values
    branches = [lambda *given, body=body: body(given, key) for body in bodies]
    platforms = params.get("branches_platforms")
    if platforms is None:
        return lax.switch(index, branches, *operands)
    default, named = None, {}
    for branch, names in zip(branches, platforms, strict=True):
        if names is None:
            default = branch
        named |= dict.fromkeys(names or (), branch)
    return lax.platform_dependent(*operands, default=default, **named)


def _jit(params: dict[str, Any], values: Values, bodies: Sequence[Body], key: Key) -> Values:
    """The same call of another jaxpr: name, shardings and donations stay."""
    params = dict(params)
    params["jaxpr"] = bodies[0].traced(values, key)
    if key is not None:
        values = [*values, key]
        for name, plain in _plain_operand().items():
            params[name] = (*params[name], plain)
    return jit_p.bind(*values, **params)


@functools.cache
def _plain_operand() -> dict[str, Any]:
    """What a jit says of an operand that nobody said anything of."""
    (call,) = jax.make_jaxpr(jax.jit(lambda x: x))(jax.ShapeDtypeStruct((), jnp.float32)).eqns
    names = ("in_shardings", "in_layouts", "donated_invars")
    return {name: call.params[name][0] for name in names}


def _remat(params: dict[str, Any], values: Values, bodies: Sequence[Body], key: Key) -> Values:
    prevent, policy = params["prevent_cse"], params["policy"]
    return jax.checkpoint(bodies[0], prevent_cse=prevent, policy=policy)(values, key)


def _shard_map(params: dict[str, Any], values: Values, bodies: Sequence[Body], key: Key) -> Values:
    return jax.shard_map(
        bodies[0],
        mesh=params["mesh"],
        in_specs=(list(params["in_specs"]), PartitionSpec()),
        out_specs=list(params["out_specs"]),
        axis_names=params["newly_manual_axes"],
        check_vma=params["check_vma"],
    )(values, key)


@functools.cache
def regions() -> dict[Any, Region]:
    """The rows, by primitive."""
    return {
        jit_p: Region(_only_body, _straight, _jit),
        remat_p: Region(_only_body, _straight, _remat),
        scan_p: Region(_only_body, _scan_flow, _scan),
        while_p: Region(_while_bodies, _while_flow, _while),
        cond_p: Region(lambda params: params["branches"], _cond_flow, _cond),
        _shard_map_primitive(): Region(_only_body, _straight, _shard_map),
    }


def _shard_map_primitive() -> Any:
    """What `jax.shard_map` traces to: `jax.extend` does not give it."""
    mesh = AbstractMesh((1,), ("x",))
    identity = jax.shard_map(
        lambda x: x, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec()
    )
    # Whatever mesh the caller has set.
    with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
        (call,) = jax.make_jaxpr(identity)(jax.ShapeDtypeStruct((), jnp.float32)).eqns
    return call.primitive
