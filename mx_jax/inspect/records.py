"""Records of a capture, the names that they go by, and its sinks."""

import collections
import dataclasses
import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

import numpy as np

from mx_jax.axes import GRADIENT, Pass, Side

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
        gradient. None: the product itself.
      axis: that blocks lie along, from the end; None for a product.
      format: name of the block format; of a product, of both operands.
      rule: name of the scale rule, likewise; `"stored"` of an operand that came quantized.
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
    side: Side | None
    axis: int | None
    format: str
    rule: str
    call: int = 0

    @property
    def tensor(self) -> str:
        """What is quantized: the layer's `"input"`, its `"weight"`, or the incoming `"gradient"`;
        `"product"` for a product."""
        return "product" if self.side is None else _TENSORS[self.product, self.side]

    def __str__(self) -> str:
        call = f" call {self.call}" if self.call else ""
        own = "" if self.side is None else f" {self.side}"
        axis = "" if self.axis is None else f" axis {self.axis}"
        return f"{self.path} {self.product}{own} {self.format} {self.rule}{axis}{call}"


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Record:
    """One operand of one product, or the product, at one step.

    Attributes:
      tag: what it is.
      step: of training; without one, how many records of the tag came before.
      index: of the layer, for each loop around it, outermost first.
      stats: statistics by name: see `capture`.
      order: records of one step, sorted by it, are in the order of the program.
      shard: whose the arrays are below `shard_map`: the device's index along each axis of the mesh.
      before: the values, if arrays were asked for, lanes of `vmap` along axes in front; None of an
        operand that came quantized.
      after: what the cast made of them, in float32; of a product, what it is.

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
        """What a line of JSON holds; arrays are left out."""
        stats = {name: _number(value) for name, value in self.stats.items()}
        place = {"step": self.step, "index": list(self.index), "order": list(self.order)}
        return {**place, **dataclasses.asdict(self.tag), **stats}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scalar:
    """A number of a step: a loss, a norm.

    Attributes:
      name: what it is.
      step: of training; without one, how many numbers of the name came before.
      value: the number.

    Examples:
      >>> import mx_jax
      >>> step = mx_jax.inspect.capture(lambda x: x * x)
      >>> for x in (2.0, 1.0):
      ...     step.scalar("loss", step(x))
      >>> [(number.step, number.value) for number in step.records.scalars["loss"]]
      [(0, 4.0), (1, 1.0)]
    """

    name: str
    step: int
    value: float

    def as_json(self) -> dict[str, Any]:
        """What a line of JSON holds."""
        return {"step": self.step, "scalar": self.name, "value": _number(self.value)}


def from_json(fields: Mapping[str, Any]) -> Record | Scalar:
    """The record of a line of JSON; ValueError if it is none."""
    try:
        if "scalar" in fields:
            return Scalar(
                name=fields["scalar"], step=int(fields["step"]), value=float(fields["value"])
            )
        rest = dict(fields)
        names = [field.name for field in dataclasses.fields(Tag)]
        tag = Tag(**{name: rest.pop(name) for name in names})
        return Record(
            tag=tag,
            step=int(rest.pop("step")),
            index=tuple(rest.pop("index")),
            order=tuple(rest.pop("order")),
            stats={name: _read(value) for name, value in rest.items()},
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"no record of a capture: {error!r} in {dict(fields)}") from error


def _number(value: object) -> Any:
    """JSON has no Inf and no NaN."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _read(value: object) -> Any:
    """Numbers that JSON has as strings; its keys always are."""
    if isinstance(value, dict):
        return {int(key): own for key, own in value.items()}
    return float(value) if isinstance(value, str) else value


class Sink(Protocol):
    """Takes the records of a capture.

    Examples:
      >>> import mx_jax
      >>> class Largest:
      ...     def __init__(self):
      ...         self.found = float("-inf")
      ...     def write(self, record):
      ...         self.found = max(self.found, getattr(record, "value", self.found))
      ...     def close(self):
      ...         print("largest:", self.found)
      >>> step = mx_jax.inspect.capture(lambda loss: loss, sink=Largest())
      >>> for loss in (4.0, 9.5, 3.0):
      ...     step.scalar("loss", step(loss))
      >>> step.close()
      largest: 9.5
    """

    def write(self, record: Record | Scalar) -> None:
        """Take a record; called from the thread that runs callbacks, one at a time."""

    def close(self) -> None:
        """The capture ends; it may begin again."""


