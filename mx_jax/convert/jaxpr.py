"""Products of a jaxpr made anew: what rules say of each, and how one is computed by its recipe."""

import collections
import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend.core import (
    ClosedJaxpr,  # pyright: ignore[reportPrivateImportUsage]
    JaxprEqn,
)

from mx_jax.codecs.explicit_axes import varying
from mx_jax.convert.kinds import traced_products
from mx_jax.convert.rules import Decision, Layer, Rule, decide
from mx_jax.jaxpr.names import LayerName
from mx_jax.jaxpr.read import Site, name_of, walk
from mx_jax.jaxpr.regions import Values, regions
from mx_jax.jaxpr.rewrite import Plan, Read
from mx_jax.ops.arguments import Key
from mx_jax.recipes import Recipe
from mx_jax.reference.random_bits import DerivedKey

# From the recipe to what multiplies as `jax.lax.dot_general`, with `key`.
DotGeneral = Callable[[Recipe], Callable[..., jax.Array]]

# The scope of a module's call, by its path; of products that are decided already, with a "=".
_MARK = re.compile(r"\[([^][]*)\]")
# What JAX writes around the names of what it has transformed, and what of it rules see.
_TRANSFORMED = re.compile(r"\b(vmap|jvp|transpose)\(([^()]*)\)")
_GRADIENTS = {"jvp", "transpose"}
_OF_A_GRADIENT = "of a gradient taken inside: convert what is differentiated, then differentiate"


# The rules of the model whose call is being traced, or None. In jit's key: such a trace has marks.
tracing: Any = jax.make_user_context(default_value=None)


def in_module(path: str) -> contextlib.AbstractContextManager[Any]:
    """A scope whose products are a module's, by its path, in a call that is traced for rules."""
    return jax.named_scope(f"[{path}]")


def decided(path: str = "") -> contextlib.AbstractContextManager[Any]:
    """A scope whose products no rule is asked about once more."""
    return contextlib.nullcontext() if tracing.value is None else in_module(f"{path}=")


# Plans ------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Module:
    """What rules know of a module whose call is traced: its class, and fields of `Layer`."""

    type: type
    aliases: tuple[str, ...] = ()
    named_only: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Product:
    """A product of a jaxpr: its scopes joined by `/`, and where it is, as in a `Plan`."""

    scope: str
    type: type
    facts: dict[str, Any]
    # Whether the left operand is the kernel.
    turned: bool
    where: tuple[int, ...]


def planned(
    program: ClosedJaxpr,
    data: Sequence[bool],
    rules: tuple[Rule, ...],
    modules: Mapping[str, Module] | None = None,
) -> tuple[Plan, tuple[Decision, ...]]:
    """The plan for a jaxpr, and the decision about each of its products: of an entry the recipe,
    and whether the operands change places."""
    # What goes into data, of which each operand has a flag, is no kernel. By module, and the scopes
    # in it; without modules, which a model has, by all scopes.
    found: list[tuple[_Product, tuple[str, str]]] = []
    for product in map(_product, walk(program, data)):
        if product is None:
            continue
        marks = list(_MARK.finditer(product.scope))
        if marks and marks[-1][1].endswith("="):
            continue
        if modules is None or not marks:
            module, rest = "", _MARK.sub("", product.scope)
        else:
            module, rest = marks[-1][1], product.scope[marks[-1].end() :]
        found.append((product, (module, "/".join(filter(None, rest.split("/"))))))
    counts = collections.Counter(key for _, key in found)
    of_module = collections.Counter(module for _, (module, _) in found)
    seen: collections.Counter[tuple[str, str]] = collections.Counter()
    plan, decisions = [], []
    for product, key in found:
        module, scope = key
        # As lax calls it: DotGeneral is dot_general.
        name = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", product.type.__name__).lower()
        names = [scope, f"{scope}/{name}_{seen[key]}"]
        seen[key] += 1
        outer, _, last = scope.rpartition("/")
        # A module's path is that of all its products, if it has several.
        alone = bool(scope) or modules is None or of_module[module] == 1
        names = names[:1] if alone and counts[key] == 1 else names[::-1]
        if "->" in last:
            # jnp.einsum names a scope after its subscripts.
            names.append(outer)
        if modules is not None and of_module[module] == 1:
            names.insert(0, "")
        known = (modules or {}).get(module, Module(product.type))
        path, *aliases = (
            "/".join(part for part in (base, own.lstrip("/")) if part)
            for base in (module, *known.aliases)
            for own in names
        )
        facts: dict[str, Any] = product.facts | {"type": known.type, "product": product.type}
        # Where nobody says which arguments are weights, any may be.
        facts["of_activations"] = product.facts["of_activations"] and not all(data)
        if known.named_only:
            facts |= {"named_only": True, "product": None}
        decisions.append(decide(rules, Layer(path=path, aliases=tuple(aliases), **facts)))
        if (recipe := decisions[-1].recipe) is not None:
            plan.append((product.where, (recipe, product.turned)))
    return tuple(plan), tuple(decisions)


