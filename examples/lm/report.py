"""What a reader gets: the table of losses, the picture of the curves, a sample of text."""

from __future__ import annotations

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

# Okabe and Ito's palette, told apart with any colour vision: the plain recipes in solid lines,
# those of publications dashed, float8 dotted.
COLOURS = {
    "float32": "#000000",
    "bf16": "#999999",
    "mxfp8": "#0072B2",
    "mxfp8_hybrid": "#56B4E9",
    "mxfp6": "#009E73",
    "mxfp6_e2m3": "#005F45",
    "mxfp4": "#D55E00",
    "mxint8": "#CC79A7",
    "nvfp4": "#E69F00",
}
DASHED = {
    "mxfp4_backward": "#999999",
    "mxfp4_stochastic": "#D55E00",
    "quartet": "#CC79A7",
    "quartet_ii": "#F0E442",
    "mxfp4_hadamard": "#56B4E9",
    "nvfp4_unbiased": "#000000",
    "nvfp4_pretraining": "#E69F00",
    "nvfp4_four_over_six": "#009E73",
    "deepseek_v3": "#0072B2",
    "deepseek_v3_1": "#882255",
}
DOTTED = {
    "float8_tensorwise": "#D55E00",
    "float8_rowwise": "#0072B2",
    "float8_rowwise_with_gw_hp": "#009E73",
}


def style(recipe: str) -> dict[str, str]:
    """Colour and dashes of a recipe's curves."""
    if recipe.endswith(ENDS):
        return {"color": style(recipe.removesuffix(ENDS))["color"], "linestyle": "-."}
    for colours, dashes in ((DASHED, "--"), (DOTTED, ":")):
        if recipe in colours:
            return {"color": colours[recipe], "linestyle": dashes}
    return {"color": COLOURS[recipe], "linestyle": "-"}


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
    return [100 * (own / other - 1) for own, other in pairs if own and other]


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
    """Loss curves above, the gap to float32 below: means over seeds, their range shaded."""
    groups = by_recipe(runs)
    firsts = [run.validation[0][1] for run in runs if run.validation]
    if not firsts:
        return
    with plt.rc_context({"axes.spines.top": False, "axes.spines.right": False}):
        figure, (losses, differences) = plt.subplots(
            2, 1, figsize=(8, 7.5), height_ratios=(3, 2), sharex=True, layout="constrained"
        )
        for recipe, group in groups.items():
            look = style(recipe)
            _plot_train(losses, group, look["color"], settings)
            curves = [run.validation for run in group]
            _plot_points(losses, curves, look, label=_legend(recipe, group, groups))
            if recipe != BASELINE:
                _plot_points(differences, gaps(group, groups.get(BASELINE, [])), look)
        # Without the fall from guessing, which would flatten all that follows.
        losses.set_ylim(top=1.15 * max(firsts))
        _label(losses, differences, settings)
        try:
            replace("the plot", path, lambda file: figure.savefig(file, format="png", dpi=150))
        finally:
            plt.close(figure)


def _legend(recipe: str, group: list[Run], groups: dict[str, list[Run]]) -> str:
    """A recipe with its last validation loss and gap."""
    if any(run.diverged_at is not None for run in group):
        return f"{recipe}: diverged"
    if not all(run.finished for run in group):
        return f"{recipe}: unfinished"
    loss = statistics.mean(run.validation[-1][1] for run in group)
    differences = [points[-1][1] for points in gaps(group, groups.get(BASELINE, [])) if points]
    if recipe == BASELINE or not differences:
        return f"{recipe}: {loss:.3f}"
    return f"{recipe}: {loss:.3f} ({statistics.mean(differences):+.2f} %)"


def _plot_train(axes: Axes, group: list[Run], colour: str, settings: Settings) -> None:
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
        axes.plot(steps, smooth, color=colour, linewidth=1, alpha=0.45)


def _plot_points(
    axes: Axes,
    curves: list[list[tuple[int, float]]],
    look: dict[str, str],
    label: str | None = None,
) -> None:
    """Mean and range of curves, as far as all of those go that have begun."""
    curves = [curve for curve in curves if curve]
    if not curves:
        axes.plot([], [], marker="o", **look, label=label)
        return
    length = min(map(len, curves))
    steps = [step for step, _ in curves[0][:length]]
    values = np.array([[value for _, value in curve[:length]] for curve in curves])
    axes.plot(steps, values.mean(0), marker="o", **look, markersize=4, linewidth=1.5, label=label)
    if len(curves) > 1:
        axes.fill_between(
            steps, values.min(0), values.max(0), color=look["color"], alpha=0.15, linewidth=0
        )


def _label(losses: Axes, differences: Axes, settings: Settings) -> None:
    losses.set_title("Validation loss (points) and smoothed training loss (thin)", loc="left")
    losses.set_ylabel("loss (nats per character)")
    losses.legend(frameon=False, title="validation loss at the last step", alignment="left")
    differences.set_title(f"Validation loss above {BASELINE}, same seed and data", loc="left")
    differences.set_ylabel("gap (%)")
    differences.set_xlabel("optimizer step")
    differences.axhline(0, color=COLOURS[BASELINE], linewidth=1)
    differences.set_xlim(0, settings.steps * 1.01)
    for axes in (losses, differences):
        axes.grid(alpha=0.25)
