"""flax.nnx: an unmodified model as a copy whose layers follow rules."""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

import jax
from flax import nnx as flax_nnx
from jax.sharding import PartitionSpec

from mx_jax.convert.kinds import Kind
from mx_jax.convert.nnx_layers import (
    Injected,
    KeyedInjected,
    cache_obstacle,
    judged,
    keeps_cache,
    put,
    put_cache,
    replaced,
    stack,
    take_back,
)
from mx_jax.convert.report import Report
from mx_jax.convert.rules import Decision, Layer, Rule, as_rules, decide
from mx_jax.nn.layers import nnx_spec, recipe_of
from mx_jax.nn.nnx import RNG_STREAM
from mx_jax.ops.tags import LayerName

M = TypeVar("M", bound=flax_nnx.Module)
Path = tuple[Any, ...]


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

    Only stochastic recipes add state: a stream `"quantize"` in each layer that has one. In a stack
    made by nnx.vmap it has a key for each layer, along the parameters' leading axis.

    Args:
      model: the model; a converted one gets the new rules instead of its old.
      rules: the first that matches a layer decides; see `Rule`. A layer that the model holds in
        several places has several paths, and matches by each.
      rngs: streams, if a recipe draws random bits; `"quantize"` or the default one is forked.
        Where gradients alone draw, evaluation needs none.
      strict: whether a rule that matched nothing is an error instead of a warning.

    Returns:
      A model of the same type.

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
    copy, result = converted(model, rules, rngs)
    result.check("convert.nnx", strict)
    return copy


def converted(model: M, rules: tuple[Rule, ...], rngs: flax_nnx.Rngs | None) -> tuple[M, Report]:
    """The copy that `nnx` gives, and what the rules said of it, which is still to be checked."""
    copy = original(model)
    plans = list(_plans(copy, rules))
    for plan in plans:
        if any(decision.recipe for decision in plan.decisions):
            _inject(plan, rngs)
        if plan.cache is not None and plan.cache.cache is not None:
            put_cache(plan.layer, plan.cache.cache)
    return copy, Report(rules=rules, decisions=_decisions(plans))


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


def decisions(model: Any, rules: tuple[Rule, ...]) -> tuple[Decision, ...]:
    """What rules say of a model's layers."""
    return _decisions(_plans(original(model), rules))


@dataclasses.dataclass(frozen=True)
class _Plan:
    layer: Any
    kind: Kind
    decisions: tuple[Decision, ...]
    cache: Decision | None


def _decisions(plans: Iterable[_Plan]) -> tuple[Decision, ...]:
    found = (decision for plan in plans for decision in (*plan.decisions, plan.cache))
    return tuple(decision for decision in found if decision is not None)


def _plans(model: flax_nnx.Module, rules: tuple[Rule, ...]) -> Iterator[_Plan]:
    """Every layer that multiplies, and what the rules say of its products."""
    for paths, layer in layers_of(model):
        found = judged(layer)
        if found is None:
            continue
        kind, facts = found
        decisions = [
            decide(rules, _judging(paths, layer, product, facts)) for product in kind.products
        ]
        cache = None
        if keeps_cache(layer) and any(rule.cache for rule in rules):
            about = {"is_cache": True, "obstacle": cache_obstacle(layer)}
            cache = decide(rules, _judging(paths, layer, "cache", about))
        yield _Plan(layer, kind, tuple(decisions), cache)


def _judging(
    paths: tuple[Path, ...], layer: Any, product: str | None, facts: dict[str, Any]
) -> Layer:
    """A layer, or a product or the cache of it, as rules judge it."""
    first, *others = (
        "/".join(map(str, path if product is None else (*path, product))) for path in paths
    )
    return Layer(path=first, aliases=tuple(others), type=type(layer), **facts)


def layers_of(model: flax_nnx.Module) -> Iterator[tuple[tuple[Path, ...], Any]]:
    """Every module of a model, once, with the paths that lead to it."""
    places = flax_nnx.find_duplicates(model)
    for parts, layer in list(flax_nnx.iter_modules(model)):
        yield (parts, *_aliases(parts, places)), layer


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
    layer, kind = plan.layer, plan.kind
    where = None
    if kind.rhs_is_kernel and (spec := nnx_spec(kind.kernel(layer))) is not None:
        where = PartitionSpec(*spec[len(stack(layer, kind)) :])
    recipes = tuple(
        None if decision.recipe is None else recipe_of(decision.recipe, where)
        for decision in plan.decisions
    )
    first = plan.decisions[0].layer.path
    product: Injected | KeyedInjected = Injected(
        operation=kind.operation(*recipes),
        replaced=replaced(layer, kind),
        layer=f"{type(layer).__name__}, converted by convert.nnx",
        name=LayerName(
            (first if kind.products[0] is None else first.rpartition("/")[0]) or "model"
        ),
    )
    if any(recipe is not None and recipe.is_stochastic for recipe in recipes):
        stream = _stream(plan, rngs)
        product = product if stream is None else KeyedInjected(product, stream)
    put(layer, kind, product)


def _stream(plan: _Plan, rngs: flax_nnx.Rngs | None) -> flax_nnx.RngStream | None:
    """A stream for one layer, or for each of a stack; None without rngs, for forward passes only.

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
    key, sizes = rngs[RNG_STREAM](), stack(plan.layer, plan.kind)
    return flax_nnx.RngStream(jax.random.split(key, sizes) if sizes else key, tag=RNG_STREAM)
