"""Ways to compute one thing on a GPU, timed beside each other; what fails is written down.

One jitted function computes the same of many arrays that together no cache holds, one after the
other (`Repeated`), since a product of few rows takes less time than starting it
from Python. A sample is several calls of that function. All ways run in one process in alternating
order, as `benchmarks.timing` says; ratios are medians over rounds. Where CUPTI is there, each way
is timed by the GPU's own clock too, whose ratio then counts.
"""

import dataclasses
import math
import statistics
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax import lax

from benchmarks.timing import Case, Samples, Spread, measure, ratio

DEVICE, WALL = "device", "wall"
# The name of the way without a kernel of the library.
PLAIN = "plain path"
# Copies together take so many bytes: far more than any GPU's L2 cache holds.
_EXCEEDING_CACHE = 384 << 20
_MAX_COPIES = 48
# How often the GPU's own clock times a chain.
_ROUNDS = 5
# A way's name, and the maker of its case, which may raise.
Maker = tuple[str, Callable[[], Case]]


def copies_exceeding_cache(bits: float) -> int:
    """How many copies of so many bits no GPU's cache holds together, within reason."""
    return min(_MAX_COPIES, max(2, math.ceil(_EXCEEDING_CACHE * 8 / bits)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Repeated:
    """One function of many copies.

    Attributes:
      one: computes it once, of x and a copy.
      x: the argument that all copies share.
      copies: together larger than the GPU's cache.
    """

    one: Callable[[Any, Any], Any]
    x: Any
    copies: Sequence[Any]

    def chain(self) -> Callable[[Any, Sequence[Any]], list[Any]]:
        """A jitted function of x and all copies: one after the other.

        Each waits for the one before it, without reading what that gave. The one inside is jitted
        too, so that it is lowered once.
        """
        one = jax.jit(self.one)

        def run(x: Any, copies: Sequence[Any]) -> list[Any]:
            outs: list[Any] = []
            for copy in copies:
                if outs:
                    x, copy, _ = lax.optimization_barrier((x, copy, outs[-1]))
                outs.append(one(x, copy))
            return outs

        return jax.jit(run)


def on_device(chain: Callable[..., Any], way: Repeated) -> float | None:
    """Median microseconds of one copy by the GPU's own clock (CUPTI); None without it."""
    if jax.devices()[0].platform != "gpu":
        return None
    try:
        from jax.experimental.mosaic.gpu import profiler

        measured: Any = profiler.measure(chain)
        milliseconds = [measured(way.x, way.copies)[1] for _ in range(_ROUNDS)]
    except Exception:
        # Not by this version of JAX, no CUPTI here, or another tool holds it.
        return None
    if any(one is None for one in milliseconds):
        return None
    return 1e3 * statistics.median(milliseconds) / len(way.copies)


@dataclasses.dataclass(frozen=True)
class Chain(Case):
    """A case that the GPU's own clock can time too.

    Attributes:
      device: microseconds of one copy by that clock; None without it.
    """

    device: Callable[[], float | None] = lambda: None


def chain_of(name: str, way: Repeated, calls: int) -> Chain:
    """All copies of a way, one after the other, `calls` times over."""
    run = way.chain()

    def sample() -> Any:
        outs = None
        for _ in range(calls):
            outs = run(way.x, way.copies)
        return outs

    return Chain(name, sample, lambda: on_device(run, way))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """Ways to compute one thing.

    Attributes:
      what: they compute.
      makers: of the ways, by name.
      baseline: name of the way that speeds are ratios to.
      count: how often a sample computes it.
      bound: that no speed exceeds, where the machine's peaks are known.
    """

    what: Any
    makers: Sequence[Maker]
    baseline: str
    count: int
    bound: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """The times of a comparison.

    Attributes:
      what: was computed.
      baseline: name of the way that speeds are ratios to.
      microseconds: of one, by way: the median by the wall clock.
      speed: over the baseline's, by way, by the wall clock.
      device_microseconds: of one, by way, by the GPU's own clock, where it is there.
      device_speed: over the baseline's, by way, by that clock.
      bound: as the comparison's.
      failed: tracebacks by way.
    """

    what: Any
    baseline: str
    microseconds: Mapping[str, float] = dataclasses.field(default_factory=dict)
    speed: Mapping[str, Spread] = dataclasses.field(default_factory=dict)
    device_microseconds: Mapping[str, float] = dataclasses.field(default_factory=dict)
    device_speed: Mapping[str, float] = dataclasses.field(default_factory=dict)
    bound: float | None = None
    failed: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def best_clock(self, way: str) -> tuple[float, str] | None:
        """A way's speed over the baseline's, and the clock that measured it; None without one."""
        if way in self.device_speed:
            return self.device_speed[way], DEVICE
        return (self.speed[way].median, WALL) if way in self.speed else None

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        facts = dataclasses.asdict(dataclasses.replace(self, what=str(self.what)))
        return facts | {"of": self.what.as_json()}


def compare(comparison: Comparison, seconds: float) -> Measured:
    """Time all ways that can be made.

    Args:
      comparison: to measure.
      seconds: budget by the wall clock.
    """
    cases, failed = [], {}
    for name, make in comparison.makers:
        # A way that cannot be compiled or started must not cost the times of the others.
        try:
            case = make()
            jax.block_until_ready(case.run())
            cases.append(case)
        except Exception:
            failed[name] = traceback.format_exc()
    samples = measure(cases, seconds=seconds, max_rounds=1001) if cases else {}
    clocked = {case.name: case.device() for case in cases if isinstance(case, Chain)}
    device = {name: time for name, time in clocked.items() if time}
    return dataclasses.replace(
        _measured(comparison, samples, device), bound=comparison.bound, failed=failed
    )


def _measured(
    comparison: Comparison, samples: Mapping[str, Samples], device: Mapping[str, float]
) -> Measured:
    base = comparison.baseline
    others = [name for name in samples if name != base and base in samples]
    return Measured(
        what=comparison.what,
        baseline=base,
        microseconds={
            name: 1e3 * of.summary()["wall_ms"]["median"] / comparison.count
            for name, of in samples.items()
        },
        speed={name: ratio(samples[base], samples[name], WALL) for name in others},
        device_microseconds=device,
        device_speed={
            name: device[base] / time
            for name, time in device.items()
            if base in device and name != base
        },
    )
