"""What `gradient_bias` found: values to ask, and tables to print."""

import dataclasses
import math
from collections.abc import Sequence

from rich.markup import escape
from rich.table import Table

from mx_jax.inspect.bias_estimate import Estimate

# An exact mean of less than so many times its own noise is none to take shares of.
_CLEAR = 2.0
_COLUMNS = ("bias", "interval", "one batch", "slope")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """The bias of one recipe, in the whole gradient or in one parameter's.

    Attributes:
      recipe: name.
      parameter: names joined by `/`, with the layer's number behind where layers are scanned; None:
        the whole gradient.
      estimate: of the gradient: `bias`, `low`, `high`, `uncorrected`, `slope`, `one`, `draws`.
      loss_increase: mean loss with the recipe less the exact one; of the whole alone.
    """

    recipe: str
    parameter: str | None
    estimate: Estimate
    loss_increase: float | None = None

    @property
    def bias(self) -> float:
        """`|E q - E g| / |E g|` without what noise adds; NaN: noise hides the exact mean.

        Or a gradient has Inf or NaN, and then `one_batch` is NaN too.
        """
        return self.estimate.bias

    @property
    def interval(self) -> tuple[float, float]:
        """Ends of the bias's confidence interval."""
        return self.estimate.low, self.estimate.high

    @property
    def one_batch(self) -> float:
        """Relative error of a single batch's gradient."""
        return self.estimate.one

    @property
    def slope(self) -> float:
        """`E q . E g / |E g|^2`: 0.98 means a gradient that is two per cent too short."""
        return self.estimate.slope

    @property
    def near_zero(self) -> bool:
        """Whether the exact mean is so close to 0, beside its noise, that shares of it say little:
        near a minimum. Tables tell how close instead."""
        return not math.isnan(self.bias) and self.estimate.signal < _CLEAR


@dataclasses.dataclass(frozen=True, kw_only=True)
class GradientBias:
    """Biases of mean gradients at one checkpoint. Print it, or hand it to rich.

    Attributes:
      rows: for each recipe the whole gradient, then each parameter.
      exact_loss: mean loss of the batches in high precision.
      confidence: of the intervals.

    Examples:
      >>> import jax, jax.numpy as jnp, mx_jax
      >>> batches = [*jax.random.normal(jax.random.key(0), (4, 32, 64))]
      >>> def loss(w, x, recipe):
      ...     return (mx_jax.matmul(x, w["up"], recipe=recipe) ** 2).mean()
      >>> w = {"up": jax.random.normal(jax.random.key(1), (64, 8))}
      >>> recipe = mx_jax.recipes.weight_only("mxfp4")
      >>> found = mx_jax.inspect.gradient_bias(loss, w, batches, recipe)
      >>> [row.parameter for row in found.parameters()], found.whole[0].bias < 0.2
      (['up'], True)
    """

    rows: tuple[Row, ...]
    exact_loss: float
    confidence: float

    @property
    def whole(self) -> tuple[Row, ...]:
        """The whole gradient, one row a recipe."""
        return tuple(row for row in self.rows if row.parameter is None)

    def parameters(self, recipe: str | None = None) -> tuple[Row, ...]:
        """Single parameters of one recipe, the largest bias first; NaN last.

        Args:
          recipe: name; None: the only one.

        Raises:
          ValueError: unknown name, or several recipes and no name.
        """
        names = [row.recipe for row in self.whole]
        if recipe is None and len(names) == 1:
            recipe = names[0]
        if recipe not in names:
            raise ValueError(
                f"GradientBias.parameters: recipe must be one of {', '.join(map(repr, names))}, "
                f"got recipe={recipe!r}"
            )
        found = [row for row in self.rows if row.parameter is not None and row.recipe == recipe]
        return tuple(sorted(found, key=lambda row: (math.isnan(row.bias), -row.bias)))

    @property
    def caption(self) -> str:
        """How to read the numbers."""
        draws = self.rows[0].estimate.draws
        near = f"; near 0: less than {_CLEAR:g} times its own noise, so a share of it says little"
        return (
            f"n = {draws} batches at one checkpoint, loss {self.exact_loss:.4g} in high precision; "
            f"interval: {100 * self.confidence:g} %, of other batches at the same parameters"
            f"{near if any(row.near_zero for row in self.rows) else ''}"
        )

    def __str__(self) -> str:
        cells = [("recipe", *_COLUMNS, "loss"), *((row.recipe, *_cells(row)) for row in self.whole)]
        return "\n".join([*_aligned(cells), self.caption])

    def __rich__(self) -> Table:
        table = Table(title="Bias of the mean gradient", caption=self.caption)
        for index, column in enumerate(("recipe", *_COLUMNS, "loss")):
            table.add_column(column, justify="right" if index else "left")
        for row in self.whole:
            table.add_row(escape(row.recipe), *_cells(row))
        return table

    def table(self, recipe: str | None = None) -> Table:
        """A rich table of single parameters, the largest bias first; `recipe` as `parameters`."""
        rows = self.parameters(recipe)
        table = Table(title=escape(f"Bias by parameter: {rows[0].recipe}"), caption=self.caption)
        for index, column in enumerate(("parameter", *_COLUMNS)):
            table.add_column(column, justify="right" if index else "left")
        for row in rows:
            table.add_row(escape(row.parameter or "."), *_cells(row)[:-1])
        return table


def _cells(row: Row) -> tuple[str, ...]:
    """Percentages; an interval from 0 on is told as what the bias is at most."""
    low, high = row.interval
    interval = f"at most {_percent(high)}" if low == 0 else f"{_percent(low)} to {_percent(high)}"
    known = not math.isnan(row.bias)
    unknown = "Inf or NaN" if math.isnan(row.one_batch) else "hidden by noise"
    if row.near_zero:
        known, unknown = False, f"near 0: mean {row.estimate.signal:.1f} x its noise"
    return (
        _percent(row.bias) if known else unknown,
        interval if known else "-",
        _percent(row.one_batch),
        f"{row.slope:.3f}" if known else "-",
        "" if row.loss_increase is None else f"{row.loss_increase:+.3g}",
    )


def _percent(value: float) -> str:
    return f"{100 * value:.3g} %"


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
