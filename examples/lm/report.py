"""The report: the table of losses, the picture of the curves, a sample of text."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterable
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # before pyplot: no display needed

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from . import intervals
from .disk import replace
from .settings import ENDS, Settings, known_recipes
from .storage import Run

BASELINE = "float32"

# Of Okabe and Ito's palette, distinct with any colour vision.
BLUE, GREY = "#0072B2", "#C0C0C0"
COLUMNS = 4


def by_recipe(runs: Iterable[Run]) -> dict[str, list[Run]]:
    """Runs grouped by recipe, in the order of `known_recipes()`, seeds ascending."""
    ordered = sorted(runs, key=lambda run: (*_place(run.recipe), run.seed))
    groups: dict[str, list[Run]] = {}
    for run in ordered:
        groups.setdefault(run.recipe, []).append(run)
    return groups


def _place(recipe: str) -> tuple[int, bool]:
    return known_recipes().index(recipe.removesuffix(ENDS)), recipe.endswith(ENDS)


def gap(run: Run, baseline: Run) -> list[tuple[int, float]]:
    """Percent that a run's validation loss lies above its baseline's, where both have one."""
    reference = dict(baseline.validation)
    return [
        (step, 100 * (loss / reference[step] - 1))
        for step, loss in run.validation
        if step in reference
    ]


def gaps(runs: Iterable[Run], baselines: Iterable[Run]) -> list[list[tuple[int, float]]]:
    """The gap of every run to the baseline of its own seed, for seeds that have one."""
    by_seed = {run.seed: run for run in baselines}
    return [gap(run, by_seed[run.seed]) for run in runs if run.seed in by_seed]


def late_loss(run: Run) -> float:
    """Mean training loss of the last quarter: many more tokens than a validation."""
    return statistics.mean(run.train_loss[-max(1, run.step // 4) :])


def late_gaps(runs: Iterable[Run], baselines: Iterable[Run]) -> list[float]:
    """Percent that `late_loss` lies above the baseline's of the same seed."""
    by_seed = {run.seed: late_loss(run) for run in baselines}
    return [100 * (late_loss(run) / by_seed[run.seed] - 1) for run in runs if run.seed in by_seed]


def averaged_gaps(runs: Iterable[Run], baselines: Iterable[Run]) -> list[float]:
    """Percent that the loss of averaged weights lies above the baseline's of the same seed."""
    by_seed = {run.seed: run.averaged_loss for run in baselines}
    pairs = ((run.averaged_loss, by_seed.get(run.seed)) for run in runs)
    return [100 * (loss / exact - 1) for loss, exact in pairs if loss and exact]


def print_table(console: Console, runs: Iterable[Run], settings: Settings) -> None:
    """Final validation losses, gaps to float32 with the same seed, and the speed."""
    groups = by_recipe(runs)
    title = (
        f"Validation loss after {settings.steps:,} steps, and gaps to {BASELINE} of the same seed "
        "in percent:\nof that loss, of the last quarter's training loss, and of the loss of "
        "weights\naveraged over it (mean over seeds ± half the width of its 95 % interval)"
    )
    table = Table(title=title, title_justify="left")
    table.add_column("recipe")
    for column in ("seeds", "loss", "gap", "training", "averaged", "tokens/s", "time (s)"):
        table.add_column(column, justify="right")
    baselines = [run for run in groups.get(BASELINE, []) if run.finished]
    for recipe, group in groups.items():
        finished = [run for run in group if run.finished]
        final_gaps = [points[-1][1] for points in gaps(finished, baselines)]
        all_gaps = (
            final_gaps,
            late_gaps(finished, baselines),
            averaged_gaps(finished, baselines),
        )
        losses = [run.final_loss for run in finished if run.final_loss is not None]
        speeds = [run.tokens_per_second(settings) for run in group if run.timed_steps]
        table.add_row(
            recipe,
            f"{len(finished)} of {len(group)}" if len(finished) < len(group) else str(len(group)),
            f"{statistics.mean(losses):.4f}" if losses else "-",
            *("" if recipe == BASELINE else intervals.text(values, "+.2f") for values in all_gaps),
            f"{statistics.mean(speeds):,.0f}" if speeds else "-",
            f"{statistics.mean(run.seconds for run in group):,.0f}",
        )
    console.print(table)
    for run in (run for group in groups.values() for run in group if not run.finished):
        console.print(Text(_unfinished(run, settings), style="bold red"))


