"""A product and its gradients on two virtual CPU devices, beside one device with two threads.

Two processes take turns, one with a device and one with two, on the same cores; each is given the
same sizes and the same number of threads. The ratio is taken within each round: what devices
exchange, and what each of them computes again, is what is left of it.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding

from benchmarks import environment, report
from benchmarks.collectives import LAYOUTS, PLAIN, Case, step

DEVICES = 2
CHOSEN = ("data", "FSDP by k", "tensor, column", "tensor, row")
RECIPES = (PLAIN, "mxfp8", "mxfp4")


def _work(options: argparse.Namespace) -> None:
    """Time what each line of the input names, on as many devices as this process has."""
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    runs: dict[str, Any] = {}
    for line in sys.stdin:
        if line not in runs:
            layout, recipe = json.loads(line)
            runs[line] = _run(layout, recipe, mesh, options)
            jax.block_until_ready(runs[line]())
        start = time.perf_counter()
        for _ in range(options.repeats):
            jax.block_until_ready(runs[line]())
        print((time.perf_counter() - start) / options.repeats, flush=True)


def _run(name: str, recipe: str, mesh: Any, options: argparse.Namespace) -> Any:
    layout = LAYOUTS[name]
    tokens, width = options.tokens, options.width
    specs = layout.x, layout.w, layout.y
    places = [NamedSharding(mesh, spec) for spec in specs]
    shapes = (tokens, width), (width, width), (tokens, width)
    arrays = [
        jax.device_put(jax.random.normal(jax.random.key(seed), shape, jnp.float32), place)
        for seed, (shape, place) in enumerate(zip(shapes, places, strict=True))
    ]
    function = step(Case(name, "no mesh", recipe, "float32"), layout)
    compiled = jax.jit(function, out_shardings=(places[2], *places[:2])).lower(*arrays).compile()
    return lambda: compiled(*arrays)


def _worker(devices: int, options: argparse.Namespace) -> subprocess.Popen[str]:
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
    command = [sys.executable, "-m", "benchmarks.devices", "--worker"]
    for name in ("tokens", "width", "repeats"):
        command += [f"--{name}", str(getattr(options, name))]
    own = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=own, stdin=pipe, stdout=pipe, text=True)


def _ask(worker: subprocess.Popen[str], case: tuple[str, str]) -> float:
    assert worker.stdin is not None and worker.stdout is not None
    worker.stdin.write(json.dumps(case) + "\n")
    worker.stdin.flush()
    return float(worker.stdout.readline())


def rows(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Milliseconds on one device and on two, and their ratio, a row for each layout and recipe."""
    workers = [_worker(devices, options) for devices in (1, DEVICES)]
    chosen = [(layout, recipe) for layout in CHOSEN for recipe in RECIPES]
    rounds: dict[tuple[str, str], list[list[float]]] = {case: [] for case in chosen}
    try:
        for number in range(-1, options.rounds):
            for case in chosen:
                times = [_ask(worker, case) for worker in workers]
                if number >= 0:  # the first compiles
                    rounds[case].append(times)
    finally:
        for worker in workers:
            worker.kill()
    found = []
    for (layout, recipe), times in rounds.items():
        one, several = (statistics.median(column) * 1e3 for column in zip(*times, strict=True))
        ratio = statistics.median(b / a for a, b in times)
        found.append(
            {"layout": layout, "recipe": recipe, "one": one, "several": several, "ratio": ratio}
        )
    return found


def sheet(found: Sequence[dict[str, Any]], options: argparse.Namespace) -> report.Sheet:
    """The table."""
    result = report.Sheet(
        f"A product and its gradients: {DEVICES} virtual devices over one device, same threads",
        ["layout", "recipe", "one device, ms", f"{DEVICES} devices, ms", "ratio"],
        notes=[f"{options.tokens} tokens, {options.width} features and units, float32."],
    )
    for row in found:
        times = (f"{row[name]:.1f}" for name in ("one", "several"))
        result.rows.append([row["layout"], row["recipe"], *times, f"{row['ratio']:.2f}"])
    return result


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = report.parser("devices", __doc__)
    parser.add_argument("--tokens", type=int, default=1024, help="rows of the input")
    parser.add_argument("--width", type=int, default=1024, help="features and units")
    parser.add_argument("--repeats", type=int, default=3, help="calls that are timed together")
    parser.add_argument("--rounds", type=int, default=9, help="samples of each case")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker:
        return _work(options)
    found = rows(options)
    result = {"environment": environment.describe(), "rows": found}
    report.publish("devices", options, result, [sheet(found, options)])
    return None


if __name__ == "__main__":
    main()
