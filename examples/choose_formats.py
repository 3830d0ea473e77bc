"""Which layers bear which format: one layer at a time, and the best choice under a budget."""

import dataclasses
import functools
import itertools
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from mx_jax.convert.rules import aligned
from mx_jax.formats import BlockFormat, block_format
from mx_jax.ops.quantize import cast
from mx_jax.recipes import weight_only

R = TypeVar("R")
# Rounds of a tighter limit, until the loss that is really there fits.
_ROUNDS = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Budget:
    """What a choice of formats may cost: one of three limits.

    Attributes:
      bytes: of all layers that are chosen for, together.
      bits: the same as an average over their parameters, scales included: 4.5 allows some layers
        eight bits where the others have four.
      loss: how far the mean loss may rise, in the loss's own units.

    Raises:
      ValueError: none of the limits, several, or one that is not positive.

    Examples:
      >>> from examples.choose_formats import Budget
      >>> Budget(bits=4.5).bits
      4.5
    """

    bytes: float | None = None
    bits: float | None = None
    loss: float | None = None

    def __post_init__(self):
        limits = {name: value for name, value in vars(self).items() if value is not None}
        if len(limits) != 1 or not min(limits.values()) > 0:
            shown = ", ".join(f"{name}={value}" for name, value in limits.items()) or "none"
            raise ValueError(
                "Budget: needs exactly one of bytes, bits and loss, a positive number, got "
                f"{shown}; e.g. Budget(bits=4.5)"
            )

    def __str__(self) -> str:
        if self.loss is not None:
            return f"loss may rise by {self.loss:g}"
        if self.bits is not None:
            return f"{self.bits:g} bits a parameter"
        return f"{self.bytes:,.0f} bytes"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidate:
    """One layer in one format, while everything else stays as it is."""

    layer: str  # name of the parameter, joined by `/`
    shape: tuple[int, ...]
    format: BlockFormat | None  # None: as it is
    bytes: int  # codes and scales
    increase: float  # of the mean loss
    deviation: float | None  # standard error of the increase over batches; None of a single batch

    @property
    def name(self) -> str:
        return "as it is" if self.format is None else self.format.name

    def __str__(self) -> str:
        sure = "" if self.deviation is None else f" ± {self.deviation:.1g}"
        return f"{self.increase:+.2g}{sure}"

    @property
    def pattern(self) -> str:
        """What a rule has to match: the layer's path, with or without the parameter's name."""
        path = re.sub(r"^params/", "", self.layer)
        layer, slash, last = path.rpartition("/")
        return f"{re.escape(layer)}(/{re.escape(last)})?" if slash else re.escape(path)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sensitivity:
    """Loss increases by layer and format, and the best choice under a budget. Print it.

    Attributes:
      rows: every layer in every format, and as it is.
      choices: the row that was chosen of each layer.
      budget: what the choice had to keep.
      loss: mean loss before.
      increase: of the mean loss with the whole choice, as computed.

    Examples:
      >>> import jax.numpy as jnp
      >>> from examples.choose_formats import Budget, sensitivity
      >>> params = {"up": {"kernel": jnp.ones((64, 8))}}
      >>> loss = lambda params, batch: params["up"]["kernel"].sum()
      >>> result = sensitivity(loss, params, [None], ["mxfp4", "mxint8"], budget=Budget(bits=5))
      >>> result.chosen, result.bytes
      ({'up/kernel': 'mxfp4'}, 272)
      >>> print(result.toml().partition("[[rule]]")[2].strip())
      pattern = "up(/kernel)?"
      format = "mxfp4"
    """

    rows: tuple[Candidate, ...]
    choices: tuple[Candidate, ...]
    budget: Budget
    loss: float
    increase: float

    @property
    def chosen(self) -> dict[str, str | None]:
        """The name of each layer's format; None: as it is."""
        return {choice.layer: choice.format and choice.format.name for choice in self.choices}

    @property
    def bytes(self) -> int:
        """Of all layers as chosen."""
        return sum(choice.bytes for choice in self.choices)

    @property
    def sum_of_increases(self) -> float:
        """What the increases of single layers add up to; `increase` is what is really there."""
        return sum(choice.increase for choice in self.choices)

    def rules(self, make: Callable[[str, Any], R]) -> list[R]:
        """The choice as rules of conversion, one a layer; all others stay as they are.

        Args:
          make: `convert.Rule`, called with a pattern and a recipe, or None.

        Examples:
          >>> import jax, jax.numpy as jnp
          >>> from mx_jax import convert
          >>> from examples.choose_formats import Budget, sensitivity
          >>> params = {"up": {"kernel": jnp.ones((64, 8))}}
          >>> loss = lambda params, batch: jax.tree.leaves(params)[0].sum()
          >>> result = sensitivity(loss, params, [None], ["mxfp4"], budget=Budget(bits=5))
          >>> print(convert.weights_report(params, result.rules(convert.Rule)))
          layer  type     kernel  rule  recipe
          up     Unknown  64x8    0     weight_only(mxfp4)
          1 of 1 layers converted
        """
        return [
            make(choice.pattern, None if choice.format is None else weight_only(choice.format))
            for choice in self.choices
        ]

    def toml(self) -> str:
        """The choice as a file of rules for `python -m mx_jax quantize --rules`."""
        lines = [f"# Chosen by examples/choose_formats.py: {self.summary}"]
        for choice in self.choices:
            what = (
                "skip = true"
                if choice.format is None
                else f"format = {json.dumps(choice.format.name)}"
            )
            lines += ["", "[[rule]]", f"pattern = {json.dumps(choice.pattern)}", what]
        return "\n".join([*lines, ""])

    def write(self, path: Path | str) -> None:
        """Write `toml` to a file."""
        Path(path).write_text(self.toml())

    @property
    def summary(self) -> str:
        """The budget, and what the choice costs."""
        bits = 8 * self.bytes / sum(math.prod(choice.shape) for choice in self.choices)
        alone = f"single layers: {self.sum_of_increases:.3g}"
        return (
            f"budget: {self.budget}; {self.bytes:,} bytes, {bits:.3g} bits a parameter; "
            f"loss {self.loss:.4g} rises by {self.increase:.3g} ({alone})"
        )

    def __str__(self) -> str:
        """A line for each layer, the one that minds most first."""
        formats = list(dict.fromkeys(row.name for row in self.rows if row.format is not None))
        known = {(row.layer, row.name): row for row in self.rows}

        def worst(candidate: Candidate) -> float:
            # By NaN nothing can be sorted, and a layer whose loss is NaN minds most.
            increases = (known[candidate.layer, name].increase for name in formats)
            return max((x if math.isfinite(x) else math.inf for x in increases), default=0.0)

        lines = [("layer", "shape", *formats, "chosen")]
        for choice in sorted(self.choices, key=worst, reverse=True):
            texts = (str(known[choice.layer, name]) for name in formats)
            lines.append((choice.layer, "x".join(map(str, choice.shape)), *texts, choice.name))
        return "\n".join([aligned(lines), self.summary])


