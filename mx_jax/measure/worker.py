"""The process of one case: it reports in lines of JSON, of which the last counts.

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
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp

from mx_jax.backends import evidence
from mx_jax.backends.select import current_target, known_backends
from mx_jax.backends.target import Backend
from mx_jax.measure import steps
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

# A function of x and all copies that computes all products or casts; and what is reported.
Chain = Callable[[Any, Any], list[Any]]
Found = dict[str, Any]


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
# Whether it runs at all, is right and how fast: nothing that a row could rest on.
TOUCH = Effort(repeats=1, checks=0, seconds=0.5, others=0)
QUICK = Effort(copies=2, repeats=1, checks=1, seconds=0.0, rounds=2, others=1)


def _print(line: str) -> None:
    # At once: a process that ends by a signal writes nothing more.
    print(line, flush=True)


def answer(
    text: str,
    write: Callable[[str], None] = _print,
    *,
    tuning: float = THOROUGH.tuning,
    touch: bool = False,
) -> int:
    """Measure the case that a JSON text describes, in lines of JSON; returns the exit status.

    `"machine"` asks what machine this is, a name in `steps.STEPS` for that step. What fails after
    something was found goes to stderr.
    """
    reported: list[Found] = []

    def report(found: Found) -> None:
        reported.append(found)
        write(json.dumps(found))

    facts = json.loads(text)
    try:
        if facts == "machine":
            target = current_target(1)
            names = "platform", "compute_capability", "device_kind"
            report({name: getattr(target, name) for name in names})
        elif isinstance(facts, str):
            # With the rows that count here, as a program has them.
            report(steps.tokens_a_second(facts))
        else:
            effort = TOUCH if touch else dataclasses.replace(THOROUGH, tuning=tuning)
            with evidence.use(()):
                case = Case.from_json(facts)
                measure(case, _backend(case), report, effort)
    except Exception as error:
        if reported:
            traceback.print_exc()
            return 1
        last = "".join(traceback.format_exception_only(error)).strip()
        report({"failed": last[:500], "traceback": traceback.format_exc()})
    return 0


def _backend(case: Case) -> Backend:
    found = next((own for own in known_backends() if own.name == case.backend), None)
    if found is None:
        raise ValueError(f"gpu: knows no backend of this name, got backend={case.backend!r}")
    return found


def measure(
    case: Case, backend: Backend, report: Callable[[Found], Any], effort: Effort = THOROUGH
) -> None:
    """Check a case, then time what is right, by itself and with other tiles.

    Reports by the clock, of the kernel by itself and of the best that was found, and then by the
    GPU's own clock.
    """
    compared = subject(case, backend, effort.copies or copies_beyond_cache(copy_bits(case)))
    chains = {name: way.chain() for name, way in compared.ways.items()}
    error = _error(compared, chains[KERNEL], effort)
    kernel = backend.kernel(case.call, current_target(1))
    found: Found = {"error": min(error, _LARGEST), "kernel": kernel, "plain": compared.plain}
    if not error <= 1:
        report(found)
        return
    found |= _by_the_clock(compared, chains, effort)
    report(dict(found))
    configs = itertools.islice(backend.configs(case.call, current_target(1)), effort.others)
    found["tried"], best, speed = [], None, _CLEARLY
    deadline = time.monotonic() + effort.tuning
    for config in configs:
        if time.monotonic() >= deadline:
            break
        configured = functools.partial(backend.configured, kernel, config)
        chain = _within(configured, compared.ways[KERNEL].chain())
        tried = _tried(compared, chains[KERNEL], chain, configured, effort)
        found["tried"].append(tried | {"config": dict(config)})
        if tried.get("speed", 0.0) > speed:
            speed, best = tried["speed"], (chain, tried["error"], dict(config))
    if best is not None:
        chains[KERNEL], found["error"], found["config"] = best
        found |= _by_the_clock(compared, chains, effort)
    report(dict(found))
    on_gpu = {name: on_device(chain, compared.ways[name]) for name, chain in chains.items()}
    if all(on_gpu.values()):
        times = {name: [own] for name, own in on_gpu.items() if own}
        found |= {"device_microseconds": on_gpu, "clock": "device"}
        report(found | _speeds(ratios(times, KERNEL)))


def _within(configured: Callable[[], AbstractContextManager[None]], chain: Chain) -> Chain:
    """A chain whose kernel has a configuration."""

    def run(x: Any, copies: Any) -> list[Any]:
        with configured():
            return chain(x, copies)

    return run


def _tried(compared: Subject, own: Chain, chain: Chain, configured: Any, effort: Effort) -> Found:
    """A configured chain, checked, then timed beside the kernel's own; what fails is reported."""
    # If this process does not come back, its last words say of what.
    print(f"trying {configured.args}", file=sys.stderr, flush=True)
    found: Found = {}
    try:
        with configured():
            error = _error(compared, chain, effort)
        found["error"] = min(error, _LARGEST)
        if error <= 1:
            found["speed"] = _over(own, chain, compared, effort.rounds)
    except Exception as problem:
        found["failed"] = f"{type(problem).__name__}: {problem}"[:500]
    return found


def _over(own: Chain, chain: Chain, compared: Subject, rounds: int) -> float:
    """Time of the kernel by itself over that of a chain, in all but a quarter of the rounds."""
    way = compared.ways[KERNEL]
    chains = {_OWN: own, KERNEL: chain}
    runs = {name: functools.partial(run, way.x, way.copies) for name, run in chains.items()}
    samples = microseconds(runs, _SECONDS, len(way.copies), rounds)
    over = [before / now for before, now in zip(samples[_OWN], samples[KERNEL], strict=True)]
    return statistics.quantiles(over, n=4)[0]


def _by_the_clock(compared: Subject, chains: Mapping[str, Chain], effort: Effort) -> Found:
    """Speeds of the kernel over each other way, and what they follow from."""
    ways = compared.ways
    runs = {
        name: functools.partial(chain, ways[name].x, ways[name].copies)
        for name, chain in chains.items()
    }
    samples = microseconds(runs, effort.seconds, len(ways[KERNEL].copies), effort.rounds)
    medians = {name: statistics.median(own) for name, own in samples.items()}
    return _speeds(ratios(samples, KERNEL)) | {"microseconds": medians, "clock": "wall"}


def _speeds(over: Mapping[str, float]) -> Found:
    names = {"over_plain": PLAIN, "over_unpacking": UNPACKING, "over_bfloat16": BFLOAT16}
    return {field: over.get(name) for field, name in names.items()}


def _error(compared: Subject, chain: Chain, effort: Effort) -> float:
    """The largest error of what is timed, and of what else its row stands for."""
    way = compared.ways[KERNEL]
    _leave_nonsense(jax.eval_shape(chain, way.x, way.copies))
    outs = jax.block_until_ready(chain(way.x, way.copies))
    error = compared.error(outs)
    for _ in range(effort.repeats):
        if error <= 1 and not same_bits(outs, chain(way.x, way.copies)):
            # A race shows as other bits.
            return math.inf
    del outs
    for check in compared.elsewhere[: effort.checks]:
        if error <= 1:
            error = max(error, check())
    return error


def _leave_nonsense(like: Any) -> None:
    """Fill memory of these sizes and free it: so a tile that nobody writes is likely to show."""

    def nonsense(own: jax.ShapeDtypeStruct) -> jax.Array:
        inexact = jnp.issubdtype(own.dtype, jnp.inexact)
        return jnp.full(own.shape, jnp.nan if inexact else jnp.iinfo(own.dtype).max, own.dtype)

    jax.block_until_ready(jax.tree.map(nonsense, like))
