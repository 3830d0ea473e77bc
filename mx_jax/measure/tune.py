"""Other tiles of a kernel, each checked before it is timed: the best one is what a row keeps."""

import dataclasses
import itertools
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from mx_jax.backends.select import current_target
from mx_jax.backends.target import Backend, Config
from mx_jax.measure.cases import Case
from mx_jax.measure.subject import KERNEL
from mx_jax.measure.timing import ROUNDS, Way, microseconds

# How much faster than what the kernel does by itself, to take its place.
_CLEARLY = 1.02
# Seconds to time one beside what the kernel does by itself.
_SECONDS = 0.5
_OWN = "by itself"

# A function of x and all copies that computes all products or casts.
Chain = Callable[[Any, Any], list[Any]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tuned:
    """The fastest of those that are right.

    Attributes:
      config: what the kernel is told; none if nothing is clearly faster than what it does by
        itself.
      chain: that computes so.
      error: the largest, over what is allowed.
      tried: of each, its error, and its speed over that of the kernel by itself if it was timed.
    """

    config: Config = ()
    chain: Chain
    error: float
    tried: tuple[dict[str, Any], ...] = ()


def under(backend: Backend, kernel: str, config: Config, chain: Chain) -> Chain:
    """A chain whose kernel does what it is told."""

    def told(x: Any, copies: Any) -> list[Any]:
        with backend.configured(kernel, config):
            return chain(x, copies)

    return told


def fastest(
    case: Case,
    backend: Backend,
    own: Tuned,
    way: Way,
    check: Callable[[Chain], float],
    *,
    count: int,
    seconds: float,
    rounds: int = ROUNDS,
) -> Tuned:
    """Try other configurations of the kernel; whatever one does, what was right before stays.

    Args:
      case: what is measured.
      backend: whose kernel it is.
      own: what the kernel does by itself, checked.
      way: to compute it, with its operands.
      check: the error of a chain, over what is allowed: of what it gives for the operands that are
        timed, and of whatever else the row stands for.
      count: of configurations, at most.
      seconds: after which none is begun.
      rounds: of timing each, at the least; two or more.
    """
    target = current_target(1)
    kernel = backend.kernel(case.call, target)
    best, speed, tried = own, _CLEARLY, []
    deadline = time.monotonic() + seconds
    for config in itertools.islice(backend.configs(case.call, target), count):
        if time.monotonic() >= deadline:
            break
        # If this process does not come back, its last words say of what.
        print(f"trying {dict(config)}", file=sys.stderr, flush=True)
        chain = under(backend, kernel, config, way.chain())
        found: dict[str, Any] = {"config": dict(config)}
        tried.append(found)
        try:
            with backend.configured(kernel, config):
                error = check(chain)
            found["error"] = min(error, sys.float_info.max)
            if error <= 1:
                found["speed"] = _over(own.chain, chain, way, rounds)
        except Exception as problem:
            found["failed"] = f"{type(problem).__name__}: {problem}"[:500]
            continue
        if found.get("speed", 0.0) > speed:
            speed = found["speed"]
            best = Tuned(config=config, chain=chain, error=error)
    return dataclasses.replace(best, tried=tuple(tried))


def _over(own: Chain, chain: Chain, way: Way, rounds: int) -> float:
    """Time of the kernel by itself over that of a chain, in all but a quarter of the rounds."""
    runs = {
        name: lambda run=run: run(way.x, way.copies) for name, run in ((_OWN, own), (KERNEL, chain))
    }
    samples = microseconds(runs, _SECONDS, len(way.copies), rounds)
    over = [own / told for own, told in zip(samples[_OWN], samples[KERNEL], strict=True)]
    return statistics.quantiles(over, n=4)[0]
