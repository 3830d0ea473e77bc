"""Goals of products and casts on one CPU core, and how far the measurements are from them.

Every goal is a ratio of two cases that run in the same rounds (`benchmarks.cpu_goal_cases`): the
time of what it is compared with, divided by this library's. So 1 is equal, and more is faster. A
share of a bound is the same: the time that the bound would take, divided by this library's. One
thread, pinned; process CPU time; see `benchmarks.timing`. Needs the target `limits`.
"""

import argparse
import contextlib
import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks import cores, environment, goals, held, report
from benchmarks.cpu_goal_cases import CACHE, FLOAT32, GROUPS, ONNX, READ, STEP, Group, Sizes
from benchmarks.timing import Samples, Spread, add_pace, measure, pace, ratio
from mx_jax.backends.cpu_ffi import library

PEERS = ("onnxruntime",)
VNNI, FMA, FMA256 = "peak vnni", "peak fma", "peak fma256"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Goal:
    """One goal.

    Attributes:
      what: the case of this library, as its group calls it.
      group: of cases that run in the same rounds.
      over: the case that it is compared with.
      ratio: to reach: the time of `over`, divided by that of `what`.
      bound: the case that nothing is faster than, if one runs: a peak of the core, a read.
    """

    what: str
    group: str
    over: str
    ratio: float
    bound: str = ""


def _goals(group: str, over: str, ratios: Mapping[str, float], bound: str = "") -> list[Goal]:
    return [Goal(what=w, group=group, over=over, ratio=r, bound=bound) for w, r in ratios.items()]


def _goals_of_set(
    isa: str, peak: str, mine: Mapping[str, float], shares: Mapping[str, float]
) -> list[Goal]:
    """Those of a smaller set, which XLA's float32 is held to as well (`benchmarks.held`)."""
    one, many = "float32 x {}, packed", "mxint8 x mxfp4, packed"
    ratios = {"mxfp4": 1.6, "nvfp4": 1.0, "mxfp8_e4m3": 1.3, "mxint8": 1.2}
    ratios |= {"mxfp6_e2m3": 1.2, "mxfp6_e3m2": 1.2}
    each = {one.format(name): ratio for name, ratio in ratios.items()}
    squares = {f"{name} x {name}": mine["squares"] for name in ("mxfp4", "mxfp6_e2m3", "mxint8")}
    # Of float32's time.
    steps = {STEP.format(name): 1 / share for name, share in shares.items()}
    column, row = "float32 to mxfp8_e4m3 by columns", "float32 to mxfp8_e4m3 by rows"
    return [
        *_goals(f"{isa}: 1 row", FLOAT32, each | {many: mine["1 row"]}, FMA256),
        *_goals(f"{isa}: 32 rows", FLOAT32, {many: mine["32 rows"]}, peak),
        *_goals(f"{isa}: 32 rows", FLOAT32, dict.fromkeys(each, 1.0), FMA256),
        *_goals(f"{isa}: 96 rows", FLOAT32, dict.fromkeys(each, 1.0), FMA256),
        *_goals(f"{isa}: squares", FLOAT32, squares, peak),
        *_goals(f"{isa}: steps", STEP.format("high_precision"), steps),
        *_goals(f"{isa}: casts", column, {row: 1}),
        *_goals(f"{isa}: attention", CACHE.format("float32"), {CACHE.format("mxfp8_e4m3"): 1.0}),
    ]


