"""Rules: which layer gets which recipe, by path, type and size; what is decided, as a table."""

import dataclasses
import math
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from mx_jax.axes import Axes
from mx_jax.formats import BlockFormat, Whole
from mx_jax.ops.arguments import as_recipe
from mx_jax.recipes import MatmulSpec, Recipe

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
      types: layer type, or types, of products that a trace finds also `convert.DotGeneral` and the
        like; None: every type but embeddings, convolutions and `nnx.LoRA`, which only a rule that
        names them converts.
      filter: `(path, shape, recipe) -> bool` with the kernel's shape as `(*contracting, kept)`,
        or None for a product without kernel; False hands the layer on to the next rule. May have a
        method `why_not` with the same arguments, whose text the report quotes. Use a function
        defined once, or a frozen value: a fresh lambda is a new rule and retraces.
      gather: mesh axes along which kernels are gathered as codes, in place of the recipe's own:
        see `mx_jax.sharding.Gather`. Flax's metadata say how the kernels are sharded.

    Raises:
      ValueError: a pattern that is no regular expression, or a name that is no recipe's.
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

    def __post_init__(self):
        try:
            re.compile(self.pattern)
        except (re.error, TypeError, RecursionError, OverflowError) as error:
            raise ValueError(
                f"Rule: pattern must be a regular expression, got pattern={self.pattern!r} "
                f"({error}); for everything write '.*', not '*'"
            ) from None
        if self.recipe is not None:
            recipe = as_recipe(self.recipe, f"Rule {self.pattern!r}", Recipe)
            if self.gather is not None:
                recipe = dataclasses.replace(recipe, gather=self.gather)
            object.__setattr__(self, "recipe", recipe)
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
      input: shape of the other operand, where a trace shows it.
      of_activations: whether neither operand is a weight, as far as that is known.
      product: its type `DotGeneral`, `RaggedDot` or `Conv`, where a trace shows it.

    Examples:
      >>> import flax.linen as nn, jax.numpy as jnp
      >>> from mx_jax import convert
      >>> heads = nn.DenseGeneral((4, 8))
      >>> report = convert.report(heads, convert.Rule(".*", "mxfp8"), jnp.ones((2, 64)))
      >>> layer = report.decisions[0].layer
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
    of_activations: bool = False
    product: Any = None


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

    Examples:
      >>> import flax.linen as nn, jax.numpy as jnp
      >>> from mx_jax import convert
      >>> model = nn.Sequential([nn.Embed(100, 64), nn.Dense(8)])
      >>> report = convert.report(model, convert.Rule(".*", "mxfp8"), jnp.array([1, 2]))
      >>> for decision in report.decisions:
      ...     print(decision.layer.path, "|", decision.reason or decision.recipe.name)
      layers_0 | rule 0: only a rule with types=Embed converts it
      layers_1 | mxfp8
    """

    layer: Layer
    rule: int | None = None
    recipe: Recipe | None = None
    reason: str = ""


def as_rules(rules: Rule | Sequence[Rule], operation: str) -> tuple[Rule, ...]:
    """The rules as a tuple."""
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
        return Decision(layer=layer, reason=layer.obstacle)
    notes: list[str] = []
    for index, rule in enumerate(rules):
        if not any(re.fullmatch(rule.pattern, path) for path in (layer.path, *layer.aliases)):
            continue
        note = _handed_on(rule, layer)
        if note is None:
            if rule.quantizes is None:
                # The layer's own product then, to the bit, whatever order it multiplies in.
                return Decision(layer=layer, rule=index, reason="kept by its rule")
            return Decision(layer=layer, rule=index, recipe=rule.quantizes)
        if note:
            notes.append(f"rule {index}: {note}")
    return Decision(layer=layer, reason="; ".join(notes) or "no rule matches")


def _handed_on(rule: Rule, layer: Layer) -> str | None:
    """Why a rule whose pattern matches hands a layer on, "" for no reason; None: it decides."""
    types: Any = rule.types
    if types is None and layer.named_only:
        of_function = "convert." if layer.type is layer.product else ""
        return f"only a rule with types={of_function}{layer.type.__name__} converts it"
    if types is not None and layer.type is Unknown:
        return "parameters alone do not tell types: give the model"
    if types is not None and not any(
        issubclass(known, types) for known in (layer.type, layer.product) if known is not None
    ):
        return ""
    recipe: Any = rule.recipe
    spec = None if rule.quantizes is None else rule.quantizes.output
    if layer.of_activations and spec is not None and spec.lhs is None and spec.rhs is not None:
        return "its recipe quantizes weights alone, and neither operand is one"
    if rule.filter is None or rule.filter(layer.path, layer.shape, recipe):
        return None
    why_not = getattr(rule.filter, "why_not", None)
    if why_not is not None:
        return why_not(layer.path, layer.shape, recipe)
    return f"{getattr(rule.filter, '__name__', rule.filter)} says no"


# Reports -----------------------------------------------------------------------------------------

COLUMNS = ("layer", "type", "kernel", "rule", "recipe")


class UnusedRuleWarning(UserWarning):
    """A rule decided about no layer of a model, or there was no rule at all.

    Examples:
      >>> import warnings, flax.linen as nn, jax.numpy as jnp
      >>> from mx_jax import convert
      >>> rules = [convert.Rule(".*", "mxfp8"), convert.Rule("haed", None)]
      >>> with warnings.catch_warnings():
      ...     warnings.simplefilter("error", convert.UnusedRuleWarning)
      ...     convert.report(nn.Dense(8), rules, jnp.ones((2, 64)))
      Traceback (most recent call last):
      mx_jax.convert.rules.UnusedRuleWarning: convert.report: rules that matched no ...
    """


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """What rules do to a model. Print it.

    Attributes:
      rules: the rules, in order.
      decisions: one for each layer, in the model's order.

    Examples:
      >>> import flax.linen as nn, jax.numpy as jnp
      >>> from mx_jax import convert
      >>> rules = [convert.Rule("layers_0", "mxfp8"), convert.Rule(".*", None)]
      >>> model = nn.Sequential([nn.Dense(64), nn.relu, nn.Dense(10)])
      >>> report = convert.report(model, rules, jnp.ones((4, 64)))
      >>> print(report.summary)
      1 of 2 layers converted
      >>> [decision.rule for decision in report.decisions]
      [0, 1]
    """

    rules: tuple[Rule, ...]
    decisions: tuple[Decision, ...]

    @property
    def used(self) -> set[int]:
        """Indices of the rules that decided about some layer."""
        return {decision.rule for decision in self.decisions if decision.rule is not None}

    @property
    def unused(self) -> tuple[int, ...]:
        """Indices of the rules that decided about no layer."""
        return tuple(sorted({*range(len(self.rules))} - self.used))

    @property
    def num_converted(self) -> int:
        """How many layers get a recipe."""
        return sum(decision.recipe is not None for decision in self.decisions)

    @property
    def summary(self) -> str:
        """How many layers are converted, and which rules are unused."""
        text = f"{self.num_converted} of {len(self.decisions)} layers converted"
        unused = [f"rule {i} ({self.rules[i]}) matched nothing" for i in self.unused]
        return "\n".join([text, *unused])

    def check(self, operation: str, strict: bool, used: set[int] | None = None) -> None:
        """Warn of rules that matched nothing, or raise ValueError if strict.

        Args:
          operation: for the message.
          strict: whether to raise.
          used: rules that matched at other times; those that match here are added.
        """
        used = set() if used is None else used
        unused = [index for index in self.unused if index not in used]
        if self.rules and not unused:
            used.update(self.used)
            return
        rules = ", ".join(f"{index} ({self.rules[index]})" for index in unused)
        paths = ", ".join(repr(decision.layer.path) for decision in self.decisions[:8])
        more = ", ..." if len(self.decisions) > 8 else ""
        complaint = f"rules that matched no layer: {rules}" if rules else "there are no rules"
        if self.num_converted == 0 and not used:
            complaint += "; no layer is converted"
        # Of layers that a pattern matches, and that only another rule would convert.
        left = {decision.reason: None for decision in self.decisions if decision.layer.named_only}
        kept = "".join(f"; {reason}" for reason in left if "types=" in reason)
        hint = "patterns match whole paths, and the first rule that matches decides"
        if obstacles := self._obstacles(unused):
            hint = "they match what cannot be converted: " + "; ".join(
                f"{', '.join(map(repr, paths))}: {reason}" for reason, paths in obstacles.items()
            )
        text = (
            f"{operation}: {complaint}; the model has {paths or 'no layer that a rule reaches'}"
            f"{more}{kept}; {hint}"
        )
        warn_or_raise(text, strict)
        used.update(self.used)

    def _obstacles(self, indices: Iterable[int]) -> dict[str, list[str]]:
        """Why what rules match is not converted, whatever they say, and the paths of it."""
        obstacles: dict[str, list[str]] = {}
        for decision in self.decisions:
            layer = decision.layer
            matches = (re.fullmatch(self.rules[index].pattern, layer.path) for index in indices)
            if layer.obstacle is not None and any(matches):
                obstacles.setdefault(layer.obstacle, []).append(layer.path)
        return obstacles

    def __str__(self) -> str:
        return f"{aligned([COLUMNS, *map(_row, self.decisions)])}\n{self.summary}"


def warn_or_raise(text: str, strict: bool) -> None:
    """Warn the caller of the caller's caller, or raise ValueError if strict."""
    if strict:
        raise ValueError(text)
    warnings.warn(text, UnusedRuleWarning, stacklevel=4)


