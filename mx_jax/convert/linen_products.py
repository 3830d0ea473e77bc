"""flax.linen: products that ask the rules when they are made, with the shapes they have."""

import contextlib
import contextvars
import dataclasses
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from mx_jax.convert.kind import Kind
from mx_jax.convert.kinds import EINSUM
from mx_jax.convert.rules import Decision, Layer, Rule, decide
from mx_jax.nn.layers import linen_recipe, named_in_errors, ungathered
from mx_jax.nn.linen import RNG_STREAM
from mx_jax.ops.tags import tag
from mx_jax.packed import Quantized
from mx_jax.recipes import Recipe, high_precision


class Recorder:
    """Decisions in the order in which a trace meets them, and layers that no rule could reach.

    Attributes:
      rules: whose decisions are kept.
      reports: whether every layer counts, not only those that some rule could convert.
    """

    def __init__(self, rules: tuple[Rule, ...], *, reports: bool):
        self.rules, self.reports = rules, reports
        self._decisions: dict[tuple[str, tuple[int, ...] | None], Decision] = {}
        self._bare: dict[str, Layer] = {}

    def add(self, decision: Decision) -> None:
        """Keep a decision; a layer called again, or traced again, adds nothing."""
        self._decisions.setdefault((decision.layer.path, decision.layer.kernel), decision)

    def add_bare(self, layer: Layer) -> None:
        """Keep a layer with an obstacle, in case nothing else is said of it."""
        self._bare.setdefault(layer.path, layer)

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """All of them; layers out of reach come last."""
        known = {path for path, _ in self._decisions}
        bare = [layer for path, layer in self._bare.items() if path not in known]
        return (*self._decisions.values(), *(decide((), layer) for layer in bare))


# Where decisions go while models run.
_recorders: contextvars.ContextVar[tuple[Recorder, ...]] = contextvars.ContextVar(
    "recorders", default=()
)


@contextlib.contextmanager
def recorded(rules: tuple[Rule, ...], *, reports: bool) -> Iterator[Recorder]:
    """A recorder of what these rules decide meanwhile."""
    record = Recorder(rules, reports=reports)
    token = _recorders.set((*_recorders.get(), record))
    try:
        yield record
    finally:
        _recorders.reset(token)


def recorders_of(rules: tuple[Rule, ...]) -> list[Recorder]:
    """The recorders that keep these rules' decisions now."""
    return [record for record in _recorders.get() if record.rules == rules]


class Lender:
    """One layer in one call: its path, and the rules to ask.

    Equal if rules and path are, so that a jit inside the layer finds what it compiled; with a
    stochastic recipe never equal, because each call draws from its own scope.
    """

    def __init__(self, rules: tuple[Rule, ...], layer: nn.Module, path: str):
        self.rules, self.layer, self.path = rules, layer, path
        stochastic = any(rule.quantizes and rule.quantizes.is_stochastic for rule in rules)
        self._identity = (rules, path, id(self) if stochastic else 0)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Lender) and self._identity == other._identity

    def __hash__(self) -> int:
        return hash(self._identity)

    def decide(self, product: str | None = None, **facts: Any) -> Decision:
        """The rules' decision about the layer, or about one named product of it.

        Args:
          product: name of the product, a further part of the path.
          **facts: fields of `Layer`.
        """
        path = self.path if product is None else "/".join(filter(None, (self.path, product)))
        decision = decide(self.rules, Layer(path=path, type=type(self.layer), **facts))
        for record in recorders_of(self.rules):
            record.add(decision)
        return decision

    def note(self, obstacle: str) -> None:
        """Tell the report why no rule reaches the layer, in case nothing else is said of it."""
        for record in recorders_of(self.rules):
            record.add_bare(Layer(path=self.path, type=type(self.layer), obstacle=obstacle))

    def key(self, recipe: Recipe) -> jax.Array | None:
        """A key from the layer's `"quantize"` stream, if the recipe draws random bits.

        As everywhere in Flax, `"params"` stands in for a stream that is not there: nn.scan and
        nn.vmap pass on only the streams they list, and every model lists that one.
        """
        if not recipe.is_stochastic:
            return None
        if self.layer.has_rng(RNG_STREAM):
            return self.layer.make_rng(RNG_STREAM)
        if self.layer.is_initializing():
            # Drawing from "params" here would change what the next parameter is drawn from.
            return jax.random.key(0)
        if self.layer.has_rng("params"):
            return self.layer.make_rng("params")
        if not recipe.fwd.is_stochastic:
            # Gradients tell themselves that they need a key.
            return None
        raise ValueError(
            f"{self.path or type(self.layer).__name__}: recipe {recipe.name!r} draws random bits "
            f"and needs the {RNG_STREAM!r} stream; call apply(..., rngs={{{RNG_STREAM!r}: key}}). "
            f"Below nn.scan or nn.vmap, list {RNG_STREAM!r} in split_rngs, or pass the key as "
            "'params', a stream that they list already"
        )


