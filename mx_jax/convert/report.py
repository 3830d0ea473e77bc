"""Reports: every layer's decision as a table, and the rules that decided nothing."""

import contextlib
import contextvars
import dataclasses
import warnings
from collections.abc import Iterable, Iterator, Set

from rich.table import Table
from rich.text import Text

from mx_jax.convert.rules import Decision, Layer, Rule, decide
from mx_jax.inspect.tables import aligned

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
      mx_jax.convert.report.UnusedRuleWarning: convert.report: rules that matched no ...
    """


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """What rules do to a model. Print it, or hand it to rich.

    Attributes:
      rules: the rules, in order.
      decisions: one for each layer, in the model's order.

    Examples:
      >>> import flax.linen as nn, jax.numpy as jnp
      >>> from mx_jax import convert
      >>> rules = [convert.Rule("layers_0", "mxfp8"), convert.Rule(".*", None)]
      >>> model = nn.Sequential([nn.Dense(64), nn.relu, nn.Dense(10)])
      >>> found = convert.report(model, rules, jnp.ones((4, 64)))
      >>> print(found.summary)
      1 of 2 layers converted
      >>> [decision.rule for decision in found.decisions]
      [0, 1]
    """

    rules: tuple[Rule, ...]
    decisions: tuple[Decision, ...]

    @property
    def used(self) -> set[int]:
        """Indices of the rules that decided about some layer."""
        return {own.rule for own in self.decisions if own.rule is not None}

    @property
    def unused(self) -> tuple[int, ...]:
        """Indices of the rules that decided about no layer."""
        return tuple(sorted({*range(len(self.rules))} - self.used))

    @property
    def num_converted(self) -> int:
        """How many layers get a recipe, or a cache its format."""
        return sum(decision.gets is not None for decision in self.decisions)

    @property
    def summary(self) -> str:
        """How many layers are converted, and which rules are unused."""
        text = f"{self.num_converted} of {len(self.decisions)} layers converted"
        unused = [f"rule {i} ({self.rules[i]}) matched nothing" for i in self.unused]
        return "\n".join([text, *unused])

    def check(
        self,
        operation: str,
        strict: bool,
        used: Set[int] = frozenset(),
        *,
        caches: bool = True,
    ) -> None:
        """Warn of rules that matched nothing, or raise ValueError if strict.

        Args:
          operation: for the message.
          strict: whether to raise.
          used: rules that are known to have matched at other times.
          caches: whether the model's caches would have been met.
        """
        unused = [index for index in self.unused if index not in used]
        met = not caches or any(decision.layer.is_cache for decision in self.decisions)
        asking = {i for i, rule in enumerate(self.rules) if rule.cache is not None}
        if missed := sorted(asking.difference(used, unused)) if not met else []:
            text = (
                f"{operation}: rules with a cache, but no layer that keeps one: "
                f"{self._listed(missed)}; caches are those of Flax's own MultiHeadAttention; in an "
                "attention of your own use mx_jax.nn.KVCache"
            )
            warn_or_raise(text, strict)
        if self.rules and not unused:
            return
        rules = self._listed(unused)
        paths = ", ".join(repr(decision.layer.path) for decision in self.decisions[:8])
        more = ", ..." if len(self.decisions) > 8 else ""
        complaint = f"rules that matched no layer: {rules}" if rules else "there are no rules"
        if self.num_converted == 0 and not used:
            complaint += "; no layer is converted"
        # Of layers that a pattern matches, and that only another rule would convert.
        left = {own.reason: None for own in self.decisions if own.layer.named_only}
        kept = "".join(f"; {reason}" for reason in left if "types=" in reason)
        text = (
            f"{operation}: {complaint}; the model has {paths or 'no layer that a rule reaches'}"
            f"{more}{kept}; patterns match whole paths, and the first rule that matches decides"
        )
        warn_or_raise(text, strict)

    def _listed(self, indices: Iterable[int]) -> str:
        return ", ".join(f"{index} ({self.rules[index]})" for index in indices)

    def __str__(self) -> str:
        return f"{aligned([COLUMNS, *map(_row, self.decisions)])}\n{self.summary}"

    def __rich__(self) -> Table:
        table = Table(*COLUMNS, caption=self.summary)
        for decision in self.decisions:
            # A bracket in a layer's path is no markup.
            table.add_row(*map(Text, _row(decision)), style=None if decision.gets else "dim")
        return table


# Recorders ---------------------------------------------------------------------------------------


class Recorder:
    """Decisions in the order of the trace, each once, and layers that no rule could reach."""

    def __init__(self, rules: tuple[Rule, ...], *, reports: bool):
        self.rules, self.reports = rules, reports
        self.decided: dict[tuple[str, tuple[int, ...] | None], Decision] = {}
        # With an obstacle, in case nothing else is said of them.
        self.bare: dict[str, Layer] = {}

    @property
    def decisions(self) -> tuple[Decision, ...]:
        known = {path for path, _ in self.decided}
        bare = [layer for path, layer in self.bare.items() if path not in known]
        return (*self.decided.values(), *(decide((), layer) for layer in bare))


# Where decisions go while models run.
_recorders: contextvars.ContextVar[tuple[Recorder, ...]] = contextvars.ContextVar(
    "recorders", default=()
)


@contextlib.contextmanager
def recorded(rules: tuple[Rule, ...], *, reports: bool) -> Iterator[Recorder]:
    """A recorder of what these rules decide meanwhile."""
    recorder = Recorder(rules, reports=reports)
    token = _recorders.set((*_recorders.get(), recorder))
    try:
        yield recorder
    finally:
        _recorders.reset(token)


def recorders_of(rules: tuple[Rule, ...]) -> list[Recorder]:
    """The recorders that keep these rules' decisions now."""
    return [recorder for recorder in _recorders.get() if recorder.rules == rules]


def record(rules: tuple[Rule, ...], *decisions: Decision) -> None:
    """Record decisions wherever those of these rules are kept now."""
    for recorder in recorders_of(rules):
        for decision in decisions:
            key = decision.layer.path, decision.layer.kernel
            recorder.decided.setdefault(key, decision)


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
    recipe = decision.gets or f"({decision.reason})"
    return (layer.path or ".", layer.type.__name__, kernel, rule, recipe)


def _size(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))
