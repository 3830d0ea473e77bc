"""flax.nnx: an unmodified model as a copy whose products follow rules.

Its call is traced, and what it multiplies is made anew in the jaxpr, as `convert.function` does it.
Modules become of a subclass whose methods stand in scopes of their names, which nnx has none of.
"""

import contextlib
import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import jax
from flax import nnx as flax_nnx
from flax.nnx import bridge
from jax.sharding import PartitionSpec

from mx_jax.axes import Axes
from mx_jax.convert.functions import traced_call
from mx_jax.convert.jaxpr import Module, in_module, tracing
from mx_jax.convert.products import (
    brings_recipe,
    conv_obstacle,
    shape_in_product,
    users_choice,
)
from mx_jax.convert.rules import Decision, Layer, Report, Rule, as_rules, decide
from mx_jax.jaxpr.read import of_arrays
from mx_jax.nn.layers import nnx_spec
from mx_jax.nn.nnx import RNG_STREAM, missing_stream, next_key

M = TypeVar("M", bound=flax_nnx.Module)


def nnx(
    model: M,
    rules: Rule | Sequence[Rule],
    *,
    rngs: flax_nnx.Rngs | None = None,
    strict: bool = False,
    methods: Sequence[str] = (),
) -> M:
    """A copy of a model whose layers follow rules. It shares the model's Variables.

    Modules are copied, Variables are not: training the copy trains the model, and a checkpoint of
    one is a checkpoint of the other. The model itself is not changed, and `original` takes the
    conversion back from a copy that came through split, merge or a transform. What is set on the
    copy's layers is static and compares by value: a rebuilt model does not retrace.

    The call of the model, or of a part of it, is traced, and what it multiplies is made anew in the
    jaxpr, as by `convert.function`: `convert.report` lists it. A warning of rules that match
    nothing comes when the model is first called.

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
      methods: names of methods that are called from outside, as `"encode"`, beside `__call__` and
        `attend`. Such a call is traced; another runs as it is written, so that its products outside
        of modules that it calls stay.

    Returns:
      A model of the same type, or of a subclass that looks like it.

    Raises:
      TypeError: not a flax.nnx module, or not rules.
      ValueError: rngs missing, and a forward product draws; a method that no module has; with
        strict, a rule that matched nothing.

    Examples:
      >>> from flax import nnx
      >>> import jax.numpy as jnp
      >>> from mx_jax import convert, recipes
      >>> model = nnx.Sequential(nnx.Linear(32, 64, rngs=nnx.Rngs(0)), nnx.relu)
      >>> quantized = convert.nnx(model, convert.Rule(".*", recipes.mxfp8()))
      >>> quantized(jnp.ones((4, 32))).shape, quantized.layers[0].kernel is model.layers[0].kernel
      ((4, 64), True)
    """
    if isinstance(methods, str):
        raise TypeError(f"convert.nnx: methods must be several names, got {methods=}")
    copy = converted(model, as_rules(rules, "convert.nnx"), rngs, strict, tuple(methods))
    public = {name for _, layer in layers_of(copy) for name in _methods_of(class_of(layer))}
    if missing := {*methods} - public:
        raise ValueError(
            "convert.nnx: methods must be names of public methods of the model or its layers, got "
            f"methods={tuple(methods)}, and no module has {', '.join(map(repr, sorted(missing)))}"
        )
    return copy


