"""Products of a jaxpr made anew: what rules say of each, and how one is computed by its recipe."""

import collections
import contextlib
import contextvars
import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend.core import (
    ClosedJaxpr,  # pyright: ignore[reportPrivateImportUsage]
    JaxprEqn,
    Literal,
)
from jax.extend.core.primitives import convert_element_type_p, transpose_p
from jax.sharding import PartitionSpec

from mx_jax.axes import Axes
from mx_jax.codecs.explicit_axes import varying
from mx_jax.codecs.rounding import DerivedKey
from mx_jax.convert.products import (
    ADAPTERS,
    ATTENTION_PRODUCTS,
    ATTENTIONS,
    EMBEDDINGS,
    DotGeneral,
    Lookup,
    row_of,
)
from mx_jax.convert.rules import Decision, Layer, Rule, decide
from mx_jax.jaxpr import rewrite
from mx_jax.jaxpr.read import LayerName, Site, is_array, name_of, walk
from mx_jax.jaxpr.regions import Values, regions
from mx_jax.jaxpr.rewrite import Plan, Read
from mx_jax.mxarray import values_p
from mx_jax.nn.layers import named_in_errors, recipe_of
from mx_jax.ops.arguments import Key
from mx_jax.packed import with_dtype
from mx_jax.recipes import Recipe, high_precision

# The scope of a module's call, by its path.
_MARK = re.compile(r"\[([^][]*)\]")
# What JAX writes around the names of what it has transformed, and what of it rules see.
_TRANSFORMED = re.compile(r"\b(vmap|jvp|transpose)\(([^()]*)\)")
_GRADIENTS = {"jvp", "transpose"}
_OF_A_GRADIENT = "of a gradient taken inside: convert what is differentiated, then differentiate"


# The rules of the model whose call is being traced, or None. In jit's key: such a trace has marks.
tracing: Any = jax.make_user_context(default_value=None)


# How often modules have been called in that trace, by path, and the path of the innermost call.
_calls: contextvars.ContextVar[tuple[collections.Counter[str], str | None]] = (
    contextvars.ContextVar("calls")
)


@contextlib.contextmanager
def tracing_for(rules: tuple[Rule, ...]) -> Iterator[None]:
    """A context in which a call of a model is traced for rules."""
    token = _calls.set((collections.Counter(), None))
    try:
        with tracing(rules):
            yield
    finally:
        _calls.reset(token)


@contextlib.contextmanager
def in_module(path: str) -> Iterator[None]:
    """The scope of a module's call, by its path, in a call of a model that is traced for rules."""
    calls, here = _calls.get()
    if here == path:
        # A method that another of the same module calls.
        yield
        return
    mark = f"{path}@{calls[path]}" if calls[path] else path
    calls[path] += 1
    token = _calls.set((calls, path))
    try:
        with jax.named_scope(f"[{mark}]"):
            yield
    finally:
        _calls.reset(token)


# Plans ------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Module:
    """What rules know of a module whose call is traced.

    Attributes:
      type: its class.
      aliases: other paths of a module that the model holds in several places.
      obstacle: why its products stay as they are, or None.
      spec: how its kernel is sharded.
    """

    type: type
    aliases: tuple[str, ...] = ()
    obstacle: str | None = None
    spec: PartitionSpec | None = None


