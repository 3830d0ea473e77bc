"""What watching a train step costs: `python -m benchmarks.capture`.

A small MLP in MXFP8, a whole step of it with gradients: as it is, and by `inspect.capture` with all
statistics, at every step and at one in ten, whose number is known outside the compiled function or
traced inside it. Medians over rounds of ten steps, taken in turns, so that a busy
machine is busy for all of them. What is compared is the process's CPU time, which another
process's work does not change much; the time on the clock stands beside it.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import mx_jax
from benchmarks import environment, report
from mx_jax import inspect

LAYERS, STEPS = 4, 10
UNWATCHED = "unwatched"


def train_step(weights: Any, x: jax.Array) -> Any:
    def loss(weights: Any) -> jax.Array:
        y = x
        for number, w in enumerate(weights):
            with jax.named_scope(f"layer_{number}"):
                y = jnp.tanh(mx_jax.matmul(y, w, recipe="mxfp8"))
        return jnp.mean(jnp.square(y))

    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights))


def measure(rows: int, width: int, rounds: int) -> list[dict[str, Any]]:
    """Seconds a step, of the CPU and of the clock, and the CPU time over that of no watching."""
    keys = jax.random.split(jax.random.key(0), LAYERS + 1)
    x = jax.random.normal(keys[0], (rows, width))
    start = [jax.random.normal(key, (width, width)) / width**0.5 for key in keys[1:]]
    compiled = jax.jit(train_step)

    def numbered(weights: Any, x: jax.Array, step: jax.Array) -> Any:
        return train_step(weights, x)

    traced = inspect.capture(numbered, every=10, step=lambda weights, x, step: step)
    ways: dict[str, Callable[..., Any]] = {
        UNWATCHED: compiled,
        "every=10": inspect.capture(compiled, every=10),
        "every=10, step traced": jax.jit(traced),
        "every=1": inspect.capture(compiled),
    }
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, run in ways.items():
            weights = start
            began = time.process_time(), time.perf_counter()
            for step in range(STEPS):
                weights = run(weights, x, *[step] * ("traced" in name))
            jax.block_until_ready(weights)
            jax.effects_barrier()
            ended = time.process_time(), time.perf_counter()
            if number:  # The first compiles.
                cpu, clock = (b - a for a, b in zip(began, ended, strict=True))
                times[name].append((cpu / STEPS, clock / STEPS))
    return [_row(name, rows, width, times[UNWATCHED], clocks) for name, clocks in times.items()]


def _row(name: str, rows: int, width: int, plain: Any, clocks: Any) -> dict[str, Any]:
    cpu, clock = (statistics.median(column) for column in zip(*clocks, strict=True))
    over = [a[0] / b[0] - 1 for a, b in zip(clocks, plain, strict=True)]
    return {
        "watching": name,
        "rows": rows,
        "width": width,
        "cpu_s": cpu,
        "clock_s": clock,
        "overhead": statistics.median(over),
    }


def sheet(rows: Sequence[dict[str, Any]]) -> report.Sheet:
    result = report.Sheet(
        f"A step of {LAYERS} MXFP8 layers, forward and backward",
        ("watching", "rows", "width", "CPU (ms)", "clock (ms)", "CPU time over unwatched (%)"),
    )
    for row in rows:
        labels = row["watching"], str(row["rows"]), str(row["width"])
        cells = (1e3 * row["cpu_s"], 1e3 * row["clock_s"], 100 * row["overhead"])
        result.rows.append((*labels, *(report.number(cell, 1) for cell in cells)))
    return result


def main() -> None:
    parser = report.parser("capture", __doc__, out="cpu/capture.json")
    parser.add_argument("--rows", type=int, nargs="+", default=[256, 1024], help="of the batch")
    parser.add_argument("--width", type=int, default=256, help="of each layer")
    parser.add_argument("--rounds", type=int, default=7, help="of ten steps")
    options = parser.parse_args()
    facts = environment.describe()
    rows = [r for n in options.rows for r in measure(n, options.width, options.rounds)]
    report.publish("capture", options, {"environment": facts, "rows": rows}, [sheet(rows)])


if __name__ == "__main__":
    main()
