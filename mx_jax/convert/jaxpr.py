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
    # What goes into data, of which each operand has a flag, is no kernel. Without modules, which a
    # model has, paths are scopes alone.
    found = []
    for product in _walk(program, data)[1]:
        marks = _MARK.findall(product.scope)
        if not marks or not marks[-1].endswith("="):
            found.append(product)
    scopes = [_scopes(own.scope, modules) for own in found]
    counts, of_module = collections.Counter(scopes), collections.Counter(own for own, _ in scopes)
    seen: collections.Counter[tuple[str, str]] = collections.Counter()
    decisions = []
    for product, key in zip(found, scopes, strict=True):
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
    plan = tuple(
        (product.where, (decision.recipe, product.turned))
        for product, decision in zip(found, decisions, strict=True)
        if decision.recipe is not None
    )
    return plan, tuple(decisions)


def _scopes(scope: str, modules: Mapping[str, Module] | None) -> tuple[str, str]:
    """The path of the innermost module, and the scopes in it; of a function, all of them."""
    marks = [] if modules is None else list(_MARK.finditer(scope))
    rest = scope[marks[-1].end() :] if marks else _MARK.sub("", scope)
    return marks[-1][1] if marks else "", "/".join(part for part in rest.split("/") if part)


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
        results, products = _met(eqn, among(eqn.invars), scope, (*where, index), obstacle)
        known |= zip(eqn.outvars, results, strict=True)
        found += products
    return among(program.jaxpr.outvars), found


def _met(
    eqn: JaxprEqn, data: list[bool], scope: str, where: tuple[int, ...], obstacle: str | None
) -> tuple[list[bool], list[_Product]]:
    """Of one equation: itself, or what is in its bodies."""
    scope, kept = _scope(scope, eqn)
    obstacle, results = obstacle or kept, [any(data)] * len(eqn.outvars)
    if eqn.primitive in traced_products():
        return results, [_product(eqn, data, scope, where, obstacle)]
    region = regions().get(eqn.primitive)
    if region is not None:
        bodies = region.bodies(eqn.params)
    else:
        bodies = tuple(map(closed, jaxprs_in_params(eqn.params)))
        stays = f"inside {eqn.primitive.name}, whose body stays as it is"
        if eqn.primitive in _DERIVATIVES:
            stays = f"inside a {_DERIVATIVES[eqn.primitive]}, whose gradient is its own"
        obstacle = obstacle or stays
    # Of each body as it was met last: loops are gone round until nothing changes.
    below: dict[int, list[_Product]] = {}

    def flow(i: int, data: Sequence[bool]) -> list[bool]:
        results, below[i] = _walk(bodies[i], data, scope, (*where, i), obstacle)
        return results

    if region is not None:
        results = region.flow(eqn.params, data, flow)
    else:
        for i, body in enumerate(bodies):
            flow(i, [True] * len(body.jaxpr.invars))
    return results, [product for i in sorted(below) for product in below[i]]