GOALS: tuple[Goal, ...] = (
    *_goals("1 row", FLOAT32, {"float32 x mxfp4, packed": 5, "float32 x mxfp8_e4m3, packed": 3}),
    *_goals(
        "32 rows", FLOAT32, {"mxint8 x mxfp4, packed": 5.5, "mxfp4 x mxfp4, packed": 5.5}, VNNI
    ),
    *_goals(
        "1 row, weights beyond the cache",
        READ,
        {
            "float32 x mxfp4, packed": 0.8,
            "mxint8 x mxfp4, packed": 0.9,
            "float32 x nvfp4, packed": 0.8,
            "float32 x mxfp8_e4m3, packed": 0.8,
        },
    ),
    *_goals(
        "1 row, weights beyond the cache",
        "mxint8 x mxfp4, packed",
        {"mxint8 x mxfp4, packed, 8 rows": 1 / 1.6},
    ),
    *_goals(
        "1 row, weights beyond the cache",
        ONNX,
        {"float32 x mxfp4, packed": 1.2, "mxint8 x mxfp4, packed": 1.2},
        READ,
    ),
    *_goals(
        "square",
        VNNI,
        {"mxfp4 x mxfp4": 0.7, "mxfp6_e2m3 x mxfp6_e2m3": 0.7, "mxint8 x mxint8": 0.7},
    ),
    *_goals("square without AVX512-BF16", FLOAT32, {"mxfp8_e4m3 x mxfp8_e4m3": 1}, FMA),
    *_goals("8 rows, random codes", FLOAT32, {"float32 x nvfp4, packed": 2}, FMA),
    *_goals("32 rows, random codes", FLOAT32, {"float32 x nvfp4, packed": 1.6}, FMA),
    *_goals("casts", "float32 to mxfp8_e4m3 by columns", {"float32 to mxfp8_e4m3 by rows": 1}),
    *_goals(
        "attention over 2,048 positions",
        CACHE.format("float32"),
        {CACHE.format("mxfp8_e4m3"): 1.5},
    ),
    *_goals_of_set(
        "avx2",
        "peak maddubs256",
        {"1 row": 2.5, "32 rows": 2.2, "squares": 1.4},
        {"mxfp4": 0.85, "mxint8": 1.0, "mxfp8": 1.0, "nvfp4": 1.0},
    ),
    *_goals_of_set(
        "avx2_vnni",
        "peak vnni256",
        {"1 row": 3.5, "32 rows": 4, "squares": 2.8},
        {"mxfp4": 0.6, "mxint8": 0.9, "mxfp8": 1.0, "nvfp4": 0.9},
    ),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """A goal and its measurement.

    Attributes:
      goal: it is about.
      ratio: that was measured; None: it was not.
      limit: the ratio that the goal's bound would reach; None: no bound ran.
      why: it was not measured.
      cpu_ms: of this library's case, the median.
    """

    goal: Goal
    ratio: Spread | None = None
    limit: float | None = None
    why: str = ""
    cpu_ms: float | None = None

    @property
    def missed_by(self) -> float | None:
        """The share of the goal that is missing; None unless it was missed."""
        return goals.missed_by(self._reached, self.goal.ratio)

    @property
    def _reached(self) -> float | None:
        return None if self.ratio is None else self.ratio.median

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        return {
            **dataclasses.asdict(self.goal),
            "ratio_to_reach": self.goal.ratio,
            "ratio": None if self.ratio is None else dataclasses.asdict(self.ratio),
            "limit": self.limit,
            "cpu_ms": self.cpu_ms,
            "missed_by": self.missed_by,
            "why": self.why,
            "verdict": str(self),
        }

    def __str__(self) -> str:
        return goals.verdict(self._reached, self.goal.ratio, self.why)


def verdicts(name: str, group: Group, samples: Mapping[str, Samples]) -> Iterator[Verdict]:
    """Of every goal of a group.

    Args:
      name: of the group.
      group: that was measured.
      samples: by case.
    """
    for goal in (goal for goal in GOALS if goal.group == name):
        missing = [name for name in (goal.what, goal.over) if name not in samples]
        if missing:
            why = group.left_out.get(missing[0], f"{missing[0]} did not run")
            yield Verdict(goal=goal, why=why)
            continue
        cpu_ms = samples[goal.what].summary()["cpu_ms"]["median"]
        measured = _times(group, samples, goal.over, goal.what)
        limit = None
        if goal.bound in samples:
            limit = _times(group, samples, goal.over, goal.bound).median
        yield Verdict(goal=goal, ratio=measured, limit=limit, cpu_ms=cpu_ms)


def _times(group: Group, samples: Mapping[str, Samples], over: str, what: str) -> Spread:
    """The time of the case `over` in times of the case `what`, for the same work."""
    work = group.work.get(over, 1.0) / group.work.get(what, 1.0)
    spread = ratio(samples[over], samples[what], "cpu")
    return Spread(*(work * value for value in dataclasses.astuple(spread)))


def run_group(name: str, sizes: Sizes, how_long: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The verdicts of one group as JSON, measured in this process."""
    group = GROUPS[name].make(sizes)
    samples = measure(group.cases, **how_long) if group.cases else {}
    loaded = library.load()
    isa = "-" if isinstance(loaded, str) else loaded.isa
    return [verdict.as_json() | {"set": isa} for verdict in verdicts(name, group, samples)]


def measured(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Each group in a process of its own on one core."""
    sizes, rows = Sizes(size=options.size, square=options.square, many=options.many), []
    names = list(dict.fromkeys(goal.group for goal in GOALS))
    wanted = [name for name in names if not options.groups or name in options.groups]
    with report.progress(len(wanted)) as step:
        for name in wanted:
            step(name)
            with _on(GROUPS[name].isa):
                rows += cores.on_one_core(run_group, name, sizes, pace(options))
    return rows


@contextlib.contextmanager
def _on(isa: str | None) -> Iterator[None]:
    """Processes that start meanwhile run on this instruction set; None: on the machine's best."""
    before = os.environ.get(held.ISA)
    if isa is not None:
        os.environ[held.ISA] = isa
    try:
        yield
    finally:
        os.environ.pop(held.ISA, None)
        if before is not None:
            os.environ[held.ISA] = before


def sheet(rows: Sequence[Mapping[str, Any]]) -> report.Sheet:
    """A line for each goal."""
    columns = (
        "",
        "set",
        "of",
        "over",
        "time (ms)",
        "goal",
        "limit",
        "measured",
        "quartiles",
        "verdict",
    )
    result = report.Sheet(
        "Goals on one CPU core: time of the other, divided by this library's; 1 is equal",
        columns,
        notes=[
            "Medians over the same rounds; CPU time of one pinned thread. Limit: what a peak of "
            "the core, or a read of the weights, would reach, measured in the same rounds. XLA's "
            "float32 has the instructions of the set's name: it is held to AVX2 under avx2 and "
            "avx2_vnni."
        ],
    )
    for row in rows:
        spread = row["ratio"] or {}
        quartiles = " to ".join(report.number(spread.get(name), 2) for name in ("q1", "q3"))
        result.rows.append(
            [
                row["group"],
                row.get("set", "-"),
                row["what"],
                row["over"],
                report.number(row["cpu_ms"], 3),
                f"{row['ratio_to_reach']:.4g}",
                report.number(row["limit"], 2),
                report.number(spread.get("median"), 2),
                quartiles if spread else "-",
                row["verdict"],
            ]
        )
    return result


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = report.parser("cpu_goals", __doc__, out="cpu/goals.json")
    parser.add_argument("--size", type=int, default=4096, help="of weights")
    parser.add_argument("--square", type=int, default=2048, help="of square products")
    parser.add_argument("--many", type=int, default=16, help="weights beyond the cache")
    parser.add_argument("--groups", nargs="*", choices=[*GROUPS], help="alone")
    add_pace(parser, seconds=12.0, min_rounds=9)
    options = parser.parse_args(arguments)
    rows = measured(options)
    result = {"environment": environment.describe(PEERS), "rows": rows}
    report.publish("cpu_goals", options, result, [sheet(rows)])


if __name__ == "__main__":
    main()
