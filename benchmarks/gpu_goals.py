"""Goals on a GPU, and how far the measurements are from them.

Goals are speeds over bfloat16's in the same run.
"""

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from benchmarks import goals, report
from benchmarks.gpu_compare import PLAIN, Measured
from benchmarks.gpu_products import KERNEL, Pair, Timed
from benchmarks.gpu_steps import Step
from mx_jax.formats import MXFP4, MXFP8_E4M3, BlockFormat

What = Timed | Step
LARGE = (8192, 8192)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Goal:
    """One goal.

    Attributes:
      what: product of so many rows, or training step.
      ratio: to reach, by the GPU's clock where it is there.
      way: to compute it.
      devices: words of the device's name, one of which it must have; empty: any GPU.
      limit: of the ratio, by the memory's bandwidth, where it is known.
    """

    what: What
    ratio: float
    way: str = KERNEL
    devices: tuple[str, ...] = ()
    limit: float | None = None

    def is_for(self, device: str) -> bool:
        """Whether it is a goal on a device of this name, such as `"NVIDIA H100 80GB HBM3"`."""
        return not self.devices or not set(self.devices).isdisjoint(device.split())

    @property
    def title(self) -> str:
        """What it is of, in words."""
        return f"{self.what}, {self.way}" if isinstance(self.what, Step) else str(self.what)


def _products(
    format: BlockFormat,
    size: tuple[int, int],
    ratios: Mapping[int, float],
    devices: tuple[str, ...] = (),
    limits: Mapping[int, float] | None = None,
) -> list[Goal]:
    """Of bfloat16 by weights of `size`, (n, k): ratios, and limits, by number of rows."""
    n, k = size
    return [
        Goal(
            what=Timed(pair=Pair(rhs=format), m=m, n=n, k=k),
            ratio=ratio,
            devices=devices,
            limit=(limits or {}).get(m),
        )
        for m, ratio in ratios.items()
    ]


_ON_H200 = {1: 2.7, 16: 2.7, 64: 2.0, 256: 1.1, 4096: 0.95}
_ON_H100 = {1: 3.0, 16: 3.0, 64: 2.3, 256: 1.1, 4096: 0.95}
_OF_MODELS = {1: 2.3, 16: 2.3, 64: 1.8}

GOALS: tuple[Goal, ...] = (
    *_products(MXFP4, LARGE, _ON_H200, ("H200",), limits={1: 3.7, 16: 3.7}),
    *_products(MXFP4, LARGE, _ON_H100, ("H100",)),
    *_products(MXFP8_E4M3, LARGE, {1: 1.7, 16: 1.7, 64: 1.6, 256: 1.0, 4096: 0.95}),
    *_products(MXFP4, (5120, 5120), _OF_MODELS),
    *_products(MXFP4, (10240, 8192), _OF_MODELS),
    *_products(MXFP4, (2880, 2880), _OF_MODELS),
    Goal(what=Step(recipe="mxfp8"), ratio=0.8, way=PLAIN),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """A goal and its measurement.

    Attributes:
      goal: it is about.
      ratio: that was measured; None: it was not.
      clock: that says so.
      why: it was not measured.
    """

    goal: Goal
    ratio: float | None = None
    clock: str = ""
    why: str = ""

    @property
    def is_met(self) -> bool | None:
        """None if it was not measured."""
        return None if self.ratio is None else self.ratio >= self.goal.ratio

    @property
    def missed_by(self) -> float | None:
        """The share of the goal that is missing; None unless it was missed."""
        return goals.missed_by(self.ratio, self.goal.ratio)

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        goal = self.goal
        return {
            "goal": goal.title,
            "devices": goal.devices,
            "ratio_to_reach": goal.ratio,
            "limit": goal.limit,
            "ratio": self.ratio,
            "clock": self.clock,
            "is_met": self.is_met,
            "missed_by": self.missed_by,
            "why": self.why,
            "verdict": str(self),
        }

    def __str__(self) -> str:
        return goals.verdict(self.ratio, self.goal.ratio, self.why)


def verdicts(
    measured: Sequence[Measured], device: str, subjects: Collection[What] = ()
) -> Iterator[Verdict]:
    """Of every goal.

    Args:
      measured: on the device.
      device: its name.
      subjects: of all measurements of this run.
    """
    by_what = {measurement.what: measurement for measurement in measured}
    for goal in GOALS:
        if not goal.is_for(device):
            yield Verdict(goal=goal, why=f"for {' and '.join(goal.devices)}, this is {device}")
        elif goal.what not in by_what:
            why = "not begun, for lack of time" if goal.what in subjects else "not asked for"
            yield Verdict(goal=goal, why=why)
        else:
            yield _verdict(goal, by_what[goal.what])


def _verdict(goal: Goal, measured: Measured) -> Verdict:
    best = measured.best_clock(goal.way)
    if best is not None:
        return Verdict(goal=goal, ratio=best[0], clock=best[1])
    for way in (goal.way, measured.baseline):
        if way in measured.failed:
            return Verdict(goal=goal, why=f"{way} failed: {report.last_line(measured.failed[way])}")
    return Verdict(goal=goal, why=f"{goal.way} was not timed")


def sheet(judged: Sequence[Verdict]) -> report.Sheet:
    """A line for each goal."""
    columns = ("", "GPU", "goal", "limit", "measured", "clock", "verdict")
    result = report.Sheet("Goals: speed over bfloat16's", columns)
    for verdict in judged:
        result.rows.append(
            [
                verdict.goal.title,
                ", ".join(verdict.goal.devices) or "any",
                *(report.number(value, 2) for value in (verdict.goal.ratio, verdict.goal.limit)),
                report.number(verdict.ratio, 3),
                verdict.clock or "-",
                str(verdict),
            ]
        )
    return result
