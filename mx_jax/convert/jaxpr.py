"""A jaxpr run with some of its products made anew: what rules say of each, and the regions.

A region is an equation that runs jaxprs: scan, while, cond, jit, remat, shard_map; one row each.
A jaxpr is public (`jax.extend.core`), the parameters of a primitive are not. Those read here are
the same in JAX 0.10 and 0.12, but scan's counts of operands: `_scan_counts` knows both.
"""

import collections
import contextlib
import dataclasses
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer
from jax.extend.core import (
    ClosedJaxpr,  # pyright: ignore[reportPrivateImportUsage]
    DropVar,
    Jaxpr,
    JaxprEqn,
    Literal,
    jaxpr_as_fun,
    jaxprs_in_params,
)
from jax.extend.core.primitives import (
    cond_p,
    custom_jvp_call_p,
    custom_vjp_call_p,
    jit_p,
    remat_p,
    scan_p,
    while_p,
)
from jax.sharding import AbstractMesh, PartitionSpec

from mx_jax.codecs.explicit_axes import varying
from mx_jax.convert.kinds import traced_products
from mx_jax.convert.rules import Decision, Layer, Rule, decide
from mx_jax.ops.arguments import Key
from mx_jax.ops.tags import LayerName, iteration, place, tag, watching
from mx_jax.recipes import Recipe
from mx_jax.reference.random_bits import DerivedKey

Values = list[Any]
# Which results of an equation's body, by its number, come from data, by which of its operands do.
Flow = Callable[[int, Sequence[bool]], list[bool]]
# From the recipe to what multiplies as `jax.lax.dot_general`, with `key`.
DotGeneral = Callable[[Recipe], Callable[..., jax.Array]]
# What becomes of a jaxpr: index of a product's equation, below the indices of those around it and
# of their bodies -> its recipe, and whether its operands change places. Hashable, so that equal
# calls share what is made of them.
Plan = tuple[tuple[tuple[int, ...], tuple[Recipe, bool]], ...]

# The scope of a module's call, by its path; of products that are decided already, with a "=".
_MARK = re.compile(r"\[([^][]*)\]")
# What JAX writes around the names of what it has transformed, and what of it rules see.
_TRANSFORMED = re.compile(r"\b(vmap|jvp|transpose)\(([^()]*)\)")
_GRADIENTS = {"jvp", "transpose"}
_OF_A_GRADIENT = "of a gradient taken inside: convert what is differentiated, then differentiate"
_DERIVATIVES = {custom_vjp_call_p: "custom_vjp", custom_jvp_call_p: "custom_jvp"}


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
    """The plan for a jaxpr, and the decision about each of its products."""
    # What goes into data, of which each operand has a flag, is no kernel. By module, and the scopes
    # in it; without modules, which a model has, by all scopes.
    found: list[tuple[_Product, tuple[str, str]]] = []
    for product in _walk(program, data)[1]:
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


def _below(plan: Plan, index: int) -> Plan:
    """What a plan says of one body, or of the bodies of one equation."""
    return tuple((where[1:], entry) for where, entry in plan if where[0] == index)


def _walk(
    program: ClosedJaxpr,
    data: Sequence[bool],
    scope: str = "",
    where: tuple[int, ...] = (),
    obstacle: str | None = None,
) -> tuple[list[bool], list[_Product]]:
    """Which results are data, and all products in order, those of inner jaxprs too."""
    known: dict[Any, bool] = dict(zip(program.jaxpr.invars, data, strict=True))
    found: list[_Product] = []

    def among(atoms: Sequence[Any]) -> list[bool]:
        return [not isinstance(atom, Literal) and known.get(atom, False) for atom in atoms]

    for index, eqn in enumerate(program.jaxpr.eqns):
        name, kept = str(eqn.source_info.name_stack), obstacle
        while match := _TRANSFORMED.search(name):
            kept = kept or (_OF_A_GRADIENT if match[1] in _GRADIENTS else None)
            name = name[: match.start()] + match[2] + name[match.end() :]
        inner, own = "/".join(filter(None, (scope, name))), among(eqn.invars)
        results, at = [any(own)] * len(eqn.outvars), (*where, index)
        if eqn.primitive in traced_products():
            found.append(_product(eqn, own, inner, at, kept))
        else:
            results, products = _walk_bodies(eqn, own, inner, at, kept)
            found += products
        known |= zip(eqn.outvars, results, strict=True)
    return among(program.jaxpr.outvars), found