def sensitivity(
    loss: Callable[[Any, Any], jax.Array],
    params: object,
    batches: Iterable[Any],
    formats: str | Sequence[Any] = ("mxfp4", "mxfp6_e2m3", "mxfp8_e4m3"),
    *,
    budget: Budget,
    layers: str = r"(.*/)?kernel",
    axis: int = -2,
    scanned: str | None = None,
) -> Sensitivity:
    """How much the loss rises when one layer's weights are in a format, and what to choose.

    Each layer in each format alone is one evaluation of the loss: its weights are replaced by what
    the format holds of them, blocks along the contracting axis, as `convert.weights` stores them.
    Then each layer gets one of the formats, or stays as it is, such that the budget is kept and the
    sum of the increases is least, where one below zero counts as none: it is there by chance (for a
    budget of loss: the bytes are least). Increases of several layers
    do not simply add up. So the loss of the whole choice is computed too, and where it exceeds a
    budget of loss, the choice is made again with a tighter one until it does not.

    Args:
      loss: `loss(params, batch)`, a scalar; it is jitted.
      params: any pytree: linen's params or variables, or nnx's state.
      batches: one or more of equal shape; several show how sure an increase is.
      formats: block formats, or names of them; each with the scale rule that loses least for it.
        One with which the loss of a layer is Inf or NaN is not chosen for it.
      budget: of bytes, bits a parameter, or loss.
      layers: regular expression of the parameters to choose for: names joined by `/`.
      axis: that their products contract: -2 of kernels `[in, out]`.
      scanned: regular expression of those whose first axis counts layers, as below `nn.scan`: they
        are chosen for together, as conversion sees them.

    Returns:
      Print it, ask for its `rows` and `chosen`, or let conversion read it: `rules(convert.Rule)`
      gives rules, `write("rules.toml")` a file for `python -m mx_jax quantize --rules`.

    Raises:
      ValueError: no layers, no batches, a loss that is not finite, a budget that nothing fits, or a
        parameter whose product is not known from its shape.

    Examples:
      >>> import jax, jax.numpy as jnp, mx_jax
      >>> from examples.choose_formats import Budget, sensitivity
      >>> w = jax.random.normal(jax.random.key(0), (64, 64))
      >>> params = {"easy": {"kernel": jnp.sign(w)}, "hard": {"kernel": w}}
      >>> def loss(params, x):
      ...     return sum(((x @ p["kernel"]) ** 2).mean() for p in params.values())
      >>> batch = jax.random.normal(jax.random.key(1), (8, 64))
      >>> result = sensitivity(loss, params, [batch], ["mxfp4", "mxint8"], budget=Budget(bits=6.5))
      >>> result.chosen
      {'easy/kernel': 'mxfp4', 'hard/kernel': 'mxint8'}
    """
    batches = list(batches)
    if not batches:
        raise ValueError("sensitivity: needs at least one batch, got none")
    named, tree, compiled = _named_leaves(params), jax.tree.structure(params), jax.jit(loss)
    weights = {}
    for name, leaf in named:
        if re.fullmatch(layers, name) and jnp.issubdtype(leaf.dtype, jnp.floating):
            expected = 3 if scanned is not None and re.fullmatch(scanned, name) else 2
            if leaf.ndim != expected:
                raise ValueError(
                    f"sensitivity: the parameter {name!r} must have {expected} axes, got "
                    f"shape={tuple(leaf.shape)}; which axis a product contracts is known of "
                    "[in, out] alone, and of [layers, in, out] by scanned=; leave others out "
                    "by layers="
                )
            weights[name] = leaf
    if not weights:
        names = ", ".join(repr(name) for name, _ in named[:8])
        raise ValueError(
            f"sensitivity: layers={layers!r} matches none of the parameters "
            f"{names}{', ...' if len(named) > 8 else ''}"
        )

    def losses(formats: Mapping[str, BlockFormat | None]) -> np.ndarray:
        """The loss of each batch, with some weights as their formats hold them."""
        leaves = []
        for name, leaf in named:
            if (format := formats.get(name)) is not None:
                # The scale rule is the one that conversion takes.
                spec = weight_only(format).output.rhs
                assert spec is not None
                leaf = cast(leaf, spec.format, axis=axis, scale_rule=spec.scale_rule)
            leaves.append(leaf)
        whole = jax.tree.unflatten(tree, leaves)
        return np.array([float(compiled(whole, batch)) for batch in batches])

    before = losses({})
    if not np.isfinite(before).all():
        raise ValueError(
            "sensitivity: the loss must be finite while nothing is quantized, got "
            f"loss={', '.join(f'{loss:g}' for loss in before)}; take parameters from before it "
            "diverged"
        )

    def candidate(name: str, leaf: jax.Array, format: BlockFormat | None) -> Candidate:
        row = functools.partial(Candidate, layer=name, shape=tuple(leaf.shape), format=format)
        if format is None:
            return row(bytes=leaf.size * leaf.dtype.itemsize, increase=0.0, deviation=0.0)
        increase = losses({name: format}) - before
        n = len(increase)
        return row(
            bytes=math.ceil(leaf.size * format.bits_per_element / 8),
            increase=float(increase.mean()),
            deviation=float(increase.std(ddof=1)) / math.sqrt(n) if n > 1 else None,
        )

    formats = (*map(block_format, (formats,) if isinstance(formats, str) else formats), None)
    rows = [[candidate(name, leaf, format) for format in formats] for name, leaf in weights.items()]
    chosen, increase = _choose(
        rows, budget, lambda chosen: losses({row.layer: row.format for row in chosen}) - before
    )
    return Sensitivity(
        rows=tuple(itertools.chain.from_iterable(rows)),
        choices=tuple(chosen),
        budget=budget,
        loss=float(before.mean()),
        increase=increase,
    )


