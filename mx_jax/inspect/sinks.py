"""Where records of a capture go. A sink has `write(record)`, and `close()`."""

import collections
import csv
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from rich.box import SIMPLE_HEAD
from rich.console import Console as RichConsole
from rich.table import Table

from mx_jax.inspect.capture_record import Record, Scalar
from mx_jax.ops.tags import Tag


class Sink(Protocol):
    """What `capture` tells."""

    def write(self, record: Record | Scalar) -> None:
        """Take a record; called from the thread that runs callbacks, one at a time."""
        ...

    def close(self) -> None:
        """The capture ends; it may begin again."""
        ...


class Memory(Mapping[Tag, Sequence[Record]]):
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
        self._records: dict[Tag, list[Record]] = {}
        self.scalars: dict[str, list[Scalar]] = collections.defaultdict(list)

    def __getitem__(self, tag: Tag) -> list[Record]:
        return self._records[tag]

    def __iter__(self) -> Iterator[Tag]:
        return iter(self._records)

    def __len__(self) -> int:
        return len(self._records)

    def __repr__(self) -> str:
        steps = {record.step for own in self._records.values() for record in own}
        span = f", steps {min(steps)} to {max(steps)}" if steps else ""
        records = sum(map(len, self._records.values()))
        numbers = f"; numbers: {', '.join(self.scalars)}" if self.scalars else ""
        return f"<Memory: {records} records of {len(self)} tags{span}{numbers}>"

    def all(self) -> list[Record]:
        """All records: steps in order, and within a step the order of the program."""
        records = (record for own in self._records.values() for record in own)
        return sorted(records, key=lambda record: (record.step, record.order))

    def write(self, record: Record | Scalar) -> None:
        """Keep it."""
        if isinstance(record, Scalar):
            self.scalars[record.name].append(record)
        else:
            self._records.setdefault(record.tag, []).append(record)

    def close(self) -> None:
        """Nothing ends."""


class _Numbers:
    """A sink without arrays: below `shard_map` one record tells what is of all devices."""

    def write(self, record: Record | Scalar) -> None:
        """Take a record, unless it is of another device than the first."""
        if isinstance(record, Scalar) or not any(record.shard.values()):
            self._write(record)

    def _write(self, record: Record | Scalar) -> None:
        raise NotImplementedError


class Jsonl(_Numbers):
    """A file with a line of JSON for each record: what `report` reads. Written as it comes.

    Args:
      path: of the file; what it holds stays, so that a run that is resumed goes on.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._file: Any = None

    def _write(self, record: Record | Scalar) -> None:
        if self._file is None:
            self._file = self.path.open("a", encoding="utf-8")
        self._file.write(json.dumps(record.as_json(), allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


# Numbers that a row of a table holds.
_COLUMNS = (
    "amax",
    "underflow",
    "saturation",
    "nonfinite_blocks",
    "sqnr_db",
    "outlier_ratio",
    "error",
    "cosine",
)
_TAG = ("path", "call", "product", "side", "axis", "format", "rule")


class Csv(_Numbers):
    """A table with a row for each record, without histograms and channels; numbers besides.

    Args:
      path: of the file; a file that is there is continued.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._file: Any = None

    def _write(self, record: Record | Scalar) -> None:
        if self._file is None:
            new = not self.path.exists() or self.path.stat().st_size == 0
            self._file = self.path.open("a", encoding="utf-8", newline="")
            if new:
                csv.writer(self._file).writerow(("step", "index", *_TAG, *_COLUMNS, "value"))
        csv.writer(self._file).writerow(_row(record))
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _row(record: Record | Scalar) -> list[Any]:
    if isinstance(record, Scalar):
        empty = len(_TAG) - 1 + len(_COLUMNS)
        return [record.step, "", record.name, *[""] * empty, record.value]
    index = "/".join(map(str, record.index))
    own = [getattr(record.tag, name) for name in _TAG]
    return [record.step, index, *own, *(record.stats.get(name, "") for name in _COLUMNS), ""]


class Console(_Numbers):
    """A table for each step, printed when the next begins, and at the end. It fits a terminal of
    80 columns.

    Args:
      console: where to; default: standard output.
      worst: how many rows: those with Inf or NaN first, then those with the lowest SQNR. That of a
        product is against the same product in float32.
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
        if records:
            title = f"step {self._step}: {len(records)} records, the worst first"
            self._console.print(_table(title, records, self._worst))


def _table(title: str, records: Sequence[Record], rows: int) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in ("operand", "format", "dB", "amax", "zero %", "sat. %", "bad", "outlier"):
        left = column in ("operand", "format")
        table.add_column(column, justify="left" if left else "right", overflow="fold")
    ranked = sorted(records, key=lambda record: (-_bad(record), _decibel(record)))
    for record in ranked[:rows]:
        cells = (
            _decibel(record),
            record.stats.get("amax"),
            *(100 * record.stats.get(name, math.nan) for name in ("underflow", "saturation")),
            _bad(record) or None,
            record.stats.get("outlier_ratio"),
        )
        table.add_row(
            f"{record.path} {record.tag.product} {record.tag.tensor}",
            record.tag.format,
            *("" if cell is None or cell != cell else f"{cell:.3g}" for cell in cells),
        )
    return table


def _bad(record: Record) -> int:
    """Blocks with Inf or NaN; of a product, entries."""
    return record.stats.get("nonfinite_blocks", record.stats.get("nonfinite", 0))


def _decibel(record: Record) -> float:
    """The SQNR of an operand, or of a product against float32; Inf where nothing was told."""
    if "error" in record.stats and record.stats["error"] > 0:
        return -20 * math.log10(record.stats["error"])
    sqnr = record.stats.get("sqnr_db", math.inf)
    return math.inf if math.isnan(sqnr) else sqnr


class TensorBoard(_Numbers):
    """Numbers for TensorBoard.

    Args:
      writer: a folder, which tensorboardX writes (`pip install "mx_jax[tensorboard]"`); or whatever
        has `add_scalar(name, value, step)`, as tensorboardX's `SummaryWriter` and torch's do, or
        `write_scalars(step, {name: value})`, as clu's writers do.

    Raises:
      ImportError: a folder, and no tensorboardX.
      TypeError: a writer that has neither.
    """

    def __init__(self, writer: Any):
        if isinstance(writer, str | Path):
            writer = _summary_writer(writer)
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
                for name in _COLUMNS
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


def _summary_writer(folder: str | Path) -> Any:
    try:
        from tensorboardX import SummaryWriter  # pyright: ignore
    except ImportError as error:
        raise ImportError(
            f"TensorBoard: writing into folder={str(folder)!r} needs tensorboardX, which is not "
            'installed; pip install "mx_jax[tensorboard]", or give a writer that you have'
        ) from error
    return SummaryWriter(str(folder))