def converted(
    model: M,
    rules: tuple[Rule, ...],
    rngs: flax_nnx.Rngs | None,
    strict: bool | None = None,
    methods: tuple[str, ...] | None = None,
) -> M:
    """The result of `nnx`; with strict=None there is no warning of rules that match nothing, with
    methods=None they are those of a converted model."""
    copy = original(model)
    before: _Call | None = vars(model).get("mx_call") if methods is None else None
    calls = (*_CALLS, *(methods or ())) if before is None else before.model.methods
    conversion = _Conversion(rules, strict, calls)
    draws = any(rule.quantizes and rule.quantizes.is_stochastic for rule in rules)
    has_stream = rngs is not None and not {RNG_STREAM, "default"}.isdisjoint(rngs)
    for paths, layer in list(layers_of(copy)):
        path, known = paths[0], known_layer(layer)
        # The whole model's call warns of rules that matched nothing.
        if known is None and path and not _may_multiply(layer):
            continue
        conversion.modules[path] = _described(layer, paths[1:], known)
        # Products of other layers draw from the stream of the call that they are in.
        decision = known and decide(rules, as_layer(paths, layer, known.facts))
        recipe = None if decision is None else decision.recipe
        if decision is not None and decision.rule is not None:
            # A layer that this or that call does not reach is one all the same.
            conversion.used.add(decision.rule)
        if rngs is not None and has_stream:
            if (not path and draws) or (recipe is not None and recipe.is_stochastic):
                # For one layer, or for each of a stack.
                key = rngs[RNG_STREAM]()
                sizes = () if known is None else known.stack
                keys = jax.random.split(key, sizes) if sizes else key
                layer.mx_stream = flax_nnx.RngStream(keys, tag=RNG_STREAM)
        elif recipe is not None and recipe.output.is_stochastic:
            # Where gradients alone draw, they raise an error of their own.
            raise missing_stream(f"convert.nnx: {path!r}", recipe, rngs)
        layer.mx_call = flax_nnx.static(_Call(conversion, path))
        object.__setattr__(layer, "__class__", _converted_class(class_of(layer)))
    return copy


def original(model: M) -> M:
    """A copy of a model, converted or not, with the products that its layers had."""
    if not isinstance(model, flax_nnx.Module):
        raise TypeError(
            f"convert.nnx: needs a flax.nnx module, got {type(model).__name__}; "
            "use convert.linen for flax.linen"
        )
    copy = flax_nnx.clone(model, variables=False)
    for _, layer in list(flax_nnx.iter_modules(copy)):
        for name in {"mx_call", "mx_stream"} & vars(layer).keys():
            delattr(layer, name)
        object.__setattr__(layer, "__class__", class_of(layer))
    return copy


def decisions(
    model: Any, rules: tuple[Rule, ...], *args: object, **kwargs: object
) -> tuple[Decision, ...]:
    """What rules say of a model's layers, from an abstract trace of its call."""
    copy: Any = converted(model, rules, flax_nnx.Rngs(0))
    graph, state = flax_nnx.split(copy)

    def call(state: object, *args: object, **kwargs: object) -> None:
        flax_nnx.merge(graph, state)(*args, **kwargs)

    try:
        inspect.signature(copy).bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(
            f"convert.report: needs example arguments of a call of {type(copy).__name__}, got "
            f"others: {error}; convert.weights_report needs none"
        ) from None
    jax.eval_shape(*of_arrays(call, (state, *args), kwargs))
    return tuple(copy.mx_call.model.decisions)


# Layers -------------------------------------------------------------------------------------------

# They multiply nothing, or elementwise.
WITHOUT_PRODUCT = (
    flax_nnx.BatchNorm,
    flax_nnx.Dropout,
    flax_nnx.GroupNorm,
    flax_nnx.LayerNorm,
    flax_nnx.RMSNorm,
)


@dataclasses.dataclass(frozen=True)
class KnownLayer:
    """A layer of flax.nnx whose kernel is known.

    Attributes:
      kernel: its variable.
      stack: the leading axes of a stack of such layers, of nnx.vmap.
      facts: fields of `Layer`.
    """

    kernel: Any
    stack: tuple[int, ...]
    facts: dict[str, Any]


def known_layer(layer: object) -> KnownLayer | None:
    """What is known of a layer of flax.nnx; None if its call alone shows its products."""
    kernel: Any = getattr(layer, "kernel", None)
    named_only, obstacle = False, None
    if isinstance(layer, flax_nnx.Linear | flax_nnx.LinearGeneral):
        sizes = (getattr(layer, "batch_axis", ()), layer.in_features, layer.out_features)
        batch, contracting, kept = (1 if isinstance(x, int) else len(x) for x in sizes)
        ndim = batch + contracting + kept
        axes = Axes.ordered(batch=batch, kept=kept, contracting=contracting, k_first=True)
        axes = axes if contracting else None
    elif isinstance(layer, flax_nnx.Einsum):
        ndim = len(layer.kernel_shape)
        axes = einsum_axes(layer.einsum_str, tuple(layer.kernel_shape))
    elif isinstance(layer, flax_nnx.Conv):
        ndim, named_only = len(layer.kernel_shape), True
        axes = Axes.ordered(contracting=ndim - 1, k_first=True)
        obstacle = conv_obstacle(layer.feature_group_count, layer.input_dilation)
    elif isinstance(layer, flax_nnx.Embed):
        ndim, named_only, kernel = 2, True, layer.embedding
        axes = Axes.ordered()
    else:
        return None
    stored = tuple(kernel.shape)
    split = len(stored) - ndim
    single = stored[split:]
    shape = shape_in_product(axes, single)
    if shape is not None and isinstance(layer, flax_nnx.Conv):
        shape = (math.prod(single[:-2]), *single[-2:])
    facts = {
        "kernel": stored,
        "shape": shape,
        "named_only": named_only,
        "obstacle": (obstacle if shape else "contracts no axis") or users_choice(layer),
        "axes": axes,
    }
    return KnownLayer(kernel, stored[:split], facts)


