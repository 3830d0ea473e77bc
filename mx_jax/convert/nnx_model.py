"""flax.nnx: an unmodified model as a copy whose layers follow rules."""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

import jax
from flax import nnx as flax_nnx
from jax.sharding import PartitionSpec

from mx_jax.convert.jaxpr import Module
from mx_jax.convert.kinds import EMBED, Kind
from mx_jax.convert.nnx_layers import (
    ADAPTERS,
    Call,
    Conversion,
    Injected,
    KeyedInjected,
    cache_obstacle,
    class_of,
    judged,
    keeps_cache,
    matrix_of,
    multiplies_itself,
    put,
    put_cache,
    put_call,
    replaced,
    stack,
    take_back,
)
from mx_jax.convert.report import Report, recorded
from mx_jax.convert.rules import Decision, Layer, Rule, as_rules, decide
from mx_jax.inspect.explanation import of_arrays
from mx_jax.nn.layers import nnx_spec, recipe_of
from mx_jax.nn.nnx import RNG_STREAM
from mx_jax.ops.tags import LayerName

M = TypeVar("M", bound=flax_nnx.Module)
Path = tuple[Any, ...]
UNSEEN = "its products show in a call: give the report example arguments"


def nnx(
    model: M,
    rules: Rule | Sequence[Rule],
    *,
    rngs: flax_nnx.Rngs | None = None,
    strict: bool = False,
) -> M:
    """A copy of a model whose layers follow rules. It shares the model's Variables.

    Modules are copied, Variables are not: training the copy trains the model, and a checkpoint of
    one is a checkpoint of the other. Key-value caches in a format are the exception: they are new
    Variables, cast when the model is converted; a stack needs `init_cache` again. The model itself
    is not changed, and `original` takes the conversion back from a copy that came through split,
    merge or a transform. What is set on the copy's layers is static and compares by value: a
    rebuilt model does not retrace.

    Layers that Flax gives an attribute for their product get another one there. The call of the
    model is traced, and what else it multiplies is made anew in its jaxpr, as `convert.function`
    does it: `convert.report` with example arguments lists both. Rules that match nothing are told
    of when the model is first called, or at once if all of its products are attributes.

    Only stochastic recipes add state: a stream `"quantize"` in each layer that has one, and one in
    the model. In a stack made by nnx.vmap it has a key for each layer, along the parameters'
    leading axis.

    Args:
      model: the model; a converted one gets the new rules instead of its old.
      rules: the first that matches a layer decides; see `Rule`. A layer that the model holds in
        several places has several paths, and matches by each.
      rngs: streams, if a recipe draws random bits; `"quantize"` or the default one is forked.
        Where gradients alone draw, evaluation needs none.
      strict: whether a rule that matched nothing is an error instead of a warning.

    Returns:
      A model of the same type, or of a subclass that looks like it.

    Raises:
      TypeError: not a flax.nnx module, or not rules.
      ValueError: rngs missing, and a forward product draws; with strict, a rule that matched
        nothing.

    Examples:
      >>> from flax import nnx
      >>> import jax.numpy as jnp
      >>> from mx_jax import convert, recipes
      >>> model = nnx.Sequential(nnx.Linear(32, 64, rngs=nnx.Rngs(0)), nnx.relu)
      >>> quantized = convert.nnx(model, convert.Rule(".*", recipes.mxfp8()))
      >>> quantized(jnp.ones((4, 32))).shape, quantized.layers[0].kernel is model.layers[0].kernel
      ((4, 64), True)
    """
    rules = as_rules(rules, "convert.nnx")
    traced = any(rule.quantizes for rule in rules)
    copy, result = converted(model, rules, rngs, strict, traced)
    if not hasattr(copy, "mx_call"):
        result.check("convert.nnx", strict)
    return copy


