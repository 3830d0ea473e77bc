"""The sink that prints a table for each step."""

import math
from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console as RichConsole
from rich.table import Table

from mx_jax.inspect.capture_record import Record, Scalar
from mx_jax.inspect.sinks import Numbers


class Console(Numbers):
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
