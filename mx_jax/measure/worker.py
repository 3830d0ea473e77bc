"""The process of one case: it answers in lines of JSON, of which the last counts.

The first has what the clock says. What comes after may still fail: other tiles may crash or hang,
and the GPU's own clock is a tool that not every machine has in order.
"""

import dataclasses
import functools
import itertools
import json
import math
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from mx_jax.backends import evidence
from mx_jax.backends.select import current_target, known_backends
from mx_jax.backends.target import Backend
from mx_jax.measure.cases import Case, copy_bits
from mx_jax.measure.subjects import (
    BFLOAT16,
    KERNEL,
    PLAIN,
    UNPACKING,
    Subject,
    same_bits,
    subject,
)
from mx_jax.measure.timing import ROUNDS, copies_beyond_cache, microseconds, on_device, ratios

# Infinity is no number in JSON.
_LARGEST = sys.float_info.max
# How much faster than a kernel's own tiles others have to be, and the seconds that say so.
_CLEARLY, _SECONDS = 1.02, 0.5
_OWN = "its own tiles"

# A function of x and all copies that computes all products or casts.
Chain = Callable[[Any, Any], list[Any]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Effort:
    """How much is done of everything.

    Attributes:
      copies: of weights, or of what is cast; None: as many as are larger than a GPU's cache.
      repeats: of what is timed: sums are added in a fixed order, so nothing may change.
      checks: of what else a row stands for, at most; None for all.
      seconds: to spend on timing.
      rounds: of timing, at the least.
      others: configurations of the kernel that are tried besides its own, at most.
      tuning: seconds after which none of them is begun.
    """

    copies: int | None = None
    repeats: int = 5
    checks: int | None = None
    seconds: float = 4.0
    rounds: int = ROUNDS
    others: int = 8
    tuning: float = 20.0


THOROUGH = Effort()
QUICK = Effort(copies=2, repeats=1, checks=1, seconds=0.0, rounds=2, others=1)


def _say(line: str) -> None:
    # At once: a process that ends by a signal writes nothing more.
    print(line, flush=True)


def answer(text: str, say: Callable[[str], None] = _say, tuning: float = THOROUGH.tuning) -> int:
    """Measure the case that a text describes, and say what was found; the exit status.

    What fails after something was found is told on stderr: what was found stays.

    Args:
      text: JSON of a `Case`; `"machine"` asks what machine this is.
      say: takes each line.
      tuning: seconds to try other configurations of the kernel.
    """
    said: list[dict[str, Any]] = []

    def tell(found: dict[str, Any]) -> None:
        said.append(found)
        say(json.dumps(found))

    with evidence.use(()):
        facts = json.loads(text)
        if facts == "machine":
            target = current_target(1)
            names = "platform", "compute_capability", "device_kind"
            tell({name: getattr(target, name) for name in names})
            return 0
        try:
            case = Case.from_json(facts)
            measure(case, _backend(case), tell, dataclasses.replace(THOROUGH, tuning=tuning))
        except Exception as error:
            if said:
                traceback.print_exc()
                return 1
            last = "".join(traceback.format_exception_only(error)).strip()
            tell({"failed": last[:500], "traceback": traceback.format_exc()})
    return 0


def _backend(case: Case) -> Backend:
    found = next((own for own in known_backends() if own.name == case.backend), None)
    if found is None:
        raise ValueError(f"gpu: knows no backend of this name, got backend={case.backend!r}")
    return found


def measure(
    case: Case,
    backend: Backend,
    say: Callable[[dict[str, Any]], Any],
    effort: Effort = THOROUGH,
) -> None:
    """Check a case, then time what is right, by itself and with other tiles.

    Args:
      case: what is measured.
      backend: whose kernel it is.
      say: takes what is known: by the clock, of the kernel by itself and of the best that was
        found, and then by the GPU's own clock.
      effort: how much is done.
    """
    copies = effort.copies or copies_beyond_cache(copy_bits(case))
    asked = subject(case, backend, copies)
    chains = {name: way.chain() for name, way in asked.ways.items()}
    error = _error(asked, chains[KERNEL], effort)
    kernel = backend.kernel(case.call, current_target(1))
    found: dict[str, Any] = {"error": min(error, _LARGEST), "kernel": kernel}
    if not error <= 1:
        say(found)
        return
    found = found | _by_the_clock(asked, chains, effort)
    say(found)
    tried, best = _tried(case, backend, kernel, asked, chains[KERNEL], effort)
    found = found | {"tried": tried}
    if best is not None:
        chains[KERNEL] = best.pop("chain")
        found = found | best | _by_the_clock(asked, chains, effort)
    say(found)
    of_device = {name: on_device(chain, asked.ways[name]) for name, chain in chains.items()}
    if all(of_device.values()):
        times = {name: [own] for name, own in of_device.items() if own}
        speeds = _speeds(ratios(times, KERNEL))
        say(found | speeds | {"device_microseconds": of_device, "clock": "device"})


def _tried(
    case: Case, backend: Backend, kernel: str, asked: Subject, own: Chain, effort: Effort
) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
    """Other configurations of the kernel, each checked before it is timed, and the fastest.

    Whatever one does, what was right before stays: None if nothing is clearly faster.
    """
    target, way, tried = current_target(1), asked.ways[KERNEL], []
    best, speed, deadline = None, _CLEARLY, time.monotonic() + effort.tuning
    for config in itertools.islice(backend.configs(case.call, target), effort.others):
        if time.monotonic() >= deadline:
            break
        # If this process does not come back, its last words say of what.
        print(f"trying {dict(config)}", file=sys.stderr, flush=True)
        chain = _configured(backend, kernel, config, way.chain())
        found: dict[str, Any] = {"config": dict(config)}
        tried.append(found)
        try:
            with backend.configured(kernel, config):
                error = _error(asked, chain, effort)
            found["error"] = min(error, _LARGEST)
            if error <= 1:
                found["speed"] = _over(own, chain, asked, effort.rounds)
        except Exception as problem:
            found["failed"] = f"{type(problem).__name__}: {problem}"[:500]
        if found.get("speed", 0.0) > speed:
            speed = found["speed"]
            best = {"chain": chain, "error": found["error"], "config": dict(config)}
    return tried, best


def _configured(backend: Backend, kernel: str, config: Any, chain: Chain) -> Chain:
    """A chain whose kernel does what it is told."""

    def told(x: Any, copies: Any) -> list[Any]:
        with backend.configured(kernel, config):
            return chain(x, copies)

    return told


def _over(own: Chain, chain: Chain, asked: Subject, rounds: int) -> float:
    """Time of the kernel by itself over that of a chain, in all but a quarter of the rounds."""
    way = asked.ways[KERNEL]
    chains = {_OWN: own, KERNEL: chain}
    runs = {name: functools.partial(run, way.x, way.copies) for name, run in chains.items()}
    samples = microseconds(runs, _SECONDS, len(way.copies), rounds)
    over = [before / now for before, now in zip(samples[_OWN], samples[KERNEL], strict=True)]
    return statistics.quantiles(over, n=4)[0]


def _by_the_clock(asked: Subject, chains: Mapping[str, Chain], effort: Effort) -> dict[str, Any]:
    """Speeds of the kernel over each other way, and what they follow from."""
    ways = asked.ways
    runs = {
        name: functools.partial(chain, ways[name].x, ways[name].copies)
        for name, chain in chains.items()
    }
    samples = microseconds(runs, effort.seconds, len(ways[KERNEL].copies), effort.rounds)
    medians = {name: statistics.median(own) for name, own in samples.items()}
    return _speeds(ratios(samples, KERNEL)) | {"microseconds": medians, "clock": "wall"}


def _error(asked: Subject, chain: Chain, effort: Effort) -> float:
    """The largest error of what is timed, and of what else its row stands for."""
    way = asked.ways[KERNEL]
    _leave_nonsense(jax.eval_shape(chain, way.x, way.copies))
    outs = jax.block_until_ready(chain(way.x, way.copies))
    error = asked.error(outs)
    for _ in range(effort.repeats):
        if error <= 1 and not same_bits(outs, chain(way.x, way.copies)):
            # A race shows as other bits.
            return math.inf
    del outs
    for check in asked.elsewhere[: effort.checks]:
        if error <= 1:
            error = max(error, check())
    return error


def _leave_nonsense(like: Any) -> None:
    """Fill memory of these sizes and free it: so a tile that nobody writes is likely to show."""

    def nonsense(own: jax.ShapeDtypeStruct) -> jax.Array:
        inexact = jnp.issubdtype(own.dtype, jnp.inexact)
        return jnp.full(own.shape, jnp.nan if inexact else jnp.iinfo(own.dtype).max, own.dtype)

    jax.block_until_ready(jax.tree.map(nonsense, like))


def _speeds(over: Mapping[str, float]) -> dict[str, float | None]:
    names = {"over_plain": PLAIN, "over_unpacking": UNPACKING, "over_bfloat16": BFLOAT16}
    return {field: over.get(name) for field, name in names.items()}
