"""Weights quantized once, for serving: a tree of parameters or a model, by rules."""

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.core import meta

from mx_jax.axes import Axes
from mx_jax.calibrate.scales import Way
from mx_jax.convert import linen_model, nnx_model
from mx_jax.convert.rules import (
    Decision,
    Layer,
    Report,
    Rule,
    Unknown,
    as_rules,
    decide,
    warn_or_raise,
)
from mx_jax.nn.linen import StoredParams
from mx_jax.ops.quantize import store_weights, why_not_stored
from mx_jax.packed import Quantized, gives_rows, unpacked
from mx_jax.recipes import Recipe

# What Flax's layers call what they multiply by or look up in.
_KERNELS = ("kernel", "embedding")
# Parameters of two axes and more that are no kernel of anything: those of a stack of layers.
_VECTORS = ("bias", "scale")
_DTYPES = tuple(map(np.dtype, (jnp.float32, jnp.bfloat16, jnp.float16)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Kernel:
    decision: Decision
    # How many of its leading axes count layers.
    num_stacked: int
    # Whether rows are looked up in it: packed only where the layout gives them one by one.
    looked_up: bool

    @classmethod
    def judge(
        cls, rules: tuple[Rule, ...], layer: Layer, value: jax.Array | np.ndarray | Quantized
    ) -> "_Kernel":
        """Ask the rules about a parameter of a layer: its shape and dtype count."""
        stacked = 0 if layer.kernel is None else value.ndim - len(layer.kernel)
        obstacle = layer.obstacle or unstorable(value)
        if obstacle is None and layer.axes is None:
            obstacle = "which of its axes a product contracts is not known"
        whole = dataclasses.replace(layer, kernel=tuple(value.shape), obstacle=obstacle)
        decision = decide(rules, whole)
        reason = decision.recipe and why_not_stored(decision.recipe)
        if reason:
            decision = dataclasses.replace(decision, recipe=None, reason=reason)
        looked_up = issubclass(layer.type, (flax.linen.Embed, nnx.Embed))
        return cls(decision=decision, num_stacked=stacked, looked_up=looked_up)

    def store(self, value: object, pack: bool, by: Way | None) -> Any:
        """The parameter as it is to be stored; without a recipe, as it is."""
        layer, recipe = self.decision.layer, self.decision.recipe
        if recipe is None or layer.axes is None:
            return value
        search, spec = None, recipe.output.rhs
        if by is not None and spec is not None:
            (axis, _), *others = layer.axes.blocks(spec.format)
            if others:
                raise ValueError(
                    f"convert.weights: by={type(by).__name__} needs blocks along one axis, but the "
                    f"recipe of {layer.path!r} has format={spec.format.name}"
                )
            search = functools.partial(
                by,
                (layer.path, *layer.aliases),
                format=spec.format,
                axis=axis if len(layer.axes.contracting) == 1 else layer.axes.contracting,
                looked_up=self.looked_up,
            )
        stored = store_weights(
            jnp.asarray(value),
            recipe,
            layer.axes,
            num_stacked=self.num_stacked,
            packed=pack,
            by=search,
        )
        return stored if not self.looked_up or gives_rows(stored) else unpacked(stored)


def unstorable(value: Any) -> str | None:
    """Why an array cannot be stored in a block format, or None."""
    if isinstance(value, Quantized):
        return f"is {value.format.name} already"
    if np.dtype(value.dtype) not in _DTYPES:
        return f"is {value.dtype}; float32, bfloat16 and float16 can be quantized"
    return None


def weights(
    params: object,
    rules: Rule | Sequence[Rule],
    *,
    model: flax.linen.Module | None = None,
    args: Sequence[Any] = (),
    pack: bool = True,
    by: Way | None = None,
    rngs: nnx.Rngs | None = None,
    strict: bool = False,
) -> Any:
    """Kernels as MXArrays, each by the first rule that matches its layer; for inference.

    The rules are those of `convert.linen` and `convert.nnx`, and the codes are those that the
    product by the rule's recipe would make each time: its `output.rhs` says format and scale
    rule, and `recipes.weight_only(format)` leaves activations in high precision. So a model
    converted by the same rules gives the same numbers from these weights, and reads 4.25 bits a
    parameter in MXFP4 where it read 32. Kernels carry no gradient then.

    A tree of parameters alone does not say which axes a product contracts: there, kernels
    `[in, out]` are quantized, and others with `model`.

    Args:
      params: a flax.nnx model: the result is a copy, converted by the same rules, that shares all
        that stays; or its `nnx.state`; or flax.linen's parameters or variables, boxed or not.
      rules: the first that matches a layer decides; see `Rule`. A path is that of the layer, as
        in `convert.linen`; of parameters alone also the parameter's own, `".*/up/kernel"`.
      model: the flax.linen module whose parameters they are, converted or not.
      args: example arguments of the module, arrays or `jax.ShapeDtypeStruct`; not run.
      pack: whether to `pack_weights` for the machine they are on, where its kernels have a layout
        of their own; False: MXArrays, which `checkpoint.save` takes as well.
      by: how codes are chosen, if not as the product would: `calibrate.SearchedScales()`, or
        `calibrate.Gptq(moments)`.
      rngs: as `convert.nnx` takes them; flax.nnx models only.
      strict: whether a rule that matched nothing, or whose recipe cannot read stored weights, is an
        error instead of an `UnusedRuleWarning`.

    Returns:
      What was passed, of the same structure, with `PackedMXArray`s and `MXArray`s in it.

    Raises:
      TypeError: neither a tree nor a flax.nnx model, or not rules.
      ValueError: with strict, a rule that matched nothing, or that stores nothing.

    Examples:
      >>> import flax.linen as nn, jax, jax.numpy as jnp, mx_jax
      >>> from mx_jax import convert
      >>> rules = convert.Rule(".*", mx_jax.recipes.weight_only("mxfp4"))
      >>> model, x = nn.Sequential([nn.Dense(64), nn.relu, nn.Dense(32)]), jnp.ones((1, 64))
      >>> variables = model.init(jax.random.key(0), x)
      >>> served = convert.weights(variables, rules)
      >>> y = convert.linen(model, rules).apply(served, x)
      >>> bool((y == convert.linen(model, rules).apply(variables, x)).all())
      True
    """
    rules = as_rules(rules, "convert.weights")
    if by is not None and not callable(by):
        raise TypeError(
            "convert.weights: by must choose codes, as calibrate.SearchedScales() or "
            f"calibrate.Gptq(moments) does, got by={by!r}"
        )
    if isinstance(params, nnx.Module):
        _check_arguments(params, model, args)
        # Quantized kernels are new Variables; one that several layers hold stays one.
        result = nnx_model.converted(params, rules, rngs)
        kernels, stored = [], dict[int, Any]()
        for layer, name, kernel in list(_kernels_of_model(result, rules)):
            kernels.append(kernel)
            if kernel.decision.recipe is None:
                continue
            variable = getattr(layer, name)
            if id(variable) not in stored:
                stored[id(variable)] = variable.replace(kernel.store(variable[...], pack, by))
            setattr(layer, name, stored[id(variable)])
    else:
        kernels, leaves, structure = _kernels_of_tree(params, rules, model, args)
        for i, kernel in kernels.items():
            leaf, value = leaves[i], kernel.store(_value(leaves[i]), pack, by)
            if isinstance(leaf, nnx.Variable):
                value = leaf.replace(value)
            leaves[i] = leaf.replace_boxed(value) if isinstance(leaf, meta.AxisMetadata) else value
        result, kernels = jax.tree.unflatten(structure, leaves), kernels.values()
    report = Report(rules=rules, decisions=tuple(kernel.decision for kernel in kernels))
    report.check("convert.weights", strict)
    _warn_of_unstored(report, strict)
    return result


def _warn_of_unstored(report: Report, strict: bool) -> None:
    """Warn of rules by which weights were to be quantized, and all stay as they were."""
    for index in sorted(report.used):
        recipe = report.rules[index].quantizes
        # One that leaves weights in high precision has nothing to store.
        if recipe is None or recipe.output.rhs is None or not (reason := why_not_stored(recipe)):
            continue
        text = (
            f"convert.weights: rule {index} ({report.rules[index]}) stores nothing: {reason}, got "
            f"recipe={recipe.name!r}; its layers stay in high precision; a recipe that can read "
            "stored weights is weight_only('mxfp4')"
        )
        warn_or_raise(text, strict)


def weights_report(
    params: object,
    rules: Rule | Sequence[Rule],
    *,
    model: flax.linen.Module | None = None,
    args: Sequence[Any] = (),
    strict: bool = False,
) -> Report:
    """What `weights` does to each kernel, and why the others stay; nothing is computed.

    Args:
      params: as `weights` takes them.
      rules: as `weights` takes them.
      model: as `weights` takes it.
      args: as `weights` takes them.
      strict: whether a rule that matched nothing is an error instead of a warning.

    Examples:
      >>> import jax.numpy as jnp
      >>> from mx_jax import convert
      >>> params = {"up": {"kernel": jnp.ones((64, 8))}, "heads": {"kernel": jnp.ones((64, 2, 4))}}
      >>> print(convert.weights_report(params, convert.Rule(".*", "mxfp8")))
      layer  type    kernel  rule  recipe
      heads  Unknown  64x2x4  -     (which of its axes a product contracts is not known)
      up     Unknown  64x8    0     mxfp8
      1 of 2 layers converted
    """
    rules = as_rules(rules, "convert.weights_report")
    if isinstance(params, nnx.Module):
        _check_arguments(params, model, args)
        kernels = [kernel for *_, kernel in _kernels_of_model(params, rules)]
    else:
        kernels = _kernels_of_tree(params, rules, model, args)[0].values()
    report = Report(rules=rules, decisions=tuple(kernel.decision for kernel in kernels))
    report.check("convert.weights_report", strict)
    return report


def _check_arguments(params: object, model: object, args: object) -> None:
    if model is not None or args:
        raise TypeError(
            f"convert.weights: {type(params).__name__} is itself a model; model= and args= are "
            "for the parameters of flax.linen modules; drop them"
        )


def _kernels_of_tree(
    params: object, rules: tuple[Rule, ...], model: flax.linen.Module | None, args: Sequence[Any]
) -> tuple[dict[int, _Kernel], list[Any], Any]:
    """What the rules say of the leaves that are kernels, by number; all leaves; the structure."""
    if not isinstance(params, Mapping | nnx.State):
        raise TypeError(
            "convert.weights: needs a flax.nnx model or state, or flax.linen's parameters, got "
            f"{type(params).__name__}; of a flax.linen module pass what init gave"
        )
    layers: dict[str, Layer] = {}
    if model is not None:
        decided = linen_model.decisions(linen_model.original(model), (), *args)
        layers = {decision.layer.path: decision.layer for decision in decided}
    leaves, structure = jax.tree.flatten_with_path(
        params, is_leaf=lambda node: isinstance(node, Quantized | meta.AxisMetadata | nnx.Variable)
    )
    key_name = functools.partial(jax.tree_util.keystr, simple=True)
    paths = [tuple(key_name((key,)) for key in path) for path, _ in leaves]
    variables = any(names[0] == "params" for names in paths if len(names) > 1)
    kernels: dict[int, _Kernel] = {}
    for i, (names, (_, leaf)) in enumerate(zip(paths, leaves, strict=True)):
        value = _value(leaf)
        other = variables and names[0] != "params"
        if other or getattr(value, "ndim", 0) < 2 or names[-1] in _VECTORS:
            continue
        names = names[1:] if variables else names
        layer = _layer(names, value, layers.get("/".join(names[:-1])))
        kernels[i] = _Kernel.judge(rules, layer, value)
    return kernels, [leaf for _, leaf in leaves], structure


def _value(leaf: object) -> Any:
    return leaf[...] if isinstance(leaf, nnx.Variable) else meta.unbox(leaf)


def _layer(
    names: tuple[str, ...], value: jax.Array | np.ndarray | Quantized, known: Layer | None
) -> Layer:
    """What rules judge a parameter by: its layer as the model has it, or what its name implies."""
    name, path, shape = "/".join(names), "/".join(names[:-1]), tuple(value.shape)
    if names[-1] not in _KERNELS and not (known and known.kernel):
        return Layer(path=name, type=Unknown, kernel=shape)
    if known is not None and not issubclass(known.type, StoredParams):
        length = len(known.kernel or ())
        if known.kernel is None or known.kernel == shape[len(shape) - length :]:
            return dataclasses.replace(known, aliases=(*known.aliases, name))
        return Layer(path=name, type=known.type, kernel=shape)
    type_ = Unknown if known is None else known.type
    layer = Layer(path=path, aliases=(name,), type=type_, kernel=shape)
    if len(shape) > 2:
        return layer
    if names[-1] == "embedding":
        embedding = {"type": flax.linen.Embed, "shape": shape[::-1], "named_only": True}
        return dataclasses.replace(layer, axes=Axes.ordered(), **embedding)
    return dataclasses.replace(layer, shape=shape, axes=Axes.ordered(k_first=True))


def _kernels_of_model(
    model: nnx.Module, rules: tuple[Rule, ...]
) -> Iterator[tuple[Any, str, _Kernel]]:
    """Layers, the attributes that hold their kernels, and what the rules say of those."""
    for paths, layer in nnx_model.layers_of(model):
        known = nnx_model.known_layer(layer)
        kernel: Any = _matrix_of(layer) if known is None else known.kernel
        names = {id(v): name for name, v in vars(layer).items() if isinstance(v, nnx.Variable)}
        if id(kernel) not in names:
            continue
        facts = {} if known is None else dict(known.facts)
        if isinstance(getattr(layer, "recipe", None), Recipe):
            # A layer of ours reads what is stored, whatever its recipe.
            facts["obstacle"] = None
        stacked = () if known is None else known.stack
        facts["kernel"] = tuple(kernel.shape)[len(stacked) :]
        judged_as = _Kernel.judge(rules, nnx_model.as_layer(paths, layer, facts), kernel[...])
        yield layer, names[id(kernel)], judged_as


def _matrix_of(layer: object) -> nnx.Param | None:
    """The first parameter of two axes or more of a module that is no known layer."""
    if isinstance(layer, nnx_model.WITHOUT_PRODUCT):
        return None
    params = (value for value in vars(layer).values() if isinstance(value, nnx.Param))
    return next((value for value in params if len(getattr(value, "shape", ())) >= 2), None)
