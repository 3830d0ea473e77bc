"""How the benchmarks measure time.

Method. The cases of one comparison run in one process, on the same arrays, in rounds: each round
runs every case once, in an order drawn anew, so that a machine that slows down slows all of them.
A case runs twice before it counts: once to compile, once to warm up. A sample ends when every JAX
array of the result is ready (`jax.block_until_ready`); dropping the result, and Python's garbage
collector, stay outside it. Rounds go on until the time budget is spent.

What is reported. The median over rounds, with the quartiles, since noise only ever adds and has a
long tail. A ratio is taken within each round and its median reported: the speed of the machine
cancels.

What the baselines mean. `x + 1` reads and writes an array of x's size: it runs at memory bandwidth.
Where the result is larger than malloc's mmap threshold (at most 32 MiB on glibc), it lies on fresh
pages every time, and page faults set the speed, which a quantizer with its smaller result may not
pay: minor faults per call are recorded beside the time. So everything is measured twice. "All
cores": the wall clock of an ordinary process, what a user gets. "One core": the CPU time of a
process that is pinned to one core and asks for huge pages (`benchmarks.cores`), which is the
arithmetic itself, and stays steady on a machine that others use too. Arrays inside and beyond the
last-level cache are both run. The bound is the time of the bytes that a case must read and write,
at the bandwidth of a plain copy.
"""

import argparse
import dataclasses
import gc
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

try:
    import resource
except ImportError:  # not on Windows
    resource = None


@dataclasses.dataclass(frozen=True)
class Case:
    """One thing to be timed.

    Attributes:
      name: in tables; unique within a comparison.
      run: does it once and returns its result.
    """

    name: str
    run: Callable[[], Any]


@dataclasses.dataclass(frozen=True)
class Spread:
    """Median, quartiles and smallest of a sample."""

    median: float
    q1: float
    q3: float
    smallest: float

    def __format__(self, spec: str) -> str:
        return f"{self.median:{spec}}"


def spread(values: Sequence[float]) -> Spread:
    """The spread of at least one value."""
    if len(values) == 1:
        return Spread(values[0], values[0], values[0], values[0])
    q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(median, q1, q3, min(values))


@dataclasses.dataclass(frozen=True)
class Samples:
    """The measurements of one case, by round.

    Attributes:
      wall: seconds on the clock.
      cpu: seconds of CPU time of the whole process, kernel included.
      faults: minor page faults.
    """

    wall: list[float] = dataclasses.field(default_factory=list)
    cpu: list[float] = dataclasses.field(default_factory=list)
    faults: list[float] = dataclasses.field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        """Milliseconds and faults, for JSON."""
        return {
            "wall_ms": dataclasses.asdict(spread([1e3 * value for value in self.wall])),
            "cpu_ms": dataclasses.asdict(spread([1e3 * value for value in self.cpu])),
            "minor_faults": statistics.median(self.faults),
            "samples": len(self.wall),
        }


def ratio(samples: Samples, baseline: Samples, clock: str) -> Spread:
    """Spread of the ratio of two cases, taken within each round.

    Args:
      samples: the numerator.
      baseline: the denominator.
      clock: `"wall"` or `"cpu"`.
    """
    pairs = zip(getattr(samples, clock), getattr(baseline, clock), strict=True)
    return spread([above / max(below, 1e-9) for above, below in pairs])


def add_pace(
    parser: argparse.ArgumentParser, *, seconds: float, min_rounds: int, max_rounds: int = 101
) -> None:
    """Options for how long a comparison lasts, with these defaults; `pace` reads them.

    Args:
      parser: of a command.
      seconds: `--seconds`, the budget of one comparison.
      min_rounds: `--min-rounds`.
      max_rounds: `--max-rounds`.
    """
    parser.add_argument("--seconds", type=float, default=seconds, help="budget of a comparison")
    parser.add_argument(
        "--min-rounds", type=int, default=min_rounds, help="rounds, whatever they take"
    )
    parser.add_argument("--max-rounds", type=int, default=max_rounds, help="rounds, however fast")


def pace(options: argparse.Namespace) -> dict[str, Any]:
    """The options of `add_pace` as keyword arguments of `measure`."""
    return {name: getattr(options, name) for name in ("seconds", "min_rounds", "max_rounds")}


def measure(
    cases: Sequence[Case], *, seconds: float, min_rounds: int = 5, max_rounds: int = 101
) -> dict[str, Samples]:
    """Time cases against each other.

    Args:
      cases: what to run; their order does not matter.
      seconds: budget for the rounds; warm-up and compilation are not counted.
      min_rounds: run at least that many, whatever they take.
      max_rounds: run at most that many, however fast they are.

    Returns:
      Samples of each case by name; sample i of every case comes from the same round.
    """
    for case in (*cases, *cases):
        jax.block_until_ready(case.run())
    samples = {case.name: Samples() for case in cases}
    order, shuffle = list(cases), random.Random(0).shuffle
    collects = gc.isenabled()
    gc.disable()
    try:
        started = time.perf_counter()
        for done in range(max_rounds):
            if done >= min_rounds and time.perf_counter() - started > seconds:
                break
            shuffle(order)
            for case in order:
                _sample(case, samples[case.name])
    finally:
        if collects:
            gc.enable()
    return samples


def _sample(case: Case, samples: Samples) -> None:
    faults, cpu, wall = _minor_faults(), time.process_time(), time.perf_counter()
    result = jax.block_until_ready(case.run())
    samples.wall.append(time.perf_counter() - wall)
    samples.cpu.append(time.process_time() - cpu)
    samples.faults.append(_minor_faults() - faults)
    del result


def _minor_faults() -> int:
    return 0 if resource is None else resource.getrusage(resource.RUSAGE_SELF).ru_minflt