def einsum_axes(subscripts: str, kernel: tuple[int, ...]) -> Axes | None:
    """A kernel's axes in an einsum of inputs and kernel; None if it contracts none of them."""
    inputs, _, out = subscripts.replace(" ", "").partition("->")
    left, _, letters = inputs.partition(",")
    # An ellipsis stands for axes that nothing contracts, in all operands that have it.
    ellipsis = len(kernel) - len(letters.replace("...", ""))
    letters = letters.replace("...", "." * ellipsis)
    left = left.replace("...", "." if "." in letters else "")
    if len(letters) != len(kernel):
        return None
    batch = tuple(i for i, c in enumerate(letters) if c in left and c in out)
    kept = tuple(i for i, c in enumerate(letters) if c not in left and c in out)
    # Blocks run along the last contracted letter in the input's order.
    contracting = tuple(letters.index(c) for c in left if c in letters and c not in out)
    return Axes(batch, kept, contracting) if contracting else None


def _may_multiply(layer: object) -> bool:
    is_flaxs = class_of(layer).__module__.startswith("flax.")
    return not isinstance(layer, WITHOUT_PRODUCT) and (callable(layer) or not is_flaxs)


def _described(layer: object, aliases: tuple[str, ...], known: KnownLayer | None) -> Module:
    spec = None if known is None else nnx_spec(known.kernel)
    if known is not None and spec is not None:
        spec = PartitionSpec(*spec[len(known.stack) :])
    # Attributes of a module that Flax does not know are its user's own.
    obstacle = brings_recipe(layer) if known is None else users_choice(layer)
    return Module(class_of(layer), aliases, obstacle, spec)


def as_layer(paths: tuple[str, ...], layer: object, facts: dict[str, Any]) -> Layer:
    """A layer as rules judge it; facts are `Layer`'s fields."""
    return Layer(path=paths[0], aliases=paths[1:], type=class_of(layer), **facts)


def layers_of(model: flax_nnx.Module) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every module of a model, once, with the paths that lead to it."""
    places = flax_nnx.find_duplicates(model)
    for path, layer in list(flax_nnx.iter_modules(model)):
        # Those too where it, or something above it, is shared.
        others = (
            (*other, *path[len(place) :])
            for group in places
            for place in group
            if path[: len(place)] == place
            for other in group
            if other != place
        )
        yield tuple("/".join(map(str, parts)) for parts in (path, *others)), layer


def class_of(layer: object) -> type:
    """The class that a module had before conversion."""
    return getattr(type(layer), "_mx_base", type(layer))


# Calls -------------------------------------------------------------------------------------------

_TAG = "mx_jax"
# What is called of a layer from outside of its model.
_CALLS = ("__call__", "attend")


@dataclasses.dataclass(frozen=True)
class _Conversion:
    """The rules of a converted model; static, equal for equal models."""

    rules: tuple[Rule, ...]
    # Whether a rule that matches nothing is an error; None: there is no warning either.
    strict: bool | None
    # Whose call from outside is traced.
    methods: tuple[str, ...]
    # By path.
    modules: dict[str, Module] = dataclasses.field(hash=False, default_factory=dict[str, Module])
    # Rules that matched something so far, and the decisions of the last call.
    used: set[int] = dataclasses.field(compare=False, default_factory=set[int])
    decisions: list[Decision] = dataclasses.field(compare=False, default_factory=list[Decision])


@dataclasses.dataclass(frozen=True)
class _Call:
    """The place of a module in a converted model."""

    model: _Conversion
    path: str


@functools.lru_cache(maxsize=1024)
def _converted_class(base: type) -> type:
    """A subclass that looks like its base, one for each, so that equal models have equal graphs:
    the methods that it does not have of flax.nnx, private ones apart, are those of a call."""
    looks = {name: getattr(base, name) for name in ("__module__", "__qualname__", "__doc__")}
    methods = {name: _in_call(name, method) for name, method in _methods_of(base).items()}
    made = {"_mx_base": base, "__reduce_ex__": _reduced}
    return type(base)(base.__name__, (base,), looks | methods | made)


def _methods_of(base: type) -> dict[str, Any]:
    inherited = {*dir(flax_nnx.Module)} - {"__call__"}
    members = {name: inspect.getattr_static(base, name) for name in {*dir(base)} - inherited}
    return {
        name: member
        for name, member in members.items()
        # nnx.jit makes objects of them.
        if callable(member) and hasattr(member, "__get__") and not isinstance(member, type)
        if not isinstance(member, staticmethod | classmethod)
        if name == "__call__" or name[0] != "_"
    }


def _reduced(layer: object, protocol: int) -> tuple[Any, ...]:
    """No module has the class by name: it is pickled by its base."""
    _, _, *state = object.__reduce_ex__(layer, 2)
    return _remade, (class_of(layer),), *state


def _remade(base: type) -> Any:
    cls: Any = _converted_class(base)
    return cls.__new__(cls)


def _in_call(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """A method whose products are its module's; the outermost call is traced."""

    @functools.wraps(method)
    def run(self: Any, *args: object, **kwargs: object) -> Any:
        here: _Call | None = vars(self).get("mx_call")
        if here is not None and tracing.value == here.model.rules:
            with in_module(here.path), _bridged(self):
                return method(self, *args, **kwargs)
        if here is None or name not in here.model.methods:
            return method(self, *args, **kwargs)
        return _traced(self, name, here, args, kwargs)

    return run


