"""What `sensitivity` found: values to ask, a table to print, and rules to convert by."""

import dataclasses
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from rich.markup import escape
from rich.table import Table

from mx_jax.formats import BlockFormat
from mx_jax.inspect.budget import Budget
from mx_jax.recipes import weight_only

R = TypeVar("R")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidate:
    """One layer in one format, while everything else stays as it is.

    Attributes:
      layer: name of the parameter, joined by `/`.
      shape: its own.
      format: None: as it is.
      bytes: codes and scales.
      increase: of the mean loss.
      deviation: standard error of the increase over batches; None of a single batch.
    """

    layer: str
    shape: tuple[int, ...]
    format: BlockFormat | None
    bytes: int
    increase: float
    deviation: float | None

    @property
    def name(self) -> str:
        """The format's."""
        return "as it is" if self.format is None else self.format.name

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
      >>> from mx_jax.inspect import Budget, sensitivity
      >>> params = {"up": {"kernel": jnp.ones((64, 8))}}
      >>> loss = lambda params, batch: params["up"]["kernel"].sum()
      >>> found = sensitivity(loss, params, [None], ["mxfp4", "mxint8"], budget=Budget(bits=5))
      >>> found.chosen, found.bytes
      ({'up/kernel': 'mxfp4'}, 272)
      >>> print(found.toml().partition("[[rule]]")[2].strip())
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
        return {own.layer: own.format and own.format.name for own in self.choices}

    @property
    def bytes(self) -> int:
        """Of all layers as chosen."""
        return sum(own.bytes for own in self.choices)

    @property
    def sum_of_increases(self) -> float:
        """What the increases of single layers add up to; `increase` is what is really there."""
        return sum(own.increase for own in self.choices)

    def rules(self, make: Callable[[str, Any], R]) -> list[R]:
        """The choice as rules of conversion, one a layer; all others stay as they are.

        Args:
          make: `convert.Rule`, called with a pattern and a recipe, or None.

        Examples:
          >>> import jax, jax.numpy as jnp
          >>> from mx_jax import convert
          >>> from mx_jax.inspect import Budget, sensitivity
          >>> params = {"up": {"kernel": jnp.ones((64, 8))}}
          >>> loss = lambda params, batch: jax.tree.leaves(params)[0].sum()
          >>> found = sensitivity(loss, params, [None], ["mxfp4"], budget=Budget(bits=5))
          >>> print(convert.weights_report(params, found.rules(convert.Rule)))
          layer  type     kernel  rule  recipe
          up     Unknown  64x8    0     weight_only(mxfp4)
          1 of 1 layers converted
        """
        return [
            make(own.pattern, None if own.format is None else weight_only(own.format))
            for own in self.choices
        ]

    def toml(self) -> str:
        """The choice as a file of rules for `python -m mx_jax quantize --rules`."""
        lines = [f"# Chosen by mx_jax.inspect.sensitivity: {self.summary}"]
        for own in self.choices:
            what = (
                "skip = true" if own.format is None else f"format = {json.dumps(own.format.name)}"
            )
            lines += ["", "[[rule]]", f"pattern = {json.dumps(own.pattern)}", what]
        return "\n".join([*lines, ""])

    def write(self, path: Path | str) -> None:
        """Write `toml` to a file."""
        Path(path).write_text(self.toml())

    @property
    def summary(self) -> str:
        """The budget, and what the choice costs."""
        bits = 8 * self.bytes / sum(math.prod(own.shape) for own in self.choices)
        alone = f"single layers: {self.sum_of_increases:.3g}"
        return (
            f"budget: {self.budget}; {self.bytes:,} bytes, {bits:.3g} bits a parameter; "
            f"loss {self.loss:.4g} rises by {self.increase:.3g} ({alone})"
        )

    def __str__(self) -> str:
        cells = [self._columns(), *self._cells()]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in cells]
        return "\n".join([*lines, self.summary])

    def __rich__(self) -> Table:
        table = Table(title="Loss increase, one layer at a time", caption=escape(self.summary))
        for index, column in enumerate(self._columns()):
            table.add_column(column, justify="right" if index else "left")
        for row in self._cells():
            table.add_row(*map(escape, row))
        return table

    def _columns(self) -> tuple[str, ...]:
        return ("layer", "shape", *self._formats(), "chosen")

    def _formats(self) -> list[str]:
        return list(dict.fromkeys(row.name for row in self.rows if row.format is not None))

    def _cells(self) -> list[tuple[str, ...]]:
        """A line for each layer, the one that minds most first."""
        known = {(row.layer, row.name): row for row in self.rows}
        lines = []
        for own in self.choices:
            rows = [known[own.layer, name] for name in self._formats()]
            shape = "x".join(map(str, own.shape))
            # By NaN nothing can be sorted, and a layer whose loss is NaN minds most.
            increases = (row.increase for row in rows)
            worst = max((x if math.isfinite(x) else math.inf for x in increases), default=0.0)
            lines.append((worst, (own.layer, shape, *map(_shown, rows), own.name)))
        return [cells for _, cells in sorted(lines, key=lambda line: -line[0])]


def _shown(row: Candidate) -> str:
    deviation = "" if row.deviation is None else f" ± {row.deviation:.1g}"
    return f"{row.increase:+.2g}{deviation}"