def converted(
    model: M,
    rules: tuple[Rule, ...],
    rngs: flax_nnx.Rngs | None,
    strict: bool | None = None,
    traced: bool = True,
) -> tuple[M, Report]:
    """The copy that `nnx` gives, and what the rules said of its layers, which is to be checked.

    One whose call is traced checks it itself, as strict says: the trace shows other products.
    """
    copy = original(model)
    plans = list(_plans(copy, rules))
    for plan in plans:
        if plan.converts:
            _inject(plan, rngs)
        if plan.cache is not None and plan.cache.cache is not None:
            put_cache(plan.layer, plan.cache.cache)
    if traced:
        _trace_calls(plans, rules, strict, rngs)
    return copy, Report(rules=rules, decisions=_decisions(plans))


def _trace_calls(
    plans: Sequence["_Plan"],
    rules: tuple[Rule, ...],
    strict: bool | None,
    rngs: flax_nnx.Rngs | None,
) -> None:
    """Have the calls traced of all modules but those that got another product."""
    calls = [plan for plan in plans if multiplies_itself(plan.layer, plan.kind, plan.converts)]
    if all(plan.is_decided for plan in calls):
        return
    # The whole model's call tells of rules that matched nothing.
    calls += [plan for plan in plans if not plan.paths[0] and plan not in calls]
    modules = {
        plan.paths[0]: Module(type(plan.layer), plan.paths[1:], isinstance(plan.layer, ADAPTERS))
        for plan in calls
    }
    model = Conversion(rules, strict, modules, _decisions(plans))
    draws = any(rule.quantizes and rule.quantizes.is_stochastic for rule in rules)
    for plan in calls:
        # That of the outermost call is all products': inside a stack there might be many.
        stream = None
        if draws and not plan.paths[0] and rngs and {RNG_STREAM, "default"} & {*rngs}:
            stream = _stream(rngs[RNG_STREAM]())
        put_call(plan.layer, Call(model, plan.paths[0], plan.is_decided), stream)


def original(model: M) -> M:
    """A copy of a model, converted or not, with the products that its layers had.

    Raises:
      TypeError: not a flax.nnx module.
    """
    if not isinstance(model, flax_nnx.Module):
        raise TypeError(
            f"convert.nnx: needs a flax.nnx module, got {type(model).__name__}; "
            "use convert.linen for flax.linen"
        )
    copy = flax_nnx.clone(model, variables=False)
    for _, layer in list(flax_nnx.iter_modules(copy)):
        take_back(layer)
    return copy


def decisions(
    model: Any, rules: tuple[Rule, ...], *args: Any, **kwargs: Any
) -> tuple[Decision, ...]:
    """What rules say of a model's layers, and of products that an abstract call shows."""
    copy, found = converted(model, rules, flax_nnx.Rngs(0))
    if args or kwargs:
        graph, state = flax_nnx.split(copy)

        def call(state: Any, *args: Any, **kwargs: Any) -> None:
            flax_nnx.merge(graph, state)(*args, **kwargs)

        with recorded(rules, reports=True) as record:
            jax.eval_shape(*of_arrays(call, state, *args, **kwargs))
        return (*found.decisions, *record.decisions)
    return tuple(
        own for plan in _plans(original(model), rules) for own in plan.judged or plan.unseen
    )


@dataclasses.dataclass(frozen=True)
class _Plan:
    """What rules say of a module.

    Attributes:
      layer: the module.
      paths: that lead to it.
      kind: None if it has no attribute for a product.
      decisions: one for each product.
      cache: about its cache.
    """

    layer: Any
    paths: tuple[str, ...]
    kind: Kind | None
    decisions: tuple[Decision, ...]
    cache: Decision | None

    @property
    def converts(self) -> bool:
        """Whether a rule gives one of its products a recipe."""
        return any(decision.recipe is not None for decision in self.decisions)

    @property
    def is_decided(self) -> bool:
        """Whether what a trace shows of the module is decided."""
        return self.kind is EMBED or (self.kind is not None and not self.converts)

    @property
    def judged(self) -> tuple[Decision, ...]:
        """All that rules say."""
        return self.decisions if self.cache is None else (*self.decisions, self.cache)

    @property
    def unseen(self) -> tuple[Decision, ...]:
        """In its place, if only a call shows what the module's matrix is multiplied by."""
        matrix = matrix_of(self.layer)
        if matrix is None:
            return ()
        layer = _judging(
            self.paths, self.layer, {"kernel": tuple(matrix.shape), "obstacle": UNSEEN}
        )
        return (decide((), layer),)