@contextlib.contextmanager
def _bridged(layer: object) -> Iterator[None]:
    """A call of a linen module in a model of nnx, which takes every attribute for a variable."""
    names = {"mx_call", "mx_stream"} & vars(layer).keys()
    hidden = {name: vars(layer).pop(name) for name in names if isinstance(layer, bridge.ToNNX)}
    try:
        yield
    finally:
        vars(layer).update(hidden)


def _traced(
    self: Any, name: str, here: _Call, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """A call as a function of the state of all that takes part, which changes where it did."""
    model = here.model
    key = next_key(self.mx_stream, "convert.nnx") if "mx_stream" in vars(self) else None
    nodes = (self, args, kwargs)
    before = flax_nnx.graphdef(nodes)
    with flax_nnx.update_context(_TAG):
        with flax_nnx.split_context(_TAG) as context:
            graph, params, rest = context.split(nodes, flax_nnx.Param, ...)

        def call(params: flax_nnx.State, rest: flax_nnx.State) -> Any:
            with flax_nnx.merge_context(_TAG, True) as context:
                inner = context.merge(graph, params, rest)
            result = getattr(type(self), name)(inner[0], *inner[1], **inner[2])
            same = flax_nnx.graphdef(inner) == before
            with flax_nnx.split_context(_TAG) as context:
                after, state = context.split(inner)
            return result, state, None if same else after

        decisions, run = traced_call(call, (params, rest), {}, model.rules, model.modules)
        model.decisions[:] = decisions
        report = Report(rules=model.rules, decisions=decisions)
        if not here.path and name == "__call__" and model.strict is not None:
            report.check("convert.nnx", model.strict, model.used)
        model.used.update(report.used)
        remedy = f"convert the model with rngs=nnx.Rngs({RNG_STREAM}=seed)"
        if here.path:
            remedy = f"call the model, or have convert.nnx(methods=) name what calls {here.path!r}"
        result, state, after = run(key, remedy)
        if after is not None:
            with flax_nnx.merge_context(_TAG, False) as context:
                context.merge(after, state)
            return result
    old = dict(flax_nnx.to_flat_state(flax_nnx.merge_state(params, rest)))
    # Whether what a Variable holds is what it held.
    changed = [
        (at, new)
        for at, new in flax_nnx.to_flat_state(state)
        if jax.tree.structure(new) != jax.tree.structure(old[at])
        or any(x is not y for x, y in zip(*map(jax.tree.leaves, (new, old[at])), strict=True))
    ]
    if changed:
        flax_nnx.update(nodes, flax_nnx.from_flat_state(changed))
    return result
