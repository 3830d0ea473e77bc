"""What watching a train step costs: `python -m benchmarks.capture`.

A small MLP in MXFP8, a whole step of it with gradients: unwatched, and under `inspect.capture`
with all statistics, at every step and at one in ten. Times are medians over rounds of ten steps,
taken in turns, so that a busy machine is busy for all of them.
"""

import argparse
import contextlib
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp

import mx_jax
from mx_jax import inspect

LAYERS = 4


def train_step(weights: Any, x: jax.Array, step: jax.Array) -> Any:
    def loss(weights: Any) -> jax.Array:
        y = x
        for number, w in enumerate(weights):
            with inspect.tag(f"layer_{number}"):
                y = jnp.tanh(mx_jax.matmul(y, w, recipe="mxfp8"))
        return jnp.mean(jnp.square(y))

    with inspect.at_step(step):
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights))


def measure(rows: int, width: int, rounds: int) -> dict[str, float]:
    """Seconds a step."""
    keys = jax.random.split(jax.random.key(0), LAYERS + 1)
    x = jax.random.normal(keys[0], (rows, width))
    start = [jax.random.normal(key, (width, width)) / width**0.5 for key in keys[1:]]
    contexts: dict[str, Any] = {
        "unwatched": contextlib.nullcontext(),
        "every=10": inspect.capture(every=10),
        "every=1": inspect.capture(),
    }
    run, times = jax.jit(train_step), {name: [] for name in contexts}
    for number in range(rounds + 1):
        for name, context in contexts.items():
            weights = start
            with context:
                began = time.perf_counter()
                for step in range(10):
                    weights = run(weights, x, jnp.int32(step))
                jax.block_until_ready(weights)
                jax.effects_barrier()
                if number:  # The first compiles.
                    times[name].append((time.perf_counter() - began) / 10)
    return {name: statistics.median(own) for name, own in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    found = measure(options.rows, options.width, options.rounds)
    for name, seconds in found.items():
        over = seconds / found["unwatched"] - 1
        print(f"{name:10} {1e3 * seconds:8.2f} ms a step  {over:+.1%}")


if __name__ == "__main__":
    main()