def _walk_bodies(
    eqn: JaxprEqn, data: list[bool], scope: str, where: tuple[int, ...], obstacle: str | None
) -> tuple[list[bool], list[_Product]]:
    """The same of an equation that is no product, whose bodies may have some."""
    # Of each body as it was met last: loops are gone round until nothing changes.
    below: dict[int, list[_Product]] = {}
    region = regions().get(eqn.primitive)
    if region is not None:
        bodies = region.bodies(eqn.params)
    else:
        bodies = tuple(map(closed, jaxprs_in_params(eqn.params)))
        stays = f"inside {eqn.primitive.name}, whose body stays as it is"
        if eqn.primitive in _DERIVATIVES:
            stays = f"inside a {_DERIVATIVES[eqn.primitive]}, whose gradient is its own"
        obstacle = obstacle or stays

    def flow(i: int, data: Sequence[bool]) -> list[bool]:
        results, below[i] = _walk(bodies[i], data, scope, (*where, i), obstacle)
        return results

    if region is not None:
        results = region.flow(eqn.params, data, flow)
    else:
        results = [any(data)] * len(eqn.outvars)
        for i, body in enumerate(bodies):
            flow(i, [True] * len(body.jaxpr.invars))
    return results, [product for i in sorted(below) for product in below[i]]


def _product(
    eqn: JaxprEqn, data: list[bool], scope: str, where: tuple[int, ...], obstacle: str | None
) -> _Product:
    row = traced_products()[eqn.primitive]
    operands: list[Any] = [atom.aval for atom in eqn.invars]
    params = eqn.params
    turns = data == [False, True] and row.turned is not None
    if row.turned is not None and turns:
        left, right, params, _ = row.turned(*operands, params)
        operands = [left, right]
    facts = row.facts(*operands, params) | {"input": tuple(operands[0].shape)}
    facts |= {"obstacle": obstacle or facts["obstacle"], "of_activations": all(data[:2])}
    return _Product(scope=scope, type=row.type, facts=facts, turned=turns, where=where)


