"""The style and palette of the docs' drawings, and the folder where they are written."""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # before pyplot: no display needed

import matplotlib.pyplot as plt

FOLDER = Path(__file__).parents[2] / "docs" / "images" / "findings"
# After Okabe and Ito: distinct with any colour vision, on white and as site.css inverts it.
BLUE, RED, GRAY, PINK = COLORS = ("#0072B2", "#D55E00", "#303030", "#CC79A7")
# Curves differ in their dashes too.
_DASHES = ("-", "--", ":", "-.")
STYLE = {
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.prop_cycle": plt.cycler(color=COLORS, linestyle=_DASHES),
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.figsize": (6.4, 3.2),
    "font.size": 9,
    "grid.color": "0.9",
    "legend.frameon": False,
    # The same file from the same numbers.
    "svg.hashsalt": "mx_jax",
}


def parse_no_options(description: str | None) -> None:
    """Answers `--help`, and refuses every other argument, before a script draws anything."""
    description, _, _ = (description or "").partition("\n\n")
    argparse.ArgumentParser(description=f"{description} Writes drawings of docs/.").parse_args()


def digest(*scripts: Path, numbers: Any = None) -> str:
    """The hash of a drawing's scripts, this file among them, and of its numbers."""
    texts = [script.read_text(encoding="utf-8") for script in (Path(__file__), *scripts)]
    return hashlib.sha256(json.dumps([texts, numbers]).encode()).hexdigest()


def save(
    name: str, draw: Callable[[Any], None], folder: Path = FOLDER, description: str | None = None
) -> Path:
    """Let `draw` fill a plot, and write it as SVG.

    Args:
      name: of the file, and of a finding's script.
      draw: gets matplotlib's axes.
      folder: where to write.
      description: the drawing's metadata, by which tests know it; a finding's is its `digest`.
    """
    description = description or digest(Path(__file__).with_name(f"{name}.py"))
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(layout="constrained")
        draw(axes)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{name}.svg"
        figure.savefig(path, metadata={"Date": None, "Description": description})
        plt.close(figure)
    print(path)
    return path


def panels(axes: Any, rows: int, columns: int, height: float) -> Any:
    """Small multiples in place of a plot: an array of axes that share both scales.

    Args:
      axes: to replace.
      rows: of panels.
      columns: of panels.
      height: of a row, in inches.
    """
    figure = axes.figure
    axes.remove()
    figure.set_size_inches(6.4, height * rows)
    return figure.subplots(rows, columns, sharex=True, sharey=True)


def bars(axes: Any, rows: list[tuple[str, list[float], float | None]], color: str = BLUE) -> None:
    """Horizontal bars of means: a name, single values, and half of the interval of their mean.

    Single values are points; where there is no interval, a line goes from the least to the largest.
    """
    for place, (_, values, half) in enumerate(rows):
        mean = sum(values) / len(values)
        reach = (half, half) if half is not None else (mean - min(values), max(values) - mean)
        axes.barh(place, mean, height=0.7, color=color, alpha=0.35, linewidth=0)
        axes.errorbar(
            mean, place, xerr=[[reach[0]], [reach[1]]], color=color, linewidth=1.2, capsize=2
        )
        if half is not None:
            axes.plot(values, [place] * len(values), "o", color=color, markersize=2.5)
    axes.set_yticks(range(len(rows)), [name for name, *_ in rows])
    axes.grid(axis="y", visible=False)
    axes.invert_yaxis()
    axes.axvline(0, color="0.2", linewidth=0.8)
