"""Sinks that write: lines of JSON, a table of numbers, and what TensorBoard shows."""

import csv
import json
import math
from pathlib import Path
from typing import Any

from mx_jax.inspect.capture_record import Record, Scalar
from mx_jax.inspect.sinks import COLUMNS, Numbers

_TAG = ("path", "call", "product", "side", "axis", "format", "rule")


class Jsonl(Numbers):
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


class Csv(Numbers):
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

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._file: Any = None

    def _write(self, record: Record | Scalar) -> None:
        if self._file is None:
            new = not self.path.exists() or self.path.stat().st_size == 0
            self._file = self.path.open("a", encoding="utf-8", newline="")
            if new:
                csv.writer(self._file).writerow(("step", "index", *_TAG, *COLUMNS, "value"))
        csv.writer(self._file).writerow(_row(record))
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _row(record: Record | Scalar) -> list[Any]:
    if isinstance(record, Scalar):
        empty = len(_TAG) - 1 + len(COLUMNS)
        return [record.step, "", record.name, *[""] * empty, record.value]
    index = "/".join(map(str, record.index))
    own = [getattr(record.tag, name) for name in _TAG]
    return [record.step, index, *own, *(record.stats.get(name, "") for name in COLUMNS), ""]


class TensorBoard(Numbers):
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
                for name in COLUMNS
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
