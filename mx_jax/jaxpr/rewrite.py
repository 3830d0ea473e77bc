"""A program run with some of its equations computed another way."""

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import (
    ClosedJaxpr,  # pyright: ignore[reportPrivateImportUsage]
    DropVar,
    Jaxpr,
    JaxprEqn,
    Literal,
    Var,
    jaxpr_as_fun,
)

from mx_jax.jaxpr.regions import Values, bodies, regions

# What becomes of equations: where each one is (its index, below the indices of those around it and
# of their bodies), and what a rule needs to compute it. Hashable, so that equal calls share what is
# made of them.
Plan = tuple[tuple[tuple[int, ...], Any], ...]
Read = Callable[[Any], Any]


class Rule:
    """How the equations of a plan are computed. `state` is a pytree of arrays that goes down."""

    def compute(self, eqn: JaxprEqn, read: Read, entry: Any, state: Any) -> Values:
        """The results of an equation; `read` gives the values of its program's variables."""
        raise NotImplementedError

    def context(self, eqn: JaxprEqn) -> contextlib.AbstractContextManager[Any]:
        """What is in context where an equation is computed, or run with other bodies."""
        return contextlib.nullcontext()

    def body(self, state: Any) -> contextlib.AbstractContextManager[Any]:
        """A context in which the equations of one body run."""
        return contextlib.nullcontext()

    def below(self, state: Any, number: int) -> Any:
        """The state of an equation, by its index, and of a loop's body, by its number."""
        return state

    def entering(self, plan: Plan, state: Any) -> Any:
        """The state that bodies with such a plan are given."""
        return state

    def shared(self, state: Any) -> Any:
        """The state as the body of a `jit` takes it, which equal calls share."""
        return state

    def counts(self, state: Any) -> bool:
        """Whether loops count their iterations."""
        return state is not None

    def iteration(self, state: Any, index: jax.Array | None) -> Any:
        """The state of an iteration of a loop."""
        raise NotImplementedError


def below(plan: Plan, index: int) -> Plan:
    """What a plan says of one body, or of the bodies of one equation."""
    return tuple((where[1:], entry) for where, entry in plan if where[0] == index)


@dataclasses.dataclass(frozen=True, eq=False)
class Rewritten:
    """A jaxpr as a function of its operands and a state that follows a plan by a rule."""

    program: ClosedJaxpr
    plan: Plan
    rule: Rule
    # What was traced in this run, so that equal calls stay one function.
    traced_before: dict[Any, Any] = dataclasses.field(default_factory=dict)

    def __call__(self, values: Sequence[Any], state: Any) -> Values:
        jaxpr = self.program.jaxpr
        known: dict[Any, Any] = dict(zip(jaxpr.constvars, self.program.consts, strict=True))
        known |= zip(jaxpr.invars, values, strict=True)

        def read(atom: Literal | Var) -> Any:
            return atom.val if isinstance(atom, Literal) else known[atom]

        changed, unchanged = {where[0] for where, _ in self.plan}, []
        with self.rule.body(state):
            for index, eqn in enumerate(jaxpr.eqns):
                if index not in changed:
                    unchanged.append(eqn)
                    continue
                _run_unchanged(jaxpr, unchanged, known)
                plan, unchanged = below(self.plan, index), []
                inner = self.rule.below(state, index)
                with eqn.ctx.manager, self.rule.context(eqn):
                    if plan[0][0]:
                        operands = [as_array(read(atom)) for atom in eqn.invars]
                        results = self._region(eqn, operands, plan, inner)
                    else:
                        ((_, entry),) = plan
                        results = self.rule.compute(eqn, read, entry, inner)
                known |= zip(eqn.outvars, results, strict=True)
            _run_unchanged(jaxpr, unchanged, known)
        return [as_array(read(atom)) for atom in jaxpr.outvars]

    def _region(self, eqn: JaxprEqn, operands: Values, plan: Plan, state: Any) -> Values:
        inner = [
            dataclasses.replace(self, program=body, plan=below(plan, i))
            for i, body in enumerate(bodies(eqn))
        ]
        state = self.rule.entering(plan, state)
        return regions()[eqn.primitive].run(eqn.params, operands, inner, state)

    def shared(self, state: Any) -> Any:
        return self.rule.shared(state)

    def counts(self, state: Any) -> bool:
        return self.rule.counts(state)

    def iterate(self, values: Values, state: Any, index: Any, number: int | None = None) -> Values:
        inner = self.rule.iteration(state, index)
        return self(values, inner if number is None else self.rule.below(inner, number))

    def traced(self, values: Values, state: Any) -> ClosedJaxpr:
        called = id(self.program), self.plan, jax.tree.structure(state)
        if called not in self.traced_before:
            self.traced_before[called] = jax.make_jaxpr(self)(values, state)
        return self.traced_before[called]


def as_array(value: object) -> Any:
    """A value as an equation takes it that no rule computes: one may put others in its place."""
    return jnp.asarray(value) if hasattr(value, "__jax_array__") else value


def _run_unchanged(jaxpr: Jaxpr, eqns: list[Any], known: dict[Any, Any]) -> None:
    """Run equations that follow each other as a jaxpr of their own; its results become known."""
    if not eqns:
        return
    made = dict.fromkeys(out for eqn in eqns for out in eqn.outvars if type(out) is not DropVar)
    read = dict.fromkeys(
        atom for eqn in eqns for atom in eqn.invars if not isinstance(atom, Literal)
    )
    inputs, results = [atom for atom in read if atom not in made], list(made)
    part = jaxpr.replace(constvars=[], invars=inputs, outvars=results, eqns=eqns)
    values = jaxpr_as_fun(ClosedJaxpr(part, []))(
        *(as_array(known[variable]) for variable in inputs)
    )
    known |= zip(results, values, strict=True)