# Running ----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class PlannedBody:
    """A jaxpr as a function of its operands that follows a plan."""

    # Every equation that draws has a key of its own, folded with its index, in loops with that of
    # the iteration too.

    program: ClosedJaxpr
    plan: Plan
    # What products of each recipe are made by.
    dot_general: DotGeneral = lambda recipe: recipe.dot_general
    # Whether the scope of a product is a part of its name for captures.
    tagged: bool = True
    # What was traced in this run, so that equal calls stay one function.
    traced_before: dict[Any, Any] = dataclasses.field(default_factory=dict)

    def __call__(self, values: Sequence[Any], key: Key) -> Values:
        """The results; the key is None where no product draws."""
        jaxpr = self.program.jaxpr
        known: dict[Any, Any] = dict(zip(jaxpr.constvars, self.program.consts, strict=True))
        known |= zip(jaxpr.invars, values, strict=True)

        def read(atoms: Sequence[Any]) -> Values:
            return [atom.val if isinstance(atom, Literal) else known[atom] for atom in atoms]

        changed, unchanged = {where[0] for where, _ in self.plan}, []
        for index, eqn in enumerate(jaxpr.eqns):
            if index not in changed:
                unchanged.append(eqn)
                continue
            _run_unchanged(jaxpr, unchanged, known)
            operands, plan, unchanged = read(eqn.invars), _below(self.plan, index), []
            # By equations, not by products: what rules change does not change others' keys.
            own = folded(key, index)
            marks = _MARK.findall(str(eqn.source_info.name_stack))
            layer = LayerName(marks[-1] or "model").context() if marks else contextlib.nullcontext()
            with eqn.ctx.manager, layer:
                region = regions().get(eqn.primitive)
                if region is None:
                    ((_, entry),) = plan
                    results = [self._product(eqn, operands, *entry, own)]
                else:
                    bodies = [
                        dataclasses.replace(self, program=body, plan=_below(plan, i))
                        for i, body in enumerate(region.bodies(eqn.params))
                    ]
                    draws = any(recipe.is_stochastic for recipe in recipes_of(plan))
                    results = region.run(eqn.params, operands, bodies, own if draws else None)
            known |= zip(eqn.outvars, results, strict=True)
        _run_unchanged(jaxpr, unchanged, known)
        return read(jaxpr.outvars)

    def traced(self, values: Sequence[Any], key: Key) -> ClosedJaxpr:
        """The jaxpr of the results; the same for each call of the same under the same plan."""
        keyed = jax.tree.structure(key)
        called = id(self.program), self.plan, keyed, watching.value and place.value
        if called not in self.traced_before:
            self.traced_before[called] = jax.make_jaxpr(self)(values, key)
        return self.traced_before[called]

    def _product(
        self, eqn: JaxprEqn, operands: Values, recipe: Recipe, turns: bool, key: Key
    ) -> Any:
        row, params = traced_products()[eqn.primitive], eqn.params
        back = None
        if turns:
            assert row.turned is not None
            *operands, params, back = row.turned(*operands, params)
        own = key if recipe.is_stochastic else None
        # Below shard_map, shards that hold different operands draw different bits.
        axes = frozenset[str]().union(*map(varying, operands)) if own is not None else ()
        for axis in sorted(axes):
            own = folded(own, lax.axis_index(axis))
        # The scope that it stood in, for profiles and for what XLA says, and for who watches.
        scope = "" if not self.tagged else _MARK.split(str(eqn.source_info.name_stack))[-1]
        with tag(scope.strip("/")) if scope.strip("/") else contextlib.nullcontext():
            product = row.multiply(recipe, self.dot_general(recipe), operands, params, own)
            return product if back is None else back(product)


def _run_unchanged(jaxpr: Jaxpr, eqns: list[Any], known: dict[Any, Any]) -> None:
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


# Regions ----------------------------------------------------------------------------------------


def closed(jaxpr: Jaxpr | ClosedJaxpr) -> ClosedJaxpr:
    """A jaxpr with its constants: some equations hold one without."""
    return jaxpr if isinstance(jaxpr, ClosedJaxpr) else ClosedJaxpr(jaxpr, ())


@dataclasses.dataclass(frozen=True)
class Region:
    """How equations of one primitive run their bodies."""

    run: Callable[[dict[str, Any], Values, Sequence[PlannedBody], Key], Values]
    # From parameters, which operands come from data, and the flow through a body, to which results.
    flow: Callable[[dict[str, Any], list[bool], Flow], list[bool]] = lambda _, data, flow: flow(
        0, data
    )
    # From the parameters to the jaxprs.
    bodies: Callable[[dict[str, Any]], tuple[Any, ...]] = lambda own: (closed(own["jaxpr"]),)


def folded(key: Key, number: int | jax.Array) -> Key:
    """A key of its own for a number; None stays None."""
    return None if key is None else DerivedKey.of(key).fold_in(number)


def _settled(
    flow: Callable[[Sequence[bool]], list[bool]], data: list[bool], carry: slice
) -> tuple[list[bool], list[bool]]:
    """What of a loop's carry is data once all has gone round; its results in that round."""
    data = list(data)
    while True:
        results = flow(data)
        after = [before or result for before, result in zip(data[carry], results, strict=False)]
        if after == data[carry]:
            return after, results
        data[carry] = after


def _scan_counts(params: dict[str, Any]) -> tuple[int, int]:
    if "ft_in" in params:
        consts, carry, _ = params["ft_in"].unpack()
        return len(consts), len(carry)
    return params["num_consts"], params["num_carry"]


def _scan_flow(params: dict[str, Any], data: list[bool], flow: Flow) -> list[bool]:
    num_consts, num_carry = _scan_counts(params)
    carry = slice(num_consts, num_consts + num_carry)
    return _settled(functools.partial(flow, 0), data, carry)[1]


def _scan(
    params: dict[str, Any], values: Values, bodies: Sequence[PlannedBody], key: Key
) -> Values:
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