def named(decision: Decision) -> AbstractContextManager[None]:
    """Say in an error which layer and rule it comes from."""
    layer = decision.layer
    return named_in_errors(
        f"{layer.path!r} ({layer.type.__name__}), converted by rule {decision.rule}"
    )


@dataclasses.dataclass(frozen=True)
class Product:
    """What a layer multiplies with in place of its own product.

    Attributes:
      lender: who asks the rules.
      kind: of the layer.
      default: what the layer calls itself.
    """

    lender: Lender
    kind: Kind
    default: Callable[..., Any]

    def __call__(self, lhs: Any, rhs: Any, *args: Any, **options: Any) -> Any:
        """Ask the rules, then multiply with their recipe, or as the layer would have."""
        facts = self.kind.facts(self.lender.layer, tuple(rhs.shape), *args)
        decision = self.lender.decide(**facts)
        recipe = decision.recipe
        if recipe is None and isinstance(rhs, Quantized):
            # A stored kernel is what it is, and only the input is as it was.
            if self.kind.reads_stored:
                recipe = high_precision()
            else:
                rhs = rhs.dequantize()
        if recipe is None:
            return self.default(lhs, rhs, *args, **options)
        with named(decision):
            key = self.lender.key(recipe)
            own = linen_recipe if self.kind.rhs_is_kernel else ungathered
            recipe = own(self.lender.layer, recipe)
            return self.kind.operation(recipe)(lhs, rhs, *args, **options, key=key)


@dataclasses.dataclass(frozen=True)
class AttentionEinsum:
    """One of the two products inside an attention: `query key` or `weights value`."""

    lender: Lender
    product: str | None
    precision: Any

    def __call__(self, subscripts: str, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        """Ask the rules, then multiply with their recipe, or as the layer would have."""
        decision = self.lender.decide(self.product)
        if decision.recipe is None:
            return jnp.einsum(subscripts, lhs, rhs, precision=self.precision)
        name = self.product
        with named(decision), contextlib.nullcontext() if name is None else tag(name):
            recipe = ungathered(self.lender.layer, decision.recipe)
            key, multiply = self.lender.key(recipe), EINSUM.operation(recipe)
            return multiply(subscripts, lhs, rhs, precision=self.precision, key=key)


@dataclasses.dataclass(frozen=True)
class Makes:
    """A factory of one thing: what Flax's `*_cls` attributes take."""

    product: Any

    def __call__(self) -> Any:
        """The thing."""
        return self.product


@dataclasses.dataclass(frozen=True)
class WithoutPrecision:
    """An attention function that takes no precision: Flax refuses it beside an einsum.

    The einsums carry the precision instead.
    """

    attention_fn: Callable[..., jax.Array]

    @property
    def __signature__(self) -> inspect.Signature:
        signature = inspect.signature(self.attention_fn)
        parameters = [p for p in signature.parameters.values() if p.name != "precision"]
        return signature.replace(parameters=parameters)

    def __call__(self, *args: Any, **options: Any) -> jax.Array:
        """The attention function's own answer."""
        return self.attention_fn(*args, **options)