def _choose(
    rows: Sequence[Sequence[Candidate]],
    budget: Budget,
    measure: Callable[[Sequence[Candidate]], np.ndarray],
) -> tuple[list[Candidate], float]:
    """The best choice of one row of each layer, and how far the mean loss rises."""
    increases = np.array([[row.increase for row in layer] for layer in rows])
    # A loss of NaN would count as none that rises; a cast that lowers it does so by chance.
    increases = np.where(np.isfinite(increases), np.maximum(increases, 0), np.inf)
    sizes = np.array([[float(row.bytes) for row in layer] for layer in rows])

    def measured(indices: list[int]) -> tuple[list[Candidate], float]:
        chosen = [layer[index] for layer, index in zip(rows, indices, strict=True)]
        return chosen, float(measure(chosen).mean())

    if budget.loss is None:
        parameters = sum(math.prod(layer[0].shape) for layer in rows)
        limit = float(budget.bytes or 0) if budget.bits is None else budget.bits * parameters / 8
        indices = best_choice(increases, sizes, limit)
        if indices is None:
            least = np.where(np.isfinite(increases), sizes, np.inf).min(axis=1).sum()
            raise ValueError(
                f"sensitivity: a budget of {budget} is {limit:,.0f} bytes, but the smallest "
                f"formats take {least:,.0f} bytes ({8 * least / parameters:.3g} bits a parameter)"
            )
        return measured(indices)
    limit = budget.loss
    for _ in range(_ROUNDS):
        indices = best_choice(sizes, increases, limit)
        assert indices is not None  # every layer may stay as it is
        chosen, rises = measured(indices)
        if rises <= budget.loss:
            return chosen, rises
        limit *= 0.9 * budget.loss / rises if math.isfinite(rises) else 0.5
    return measured([-1] * len(rows))