def _while_split(params: dict[str, Any], values: list[Any]) -> tuple[Any, Any, Any]:
    """Constants of the condition, those of the body, and what goes round."""
    first = params["cond_nconsts"]
    second = first + params["body_nconsts"]
    return values[:first], values[first:second], values[second:]


def _while_flow(params: dict[str, Any], data: list[bool], flow: Flow) -> list[bool]:
    asked, consts, start = _while_split(params, data)
    carry = slice(len(consts), None)
    settled, _ = _settled(functools.partial(flow, 1), [*consts, *start], carry)
    flow(0, [*asked, *settled])
    return settled


def _while(
    params: dict[str, Any], values: Values, bodies: Sequence[PlannedBody], key: Key
) -> Values:
    asked, consts, start = _while_split(params, values)
    condition, body = bodies

    def goes_on(state: tuple[Any, Values]) -> Any:
        i, carry = state
        return condition([*asked, *carry], folded(folded(key, i), 0))[0]

    def step(state: tuple[Any, Values]) -> tuple[Any, Values]:
        i, carry = state
        own = folded(folded(key, i), 1)
        return None if i is None else i + 1, body([*consts, *carry], own)

    first = None if key is None else jnp.uint32(0)
    return lax.while_loop(goes_on, step, (first, start))[1]


def _cond_flow(params: dict[str, Any], data: list[bool], flow: Flow) -> list[bool]:
    results = (flow(i, data[1:]) for i, _ in enumerate(params["branches"]))
    return [any(own) for own in zip(*results, strict=True)]


def _cond(
    params: dict[str, Any], values: Values, bodies: Sequence[PlannedBody], key: Key
) -> Values:
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


def _jit(params: dict[str, Any], values: Values, bodies: Sequence[PlannedBody], key: Key) -> Values:
    """The same call of another jaxpr: name, shardings and donations stay."""
    params = dict(params)
    if key is not None:
        # As an array: equal calls share a jaxpr, to which what derives a key would belong.
        key = DerivedKey.of(DerivedKey.of(key).get())
    made = bodies[0].traced(values, key)
    if any(isinstance(const, Tracer) for const in made.consts):
        # A capture in a scan names the layer by the scan's index, which no jaxpr of its own has.
        return bodies[0](values, key)
    params["jaxpr"] = made
    if key is not None:
        values = [*values, *jax.tree.leaves(key)]
        for name, plain in _plain_operand().items():
            params[name] = (*params[name], plain)
    return jit_p.bind(*values, **params)


@functools.cache
def _plain_operand() -> dict[str, Any]:
    """What a jit says of an operand that nobody said anything of."""
    (call,) = jax.make_jaxpr(jax.jit(lambda x: x))(jax.ShapeDtypeStruct((), jnp.float32)).eqns
    names = ("in_shardings", "in_layouts", "donated_invars")
    return {name: call.params[name][0] for name in names}


def _remat(own: dict[str, Any], values: Values, bodies: Sequence[PlannedBody], key: Key) -> Values:
    remat = jax.checkpoint(bodies[0], prevent_cse=own["prevent_cse"], policy=own["policy"])
    return remat(values, key)


def _shard_map(
    params: dict[str, Any], values: Values, bodies: Sequence[PlannedBody], key: Key
) -> Values:
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
    # `jax.extend` does not give what `jax.shard_map` traces to.
    mesh, spec = AbstractMesh((1,), ("x",)), PartitionSpec()
    identity = jax.shard_map(lambda x: x, mesh=mesh, in_specs=spec, out_specs=spec)
    # Whatever mesh the caller has set.
    with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
        (call,) = jax.make_jaxpr(identity)(jax.ShapeDtypeStruct((), jnp.float32)).eqns
    return {
        jit_p: Region(_jit),
        remat_p: Region(_remat),
        scan_p: Region(_scan, _scan_flow),
        while_p: Region(_while, _while_flow, lambda own: (own["cond_jaxpr"], own["body_jaxpr"])),
        cond_p: Region(_cond, _cond_flow, lambda own: own["branches"]),
        call.primitive: Region(_shard_map),
    }