@dataclasses.dataclass(frozen=True)
class Entry:
    """How one equation is computed: its recipe, None for codes that go on as they are; whether the
    operands change places; and the layer, for errors."""

    recipe: Recipe | None = None
    swapped: bool = False
    layer: str = dataclasses.field(default="", compare=False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Product:
    """A product of a jaxpr: its scopes joined by `/`, and where it is, as in a `Plan`."""

    scope: str
    type: type
    facts: dict[str, Any]
    # Whether the left operand is the kernel, and whether the kernel is stored as codes.
    swapped: bool
    stored: bool
    # What the kernel is computed from.
    marks: int
    where: tuple[int, ...]

    def placed(self, modules: Mapping[str, Module] | None) -> tuple[str, str, str]:
        """The path of its module, the call of it, and the scopes in it."""
        marks = list(_MARK.finditer(self.scope))
        if modules is None or not marks:
            return "", "", _joined(_MARK.sub("", self.scope))
        path, _, call = marks[-1][1].partition("@")
        return path, call, _joined(self.scope[marks[-1].end() :])


def _joined(scope: str) -> str:
    return "/".join(filter(None, scope.split("/")))


@dataclasses.dataclass(frozen=True)
class Weight:
    """An array of a function's argument: its path there, and the class of the layer that holds it,
    a node that can be called."""

    path: str
    layer: type | None


def weights_of(node: object, path: tuple[Any, ...] = (), layer: type | None = None) -> list[Weight]:
    """The arrays of a pytree, in its order."""
    if jax.tree_util.all_leaves([node]):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        return [Weight(name, layer)] if is_array(node) else []
    layer = type(node) if callable(node) else None
    children = jax.tree.leaves_with_path(node, is_leaf=lambda inner: inner is not node)
    return [
        weight for (key,), child in children for weight in weights_of(child, (*path, key), layer)
    ]


# The mark of what is computed from data. Those of weights are the powers of two after it.
_DATA = 1


def _named_by(product: _Product, weights: Sequence[Weight]) -> tuple[type, list[str]]:
    """The class and the paths of what holds the kernel of a function's product."""
    kernel = [weight for i, weight in enumerate(weights) if product.marks >> 1 + i & 1]
    holders = {(weight.path.rpartition("/")[0], weight.layer) for weight in kernel}
    if product.marks & _DATA or len(holders) != 1:
        return product.type, []
    ((holder, layer),) = holders
    paths = [holder] if layer or holder else []
    paths += [weight.path for weight in kernel if len(kernel) == 1]
    return layer or product.type, paths


def planned(
    program: ClosedJaxpr,
    data: Sequence[bool],
    rules: tuple[Rule, ...],
    modules: Mapping[str, Module] | None = None,
    weights: Sequence[Weight] = (),
) -> tuple[Plan, tuple[Decision, ...]]:
    """The plan for a jaxpr, and the decision about each of its products."""
    # What goes into data, of which each operand has a flag, is no kernel. By module, and the scopes
    # in it; without modules, which a model has, by all scopes, and by what holds the kernel.
    marks = [_DATA if flag else 2 << i if weights else 0 for i, flag in enumerate(data)]
    plan, products = _read(walk(program, marks))
    entries: list[tuple[_Product, tuple[str, str, str], Module, list[str]]] = []
    for product in products:
        at = product.placed(modules)
        known, paths = (modules or {}).get(at[0]), list[str]()
        if known is None:
            layer, paths = _named_by(product, weights)
            known = Module(layer)
        # Nobody looks rows up in what rules know, but embeddings.
        if product.type is not Lookup or issubclass(known.type, EMBEDDINGS):
            entries.append((product, at, known, paths))
    counts = collections.Counter(at for _, at, *_ in entries)
    of_call = collections.Counter(at[:2] for _, at, *_ in entries)
    seen: collections.Counter[tuple[str, str, str]] = collections.Counter()
    decisions: list[Decision] = []
    for product, at, known, paths in entries:
        module, _, scope = at
        alone = modules is not None and of_call[at[:2]] == 1
        names = _names(product, scope, alone, counts[at], seen[at], modules is None)
        # A layer goes before scopes, a mere table of weights after them.
        names = names + paths if known.type is product.type else paths + names
        seen[at] += 1
        facts: dict[str, Any] = product.facts | {"type": known.type, "product": product.type}
        # Where nobody says which arguments are weights, any may be.
        facts["of_activations"] = product.facts["of_activations"] and not all(data)
        if (name := ATTENTION_PRODUCTS.get(scope)) and issubclass(known.type, ATTENTIONS):
            names = [name]
            facts |= {"of_activations": True, "shape": None, "kernel": None, "axes": None}
        if modules is not None and (name or not facts["of_activations"]):
            facts["input"] = None
        # Of Flax's layers alone the kernel is multiplied as it is stored.
        is_flaxs = known.type.__module__.startswith("flax.")
        if not is_flaxs:
            facts["axes"] = None
        path, *aliases = (
            "/".join(part for part in (base, name_in_module.lstrip("/")) if part)
            for base in (module, *known.aliases)
            for name_in_module in names
        )
        if issubclass(known.type, EMBEDDINGS) and facts["shape"]:
            # Looked up in, or multiplied by as it lies transposed, it is one table.
            table = {"kernel": facts["shape"][::-1], "axes": Axes.ordered()}
            facts |= table | {"named_only": True}
        if issubclass(known.type, ADAPTERS):
            facts |= {"named_only": True, "product": None}
        facts["obstacle"] = known.obstacle or facts["obstacle"]
        decision = decide(rules, Layer(path=path, aliases=tuple(aliases), **facts))
        decisions.append(decision)
        recipe = decision.recipe
        if recipe is None and product.stored and product.type in (DotGeneral, Lookup):
            # What is stored is what it is, and only the input is as it was.
            recipe = high_precision()
        if recipe is not None:
            layer = f"{path!r} ({known.type.__name__}), converted by rule {decision.rule}"
            recipe = recipe_of(recipe, known.spec) if is_flaxs else recipe
            plan[product.where] = Entry(recipe, product.swapped, layer)
    return tuple(plan.items()), tuple(decisions)


def _names(
    product: _Product, scope: str, alone: bool, count: int, index: int, is_function: bool
) -> list[str]:
    """The names of a product within its module; the first is that of reports."""
    # As lax calls it: DotGeneral is dot_general.
    name = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", product.type.__name__).lower()
    names = [scope, f"{scope}/{name}_{index}"]
    outer, _, last = scope.rpartition("/")
    # A module's path is that of all its products, if a call makes several.
    names = names[:1] if (scope or is_function or alone) and count == 1 else names[::-1]
    if "->" in last:
        # jnp.einsum names a scope after its subscripts.
        names.append(outer)
    return ["", *names] if alone else names


def recipes_of(plan: Plan) -> list[Recipe]:
    """The recipes of a plan's products."""
    return [entry.recipe for _, entry in plan if entry.recipe is not None]


def _read(sites: Sequence[Site]) -> tuple[dict[tuple[int, ...], Entry], list[_Product]]:
    """Equations by which codes go on as they are, and products."""
    codes: dict[tuple[int, ...], Entry] = {}
    products: list[_Product] = []
    # Variables that hold codes, of whichever program.
    stored: set[Any] = set()
    for site in sites:
        eqn, obstacle = site.eqn, _obstacle(site)
        held = tuple(not isinstance(x, Literal) and x in stored for x in eqn.invars[:2])
        goes_on = eqn.primitive in (convert_element_type_p, transpose_p) and held[0]
        if (_is_implicit(eqn) or goes_on) and obstacle is None:
            stored.add(eqn.outvars[0])
            codes[site.where] = Entry()
        elif (product := _product(site, obstacle, held)) is not None:
            products.append(product)
    return codes, products


def _is_implicit(eqn: JaxprEqn) -> bool:
    return eqn.primitive is values_p and eqn.params["implicit"]


def _product(site: Site, obstacle: str | None, stored: tuple[bool, ...]) -> _Product | None:
    """The product that an equation is, with what keeps rules from it, or None."""
    row, params = row_of(site.eqn), site.eqn.params
    if row is None:
        return None
    scope = site.scope
    while match := _TRANSFORMED.search(scope):
        obstacle = obstacle or (_OF_A_GRADIENT if match[1] in _GRADIENTS else None)
        scope = scope[: match.start()] + match[2] + scope[match.end() :]
    operands: list[Any] = [atom.aval for atom in site.eqn.invars]
    data = [mark & _DATA for mark in site.marks[:2]]
    left = stored == (True, False) or (stored == (False, False) and data == [0, _DATA])
    swaps = left and row.swapped is not None
    if row.swapped is not None and swaps:
        left, right, params, _ = row.swapped(*operands, params)
        operands = [left, right]
    facts = row.facts(*operands, params) | {"input": tuple(operands[0].shape)}
    facts |= {"obstacle": obstacle or facts["obstacle"], "of_activations": all(data)}
    return _Product(
        scope=scope,
        type=row.type,
        facts=facts,
        swapped=swaps,
        stored=any(stored) and obstacle is None,
        marks=site.marks[0 if swaps else 1],
        where=site.where,
    )


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


class ByRecipe(rewrite.Rule):
    """The rule by which products of a plan are computed; its state is a key, None for none."""

    # Every equation that draws has a key of its own, folded with its index, in loops with that of
    # the iteration too.

    def below(self, state: Key, number: int) -> Key:
        # By equations, not by products: what rules change does not change others' keys.
        return folded(state, number)

    def entering(self, plan: Plan, state: Key) -> Key:
        return state if any(recipe.is_stochastic for recipe in recipes_of(plan)) else None

    def iteration(self, state: Key, index: jax.Array | None) -> Key:
        return folded(state, index)

    def shared(self, state: Key) -> Key:
        # As an array: to the jaxpr that equal calls share what derives a key would belong.
        return None if state is None else DerivedKey.of(DerivedKey.of(state).get())

    @contextlib.contextmanager
    def context(self, eqn: JaxprEqn) -> Iterator[None]:
        # The scope that it stood in, for profiles, for what XLA says, and for captures.
        parts = _MARK.split(name_of(eqn))
        *outer, scope = parts[::2]
        scope = scope.strip("/")
        scope = ATTENTION_PRODUCTS.get(_TRANSFORMED.sub(r"\2", scope), scope)
        with contextlib.ExitStack() as stack:
            if outer and outer[0].strip("/"):
                # Flax's linen has put its own names before each mark.
                stack.enter_context(jax.named_scope(_joined("/".join(outer))))
            elif outer:
                path = parts[-2].partition("@")[0]
                stack.enter_context(LayerName(path or "model").context())
            if scope:
                stack.enter_context(jax.named_scope(scope))
            yield

    def compute(self, eqn: JaxprEqn, read: Read, entry: Entry, state: Key) -> Values:
        operands, params, recipe = list(map(read, eqn.invars)), eqn.params, entry.recipe
        if recipe is None:
            return [_codes(eqn, operands)]
        row, back = row_of(eqn), None
        assert row is not None
        if entry.swapped:
            assert row.swapped is not None
            *operands, params, back = row.swapped(*operands, params)
        key = state if recipe.is_stochastic else None
        # Below shard_map, shards that hold different operands draw different bits.
        axes = frozenset[str]().union(*map(varying, operands)) if key is not None else ()
        for axis in sorted(axes):
            key = folded(key, lax.axis_index(axis))
        with named_in_errors(entry.layer) if entry.layer else contextlib.nullcontext():
            product = row.multiply(recipe, recipe.dot_general, operands, params, key)
            return [product if back is None else back(product)]


def _codes(eqn: JaxprEqn, operands: Values) -> Any:
    """The stored codes, in place of the values that an equation makes of them."""
    if _is_implicit(eqn):
        return jax.tree.unflatten(eqn.params["tree"], operands)
    if eqn.primitive is transpose_p:
        return operands[0].transpose(*eqn.params["permutation"])
    return with_dtype(operands[0], eqn.params["new_dtype"])


def folded(key: Key, number: int | jax.Array | None) -> Key:
    """A key of its own for a number; None stays None."""
    return None if key is None or number is None else DerivedKey.of(key).fold_in(number)
