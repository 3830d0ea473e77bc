"""A traced function's products: where they stand, and what the rules say of each."""

import collections
import dataclasses
import re
from collections.abc import Iterator, Sequence
from typing import Any

from jax.extend.core import jaxprs_in_params  # pyright: ignore[reportPrivateImportUsage]
from jax.extend.core.primitives import custom_jvp_call_p, custom_vjp_call_p

from mx_jax.convert.regions import closed, regions
from mx_jax.convert.rules import Decision, Layer, Rule, decide
from mx_jax.convert.traced_products import TracedProduct, traced_products
from mx_jax.recipes import Recipe

# What JAX writes around the names of what it has transformed, and what of it rules see.
_TRANSFORMED = re.compile(r"\b(vmap|jvp|transpose)\(([^()]*)\)")
_GRADIENTS = {"jvp", "transpose"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Product:
    """A product of a jaxpr.

    Attributes:
      scope: names of the `jax.named_scope`s around it, joined by `/`.
      row: how its primitive is judged and made anew.
      facts: fields of `Layer`.
      turned: whether the left operand is the kernel.
      where: index of its equation, below the indices of those around it.
    """

    scope: str
    row: TracedProduct
    facts: dict[str, Any]
    turned: bool
    where: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Plan:
    """What becomes of a jaxpr; hashable, so that equal calls share what is made of them.

    Attributes:
      products: index of an equation -> recipe of its product, and whether its operands turn.
      bodies: index of an equation -> plans for the jaxprs that it runs.
    """

    products: tuple[tuple[int, tuple[Recipe, bool]], ...]
    bodies: tuple[tuple[int, tuple["Plan", ...]], ...]

    def __bool__(self) -> bool:
        return bool(self.products or self.bodies)

    @property
    def recipes(self) -> Iterator[Recipe]:
        """The recipes of all products."""
        yield from (recipe for _, (recipe, _) in self.products)
        for _, plans in self.bodies:
            for plan in plans:
                yield from plan.recipes

    @property
    def draws(self) -> bool:
        """Whether a product draws random bits."""
        return any(recipe.is_stochastic for recipe in self.recipes)


def decided(
    program: Any, data: Sequence[bool], rules: tuple[Rule, ...]
) -> tuple[Plan, tuple[Decision, ...]]:
    """The plan for a jaxpr, and the decision about each of its products.

    Args:
      program: the jaxpr, with its constants.
      data: whether each operand is data; what data go into is no kernel.
      rules: the first that matches decides.
    """
    found = list(_products(program, data, "", (), None))
    counts = collections.Counter(product.scope for product in found)
    seen: collections.Counter[str] = collections.Counter()
    decisions = []
    for product in found:
        scope, name = product.scope, _name(product.row.type)
        numbered = f"{scope}/{name}_{seen[scope]}".lstrip("/")
        seen[scope] += 1
        path, *aliases = (scope, numbered) if counts[scope] == 1 else (numbered, scope)
        outer, _, last = scope.rpartition("/")
        if "->" in last:
            # jnp.einsum names a scope after its subscripts.
            aliases.append(outer)
        layer = Layer(path=path, aliases=tuple(aliases), type=product.row.type, **product.facts)
        decisions.append(decide(rules, layer))
    made = {
        product.where: (decision.recipe, product.turned)
        for product, decision in zip(found, decisions, strict=True)
        if decision.recipe is not None
    }
    return _plan(program, made, ()), tuple(decisions)


def _name(kind: type) -> str:
    """As lax calls it: DotGeneral is dot_general."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", kind.__name__).lower()


def _plan(program: Any, made: dict[tuple[int, ...], Any], where: tuple[int, ...]) -> Plan:
    products, bodies = [], []
    for index, eqn in enumerate(program.jaxpr.eqns):
        here = (*where, index)
        if here in made:
            products.append((index, made[here]))
        elif eqn.primitive in regions():
            inner = regions()[eqn.primitive].bodies(eqn.params)
            plans = tuple(_plan(body, made, (*here, i)) for i, body in enumerate(inner))
            if any(plans):
                bodies.append((index, plans))
    return Plan(tuple(products), tuple(bodies))


def _products(
    program: Any,
    data: Sequence[bool],
    scope: str,
    where: tuple[int, ...],
    obstacle: str | None,
) -> Iterator[Product]:
    """All products in order, those of inner jaxprs too."""
    origins = _Origins(program, data)
    for index, eqn in enumerate(program.jaxpr.eqns):
        operands, here = origins.of(eqn), (*where, index)
        inside, kept = _scope(scope, eqn)
        kept = obstacle or kept
        if eqn.primitive in traced_products():
            yield _product(eqn, operands, inside, here, kept)
            origins.add(eqn, [any(operands)])
        elif eqn.primitive in regions():
            region = regions()[eqn.primitive]
            flags, results = region.flow(eqn.params, operands, flow)
            for i, (body, own) in enumerate(zip(region.bodies(eqn.params), flags, strict=True)):
                yield from _products(body, own, inside, (*here, i), kept)
            origins.add(eqn, results)
        else:
            for i, body in enumerate(jaxprs_in_params(eqn.params)):
                kept = kept or _closed_to_rules(eqn.primitive)
                own = [True] * len(body.invars)
                yield from _products(closed(body), own, inside, (*here, i), kept)
            origins.add(eqn, [any(operands)] * len(eqn.outvars))


def _closed_to_rules(primitive: Any) -> str:
    if primitive in (custom_vjp_call_p, custom_jvp_call_p):
        kind = "custom_vjp" if primitive is custom_vjp_call_p else "custom_jvp"
        return f"inside a {kind}, whose gradient is its own"
    return f"inside {primitive.name}, whose body stays as it is"


def _scope(outer: str, eqn: Any) -> tuple[str, str | None]:
    """The path of an equation, and why products there are not converted, or None."""
    name, transforms = str(eqn.source_info.name_stack), set[str]()
    while found := _TRANSFORMED.search(name):
        transforms.add(found[1])
        name = name[: found.start()] + found[2] + name[found.end() :]
    kept = None
    if transforms & _GRADIENTS:
        kept = "of a gradient taken inside: convert what is differentiated, then differentiate"
    return "/".join(part for part in (outer, name) if part), kept


def _product(
    eqn: Any, data: list[bool], scope: str, where: tuple[int, ...], obstacle: str | None
) -> Product:
    row = traced_products()[eqn.primitive]
    operands, params = [atom.aval for atom in eqn.invars], eqn.params
    turns = data == [False, True] and row.turned is not None
    if row.turned is not None and turns:
        left, right, params, _ = row.turned(*operands, params)
        operands = [left, right]
    facts = row.facts(*operands, params) | {"input": tuple(operands[0].shape)}
    facts["obstacle"] = obstacle or facts["obstacle"]
    return Product(scope=scope, row=row, facts=facts, turned=turns, where=where)


class _Origins:
    """Which values of a jaxpr data go into."""

    def __init__(self, program: Any, data: Sequence[bool]):
        jaxpr = program.jaxpr
        self._data = dict(zip(jaxpr.invars, data, strict=True))

    def of(self, eqn: Any) -> list[bool]:
        """Of an equation's operands: literals and constants are no data."""
        return self.among(eqn.invars)

    def among(self, atoms: Sequence[Any]) -> list[bool]:
        return [not hasattr(atom, "val") and self._data.get(atom, False) for atom in atoms]

    def add(self, eqn: Any, results: Sequence[bool]) -> None:
        self._data |= zip(eqn.outvars, results, strict=True)


def flow(program: Any, data: Sequence[bool]) -> list[bool]:
    """Which results of a jaxpr data go into.

    Args:
      program: the jaxpr.
      data: whether each operand is data.
    """
    origins = _Origins(program, data)
    for eqn in program.jaxpr.eqns:
        operands = origins.of(eqn)
        if eqn.primitive in regions():
            results = regions()[eqn.primitive].flow(eqn.params, operands, flow)[1]
        else:
            results = [any(operands)] * len(eqn.outvars)
        origins.add(eqn, results)
    return origins.among(program.jaxpr.outvars)
