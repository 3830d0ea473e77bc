"""Records of a capture, which files hold as JSON, and how statistics get to the host."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

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
        return Record(
            tag=tag,
            step=int(rest.pop("step")),
            index=tuple(rest.pop("index")),
            order=tuple(rest.pop("order")),
            stats={name: _read(value) for name, value in rest.items()},
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"no record of a capture: {error!r} in {dict(fields)}") from error


def _number(value: Any) -> Any:
    """JSON has no Inf and no NaN."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _read(value: Any) -> Any:
    """Numbers that JSON has as strings; its keys always are."""
    if isinstance(value, dict):
        return {int(key): own for key, own in value.items()}
    return float(value) if isinstance(value, str) else value


def program_order(tag: Tag, tap: Tap, index: tuple[int, ...]) -> tuple[int, ...]:
    """Where in its step: loops by their index, and gradients backwards, after all outputs."""
    *loops, own = tap.order
    path = [number for pair in zip(loops, index, strict=False) for number in pair]
    if tag.product == "output":
        return (0, *path, own)
    return (1, *(-number for number in (*path, own)))


def pack(content: Any) -> tuple[jax.Array, Any]:
    """A pytree of arrays of 32 bits as one, since a callback costs for each array that it is given.

    Returns:
      Words, uint32, scalars first; how `unpack` reads them.
    """
    leaves, tree = jax.tree.flatten(content)
    words = [jnp.ravel(lax.bitcast_convert_type(x, jnp.uint32)) for x in leaves]
    order = sorted(range(len(leaves)), key=lambda place: leaves[place].ndim > 0)
    layout = tree, [(leaf.shape, np.dtype(leaf.dtype)) for leaf in leaves]
    return jnp.concatenate([words[place] for place in order]), layout


def unpack(words: Any, layout: Any) -> Any:
    """What was packed: NumPy arrays, and numbers of Python, which NumPy reads together."""
    tree, leaves = layout
    words = np.asarray(words)
    start, place = sum(not shape for shape, _ in leaves), 0
    scalars = {dtype: words[:start].view(dtype).tolist() for _, dtype in leaves}
    found = []
    for shape, dtype in leaves:
        if not shape:
            found.append(scalars[dtype][place])
            place += 1
        else:
            end = start + math.prod(shape)
            found.append(words[start:end].view(dtype).reshape(shape))
            start = end
    return jax.tree.unflatten(tree, found)
