"""Records of a capture and its sinks, which have `write(record)` and `close()`."""

import collections
import csv
import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, TextIO

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console as RichConsole

from mx_jax.inspect.statistics import columns, decibel, headed, nonfinite
from mx_jax.inspect.tables import rich_table
from mx_jax.ops.tags import Tag

_TAG = ("path", "call", "product", "side", "axis", "format", "rule")


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
      >>> with mx_jax.inspect.capture(sink=Largest()):
      ...     for loss in (4.0, 9.5, 3.0):
      ...         mx_jax.inspect.scalar("loss", loss)
      largest: 9.5
    """

    def write(self, record: Record | Scalar) -> None:
        """Take a record; called from the thread that runs callbacks, one at a time."""
        ...

    def close(self) -> None:
        """The capture ends; it may begin again."""
        ...


class Memory(dict[Tag, list[Record]]):
    """Records in memory: a mapping from each tag to its records, as they came.

    Attributes:
      scalars: numbers by name.

    Examples:
      >>> import jax, jax.numpy as jnp, mx_jax
      >>> layer = jax.jit(lambda x, w: mx_jax.matmul(x, w, recipe="mxfp8"))
      >>> with mx_jax.inspect.capture() as records:
      ...     _ = layer(jnp.ones((4, 64)), jnp.ones((64, 8)))
      >>> print(*(tag.tensor for tag in records))
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


class _Numbers:
    """A sink without arrays: below `shard_map` one record has the numbers of all devices."""

    def write(self, record: Record | Scalar) -> None:
        """Take a record, unless it is of another device than the first."""
        if isinstance(record, Scalar) or not any(record.shard.values()):
            self._write(record)

    def _write(self, record: Record | Scalar) -> None:
        raise NotImplementedError


