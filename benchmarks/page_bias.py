"""The table of gradient biases in docs/accuracy.md, from committed results."""

import functools
from collections.abc import Callable
from typing import Any

from benchmarks.gradient_bias import SETTINGS, rows_to_measure
from benchmarks.language_model import intervals
from benchmarks.page_tables import Table, result

# Rows of the page, in its order, and the steps of its checkpoints; the results have more of both.
_ROWS = (
    *("bf16", "mxfp8", "mxfp4_floor", "mxfp4", "mxfp4, forward alone", "mxfp4, backward alone"),
    *("mxfp4_stochastic", "mxfp4, ends", "mxfp4, head too", "mxfp4_backward"),
    *("nvfp4", "nvfp4_pretraining", "nvfp4_unbiased", "quartet_ii", "deepseek_v3"),
)
_STEPS, _MIDDLE = (300, 800), 300


def gradient_bias() -> Table:
    """Means over seeds, with their intervals; n where a checkpoint has fewer seeds than the row."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in result("gradient_bias")["rows"]:
        found.setdefault(row["name"], []).append(row)
    what = {variant.name: variant.what for variant in rows_to_measure(SETTINGS.layers)}
    heads = ("variant", "what it is, or adds", *(f"bias at {step} (%)" for step in _STEPS))
    return (*heads, "slope", "loss (%)"), [(n, what[n], *_cells(found[n])) for n in _ROWS]


def _cells(own: list[dict[str, Any]]) -> tuple[str, ...]:
    over = functools.partial(_over_seeds, own)
    return (
        *(over(step, lambda row: 100 * row["bias"], ".1f") for step in _STEPS),
        over(_MIDDLE, lambda row: row["slope"], ".3f"),
        over(_MIDDLE, lambda row: 100 * row["loss_increase"] / row["loss"], "+.2f"),
    )


def _over_seeds(
    own: list[dict[str, Any]], step: int, value: Callable[[dict[str, Any]], float], pattern: str
) -> str:
    values = [value(row) for row in own if row["step"] == step]
    fewer = f" (n = {len(values)})" if 0 < len(values) < len({row["seed"] for row in own}) else ""
    return intervals.text(values, pattern) + fewer
