"""The table of gradient biases in docs/accuracy.md, from committed results."""

import functools
from collections.abc import Callable
from typing import Any

from benchmarks.language_model import intervals
from benchmarks.page_tables import Table, result

# Rows of the page, in its order, and the step of its checkpoints; the results have more of both.
_ROWS = (
    *("mxfp8", "mxfp4_floor", "mxfp4", "mxfp4, forward alone", "mxfp4, backward alone"),
    *("mxfp4, ends", "mxfp4, head too", "mxfp4_backward"),
    *("nvfp4", "nvfp4_pretraining", "quartet_ii", "deepseek_v3"),
)
_STEP = 300


def gradient_bias() -> Table:
    """Means over seeds, with their intervals; n where a checkpoint has fewer seeds than the row."""
    by_variant: dict[str, list[dict[str, Any]]] = {}
    for row in result("gradient_bias")["rows"]:
        by_variant.setdefault(row["name"], []).append(row)
    return ("variant", "bias (%)", "slope", "loss (%)"), [
        (name, *_cells(by_variant[name])) for name in _ROWS
    ]


def _cells(rows: list[dict[str, Any]]) -> tuple[str, ...]:
    over = functools.partial(_over_seeds, rows)
    return (
        over(lambda row: 100 * row["bias"], ".1f"),
        over(lambda row: row["slope"], ".3f"),
        over(lambda row: 100 * row["loss_increase"] / row["loss"], "+.2f"),
    )


def _over_seeds(
    rows: list[dict[str, Any]], value: Callable[[dict[str, Any]], float], pattern: str
) -> str:
    values = [value(row) for row in rows if row["step"] == _STEP]
    fewer = f" (n = {len(values)})" if 0 < len(values) < len({row["seed"] for row in rows}) else ""
    return intervals.text(values, pattern) + fewer
