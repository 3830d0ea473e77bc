"""Equations that run programs: scan, while, cond, jit, remat, shard_map, custom derivatives.

A jaxpr is public (`jax.extend.core`), the parameters of a primitive are not. Those read here are
the same in JAX 0.10 and 0.12, but scan's counts of operands: `_scan_counts` knows both.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer
from jax.extend.core import (
    ClosedJaxpr,  # pyright: ignore[reportPrivateImportUsage]
    Jaxpr,
    JaxprEqn,
    jaxprs_in_params,
)
from jax.extend.core.primitives import (
    closed_call_p,
    cond_p,
    custom_jvp_call_p,
    custom_vjp_call_p,
    jit_p,
    remat_p,
    scan_p,
    while_p,
)
from jax.sharding import AbstractMesh, PartitionSpec

Params = dict[str, Any]
Values = list[Any]
# The bodies of an equation as they are run: `rewrite.Rewritten`.
Bodies = Sequence[Any]
# Of each operand or result, bits that say what it is computed from.
Marks = Sequence[int]
# The marks of the results of an equation's body, by its number, from those of its operands.
Flow = Callable[[int, Marks], list[int]]


@dataclasses.dataclass(frozen=True)
class Region:
    """How equations of one primitive run their bodies.

    Attributes:
      run: the results, from parameters, operands, the bodies, and the state that goes down to them:
        any pytree of arrays, None for none.
      flow: from parameters, the marks of operands, and the flow through a body, to those of the
        results.
      bodies: from the parameters to the jaxprs.
      derivative: the rule that defines its derivative, if not its body's; None: it has none.
    """

    run: Callable[[Params, Values, Bodies, Any], Values]
    flow: Callable[[Params, list[int], Flow], list[int]] = lambda _, marks, flow: flow(0, marks)
    bodies: Callable[[Params], Sequence[Any]] = lambda params: (params["jaxpr"],)
    derivative: str | None = None


def closed(jaxpr: Jaxpr | ClosedJaxpr) -> ClosedJaxpr:
    """A jaxpr with its constants: some equations hold one without."""
    return jaxpr if isinstance(jaxpr, ClosedJaxpr) else ClosedJaxpr(jaxpr, ())


def bodies(eqn: JaxprEqn) -> list[ClosedJaxpr]:
    """The programs that an equation runs, or holds."""
    region = regions().get(eqn.primitive)
    inner = jaxprs_in_params(eqn.params) if region is None else region.bodies(eqn.params)
    return [closed(jaxpr) for jaxpr in inner]


@functools.cache
def regions() -> dict[Any, Region]:
    """The rows, by primitive."""
    # `jax.extend` does not give what `jax.shard_map` traces to.
    mesh, spec = AbstractMesh((1,), ("x",)), PartitionSpec()
    identity = jax.shard_map(lambda x: x, mesh=mesh, in_specs=spec, out_specs=spec)
    # Whatever mesh the caller has set.
    with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
        (call,) = jax.make_jaxpr(identity)(jax.ShapeDtypeStruct((), jnp.float32)).eqns
    # The body alone, with its own derivative: for programs that are not differentiated again.
    called = Region(
        lambda _, values, bodies, state: bodies[0](values, state),
        bodies=lambda params: (params["call_jaxpr"],),
    )
    return {
        jit_p: Region(_jit),
        remat_p: Region(_remat),
        scan_p: Region(_scan, _scan_flow),
        while_p: Region(
            _while, _while_flow, lambda params: (params["cond_jaxpr"], params["body_jaxpr"])
        ),
        cond_p: Region(_cond, _cond_flow, lambda params: params["branches"]),
        call.primitive: Region(_shard_map),
        closed_call_p: called,
        custom_jvp_call_p: dataclasses.replace(called, derivative="custom_jvp"),
        custom_vjp_call_p: dataclasses.replace(called, derivative="custom_vjp"),
    }


def joined(marks: Marks) -> int:
    """The marks of what is computed from all of some operands."""
    return functools.reduce(operator.or_, marks, 0)


def _settled(
    flow: Callable[[Marks], list[int]], marks: list[int], carry: slice
) -> tuple[list[int], list[int]]:
    """The marks of a loop's carry once all has gone round; its results in that round."""
    marks = list(marks)
    while True:
        results = flow(marks)
        after = [before | result for before, result in zip(marks[carry], results, strict=False)]
        if after == marks[carry]:
            return after, results
        marks[carry] = after


def _scan_counts(params: Params) -> tuple[int, int]:
    if "ft_in" in params:
        consts, carry, _ = params["ft_in"].unpack()
        return len(consts), len(carry)
    return params["num_consts"], params["num_carry"]


