"""How long kernels take: chains under one jit, in rounds, by the clock and by the GPU's own."""

import dataclasses
import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax import lax

# A sample takes at least so many seconds: the clock, and starting from Python, weigh little then.
_SAMPLE = 5e-3
# At the least, however long they take; and at the most.
_ROUNDS, _MAX_ROUNDS = 5, 200
# Copies together take so many bytes: far more than any GPU's L2 cache holds.
_BEYOND_CACHE = 384 << 20
_MAX_COPIES = 48


def copies_beyond_cache(bits: float) -> int:
    """How many copies of so many bits no GPU's cache holds together, within reason."""
    return min(_MAX_COPIES, max(2, math.ceil(_BEYOND_CACHE * 8 / bits)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Way:
    """One way to compute what is timed.

    Attributes:
      one: computes it once, of x and a copy.
      x: what every copy meets.
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


def microseconds(
    runs: Mapping[str, Callable[[], Any]], seconds: float, count: int
) -> dict[str, list[float]]:
    """Microseconds of one of `count` products in a run, by the clock.

    Rounds: each runs everything, in an order drawn anew; so a clock that falls slows all.

    Args:
      runs: by name; what a run returns is waited for.
      seconds: to spend.
      count: products in a run.
    """
    repeats = {}
    for name, run in runs.items():
        _seconds(run, 1)  # compiles
        repeats[name] = max(1, round(_SAMPLE / max(_seconds(run, 1), 1e-9)))
    samples: dict[str, list[float]] = {name: [] for name in runs}
    order, draw = list(runs), random.Random(0)
    started = time.perf_counter()
    for done in range(_MAX_ROUNDS):
        if done >= _ROUNDS and time.perf_counter() - started > seconds:
            break
        draw.shuffle(order)
        for name in order:
            took = _seconds(runs[name], repeats[name])
            samples[name].append(1e6 * took / repeats[name] / count)
    return samples


def _seconds(run: Callable[[], Any], repeats: int) -> float:
    """Of runs that are started one after the other, until the last is done."""
    result = None
    started = time.perf_counter()
    for _ in range(repeats):
        result = run()
    jax.block_until_ready(result)
    return time.perf_counter() - started


def on_device(chain: Callable[..., Any], way: Way) -> float | None:
    """Median microseconds of one copy by the GPU's own clock (CUPTI); None without it."""
    if jax.devices()[0].platform != "gpu":
        return None
    try:
        from jax.experimental.mosaic.gpu import profiler

        measured: Any = profiler.measure(chain)
        found = [measured(way.x, way.copies)[1] for _ in range(_ROUNDS)]
    except Exception:
        # Not by this version of JAX, no CUPTI here, or another tool holds it.
        return None
    if any(one is None for one in found):
        return None
    return 1e3 * statistics.median(found) / len(way.copies)
