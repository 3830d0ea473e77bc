"""What a capture tells: one record an operand, a product or a number, which files hold as JSON."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from mx_jax.ops.tags import Tag
from mx_jax.ops.watched import Tap


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
        fields = dataclasses.asdict(self.tag)
        index, order = list(self.index), list(self.order)
        return {"step": self.step, "index": index, "order": order, **fields, **_plain(self.stats)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scalar:
    """A number of a step: a loss, a norm.

    Attributes:
      name: what it is.
      step: of training; without one, how many numbers of the name came before.
      value: the number.

    Examples:
      >>> import mx_jax
      >>> with mx_jax.inspect.capture() as records:
      ...     for step in (0, 1):
      ...         mx_jax.inspect.scalar("loss", 2.0 / (step + 1))
      >>> [(number.step, number.value) for number in records.scalars["loss"]]
      [(0, 2.0), (1, 1.0)]
    """

    name: str
    step: int
    value: float

    def as_json(self) -> dict[str, Any]:
        """What a line of JSON holds."""
        return {"step": self.step, "scalar": self.name, "value": _number(self.value)}


def from_json(fields: Mapping[str, Any]) -> Record | Scalar:
    """What a line of JSON holds.

    Raises:
      ValueError: it is no record.
    """
    try:
        if "scalar" in fields:
            return Scalar(
                name=fields["scalar"], step=int(fields["step"]), value=float(fields["value"])
            )
        rest = dict(fields)
        names = [field.name for field in dataclasses.fields(Tag)]
        tag = Tag(**{name: rest.pop(name) for name in names})
        step, index, order = (rest.pop(name) for name in ("step", "index", "order"))
        return Record(
            tag=tag, step=int(step), index=tuple(index), order=tuple(order), stats=_read(rest)
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"no record of a capture: {error!r} in {dict(fields)}") from error


def _plain(stats: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: _number(value) if isinstance(value, float) else value for name, value in stats.items()
    }


def _number(value: float) -> Any:
    """JSON has no Inf and no NaN."""
    return value if math.isfinite(value) else str(value)


def _read(stats: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {
        name: float(value) if isinstance(value, str) else value for name, value in stats.items()
    }
    if "scales" in found:
        found["scales"] = {int(exponent): count for exponent, count in found["scales"].items()}
    return found


def program_order(tag: Tag, tap: Tap, index: tuple[int, ...]) -> tuple[int, ...]:
    """Where in its step: loops by their index, and gradients backwards, after all outputs."""
    *loops, own = tap.order
    path = [number for pair in zip(loops, index, strict=False) for number in pair]
    if tag.product == "output":
        return (0, *path, own)
    return (1, *(-number for number in (*path, own)))
