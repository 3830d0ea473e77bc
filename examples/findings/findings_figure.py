"""What the findings share: a figure of one style, and where it is written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # before pyplot: no display needed

import matplotlib.pyplot as plt

FOLDER = Path(__file__).parents[2] / "docs" / "images" / "findings"
STYLE = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.figsize": (6.4, 3.2),
    "font.size": 9,
    # The same file from the same numbers.
    "svg.hashsalt": "mx_jax",
}


def save(
    name: str, draw: Callable[[Any], None], folder: Path = FOLDER, description: str | None = None
) -> Path:
    """Let `draw` fill a plot, and write it as SVG, which says a description if there is one."""
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(layout="constrained")
        draw(axes)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{name}.svg"
        figure.savefig(path, metadata={"Date": None, "Description": description})
        plt.close(figure)
    print(path)
    return path
