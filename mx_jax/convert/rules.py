"""Rules: which layer gets which recipe, decided by path, type and size."""

import dataclasses
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from mx_jax.axes import Axes
from mx_jax.convert.caches import CacheFormat
from mx_jax.formats import BlockFormat
from mx_jax.ops.arguments import as_recipe
from mx_jax.recipes import Recipe

# The kernel as a filter sees it: contracting axes in order, then all kept axes merged into one;
# None where there is no kernel (the two products of an attention).
Shape = tuple[int, ...] | None

Filter = Callable[[str, Shape, Recipe | None], bool]


@dataclasses.dataclass(frozen=True)
class Rule:
    """Layers by path, and the recipe for them. The first rule that matches a layer decides.

    Attributes:
      pattern: regular expression that the whole path has to match (`re.fullmatch`). A path joins
        the names of the parameter tree by `/`, relative to the converted model:
        `"encoder/block_3/attention/query"`; the model itself is `""`.
      recipe: what to quantize in the layer's products, or a recipe's name; None leaves it in high
        precision.
      types: layer type, or types; None: every type but embeddings, convolutions and layers that
        are not Flax's, which only a rule that names them converts.
      filter: `(path, shape, recipe) -> bool` with the kernel's shape as `(*contracting, kept)`,
        or None for a product without kernel; False hands the layer on to the next rule. May have a
        method `why_not` with the same arguments, whose text the report quotes. Use a function
        defined once, or a frozen value: a fresh lambda is a new rule and retraces.
      gather: mesh axes along which kernels are gathered as codes, in place of the recipe's own:
        see `mx_jax.sharding.Gather`. Flax's metadata say where the kernels lie.
      cache: format of the keys and values that an attention keeps when it decodes, whose path ends
        in `/cache`: a block format, its name, or a `CacheFormat`; None leaves them as they are.

    Raises:
      ValueError: a pattern that is no regular expression, a name that is no recipe's, or a format
        that a cache cannot have.
      TypeError: a recipe, types or filter of another type.

    Examples:
      >>> from mx_jax import convert, recipes
      >>> rules = [
      ...     convert.Rule(r".*/(query|key)", None),
      ...     convert.Rule(r".*", recipes.mxfp8(), filter=convert.gains),
      ... ]
    """

    pattern: str
    recipe: Recipe | str | None
    _: dataclasses.KW_ONLY
    types: type | tuple[type, ...] | None = None
    filter: Filter | None = None
    gather: Any = None
    cache: CacheFormat | BlockFormat | str | None = None

    def __post_init__(self):
        try:
            re.compile(self.pattern)
        except (re.error, TypeError) as error:
            raise ValueError(
                f"Rule: pattern must be a regular expression, got pattern={self.pattern!r} "
                f"({error}); for everything write '.*', not '*'"
            ) from None
        if self.recipe is not None:
            recipe = as_recipe(self.recipe, f"Rule {self.pattern!r}", Recipe)
            if self.gather is not None:
                recipe = recipe.with_(gather=self.gather)
            object.__setattr__(self, "recipe", recipe)
        if self.cache is not None and not isinstance(self.cache, CacheFormat):
            object.__setattr__(self, "cache", CacheFormat(self.cache))
        if self.types is not None:
            types = tuple(self.types) if isinstance(self.types, tuple | list) else (self.types,)
            if not all(isinstance(entry, type) for entry in types):
                raise TypeError(
                    f"Rule {self.pattern!r}: types must be classes, e.g. flax.linen.Dense, "
                    f"got types={self.types!r}"
                )
            object.__setattr__(self, "types", types)
        if self.filter is not None and not callable(self.filter):
            raise TypeError(
                f"Rule {self.pattern!r}: filter must be a function of (path, shape, recipe), "
                f"got filter={self.filter!r}"
            )

    @property
    def quantizes(self) -> Recipe | None:
        """The recipe, also where it was given by name; None for high precision."""
        assert not isinstance(self.recipe, str)
        return None if self.recipe is None or self.recipe.is_high_precision else self.recipe

    @property
    def cache_format(self) -> CacheFormat | None:
        """The format of caches, also where it was given by name."""
        assert self.cache is None or isinstance(self.cache, CacheFormat)
        return self.cache

    def __str__(self) -> str:
        return repr(self.pattern)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layer:
    """What rules judge: one layer, or one product of it.

    Attributes:
      path: names joined by `/`.
      aliases: other paths of a layer that the model holds in several places.
      type: its class.
      kernel: shape of its kernel as stored.
      shape: that shape as filters see it.
      named_only: whether only a rule that names its type converts it.
      obstacle: why it cannot be converted whatever the rules say, or None.
      axes: of the kernel as stored, in the product; None where they are not known.
      input: shape of the other operand, where a trace tells it.
      is_cache: whether it is no product, but what an attention keeps when it decodes.

    Examples:
      >>> import flax.linen as nn, jax.numpy as jnp
      >>> from mx_jax import convert
      >>> heads = nn.DenseGeneral((4, 8))
      >>> found = convert.report(heads, convert.Rule(".*", "mxfp8"), jnp.ones((2, 64)))
      >>> layer = found.decisions[0].layer
      >>> layer.type.__name__, layer.kernel, layer.shape
      ('DenseGeneral', (64, 4, 8), (64, 32))
    """

    path: str
    aliases: tuple[str, ...] = ()
    type: type
    kernel: tuple[int, ...] | None = None
    shape: Shape = None
    named_only: bool = False
    obstacle: str | None = None
    axes: Axes | None = None
    input: tuple[int, ...] | None = None
    is_cache: bool = False


