"""flax.nnx: a model as a copy that keeps its kernels quantized."""

import dataclasses
from collections.abc import Iterator
from typing import Any, TypeVar

from flax import nnx as flax_nnx

from mx_jax.calibrate.ways import Way
from mx_jax.convert.kind import Kind
from mx_jax.convert.kinds import EMBED
from mx_jax.convert.nnx_embed import StoredEmbed
from mx_jax.convert.nnx_layers import judged, stack
from mx_jax.convert.nnx_model import converted, layers_of
from mx_jax.convert.report import Report
from mx_jax.convert.rules import Layer, Rule
from mx_jax.convert.stored import Kernel
from mx_jax.recipes import Recipe

M = TypeVar("M", bound=flax_nnx.Module)
# Why an embedding of a state stays.
LOOKED_UP = "flax.nnx's Embed looks rows up in an array: pass the model in place of its state"


def weights(
    model: M,
    rules: tuple[Rule, ...],
    *,
    pack: bool,
    by: Way | None,
    rngs: flax_nnx.Rngs | None,
) -> tuple[M, Report]:
    """A converted copy whose quantized kernels are new Variables; all others are the model's."""
    copy, _ = converted(model, rules, rngs)
    found = list(_found(copy, rules))
    # A Variable that several layers hold stays one.
    stored: dict[int, Any] = {}
    for each in found:
        if each.kernel.decision.recipe is None:
            continue
        variable = getattr(each.layer, each.name)
        if id(variable) not in stored:
            stored[id(variable)] = variable.replace(each.kernel.store(variable[...], pack, by))
        setattr(each.layer, each.name, stored[id(variable)])
        if type(each.layer) is flax_nnx.Embed:
            # Its own would ask for an array; one that is no longer Flax's does as it was written.
            each.layer.__class__ = StoredEmbed
    return copy, _report(rules, found)


def report(model: flax_nnx.Module, rules: tuple[Rule, ...]) -> Report:
    """What `weights` would do."""
    return _report(rules, list(_found(model, rules)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Found:
    """A layer, the attribute that holds its kernel, and what the rules say of that."""

    layer: Any
    name: str
    kernel: Kernel


def _report(rules: tuple[Rule, ...], found: list[_Found]) -> Report:
    return Report(rules=rules, decisions=tuple(each.kernel.decision for each in found))


def _found(model: flax_nnx.Module, rules: tuple[Rule, ...]) -> Iterator[_Found]:
    for paths, layer in layers_of(model):
        known = judged(layer)
        if known is None or known[1].get("kernel") is None:
            continue
        kind, facts = known
        if kind is EMBED and type(layer) not in (flax_nnx.Embed, StoredEmbed):
            facts["obstacle"] = "a class of its own may look rows up in an array"
        name = _attribute(kind, layer)
        if name is None:
            continue
        facts["kernel"] = facts["kernel"][len(stack(layer, kind)) :]
        if isinstance(getattr(layer, "recipe", None), Recipe):
            # A layer of ours reads what is stored, whatever its recipe.
            facts["obstacle"] = None
        first, *others = ("/".join(map(str, path)) for path in paths)
        judging = Layer(path=first, aliases=tuple(others), type=type(layer), **facts)
        kernel = Kernel.judge(rules, judging, getattr(layer, name)[...])
        yield _Found(layer=layer, name=name, kernel=kernel)


def _attribute(kind: Kind, layer: Any) -> str | None:
    """Where a layer holds its kernel; of one that nobody registered, its first matrix."""
    own = {name: v for name, v in vars(layer).items() if isinstance(v, flax_nnx.Variable)}
    try:
        kernel = kind.kernel(layer)
    except AttributeError:
        kernel = next((v for v in own.values() if len(v.shape) >= 2), None)
    return next((name for name, value in own.items() if value is kernel), None)