def _row(decision: Decision) -> tuple[str, ...]:
    layer = decision.layer
    kernel = _size(layer.kernel) if layer.kernel else "-"
    if layer.input is not None:
        kernel = f"{_size(layer.input)} by {kernel}"
    rule = "-" if decision.rule is None else str(decision.rule)
    recipe = decision.recipe.name if decision.recipe else f"({decision.reason})"
    return (layer.path or ".", layer.type.__name__, kernel, rule, recipe)


def _size(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


# Filters -----------------------------------------------------------------------------------------


# When a product of `[m, k]` and `[k, n]` is too small to gain, by which axes of an operand share a
# scale (all kept axes, all contracting axes): a number that k and n must be multiples of, and pairs
# (k, n): no gain where both sizes are at most these, None for any size. The numbers are torchao's,
# measured on H100: `_auto_filter_for_tensorwise` and `_auto_filter_for_rowwise` of torchao 0.18.
# Formats with blocks have no measured limits; their block is the multiple.
_Pairs = tuple[tuple[int | None, int | None], ...]
_LIMITS: dict[tuple[bool, bool], tuple[int, _Pairs]] = {
    (True, True): (16, ((4096, 1024),)),
    (False, True): (16, ((None, 2048), (1024, None), (2048, 4096))),
    (False, False): (1, ()),
}


@dataclasses.dataclass(frozen=True)
class AutoFilter:
    """Whether a layer is large and aligned enough for its recipe to pay. Pure.

    `convert.gains` is the one without `skip`.

    Attributes:
      skip: layers whose path contains one of these are left out.

    Examples:
      >>> from mx_jax import convert, recipes
      >>> convert.gains("mlp/up", (1024, 4096), recipes.mxfp8())
      True
      >>> convert.gains.why_not("mlp/up", (1000, 4096), recipes.mxfp8())
      'k=1000 is no multiple of 32 (mxfp8_e4m3)'
      >>> convert.AutoFilter(("head",)).why_not("lm_head", (1024, 4096), recipes.mxfp8())
      "the path contains 'head'"
    """

    skip: tuple[str, ...] = ()

    def __call__(self, path: str, shape: Shape, recipe: Recipe | str | None) -> bool:
        """Whether converting the layer should pay; the arguments are a rule's filter's."""
        return self.why_not(path, shape, recipe) is None

    def why_not(self, path: str, shape: Shape, recipe: Recipe | str | None) -> str | None:
        """The reason against converting the layer, or None.

        Args:
          path: of the layer.
          shape: `(*contracting, kept)` of the kernel, or None.
          recipe: what the layer would get, or its name.
        """
        for part in self.skip:
            if part in path:
                return f"the path contains {part!r}"
        if recipe is not None:
            recipe = as_recipe(recipe, type(self).__name__, Recipe)
        if recipe is None or recipe.is_high_precision:
            return "its recipe quantizes nothing"
        if shape is None:
            return "no kernel whose axes are known"
        return _misaligned(shape, recipe) or _too_small(shape, recipe)


gains = AutoFilter()


def _limits(spec: MatmulSpec) -> Iterator[tuple[BlockFormat, int, _Pairs]]:
    """The format of each operand that has one, and when products by it are too small."""
    for operand in filter(None, (spec.lhs, spec.rhs)):
        kept, contracting = (isinstance(size, Whole) for size in operand.format.block)
        yield operand.format, *_LIMITS[kept, contracting]


def _misaligned(shape: tuple[int, ...], recipe: Recipe) -> str | None:
    """The product contracts k, the gradient of the input contracts n; the rows are not known."""
    # Blocks run along the last contracting axis alone.
    k, n = ("k", shape[-2]), ("n", shape[-1])
    for spec, (contracting, kept) in ((recipe.output, (k, n)), (recipe.grad_input, (n, k))):
        for format, multiple, _ in _limits(spec):
            # Only the right operand is the kernel: its kept blocks run along the other axis.
            kernel = spec.rhs is not None and format == spec.rhs.format
            kept_block = format.block[0] if kernel else 1
            for (name, size), block in ((contracting, format.block[1]), (kept, kept_block)):
                divisor = math.lcm(multiple, 1 if isinstance(block, Whole) else block)
                if size % divisor:
                    return f"{name}={size} is no multiple of {divisor} ({format.name})"
    return None


def _too_small(shape: tuple[int, ...], recipe: Recipe) -> str | None:
    sizes = {"k": math.prod(shape[:-1]), "n": shape[-1]}
    for spec in (recipe.output, recipe.grad_input, recipe.grad_weight):
        # One operand alone in low precision saves memory, not time: sizes say nothing then.
        if spec.lhs is None or spec.rhs is None:
            continue
        for format, _, pairs in _limits(spec):
            for pair in pairs:
                limits = {name: limit for name, limit in zip("kn", pair, strict=True) if limit}
                if all(sizes[name] <= limit for name, limit in limits.items()):
                    texts = (f"{name}={sizes[name]} <= {limit}" for name, limit in limits.items())
                    return f"too small to gain: {', '.join(texts)} ({format.name})"
    return None


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Lines of text whose columns are aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
