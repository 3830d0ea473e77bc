"""The rows of `fp4_ablation`: losses and gaps of runs, and of commands that ran before."""

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.fp4_variants import BASELINE, Variant
from benchmarks.language_model import Run

# When a row was trained, and with which code.
TRAINED = ("date", "commit")


def late_loss(run: Run) -> float:
    """Mean training loss of the last tenth of the steps: many more tokens than a validation."""
    return statistics.mean(run.train_loss[-max(1, run.step // 10) :])


def rows_of(chosen: Sequence[Variant], runs: Sequence[Run]) -> list[dict[str, Any]]:
    """One row a variant: final losses and gaps in per cent to float32 of the same seed."""
    finished = {(run.recipe, run.seed): run for run in runs if run.finished}
    return [_row(variant, finished, runs) for variant in chosen]


def _row(
    variant: Variant, finished: dict[tuple[str, int], Run], runs: Sequence[Run]
) -> dict[str, Any]:
    seeds = sorted(seed for name, seed in finished if name == variant.name)
    of_seed = [finished[variant.name, seed] for seed in seeds]
    pairs = [(run, finished.get((BASELINE, run.seed))) for run in of_seed]

    def gaps(loss: Callable[[Run], Any]) -> list[float]:
        return [100 * (loss(run) / loss(base) - 1) for run, base in pairs if base is not None]

    diverged = [run for run in runs if run.recipe == variant.name and run.diverged_at is not None]
    return {
        "name": variant.name,
        "what": variant.what,
        "group": variant.group,
        "decisions": str(variant.precision.recipe),
        "high_blocks": variant.precision.high_blocks,
        "head": variant.precision.head.name,
        "seeds": seeds,
        "losses": [run.final_loss for run in of_seed],
        "gaps_percent": gaps(lambda run: run.final_loss),
        "training_gaps_percent": gaps(late_loss),
        "diverged": sorted(run.seed for run in diverged),
    }


def differences(row: dict[str, Any], other: dict[str, Any], of: str) -> list[float]:
    """How far a row's gaps lie above another's, in points, seed by seed."""
    theirs = dict(zip(other["seeds"], other[of], strict=True))
    return [
        gap - theirs[seed]
        for seed, gap in zip(row["seeds"], row[of], strict=True)
        if seed in theirs
    ]


def check_settings(before: dict[str, Any], now: dict[str, Any]) -> None:
    """Refuse to put runs of other settings into one table."""
    differ = {
        name: (setting, now.get(name))
        for name, setting in before.items()
        if setting != now.get(name)
    }
    if differ:
        raise SystemExit(f"--keep: settings differ from those of --out (there, here): {differ}")


def joined(before: dict[str, Any], now: dict[str, Any], order: Sequence[Variant]) -> dict[str, Any]:
    """The result with rows of an earlier one, each with the date and commit of its training.

    Args:
      before: the earlier result; rows that were trained anew are dropped from it.
      now: the result; its baseline only proves that both were trained alike, and is dropped.
      order: the rows' order in the table.

    Raises:
      SystemExit: other losses of the baseline: gaps could not be compared.
    """
    base, again = (_baseline(result) for result in (before, now))
    differ = {
        seed: (base.get(seed), loss) for seed, loss in again.items() if base.get(seed) != loss
    }
    if differ:
        raise SystemExit(
            f"--keep: {BASELINE} ends at other losses than in --out (seed: there, here): {differ}; "
            "gaps to two baselines cannot stand in one table"
        )
    rows = {row["name"]: row | _trained(before, row) for row in before["rows"]}
    rows |= {
        row["name"]: row | _trained(now, row)
        for row in now["rows"]
        if row["seeds"] and row["name"] != BASELINE
    }
    names = [variant.name for variant in order]
    return now | {"rows": sorted(rows.values(), key=lambda row: names.index(row["name"]))}


def _baseline(result: dict[str, Any]) -> dict[int, float]:
    """Final losses of the baseline by seed."""
    (row,) = (row for row in result["rows"] if row["name"] == BASELINE)
    return dict(zip(row["seeds"], row["losses"], strict=True))


def _trained(result: dict[str, Any], row: dict[str, Any]) -> dict[str, str]:
    return {fact: row.get(fact, result["environment"][fact]) for fact in TRAINED}


def when(rows: Sequence[dict[str, Any]]) -> list[str]:
    """One sentence a commit: which rows were trained by it; none where rows do not say."""
    groups: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if "commit" in row:
            groups.setdefault((row["date"][:10], row["commit"]), []).append(row["name"])
    return [
        f"Trained on {date} at commit {commit}: {'; '.join(names)}."
        for (date, commit), names in sorted(groups.items())
    ]