def _unfinished(run: Run, settings: Settings) -> str:
    if run.diverged_at is not None:
        return f"{run.label} DIVERGED: its loss was no longer finite after step {run.diverged_at:,}"
    return f"{run.label} is unfinished: step {run.step:,} of {settings.steps:,}"


def print_sample(console: Console, recipe: str, prompt: str, text: str) -> None:
    """A sample, its prompt in bold."""
    console.print(Panel(Text.assemble((prompt, "bold"), text), title=recipe, title_align="left"))


def save_plot(path: Path, runs: Collection[Run], settings: Settings) -> None:
    """A panel for each recipe: its gap to float32, mean and range over seeds, others' in grey.

    float32's own panel is its loss, and so is every panel where no run is in float32.
    """
    groups = by_recipe(runs)
    if not any(run.validation for run in runs):
        return
    above = {name: gaps(group, groups.get(BASELINE, [])) for name, group in groups.items()}
    above = {name: curves for name, curves in above.items() if name != BASELINE and any(curves)}
    values = [value for curves in above.values() for curve in curves for _, value in curve]
    columns = min(COLUMNS, len(groups))
    rows = math.ceil(len(groups) / columns)
    with plt.rc_context({"axes.spines.top": False, "axes.spines.right": False, "font.size": 8}):
        size = max(2.4 * columns, 5), 2 * rows + 0.6
        figure, places = plt.subplots(*(rows, columns), figsize=size, layout="constrained")
        for place, (recipe, group) in zip(np.ravel(places), groups.items(), strict=False):
            place.set_title(_title(recipe, group, groups), loc="left", fontsize=8)
            place.set_xlim(0, settings.steps * 1.02)
            place.grid(alpha=0.25)
            if recipe in above:
                for other in above.values():
                    _plot_points(place, other, GREY, with_range=False)
                place.axhline(0, color="black", linewidth=0.8)
                place.set_ylim(min(values) - 0.2, max(values) + 0.2)
                _plot_points(place, above[recipe], BLUE)
            else:
                _plot_train(place, group, settings)
                _plot_points(place, [run.validation for run in group], BLUE)
        for place in np.ravel(places)[len(groups) :]:
            place.remove()
        figure.supxlabel(f"optimizer step; loss in nats per character, else % above {BASELINE}")
        try:
            replace("the plot", path, lambda file: figure.savefig(file, format="png", dpi=150))
        finally:
            plt.close(figure)


def _title(recipe: str, group: list[Run], groups: dict[str, list[Run]]) -> str:
    """A recipe with its last validation loss and gap."""
    if any(run.diverged_at is not None for run in group):
        return f"{recipe}: diverged"
    if not all(run.finished for run in group):
        return f"{recipe}: unfinished"
    loss = statistics.mean(run.validation[-1][1] for run in group)
    differences = [points[-1][1] for points in gaps(group, groups.get(BASELINE, [])) if points]
    if recipe == BASELINE or not differences:
        return f"{recipe}: {loss:.3f}"
    return f"{recipe}: {statistics.mean(differences):+.2f} %"


def _plot_train(axes: Axes, group: list[Run], settings: Settings) -> None:
    """Training loss, averaged over seeds and over a fortieth of the steps."""
    group = [run for run in group if run.step]
    if not group:
        return
    length = min(run.step for run in group)
    loss = np.mean([run.train_loss[:length] for run in group], axis=0)
    window = max(1, settings.steps // 40)
    if length > window:
        smooth = np.convolve(loss, np.full(window, 1 / window), mode="valid")
        # Each mean stands at the middle of its window.
        steps = np.arange(len(smooth)) + (window + 1) / 2
        axes.plot(steps, smooth, color=BLUE, linewidth=0.8, alpha=0.45)


def _plot_points(
    axes: Axes, curves: list[list[tuple[int, float]]], colour: str, with_range: bool = True
) -> None:
    """Mean and range of curves, as far as all of those go that have begun."""
    curves = [curve for curve in curves if curve]
    if not curves:
        return
    length = min(map(len, curves))
    steps = [step for step, _ in curves[0][:length]]
    values = np.array([[value for _, value in curve[:length]] for curve in curves])
    if not with_range:
        axes.plot(steps, values.mean(0), color=colour, linewidth=0.7)
        return
    axes.plot(steps, values.mean(0), marker="o", color=colour, markersize=3, linewidth=1.4)
    if len(curves) > 1:
        axes.fill_between(
            steps, values.min(0), values.max(0), color=colour, alpha=0.15, linewidth=0
        )
