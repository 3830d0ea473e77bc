"""A jaxpr run with some of its products made anew, as a plan says."""

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax.extend.core import ClosedJaxpr, DropVar, Literal, jaxpr_as_fun  # pyright: ignore

from mx_jax.codecs.explicit_axes import varying
from mx_jax.convert.program import Plan
from mx_jax.convert.regions import Key, Values, folded, regions
from mx_jax.convert.traced_products import traced_products
from mx_jax.ops.tags import tag
from mx_jax.recipes import Recipe


@dataclasses.dataclass(frozen=True, eq=False)
class PlannedBody:
    """A jaxpr as a function that follows a plan.

    Equations that nothing changes are run as JAX runs them. Every equation that draws has a key of
    its own, folded with its index, in loops with that of the iteration too.

    Attributes:
      program: the jaxpr, with its constants.
      plan: for the jaxpr.
      traced_before: what was traced in this run, so that equal calls stay one function.
    """

    program: Any
    plan: Plan
    traced_before: dict[Any, Any] = dataclasses.field(default_factory=dict)

    def __call__(self, values: Sequence[Any], key: Key) -> Values:
        """The results.

        Args:
          values: of the operands.
          key: where products draw from; None where none has to.
        """
        jaxpr, plan = self.program.jaxpr, self.plan
        known: dict[Any, Any] = dict(zip(jaxpr.constvars, self.program.consts, strict=True))
        known |= zip(jaxpr.invars, values, strict=True)
        products, bodies, unchanged = dict(plan.products), dict(plan.bodies), []
        for index, eqn in enumerate(jaxpr.eqns):
            if index not in products and index not in bodies:
                unchanged.append(eqn)
                continue
            _run_unchanged(jaxpr, unchanged, known)
            unchanged = []
            operands = [_read(atom, known) for atom in eqn.invars]
            # By equations, not by products: what rules change does not change others' keys.
            own = folded(key, index)
            with eqn.ctx.manager:
                if index in products:
                    results = [_product(eqn, operands, *products[index], own)]
                else:
                    results = self._region(eqn, operands, bodies[index], own)
            known |= zip(eqn.outvars, results, strict=True)
        _run_unchanged(jaxpr, unchanged, known)
        return [_read(atom, known) for atom in jaxpr.outvars]

    def traced(self, values: Sequence[Any], key: Key) -> Any:
        """The jaxpr of the results; the same for each call of the same under the same plan."""
        called = id(self.program), self.plan, key is None
        if called not in self.traced_before:
            self.traced_before[called] = jax.make_jaxpr(self)(values, key)
        return self.traced_before[called]

    def _region(self, eqn: Any, operands: Values, plans: tuple[Plan, ...], key: Key) -> Values:
        region = regions()[eqn.primitive]
        bodies = [
            PlannedBody(body, plan, self.traced_before)
            for body, plan in zip(region.bodies(eqn.params), plans, strict=True)
        ]
        own = key if any(plan.draws for plan in plans) else None
        return region.run(eqn.params, operands, bodies, own)


def _read(atom: Any, known: dict[Any, Any]) -> Any:
    return atom.val if isinstance(atom, Literal) else known[atom]


def _run_unchanged(jaxpr: Any, eqns: list[Any], known: dict[Any, Any]) -> None:
    """Run equations that follow each other as a jaxpr of their own; its results become known."""
    if not eqns:
        return
    made = dict.fromkeys(out for eqn in eqns for out in eqn.outvars if type(out) is not DropVar)
    read = dict.fromkeys(
        atom for eqn in eqns for atom in eqn.invars if not isinstance(atom, Literal)
    )
    given, results = [atom for atom in read if atom not in made], list(made)
    part = jaxpr.replace(constvars=[], invars=given, outvars=results, eqns=eqns)
    values = jaxpr_as_fun(ClosedJaxpr(part, []))(*(known[variable] for variable in given))
    known |= zip(results, values, strict=True)


def _product(eqn: Any, operands: Values, recipe: Recipe, turns: bool, key: Key) -> Any:
    row, params = traced_products()[eqn.primitive], eqn.params
    back = None
    if turns:
        assert row.turned is not None
        *operands, params, back = row.turned(*operands, params)
    # The scope that it stood in, for profiles and for what XLA says, and for those who watch.
    scope = str(eqn.source_info.name_stack)
    with tag(scope) if scope else contextlib.nullcontext():
        own = _of_shard(key, operands) if recipe.is_stochastic else None
        product = row.multiply(recipe, operands, params, own)
        return product if back is None else back(product)


def _of_shard(key: Key, operands: Values) -> Key:
    """Below shard_map, shards that hold different operands draw different bits."""
    for axis in sorted(frozenset[str]().union(*map(varying, operands))):
        key = folded(key, lax.axis_index(axis))
    return key