def _scan_flow(params: Params, marks: list[int], flow: Flow) -> list[int]:
    num_consts, num_carry = _scan_counts(params)
    carry = slice(num_consts, num_consts + num_carry)
    return _settled(functools.partial(flow, 0), marks, carry)[1]


def _scan(params: Params, values: Values, bodies: Bodies, state: Any) -> Values:
    num_consts, num_carry = _scan_counts(params)
    consts, rest = values[:num_consts], values[num_consts:]
    (body,) = bodies
    index = jnp.arange(params["length"]) if body.counts(state) else None

    def step(carry: Values, inputs: tuple[Values, Any]) -> tuple[Values, Values]:
        slices, i = inputs
        results = body.iterate([*consts, *carry, *slices], state, i)
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


def _while_split(params: Params, values: list[Any]) -> tuple[Any, Any, Any]:
    """Constants of the condition, those of the body, and what goes round."""
    first = params["cond_nconsts"]
    second = first + params["body_nconsts"]
    return values[:first], values[first:second], values[second:]


def _while_flow(params: Params, marks: list[int], flow: Flow) -> list[int]:
    of_condition, consts, start = _while_split(params, marks)
    carry = slice(len(consts), None)
    settled, _ = _settled(functools.partial(flow, 1), [*consts, *start], carry)
    flow(0, [*of_condition, *settled])
    return settled


def _while(params: Params, values: Values, bodies: Bodies, state: Any) -> Values:
    of_condition, consts, start = _while_split(params, values)
    condition, body = bodies

    def goes_on(carried: tuple[Any, Values]) -> Any:
        i, carry = carried
        return condition.iterate([*of_condition, *carry], state, i, 0)[0]

    def step(carried: tuple[Any, Values]) -> tuple[Any, Values]:
        i, carry = carried
        return None if i is None else i + 1, body.iterate([*consts, *carry], state, i, 1)

    first = jnp.uint32(0) if body.counts(state) else None
    return lax.while_loop(goes_on, step, (first, start))[1]


def _cond_flow(params: Params, marks: list[int], flow: Flow) -> list[int]:
    results = (flow(i, marks[1:]) for i, _ in enumerate(params["branches"]))
    return [joined(of_branches) for of_branches in zip(*results, strict=True)]


def _cond(params: Params, values: Values, bodies: Bodies, state: Any) -> Values:
    index, *operands = values
    branches = [lambda *inputs, body=body: body(inputs, state) for body in bodies]
    platforms = params.get("branches_platforms")
    if platforms is None:
        return lax.switch(index, branches, *operands)
    default, named = None, {}
    for branch, names in zip(branches, platforms, strict=True):
        if names is None:
            default = branch
        named |= dict.fromkeys(names or (), branch)
    return lax.platform_dependent(*operands, default=default, **named)


def _jit(params: Params, values: Values, bodies: Bodies, state: Any) -> Values:
    """The same call of another jaxpr: name, shardings and donations stay."""
    params, state = dict(params), bodies[0].shared(state)
    made = bodies[0].traced(values, state)
    if any(isinstance(const, Tracer) for const in made.consts):
        # What the call's own jaxpr would have to take from the one around it.
        return bodies[0](values, state)
    params["jaxpr"] = made
    more = jax.tree.leaves(state)
    for name, plain in _plain_operand().items() if more else ():
        params[name] = (*params[name], *[plain] * len(more))
    return jit_p.bind(*values, *more, **params)


@functools.cache
def _plain_operand() -> Params:
    """What a jit says of an operand that nobody said anything of."""
    (call,) = jax.make_jaxpr(jax.jit(lambda x: x))(jax.ShapeDtypeStruct((), jnp.float32)).eqns
    names = ("in_shardings", "in_layouts", "donated_invars")
    return {name: call.params[name][0] for name in names}


def _remat(params: Params, values: Values, bodies: Bodies, state: Any) -> Values:
    if params["differentiated"]:
        # What is computed again is not to be found in what was computed before.
        values = lax.optimization_barrier(values) if params["prevent_cse"] else values
        return bodies[0](values, state)
    remat = jax.checkpoint(bodies[0], prevent_cse=params["prevent_cse"], policy=params["policy"])
    return remat(values, state)


def _shard_map(params: Params, values: Values, bodies: Bodies, state: Any) -> Values:
    return jax.shard_map(
        bodies[0],
        mesh=params["mesh"],
        in_specs=(list(params["in_specs"]), PartitionSpec()),
        out_specs=list(params["out_specs"]),
        axis_names=params["newly_manual_axes"],
        check_vma=params["check_vma"],
    )(values, state)