class Memory(dict[Tag, list[Record]]):
    """Records in memory: a mapping from each tag to its records, as they came.

    Attributes:
      scalars: numbers by name.

    Examples:
      >>> import jax.numpy as jnp, mx_jax
      >>> layer = mx_jax.inspect.capture(lambda x, w: mx_jax.matmul(x, w, recipe="mxfp8"))
      >>> _ = layer(jnp.ones((4, 64)), jnp.ones((64, 8)))
      >>> print(*(tag.tensor for tag in layer.records))
      input weight product
    """

    def __init__(self):
        super().__init__()
        self.scalars: dict[str, list[Scalar]] = collections.defaultdict(list)

    def __repr__(self) -> str:
        records = self.all()
        span = f", steps {records[0].step} to {records[-1].step}" if records else ""
        numbers = f"; numbers: {', '.join(self.scalars)}" if self.scalars else ""
        return f"<Memory: {len(records)} records of {len(self)} tags{span}{numbers}>"

    def all(self) -> list[Record]:
        """All records: steps in order, and within a step the order of the program."""
        records = (record for own in self.values() for record in own)
        return sorted(records, key=lambda record: (record.step, record.order))

    def write(self, record: Record | Scalar) -> None:
        """Keep it."""
        if isinstance(record, Scalar):
            self.scalars[record.name].append(record)
        else:
            self.setdefault(record.tag, []).append(record)

    def close(self) -> None:
        """Nothing ends."""


class Jsonl:
    """A file with a line of JSON for each record: what `report` reads. Written as it comes.

    Args:
      path: of the file; what it holds stays, so that a run that is resumed goes on.

    Examples:
      >>> import pathlib, tempfile, mx_jax
      >>> path = pathlib.Path(tempfile.mkdtemp(), "run.jsonl")
      >>> step = mx_jax.inspect.capture(lambda x: x, sink=mx_jax.inspect.Jsonl(path))
      >>> step.scalar("loss", step(2.5))
      >>> step.close()
      >>> print(path.read_text().strip())
      {"step": 0, "scalar": "loss", "value": 2.5}
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._file: Any = None

    def write(self, record: Record | Scalar) -> None:
        """Append it; below `shard_map` one record has the numbers of all devices."""
        if isinstance(record, Record) and any(record.shard.values()):
            return
        if self._file is None:
            self._file = self.path.open("a", encoding="utf-8")
        self._file.write(json.dumps(record.as_json(), allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


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
    """A product, or an operand of one that is cast."""

    path: str
    product: Pass
    side: Side | None
    axis: int | None  # that the blocks of a cast lie along


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


def product_of(scope: str) -> Part | None:
    """The product that a scope is of, or None."""
    *outer, last = names_of(scope) or [""]
    return _part(outer, cast(Pass, last)) if last in _PRODUCTS else None


def casts_of(scope: str) -> Iterator[Part]:
    """The operand that each cast of an equation of this scope casts; none if it is nobody's."""
    names = names_of(scope)
    # Of a pair of casts that are made one by one.
    number = _PAIR.index(names.pop()) if names and names[-1] in _PAIR else None
    *outer, product, own = ["", "", *names]
    if product in _PRODUCTS and (found := _CAST.fullmatch(own)):
        yield _part(outer, cast(Pass, product), cast(Side, found[1]), int(found[2]))
    elif product == "grad_both" and (found := _BOTH.fullmatch(own)):
        for i, name in enumerate(GRADIENT.values()):
            if number in (None, i):
                yield _part(outer, name, "lhs", int(found[i + 1]))


def _part(
    outer: list[str], product: Pass, side: Side | None = None, axis: int | None = None
) -> Part:
    path = "/".join(filter(None, dict.fromkeys(outer)))
    return Part(path or UNNAMED, product, side, axis)