def _decisions(plans: Iterable[_Plan]) -> tuple[Decision, ...]:
    return tuple(decision for plan in plans for decision in plan.judged)


def _plans(model: flax_nnx.Module, rules: tuple[Rule, ...]) -> Iterator[_Plan]:
    """Every module, and what the rules say of the products that it has an attribute for."""
    for paths, layer in layers_of(model):
        kind, facts = judged(layer) or (None, {})
        decisions = tuple(
            decide(rules, _judging(_below(paths, product), layer, facts))
            for product in (() if kind is None else kind.products)
        )
        cache = None
        if keeps_cache(layer) and any(rule.cache for rule in rules):
            about = {"is_cache": True, "obstacle": cache_obstacle(layer)}
            cache = decide(rules, _judging(_below(paths, "cache"), layer, about))
        yield _Plan(layer, paths, kind, decisions, cache)


def _below(paths: tuple[str, ...], name: str | None) -> tuple[str, ...]:
    return paths if name is None else tuple(f"{path}/{name}".lstrip("/") for path in paths)


def _judging(paths: tuple[str, ...], layer: Any, facts: dict[str, Any]) -> Layer:
    """A layer, or a product or the cache of it, as rules judge it."""
    return Layer(path=paths[0], aliases=paths[1:], type=class_of(layer), **facts)


def layers_of(model: flax_nnx.Module) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every module of a model, once, with the paths that lead to it."""
    places = flax_nnx.find_duplicates(model)
    for parts, layer in list(flax_nnx.iter_modules(model)):
        yield tuple("/".join(map(str, path)) for path in (parts, *_aliases(parts, places))), layer


def _aliases(path: Path, places: Sequence[Sequence[Path]]) -> list[Path]:
    """The other paths of what lies at a path, where it or something above it is shared."""
    return [
        (*other, *path[len(place) :])
        for group in places
        for place in group
        if path[: len(place)] == place
        for other in group
        if other != place
    ]


def _inject(plan: _Plan, rngs: flax_nnx.Rngs | None) -> None:
    layer, kind, where = plan.layer, plan.kind, None
    assert kind is not None
    if kind.rhs_is_kernel and (spec := nnx_spec(kind.kernel(layer))) is not None:
        where = PartitionSpec(*spec[len(stack(layer, kind)) :])
    recipes = tuple(
        None if decision.recipe is None else recipe_of(decision.recipe, where)
        for decision in plan.decisions
    )
    product: Injected | KeyedInjected = Injected(
        operation=kind.operation(*recipes),
        replaced=replaced(layer, kind),
        layer=f"{type(layer).__name__}, converted by convert.nnx",
        name=LayerName(plan.paths[0] or "model"),
    )
    if any(recipe is not None and recipe.is_stochastic for recipe in recipes):
        key = _key(plan, rngs)
        product = product if key is None else KeyedInjected(product, _stream(key))
    put(layer, kind, product)


def _key(plan: _Plan, rngs: flax_nnx.Rngs | None) -> jax.Array | None:
    """A key for one layer, or for each of a stack; None without rngs, for forward passes only.

    Raises:
      ValueError: no rngs, or none with the stream, and a forward product draws.
    """
    names = () if rngs is None else tuple(rngs)
    if rngs is None or not {RNG_STREAM, "default"} & set(names):
        for decision in plan.decisions:
            if decision.recipe is not None and decision.recipe.fwd.is_stochastic:
                but = "" if rngs is None else f", but rngs has only {', '.join(map(repr, names))}"
                raise ValueError(
                    f"convert.nnx: {decision.layer.path!r} gets recipe {decision.recipe.name!r}, "
                    f"which draws random bits{but}; pass rngs=nnx.Rngs({RNG_STREAM}=seed)"
                )
        return None
    assert plan.kind is not None
    key, sizes = rngs[RNG_STREAM](), stack(plan.layer, plan.kind)
    return jax.random.split(key, sizes) if sizes else key


def _stream(key: jax.Array) -> flax_nnx.RngStream:
    return flax_nnx.RngStream(key, tag=RNG_STREAM)
