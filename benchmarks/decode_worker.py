"""One case of `benchmarks.decode` here: a model in its formats.

Reads a number a line, decodes that many tokens from the same place, some in each dispatch, and
answers with the seconds that they took; `parts` is answered with where a step spends its time.
"""

import argparse
import dataclasses
import gc
import json
import re
import sys
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks import held
from benchmarks.llama import Generator, advance, load


def time_of_parts(generator: Generator, tokens: int) -> dict[str, float]:
    """Seconds that a step takes in each of its parts, with caches for so many tokens."""
    key, first = jax.random.key(0), max(tokens - _STEPS, 0)
    token, caches = np.zeros((1, 1), np.int32), generator.caches(tokens)
    held = generator.model, generator.sampling
    # A single step's program: in a loop arguments have no names.
    step = jax.jit(advance, static_argnums=(0, 1), donate_argnames="caches")
    program = step.lower(*held, generator.params, token, caches, np.int32(0), key).compile()

    def steps() -> None:
        following: Any = token
        rows = caches
        for index in range(_STEPS):
            following, rows = program(
                generator.params, following, rows, np.int32(first + index), key
            )
        following.block_until_ready()

    return seconds_by_part(steps, _STEPS, operations(program.as_text() or ""))


_STEPS = 8
# Parts of a step by their names in the model; the first that a program's name contains.
PARTS = (
    *("qkv", "attention_out", "gate_up", "down", "head", "cache", "attention"),
    *("rotary", "gate", "norm", "embedding", "sampling"),
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
        op_name = re.search(r'op_name="([^"]*/[^"]*)"', rest)
        operands = re.findall(r"%([\w.\-]+)", rest)
        among = (parts.get(each, part_of(each)) for each in reversed(operands))
        known = (part for part in among if part != OTHER)
        part = part_of(op_name[1]) if op_name else next(known, part_of(name))
        parts[name] = "head" if part == "embedding" and not op_name else part
    return parts


def seconds_by_part(
    run: Callable[[], Any], steps: int, parts: Mapping[str, str]
) -> dict[str, float]:
    """Seconds a step in each part.

    Args:
      run: takes that many steps, and waits for the last.
      steps: how many.
      parts: of the program, by `operations`.

    Returns:
      By part, the largest first; empty where the profiler records no operations.
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


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--context", type=int, required=True)
    parser.add_argument("--stride", type=int, required=True)
    for name in ("weights", "activations", "cache"):
        parser.add_argument(f"--{name}")
    options = parser.parse_args()
    held.hold()
    generator, _ = load(
        options.model,
        weights=options.weights,
        activations=options.activations,
        cache=options.cache,
    )
    generator = dataclasses.replace(generator, stride=options.stride)
    key, first = jax.random.key(0), np.ones((1, 1), np.int32)
    caches = generator.caches(options.context)
    token, caches = generator.steps(first, caches, 0, key)
    gc.freeze()
    used = sum(leaf.nbytes for leaf in jax.tree.leaves(generator.params))
    print(json.dumps({"bytes": used}), flush=True)
    for line in sys.stdin:
        if line.strip() == "parts":
            print(json.dumps(time_of_parts(generator, options.context)), flush=True)
            continue
        token = first
        wall, cpu = time.perf_counter(), time.process_time()
        for position in range(0, int(line), generator.stride):
            tokens, caches = generator.steps(token, caches, position, key)
            token = tokens[:, -1:]
            token.block_until_ready()
        spent = {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}
        print(json.dumps(spent), flush=True)


if __name__ == "__main__":
    main()
