"""Where a step of decoding spends its time, by the profiler, summed over layers."""

import re
import tempfile
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

# Parts of a step, by what the model calls them; the first that a program's name contains.
PARTS = (
    "qkv",
    "attention_out",
    "gate_up",
    "down",
    "head",
    "cache",
    "attention",
    "rotary",
    "gate",
    "norm",
    "embedding",
    "sampling",
)
OTHER = "other"


def part_of(name: str) -> str:
    """The part that an operation belongs to, by its `op_name`, or that of an argument."""
    scopes = re.split(r"[/()]|__+", name)
    for part in PARTS:
        if any(scope == part or (part == "norm" and scope.endswith("norm")) for scope in scopes):
            return part
    return OTHER


def operations(program: str) -> dict[str, str]:
    """The part of each operation of a compiled program, from its text.

    What XLA made itself has no name of the model's: it belongs to what its operands belong to. So
    does a product that it simplified: one by a tied embedding is the head's, as looking up has a
    name.
    """
    parts: dict[str, str] = {}
    for name, rest in re.findall(r"^\s*(?:ROOT )?%?([\w.\-]+) = (.*)$", program, re.MULTILINE):
        own = re.search(r'op_name="([^"]*/[^"]*)"', rest)
        operands = re.findall(r"%([\w.\-]+)", rest)
        among = (parts.get(each, part_of(each)) for each in reversed(operands))
        known = (part for part in among if part != OTHER)
        part = part_of(own[1]) if own else next(known, part_of(name))
        parts[name] = "head" if part == "embedding" and not own else part
    return parts


def seconds_by_part(
    run: Callable[[], Any], steps: int, parts: Mapping[str, str]
) -> dict[str, float]:
    """Seconds a step in each part.

    Args:
      run: takes that many steps, and waits for the last.
      steps: how many.
      parts: what `operations` found in the program.

    Returns:
      By part, the largest first; empty where the profiler tells nothing of operations.
    """
    spent: defaultdict[str, float] = defaultdict(float)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run()
        for path in Path(folder).rglob("*.xplane.pb"):
            for operation, seconds in _events(path):
                spent[parts.get(operation, OTHER)] += seconds / steps
    return dict(sorted(spent.items(), key=lambda each: each[1], reverse=True))


def _events(path: Path) -> Iterator[tuple[str, float]]:
    """Operations of a profile, and their seconds."""
    with warnings.catch_warnings():
        # JAX's reader makes types in a way that Python deprecates; made an error, it aborts.
        warnings.simplefilter("ignore", DeprecationWarning)
        for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
            for line in plane.lines:
                for event in line.events:
                    operation = dict(event.stats).get("hlo_op")
                    if operation is not None:
                        yield str(operation), event.duration_ns * 1e-9
