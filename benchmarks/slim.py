"""Leaves in results what git keeps: `python -m benchmarks.slim` after measuring anew.

The tables of docs/ take medians; quartiles, clocks that no table shows, the loss of each step and
digits after the ninth are dropped. The Markdown beside a result has all its rows.
"""

import argparse
import json
import statistics
from typing import Any

from benchmarks.report import RESULTS

# Steps at the end of a run whose mean loss a table shows.
LATE = 200
_QUARTILES = {"median", "q1", "q3", "smallest"}
_DROPPED = {
    "wall_ms",
    "minor_faults",
    "samples",
    "train_loss",
    "validation",
    "parameters",
}
# Kept as they are: bytes and counts that tests compare, and rows that `fp4_ablation` adds to.
_WHOLE = ("gpu/", "mutated_checkpoints.json", "train_lm_fp4/")


def slimmed(x: Any) -> Any:
    """A result without the values that no table shows."""
    if isinstance(x, dict):
        if set(x) == _QUARTILES:
            return {"median": slimmed(x["median"])}
        kept = {name: slimmed(value) for name, value in x.items() if name not in _DROPPED}
        if "train_loss" in x:
            kept["late_train_loss"] = statistics.mean(x["train_loss"][-LATE:])
        return kept
    if isinstance(x, float):
        return float(f"{x:.9g}")
    return [slimmed(each) for each in x] if isinstance(x, list) else x


def written(result: dict[str, Any]) -> str:
    """As JSON, a row a line."""
    text = json.dumps(slimmed(result), separators=(",", ":"))
    return text.replace("},{", "},\n{").replace(":[{", ":[\n{") + "\n"


def main() -> None:
    """Run the command."""
    argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0]).parse_args()
    for path in sorted(RESULTS.rglob("*.json")):
        if not path.relative_to(RESULTS).as_posix().startswith(_WHOLE):
            path.write_text(written(json.loads(path.read_text())))


if __name__ == "__main__":
    main()