def _scope(outer: str, eqn: JaxprEqn) -> tuple[str, str | None]:
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
        changed, unchanged = {where[0] for where, _ in self.plan}, []
        for index, eqn in enumerate(jaxpr.eqns):
            if index not in changed:
                unchanged.append(eqn)
                continue
            _run_unchanged(jaxpr, unchanged, known)
            unchanged = []
            operands = [_read(atom, known) for atom in eqn.invars]
            # By equations, not by products: what rules change does not change others' keys.
            own = folded(key, index)
            with eqn.ctx.manager, _in_layer(eqn):
                if eqn.primitive in regions():
                    results = self._region(eqn, operands, _below(self.plan, index), own)
                else:
                    ((_, entry),) = _below(self.plan, index)
                    results = [self._product(eqn, operands, *entry, own)]
            known |= zip(eqn.outvars, results, strict=True)
        _run_unchanged(jaxpr, unchanged, known)
        return [_read(atom, known) for atom in jaxpr.outvars]

    def traced(self, values: Sequence[Any], key: Key) -> ClosedJaxpr:
        """The jaxpr of the results; the same for each call of the same under the same plan."""
        keyed = jax.tree.structure(key)
        called = id(self.program), self.plan, keyed, watching.value and place.value
        if called not in self.traced_before:
            self.traced_before[called] = jax.make_jaxpr(self)(values, key)
        return self.traced_before[called]

    def _region(self, eqn: JaxprEqn, operands: Values, plan: Plan, key: Key) -> Values:
        region = regions()[eqn.primitive]
        bodies = [
            dataclasses.replace(self, program=body, plan=_below(plan, i))
            for i, body in enumerate(region.bodies(eqn.params))
        ]
        draws = any(recipe.is_stochastic for recipe in recipes_of(plan))
        return region.run(eqn.params, operands, bodies, key if draws else None)

    def _product(
        self, eqn: JaxprEqn, operands: Values, recipe: Recipe, turns: bool, key: Key
    ) -> Any:
        row, params = traced_products()[eqn.primitive], eqn.params
        back = None
        if turns:
            assert row.turned is not None
            *operands, params, back = row.turned(*operands, params)
        # The scope that it stood in, for profiles and for what XLA says, and for who watches.
        scope = "" if not self.tagged else _MARK.split(str(eqn.source_info.name_stack))[-1]
        with tag(scope.strip("/")) if scope.strip("/") else contextlib.nullcontext():
            own = _of_shard(key, operands) if recipe.is_stochastic else None
            product = row.multiply(recipe, self.dot_general(recipe), operands, params, own)
            return product if back is None else back(product)


def _in_layer(eqn: JaxprEqn) -> contextlib.AbstractContextManager[None]:
    marks = _MARK.findall(str(eqn.source_info.name_stack))
    return LayerName(marks[-1] or "model").context() if marks else contextlib.nullcontext()


def _read(atom: object, known: dict[Any, Any]) -> Any:
    return atom.val if isinstance(atom, Literal) else known[atom]


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


def _of_shard(key: Key, operands: Values) -> Key:
    """Below shard_map, shards that hold different operands draw different bits."""
    for axis in sorted(frozenset[str]().union(*map(varying, operands))):
        key = folded(key, lax.axis_index(axis))
    return key


# Regions ----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Region:
    """How equations of one primitive run their bodies."""

    # From the parameters to the jaxprs.
    bodies: Callable[[dict[str, Any]], tuple[Any, ...]]
    # From parameters, which operands come from data, and the flow through a body, to which results.
    flow: Callable[[dict[str, Any], list[bool], Flow], list[bool]]
    run: Callable[[dict[str, Any], Values, Sequence[PlannedBody], Key], Values]


def closed(jaxpr: Jaxpr | ClosedJaxpr) -> ClosedJaxpr:
    """A jaxpr with its constants: some equations hold one without."""
    return jaxpr if hasattr(jaxpr, "consts") else ClosedJaxpr(jaxpr, ())


def folded(key: Key, number: int | jax.Array) -> Key:
    """A key of its own for a number; None stays None."""
    return None if key is None else DerivedKey.of(key).fold_in(number)


def _only_body(params: dict[str, Any]) -> tuple[Any, ...]:
    return (closed(params["jaxpr"]),)


def _straight(params: dict[str, Any], data: list[bool], flow: Flow) -> list[bool]:
    return flow(0, data)


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
    params["jaxpr"] = bodies[0].traced(values, key)
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


def _remat(
    params: dict[str, Any], values: Values, bodies: Sequence[PlannedBody], key: Key
) -> Values:
    prevent, policy = params["prevent_cse"], params["policy"]
    return jax.checkpoint(bodies[0], prevent_cse=prevent, policy=policy)(values, key)


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
        jit_p: Region(_only_body, _straight, _jit),
        remat_p: Region(_only_body, _straight, _remat),
        scan_p: Region(_only_body, _scan_flow, _scan),
        while_p: Region(lambda own: (own["cond_jaxpr"], own["body_jaxpr"]), _while_flow, _while),
        cond_p: Region(lambda params: params["branches"], _cond_flow, _cond),
        call.primitive: Region(_only_body, _straight, _shard_map),
    }