def recipes_of(plan: Plan) -> list[Recipe]:
    """The recipes of a plan's products."""
    return [recipe for _, (recipe, _) in plan]


def _product(site: Site) -> _Product | None:
    """The product that an equation is, with what keeps rules from it, or None."""
    row, params = traced_products().get(site.eqn.primitive), site.eqn.params
    if row is None:
        return None
    scope, obstacle = site.scope, _obstacle(site)
    while match := _TRANSFORMED.search(scope):
        obstacle = obstacle or (_OF_A_GRADIENT if match[1] in _GRADIENTS else None)
        scope = scope[: match.start()] + match[2] + scope[match.end() :]
    operands: list[Any] = [atom.aval for atom in site.eqn.invars]
    turns = site.marked == (False, True) and row.turned is not None
    if row.turned is not None and turns:
        left, right, params, _ = row.turned(*operands, params)
        operands = [left, right]
    facts = row.facts(*operands, params) | {"input": tuple(operands[0].shape)}
    facts |= {"obstacle": obstacle or facts["obstacle"], "of_activations": all(site.marked[:2])}
    return _Product(scope=scope, type=row.type, facts=facts, turned=turns, where=site.where)


def _obstacle(site: Site) -> str | None:
    """What around an equation stays as it is."""
    for eqn in site.around:
        region = regions().get(eqn.primitive)
        if region is None:
            return f"inside {eqn.primitive.name}, whose body stays as it is"
        if region.derivative is not None:
            return f"inside a {region.derivative}, whose gradient is its own"
    return None


# Running ----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class ByRecipe:
    """The rule by which products of a plan are computed; its state is a key, None for none."""

    # Every equation that draws has a key of its own, folded with its index, in loops with that of
    # the iteration too.

    # What products of each recipe are made by.
    dot_general: DotGeneral = lambda recipe: recipe.dot_general
    # Whether the scope of a product is a part of its name.
    named: bool = True

    def below(self, state: Key, number: int) -> Key:
        # By equations, not by products: what rules change does not change others' keys.
        return folded(state, number)

    def entering(self, plan: Plan, state: Key) -> Key:
        return state if any(recipe.is_stochastic for recipe in recipes_of(plan)) else None

    def counts(self, state: Key) -> bool:
        return state is not None

    def iteration(self, state: Key, index: jax.Array | None) -> Key:
        return folded(state, index)

    def shared(self, state: Key) -> Key:
        # As an array: to the jaxpr that equal calls share what derives a key would belong.
        return None if state is None else DerivedKey.of(DerivedKey.of(state).get())

    def body(self, state: Key) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def context(self, eqn: JaxprEqn) -> Iterator[None]:
        # The scope that it stood in, for profiles, for what XLA says, and for captures.
        *outer, scope = _MARK.split(name_of(eqn))
        with contextlib.ExitStack() as stack:
            if outer:
                stack.enter_context(LayerName(outer[-1] or "model").context())
            if self.named and (scope := scope.strip("/")):
                stack.enter_context(jax.named_scope(scope))
            yield

    def compute(self, eqn: JaxprEqn, read: Read, entry: tuple[Recipe, bool], state: Key) -> Values:
        (recipe, turns), operands = entry, list(map(read, eqn.invars))
        row, params = traced_products()[eqn.primitive], eqn.params
        back = None
        if turns:
            assert row.turned is not None
            *operands, params, back = row.turned(*operands, params)
        own = state if recipe.is_stochastic else None
        # Below shard_map, shards that hold different operands draw different bits.
        axes = frozenset[str]().union(*map(varying, operands)) if own is not None else ()
        for axis in sorted(axes):
            own = folded(own, lax.axis_index(axis))
        product = row.multiply(recipe, self.dot_general(recipe), operands, params, own)
        return [product if back is None else back(product)]


def folded(key: Key, number: int | jax.Array | None) -> Key:
    """A key of its own for a number; None stays None."""
    return None if key is None or number is None else DerivedKey.of(key).fold_in(number)