def best_choice(
    costs: Sequence[Sequence[float]] | np.ndarray,
    sizes: Sequence[Sequence[float]] | np.ndarray,
    limit: float,
) -> list[int] | None:
    """One option for each item, of the least summed cost, whose sizes add up to the limit at most.

    The multiple-choice knapsack problem, as a linear program in whole numbers. Costs and sizes are
    `[items, options]`; a cost of Inf is never chosen. None where even the smallest do not fit.
    """
    from scipy import optimize, sparse  # takes half a second to import

    costs, sizes = np.asarray(costs, float), np.asarray(sizes, float)
    allowed: Any = np.isfinite(costs) & np.isfinite(sizes)
    if np.where(allowed, sizes, np.inf).min(axis=1).sum() > limit:
        return None
    costs, sizes = (np.where(allowed, array, 0) for array in (costs, sizes))
    # In units of what there is to decide about, so that tolerances mean the same everywhere.
    spread, unit = (float(array.max()) or 1.0 for array in (costs, sizes))
    # Of equally good choices the smallest one.
    goal = costs / spread + 1e-6 * sizes / unit
    items, options = costs.shape
    solution = optimize.milp(
        goal.ravel(),
        integrality=np.ones(goal.size),
        bounds=optimize.Bounds(0, allowed.ravel().astype(float)),
        constraints=[
            optimize.LinearConstraint(sparse.kron(sparse.eye(items), np.ones(options)), 1, 1),
            optimize.LinearConstraint(sizes.reshape(1, -1) / unit, -np.inf, limit / unit),
        ],
    )
    return solution.x.reshape(costs.shape).argmax(axis=1).tolist()


def _named_leaves(tree: object) -> list[tuple[str, Any]]:
    """Leaves by their paths, joined by `/`; boxes of Flax end in `value`, which is no name."""
    named = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        boxed = path and path[-1] == jax.tree_util.GetAttrKey("value")
        keys = path[:-1] if boxed else path
        named.append((jax.tree_util.keystr(keys, simple=True, separator="/"), leaf))
    return named