class _File(_Numbers):
    """A file that is appended to, and written as records come."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._file: Any = None

    def _write(self, record: Record | Scalar) -> None:
        if self._file is None:
            self._file = self.path.open("a", encoding="utf-8", newline="")
        self._append(self._file, record)
        self._file.flush()

    def _append(self, file: TextIO, record: Record | Scalar) -> None:
        raise NotImplementedError

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


class Jsonl(_File):
    """A file with a line of JSON for each record: what `report` reads. Written as it comes.

    Args:
      path: of the file; what it holds stays, so that a run that is resumed goes on.

    Examples:
      >>> import pathlib, tempfile, mx_jax
      >>> path = pathlib.Path(tempfile.mkdtemp(), "run.jsonl")
      >>> with mx_jax.inspect.capture(sink=mx_jax.inspect.Jsonl(path)):
      ...     mx_jax.inspect.scalar("loss", 2.5)
      >>> print(path.read_text().strip())
      {"step": 0, "scalar": "loss", "value": 2.5}
    """

    def _append(self, file: TextIO, record: Record | Scalar) -> None:
        file.write(json.dumps(record.as_json(), allow_nan=False) + "\n")


class Csv(_File):
    """A table with a row for each record, without histograms and channels; numbers besides.

    Args:
      path: of the file; a file that is there is continued.

    Examples:
      >>> import csv, pathlib, tempfile, mx_jax
      >>> path = pathlib.Path(tempfile.mkdtemp(), "run.csv")
      >>> with mx_jax.inspect.capture(sink=mx_jax.inspect.Csv(path)):
      ...     mx_jax.inspect.scalar("loss", 2.5)
      >>> rows = csv.DictReader(path.read_text().splitlines())
      >>> [(row["step"], row["path"], row["value"]) for row in rows]
      [('0', 'loss', '2.5')]
    """

    def _append(self, file: TextIO, record: Record | Scalar) -> None:
        rows = csv.DictWriter(file, ("step", "index", *_TAG, *columns(), "value"), restval="")
        if not file.tell():
            rows.writeheader()
        if isinstance(record, Scalar):
            rows.writerow({"step": record.step, "path": record.name, "value": record.value})
        else:
            row: dict[str, Any] = {name: getattr(record.tag, name) for name in _TAG}
            row |= {name: record.stats[name] for name in columns() if name in record.stats}
            index = "/".join(map(str, record.index))
            rows.writerow({"step": record.step, "index": index, **row})


class TensorBoard(_Numbers):
    """Numbers for TensorBoard.

    Args:
      writer: a folder, which tensorboardX writes (`pip install "mx_jax[tensorboard]"`); or whatever
        has `add_scalar(name, value, step)`, as tensorboardX's `SummaryWriter` and torch's do, or
        `write_scalars(step, {name: value})`, as clu's writers do.

    Raises:
      ImportError: a folder, and no tensorboardX.
      TypeError: a writer that has neither.

    Examples:
      >>> import mx_jax
      >>> class Writer:
      ...     def add_scalar(self, name, value, step):
      ...         print(f"step {step}: {name} {value}")
      >>> with mx_jax.inspect.capture(sink=mx_jax.inspect.TensorBoard(Writer())):
      ...     mx_jax.inspect.scalar("loss", 2.5)
      step 0: loss 2.5
    """

    def __init__(self, writer: Any):
        if isinstance(writer, str | Path):
            try:
                from tensorboardX import SummaryWriter  # pyright: ignore
            except ImportError as error:
                raise ImportError(
                    f"TensorBoard: writing into folder={str(writer)!r} needs tensorboardX, which "
                    'is not installed; pip install "mx_jax[tensorboard]", or give a writer that '
                    "you have"
                ) from error
            writer = SummaryWriter(str(writer))
        if not hasattr(writer, "add_scalar") and not hasattr(writer, "write_scalars"):
            raise TypeError(
                "TensorBoard: needs a folder, or a writer with add_scalar (tensorboardX) or "
                f"write_scalars (clu), got writer of type {type(writer).__name__}"
            )
        self._writer = writer

    def _write(self, record: Record | Scalar) -> None:
        if isinstance(record, Scalar):
            numbers = {record.name: record.value}
        else:
            own = f"{record.path}/{record.tag.product}/{record.tag.tensor}"
            own += f"/{record.tag.call}" if record.tag.call else ""
            # An operand without an error has an SQNR of Inf: no news, and no point in a plot.
            numbers = {
                f"{own}/{name}": record.stats[name]
                for name in columns()
                if name in record.stats and math.isfinite(record.stats[name])
            }
        if hasattr(self._writer, "write_scalars"):
            self._writer.write_scalars(record.step, numbers)
            return
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, record.step)

    def close(self) -> None:
        """Hand on what the writer holds back."""
        if hasattr(self._writer, "flush"):
            self._writer.flush()


class Console(_Numbers):
    """A table for each step, printed when the next begins, and at the end. It fits a terminal of
    80 columns.

    Args:
      console: where to; default: standard output.
      worst: how many rows: those with Inf or NaN first, then those with the lowest SQNR. That of a
        product is against the same product in float32.

    Examples:
      >>> import mx_jax
      >>> with mx_jax.inspect.capture(sink=mx_jax.inspect.Console(worst=5)):
      ...     mx_jax.inspect.scalar("loss", 2.5)
      step 0: loss = 2.5
    """

    def __init__(self, console: RichConsole | None = None, worst: int = 10):
        self._console = RichConsole() if console is None else console
        self._worst, self._step = worst, 0
        self._records: list[Record] = []

    def _write(self, record: Record | Scalar) -> None:
        if isinstance(record, Scalar):
            self._console.print(f"step {record.step}: {record.name} = {record.value:.6g}")
            return
        if record.step != self._step:
            self.close()
            self._step = record.step
        self._records.append(record)

    def close(self) -> None:
        """Print the last step."""
        records, self._records = self._records, []
        if not records:
            return

        def worst(record: Record) -> tuple[float, float]:
            return -nonfinite(record.stats), decibel(record.stats)

        columns = headed()
        rows = (
            (
                f"{record.path} {record.tag.product} {record.tag.tensor}",
                record.tag.format,
                *(column.text(record.stats) for column in columns),
            )
            for record in sorted(records, key=worst)[: self._worst]
        )
        title = f"step {self._step}: {len(records)} records, the worst first"
        heads = ("operand", "format", *(column.heading for column in columns))
        table = rich_table(title, heads, rows, left=2, box=SIMPLE_HEAD)
        table.padding = (0, 1, 0, 0)
        self._console.print(table)
