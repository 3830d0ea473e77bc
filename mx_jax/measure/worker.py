"""The process of one case: it answers in lines of JSON, of which the last counts.

The first has what the clock says. What comes after may still fail: the GPU's own clock is a tool
that not every machine has in order.
"""

import dataclasses
import functools
import json
import math
import statistics
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import jax.numpy as jnp

from mx_jax.backends import evidence
from mx_jax.backends.select import current_target, known_backends
from mx_jax.backends.target import Backend, use_target
from mx_jax.measure import casts, products, ragged, ragged_sums, simulation
from mx_jax.measure.cases import Case, copy_bits
from mx_jax.measure.subject import BFLOAT16, KERNEL, PLAIN, UNPACKING, Subject, same_bits
from mx_jax.measure.timing import (
    ROUNDS,
    copies_beyond_cache,
    microseconds,
    on_device,
    ratios,
)
from mx_jax.measure.tune import Tuned, fastest

# What makes the arrays of each kind of case, and says whether a kernel's results are right.
SUBJECTS: Mapping[str, Callable[[Case, Backend, int], Subject]] = {
    "product": products.subject,
    "ragged product": ragged.subject,
    "ragged sums": ragged_sums.subject,
    "cast": casts.subject,
    "cast both ways": casts.subject,
}

# Infinity is no number in JSON.
_LARGEST = sys.float_info.max


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


def answer(
    text: str,
    simulated: bool,
    say: Callable[[str], None] = _say,
    tuning: float = THOROUGH.tuning,
) -> int:
    """Measure the case that a text describes, and say what was found; the exit status.

    What fails after something was found is told on stderr: what was found stays.

    Args:
      text: JSON of a `Case`; `"machine"` asks what machine this is.
      simulated: on the CPU, by Mosaic's interpreter.
      say: takes each line.
      tuning: seconds to try other configurations of the kernel.
    """
    said: list[dict[str, Any]] = []

    def tell(found: dict[str, Any]) -> None:
        said.append(found)
        say(json.dumps(found))

    place: AbstractContextManager[Any] = nullcontext()
    if simulated:
        simulation.give_threads()
        place = use_target(simulation.TARGET)
    with place, evidence.use(()):
        facts = json.loads(text)
        if facts == "machine":
            tell(machine())
            return 0
        try:
            case = Case.from_json(facts)
            backend = simulation.backend() if simulated else _backend(case)
            effort = dataclasses.replace(QUICK if simulated else THOROUGH, tuning=tuning)
            measure(case, backend, tell, effort)
        except Exception as error:
            if said:
                traceback.print_exc()
                return 1
            last = "".join(traceback.format_exception_only(error)).strip()
            tell({"failed": last[:500], "traceback": traceback.format_exc()})
    return 0


def machine() -> dict[str, Any]:
    """What JAX sees."""
    target = current_target(1)
    return {
        "platform": target.platform,
        "compute_capability": target.compute_capability,
        "device_kind": target.device_kind,
    }


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
    subject = SUBJECTS[case.kind](case, backend, copies)
    check = functools.partial(_error, subject, effort=effort)
    chains = {name: way.chain() for name, way in subject.ways.items()}
    own = Tuned(chain=chains[KERNEL], error=check(chains[KERNEL]))
    found: dict[str, Any] = {
        "error": min(own.error, _LARGEST),
        "kernel": backend.kernel(case.call, current_target(1)),
    }
    if not own.error <= 1:
        say(found)
        return
    found = found | _by_the_clock(subject, chains, effort)
    say(found)
    way = subject.ways[KERNEL]
    limits = {"count": effort.others, "seconds": effort.tuning, "rounds": effort.rounds}
    best = fastest(case, backend, own, way, check, **limits)
    found = found | {"tried": best.tried}
    if best.config:
        chains[KERNEL] = best.chain
        found = found | {"error": best.error, "config": dict(best.config)}
        found = found | _by_the_clock(subject, chains, effort)
    say(found)
    of_device = {name: on_device(chain, subject.ways[name]) for name, chain in chains.items()}
    if all(of_device.values()):
        times = {name: [own] for name, own in of_device.items() if own}
        speeds = _speeds(ratios(times, KERNEL))
        say(found | speeds | {"device_microseconds": of_device, "clock": "device"})


def _by_the_clock(
    subject: Subject, chains: Mapping[str, Callable[..., Any]], effort: Effort
) -> dict[str, Any]:
    """Speeds of the kernel over each other way, and what they follow from."""
    ways = subject.ways
    runs = {
        name: functools.partial(chain, ways[name].x, ways[name].copies)
        for name, chain in chains.items()
    }
    samples = microseconds(runs, effort.seconds, len(ways[KERNEL].copies), effort.rounds)
    medians = {name: statistics.median(own) for name, own in samples.items()}
    return _speeds(ratios(samples, KERNEL)) | {"microseconds": medians, "clock": "wall"}


def _error(subject: Subject, chain: Callable[..., Any], effort: Effort) -> float:
    """The largest error of what is timed, and of what else its row stands for."""
    way = subject.ways[KERNEL]
    _leave_nonsense(jax.eval_shape(chain, way.x, way.copies))
    outs = jax.block_until_ready(chain(way.x, way.copies))
    error = subject.error(outs)
    for _ in range(effort.repeats):
        if error <= 1 and not same_bits(outs, chain(way.x, way.copies)):
            # A race shows as other bits.
            return math.inf
    del outs
    for check in subject.elsewhere[: effort.checks]:
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
