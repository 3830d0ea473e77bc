"""Write the tables of docs/benchmarks.md from committed results: `python -m benchmarks.page`.

A table stands between `<!-- table: NAME -->` and `<!-- end -->`. What is around it is written by
hand, and stays. A new table is a row of `TABLES`.
"""

import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import RESULTS, number

PAGE = Path(__file__).parents[1] / "docs" / "benchmarks.md"
_TABLE = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
_SQNR = ("mxint8", "mxfp8", "mxfp8_hybrid", "mxfp6", "nvfp4", "mxfp4")
# What a result calls a way to round, and what the page does.
_WAYS = {
    "nearest, amax": "nearest, `amax`",
    "MS-EDEN without rotation": "MS-EDEN without the transform",
    "stochastic, amax_subnormal": "stochastic, `amax_subnormal` (`nvfp4_pretraining`)",
    "stochastic, 4/6": "stochastic, `four_over_six` (`nvfp4_four_over_six`)",
    "stochastic, amax_headroom": "stochastic, `amax_headroom` (`nvfp4_unbiased`)",
    "MS-EDEN": "MS-EDEN (`quartet_ii`)",
    "MS-EDEN, groups of 128": "MS-EDEN with one correction for each group of 128",
}
Table = tuple[Sequence[str], Iterable[Sequence[str]]]


def result(name: str) -> dict[str, Any]:
    """A committed result."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def sqnr() -> Table:
    rows = {row["recipe"]: row for row in result("sqnr")["layer"]}
    heads = ("recipe", "output (dB)", "input gradient (dB)", "weight gradient (dB)")
    products = ("output", "grad_input", "grad_weight")
    return heads, [(n, *(number(rows[n][product], 1) for product in products)) for n in _SQNR]


def rounding() -> Table:
    found = {row["way"]: row for row in result("rounding")["casts"] if row["data"] == "normal"}
    rows = [
        (
            text,
            _interval(found[way]["slope"], 1, 5),
            *(_interval(found[way][what], 100, 3) for what in ("error", "bias")),
        )
        for way, text in _WAYS.items()
    ]
    return ("way", "slope", "error (%)", "bias (%)"), rows


def compile_time() -> Table:
    found = {(r["case"], r["backends"]): r for r in result("cpu/compile_time")["rows"]}
    rows = []
    for case in ("mxfp8", "mxfp4", "nvfp4", "float8_tensorwise"):
        ways = (
            found[case, way]["compile_of_float32"]["median"] for way in ("default", "reference")
        )
        rows.append((case, *(number(value, 1 if value < 10 else 0) for value in ways)))
    return ("recipe", "C++", "reference"), rows


def capture() -> Table:
    rows = [
        (
            row["watching"],
            str(row["rows"]),
            number(1e3 * row["cpu_s"], 1),
            "" if row["watching"] == "unwatched" else f"{100 * row['overhead']:+.0f}",
        )
        for row in result("cpu/capture")["rows"]
    ]
    return ("watching", "rows", "CPU time of a step (ms)", "over unwatched (%)"), rows


TABLES: dict[str, Callable[[], Table]] = {
    function.__name__: function for function in (sqnr, rounding, compile_time, capture)
}


def _interval(value: dict[str, float], factor: float, digits: int) -> str:
    mean, half = (f"{factor * value[name]:.{digits}f}" for name in ("mean", "half"))
    return f"{mean} ± {half}"


def _markdown(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = (heads, ["---"] * len(heads), *rows)
    rule = f"|{'---|' * len(heads)}"
    texts = [f"| {' | '.join(line)} |".replace("|  |", "| |") for line in lines]
    return "\n".join([texts[0], rule, *texts[2:]]) + "\n"


def written(text: str) -> str:
    """A page with its tables as the results have them; Markdown wants empty lines around them.

    Raises:
      KeyError: a table that there is not.
    """
    return _TABLE.sub(
        lambda found: f"{found[1]}\n{_markdown(*TABLES[found[2]]())}\n{found[3]}", text
    )


def main() -> None:
    """Run the command."""
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(PAGE)


if __name__ == "__main__":
    main()