class Unknown:
    """The type of a layer of which only the parameters are there."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decision:
    """What the rules say of one layer.

    Attributes:
      layer: the layer.
      rule: index of the rule that decided, or None.
      recipe: what the layer gets; None: it stays in high precision.
      reason: why it stays.
      cache: what a cache gets; None: it stays as it is.

    Examples:
      >>> import flax.linen as nn, jax.numpy as jnp
      >>> from mx_jax import convert
      >>> model = nn.Sequential([nn.Embed(100, 64), nn.Dense(8)])
      >>> found = convert.report(model, convert.Rule(".*", "mxfp8"), jnp.array([1, 2]))
      >>> for decision in found.decisions:
      ...     print(decision.layer.path, "|", decision.reason or decision.recipe.name)
      layers_0 | rule 0: only a rule with types=Embed converts it
      layers_1 | mxfp8
    """

    layer: Layer
    rule: int | None
    recipe: Recipe | None
    reason: str = ""
    cache: CacheFormat | None = None

    @property
    def gets(self) -> str | None:
        """Name of the recipe or of the cache's format; None: it stays as it is."""
        return self.recipe.name if self.recipe else self.cache and self.cache.name


def as_rules(rules: Rule | Sequence[Rule], operation: str) -> tuple[Rule, ...]:
    """The rules as a tuple.

    Raises:
      TypeError: anything that is not a Rule.
    """
    # A name is a sequence too, but one thing that is no rule.
    if isinstance(rules, str) or not isinstance(rules, Iterable):
        entries: tuple[Any, ...] = (rules,)
    else:
        entries = tuple(rules)
    for entry in entries:
        if not isinstance(entry, Rule):
            raise TypeError(
                f"{operation}: rules must be Rule objects, got {entry!r}; write "
                "[convert.Rule('.*', recipe)]"
            )
    return entries


def decide(rules: tuple[Rule, ...], layer: Layer) -> Decision:
    """The first rule that matches, with the reasons of those that handed the layer on."""
    if layer.obstacle is not None:
        return Decision(layer=layer, rule=None, recipe=None, reason=layer.obstacle)
    notes: list[str] = []
    for index, rule in enumerate(rules):
        if not any(re.fullmatch(rule.pattern, path) for path in (layer.path, *layer.aliases)):
            continue
        note = _handed_on(rule, layer)
        if note is None:
            if layer.is_cache and rule.cache is not None:
                return Decision(layer=layer, rule=index, recipe=None, cache=rule.cache_format)
            if layer.is_cache or rule.quantizes is None:
                # The layer's own product then, to the bit, whatever order it multiplies in.
                return Decision(layer=layer, rule=index, recipe=None, reason="kept by its rule")
            return Decision(layer=layer, rule=index, recipe=rule.quantizes)
        if note:
            notes.append(f"rule {index}: {note}")
    return Decision(
        layer=layer, rule=None, recipe=None, reason="; ".join(notes) or "no rule matches"
    )


def _handed_on(rule: Rule, layer: Layer) -> str | None:
    """Why a rule whose pattern matches hands a layer on, "" for no reason; None: it decides."""
    types: Any = rule.types
    if types is None and layer.named_only:
        return f"only a rule with types={layer.type.__name__} converts it"
    if types is not None and layer.type is Unknown:
        return "parameters alone do not tell types: give the model"
    if types is not None and not issubclass(layer.type, types):
        return ""
    recipe: Any = rule.recipe
    if rule.filter is None or rule.filter(layer.path, layer.shape, recipe):
        return None
    why_not = getattr(rule.filter, "why_not", None)
    if why_not is not None:
        return why_not(layer.path, layer.shape, recipe)
    return f"{getattr(rule.filter, '__name__', rule.filter)} says no"
