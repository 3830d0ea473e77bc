"""Records of a capture, and the names that they go by."""

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, cast

import numpy as np

from mx_jax.axes import GRADIENT, Pass, Side
from mx_jax.inspect import statistics

_TENSORS: dict[tuple[str, str], str] = {
    ("output", "lhs"): "input",
    ("output", "rhs"): "weight",
    ("grad_input", "lhs"): "gradient",
    ("grad_input", "rhs"): "weight",
    ("grad_weight", "lhs"): "gradient",
    ("grad_weight", "rhs"): "input",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tag:
    """Which operand of which product of which layer, and how it is quantized.

    Attributes:
      path: of the module, parts parted by `/`; and `jax.named_scope`s, as `explain` has them.
      product: `"output"`, or the product that gives the gradient of the left operand
        (`"grad_input"`) or of the right one (`"grad_weight"`).
      side: `"lhs"` or `"rhs"`, as the recipe has them: of a gradient's product, lhs is the incoming
        gradient.
      axis: that blocks lie along, from the end.
      format: name of the block format.
      rule: name of the scale rule.
      call: which use of the module in its function, from 0.

    Examples:
      >>> from mx_jax.inspect import Tag
      >>> operand = {"side": "lhs", "axis": -1, "format": "mxfp4", "rule": "even"}
      >>> tag = Tag(path="mlp/up", product="output", **operand)
      >>> print(tag, "|", tag.tensor)
      mlp/up output lhs mxfp4 even axis -1 | input
    """

    path: str
    product: Pass
    side: Side
    axis: int
    format: str
    rule: str
    call: int = 0

    @property
    def tensor(self) -> str:
        """What is quantized: the `"input"`, the `"weight"`, or the incoming `"gradient"`."""
        return _TENSORS[self.product, self.side]

    def __str__(self) -> str:
        call = f" call {self.call}" if self.call else ""
        how = f"{self.format} {self.rule} axis {self.axis}"
        return f"{self.path} {self.product} {self.side} {how}{call}"


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Record:
    """One operand of one product at one step.

    Attributes:
      tag: what it is.
      step: of training; without one, how many records of the tag came before.
      index: of the layer, for each loop around it, outermost first.
      stats: statistics by name: see `capture`.
      order: records of one step, sorted by it, are in the order of the program.
      shard: whose the arrays are below `shard_map`: the device's index along each axis of the mesh.
      before: the values, if `stats` has `"arrays"`, lanes of `vmap` along axes in front; else None.
      after: what the cast made of them, in float32.

    Examples:
      >>> from mx_jax.inspect import Record, Tag
      >>> operand = {"side": "lhs", "axis": -1, "format": "mxfp4", "rule": "even"}
      >>> tag = Tag(path="block/mlp", product="grad_weight", **operand)
      >>> record = Record(tag=tag, step=7, index=(3,), stats={"amax": 1.5})
      >>> record.path, record.tag.tensor, record.as_json()["amax"]
      ('block/mlp[3]', 'gradient', 1.5)
    """

    tag: Tag
    step: int
    index: tuple[int, ...] = ()
    stats: Mapping[str, Any]
    order: tuple[int, ...] = ()
    shard: Mapping[str, int] = dataclasses.field(default_factory=dict)
    before: np.ndarray | None = None
    after: np.ndarray | None = None

    @property
    def path(self) -> str:
        """The module's path, with the layer's index."""
        return self.tag.path + "".join(f"[{number}]" for number in self.index)

    def as_json(self) -> dict[str, Any]:
        """For `json.dumps`, to write a line of a file or of a database; without the arrays."""
        stats = {
            name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in self.stats.items()
        }
        place = {"step": self.step, "index": list(self.index), "order": list(self.order)}
        return {**place, **dataclasses.asdict(self.tag), **stats}


class Records(dict[Tag, list[Record]]):
    """What a capture recorded: a mapping from each tag to its records, as they came. Print it: a
    table has the worst record of each operand, those with the lowest SQNR first.

    In a long run take them out: `records.all()`, then `records.clear()`.

    Examples:
      >>> import jax.numpy as jnp, mx_jax
      >>> layer = mx_jax.inspect.capture(lambda x, w: mx_jax.matmul(x, w, recipe="mxfp8"))
      >>> _ = layer(jnp.ones((4, 64)), 1.1 * jnp.ones((64, 8)))
      >>> print(layer.records)
      operand                format      step  amax  underflow  saturation  nonfinite_blocks  ...
      unnamed output weight  mxfp8_e4m3     0   1.1          0           0                 0  ...
      unnamed output input   mxfp8_e4m3     0     1          0           0                 0  ...
    """

    def all(self) -> list[Record]:
        """All records: steps in order, and within a step the order of the program."""
        records = (record for each in self.values() for record in each)
        return sorted(records, key=lambda record: (record.step, record.order))

    def __repr__(self) -> str:
        records = self.all()
        span = f", steps {records[0].step} to {records[-1].step}" if records else ""
        return f"<Records: {len(records)} of {len(self)} tags{span}>"

    def __str__(self) -> str:
        worst: dict[tuple[Tag, tuple[int, ...]], Record] = {}
        for record in sorted(self.all(), key=_badness):
            worst.setdefault((record.tag, record.index), record)
        numbers = [row.shown for row in statistics.TABLE if row.shown]
        numbers = [
            name for name in numbers if any(name in record.stats for record in worst.values())
        ]
        rows = [["operand", "format", "step", *numbers]]
        for record in worst.values():
            tag = record.tag
            call = f" call {tag.call}" if tag.call else ""
            operand = f"{record.path} {tag.product} {tag.tensor}{call}"
            cells = (f"{record.stats.get(name, math.nan):.3g}" for name in numbers)
            rows.append([operand, tag.format, str(record.step), *cells])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        justify = [str.ljust, str.ljust, *[str.rjust] * (len(numbers) + 1)]
        lines = (
            [fit(cell, width) for fit, cell, width in zip(justify, row, widths, strict=True)]
            for row in rows
        )
        return "\n".join("  ".join(cells).rstrip() for cells in lines)


def _badness(record: Record) -> tuple[float, float]:
    """Where a record stands in the table: with NaN and Inf first, then by its SQNR."""
    sqnr = record.stats.get("sqnr_db", math.inf)
    return -record.stats.get("nonfinite_blocks", 0), math.inf if math.isnan(sqnr) else sqnr


# Names of scopes: where in a model an equation is, and of which product ---------------------------

UNNAMED = "unnamed"
# What transformations and calls add to names of scopes.
_WRAPPERS = re.compile(r"\b(jvp|vmap|transpose|jit|pjit|checkpoint|remat\w*)\(|[()]")
_AGAIN = "rematted_computation"
_NOISE = {"", "checkpoint", _AGAIN, "while", "body", "cond", "scan", "remat"}
_PRODUCTS = {"output", *GRADIENT.values()}
_CAST = re.compile(r"(lhs|rhs)\..*\.axis(-\d+)")
_PAIR = ["first", "second"]
_BOTH = re.compile(r"axis(-\d+)\.axis(-\d+)")


class Place(NamedTuple):
    """Where in a function something is computed."""

    path: str  # scopes joined by `/`, layers of Flax among them; `""` outside of all
    backward: bool  # whether a gradient asks for it


class Part(NamedTuple):
    """An operand of a product that is cast."""

    path: str
    product: Pass
    side: Side
    axis: int  # that the blocks lie along


def names_of(scope: str) -> list[str]:
    """The names in a scope that people gave."""
    # `convert` writes the path of a module in brackets.
    parts = _WRAPPERS.sub("", scope).split("/")
    return [name for part in parts if (name := part.strip("[=]")) not in _NOISE]


def place_of(scope: str) -> Place:
    """The place that a scope names."""
    return Place("/".join(dict.fromkeys(names_of(scope))), "transpose(" in scope)


def is_again(scope: str) -> bool:
    """Whether `jax.checkpoint` computes it once more."""
    return _AGAIN in scope


def casts_of(scope: str) -> Iterator[Part]:
    """The operand that each cast of an equation of this scope casts; none if it is nobody's."""
    names = names_of(scope)
    # Of a pair of casts that are made one by one.
    number = _PAIR.index(names.pop()) if names and names[-1] in _PAIR else None
    *outer, product, operand = ["", "", *names]
    if product in _PRODUCTS and (match := _CAST.fullmatch(operand)):
        yield _part(outer, cast(Pass, product), cast(Side, match[1]), int(match[2]))
    elif product == "grad_both" and (match := _BOTH.fullmatch(operand)):
        for i, name in enumerate(GRADIENT.values()):
            if number in (None, i):
                yield _part(outer, name, "lhs", int(match[i + 1]))


def _part(outer: list[str], product: Pass, side: Side, axis: int) -> Part:
    path = "/".join(filter(None, dict.fromkeys(outer)))
    return Part(path or UNNAMED, product, side, axis)
