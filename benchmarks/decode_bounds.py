"""What a decoding step would take without one of its parts, or as XLA compiles it in other ways.

All programs share one process and one copy of the weights: two processes with the same program
differ by some percent, by where their pages lie. Rounds run each program once, in an order drawn
anew. The first program is there twice: its ratio to itself tells what those of others are worth.
"""

import contextlib
import dataclasses
import gc
import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from benchmarks import environment, report
from benchmarks.llama import decode, find_model, load, model
from benchmarks.timing import Samples, add_pace, ratio

COMMAND = "cpu/decode_bounds"
AGAIN = "as it is, again"


class _Identity(nn.Module):
    """In place of a norm."""

    epsilon: float
    dtype: Any = None

    def __call__(self, x: jax.Array) -> jax.Array:
        return x


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def without_norms() -> contextlib.AbstractContextManager[None]:
    """Layers that read what norms would read."""
    return _replaced(nn, "RMSNorm", _Identity)


def without_rotary() -> contextlib.AbstractContextManager[None]:
    """Queries and keys that are not turned."""
    return _replaced(model, "rotate", lambda x, turn: x)


# What is changed while a program is traced, and what XLA's compiler is told.
PROGRAMS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "as it is": (contextlib.nullcontext, {}),
    AGAIN: (contextlib.nullcontext, {}),
    "without norms": (without_norms, {}),
    "without rotary embedding": (without_rotary, {}),
    "vectors of 512 bits": (contextlib.nullcontext, {"xla_cpu_prefer_vector_width": 512}),
    "vectors of 128 bits": (contextlib.nullcontext, {"xla_cpu_prefer_vector_width": 128}),
    "without XNNPACK": (contextlib.nullcontext, {"xla_cpu_use_xnnpack": False}),
    "preset FAST_RUNTIME": (
        contextlib.nullcontext,
        {"xla_cpu_opt_preset": "CPU_OPT_PRESET_FAST_RUNTIME"},
    ),
}


def compiled(generator: Any, context: int, name: str) -> Any:
    """A dispatch of the generator's `stride` steps."""
    changed, told = PROGRAMS[name]
    # A layer that was traced before is not traced again.
    jax.clear_caches()
    held = generator.model, generator.sampling, generator.params
    token, caches = jnp.ones((1, 1), jnp.int32), generator.caches(context)
    with changed():
        lowered = decode.advance_many.lower(
            *held, token, caches, jnp.int32(0), jax.random.key(0), count=generator.stride
        )
    return lowered.compile(compiler_options=told)


def measure(options: Any) -> list[dict[str, Any]]:
    """A row a program."""
    generator, _ = load(find_model(options.model), weights=options.weights, cache=options.cache)
    with report.progress(len(PROGRAMS)) as step:
        programs = {}
        for name in PROGRAMS:
            step(name)
            programs[name] = compiled(generator, options.context, name)
    caches = {name: generator.caches(options.context) for name in programs}
    key, first = jax.random.key(0), jnp.ones((1, 1), jnp.int32)
    gc.freeze()

    def run(name: str) -> tuple[float, float]:
        token, wall, cpu = first, time.perf_counter(), time.process_time()
        for dispatch in range(options.dispatches):
            position = jnp.int32(options.position + dispatch * generator.stride)
            given = generator.params, token, caches[name], position, key
            tokens, caches[name] = programs[name](*given)
            token = tokens[:, -1:]
            token.block_until_ready()
        steps = options.dispatches * generator.stride
        return (time.perf_counter() - wall) / steps, (time.process_time() - cpu) / steps

    samples = {name: Samples() for name in programs}
    order, started = list(programs), time.perf_counter()
    for name in order:
        run(name)
    while len(samples[AGAIN].cpu) < options.max_rounds and (
        time.perf_counter() - started < options.seconds
        or len(samples[AGAIN].cpu) < options.min_rounds
    ):
        random.shuffle(order)
        for name in order:
            wall, cpu = run(name)
            samples[name].wall.append(wall)
            samples[name].cpu.append(cpu)
            samples[name].faults.append(0)
    base = samples[next(iter(PROGRAMS))]
    return [
        {
            "program": name,
            "timings": own.summary(),
            "time over the first": dataclasses.asdict(ratio(own, base, "cpu")),
        }
        for name, own in samples.items()
    ]


def sheet(rows: Sequence[dict[str, Any]]) -> report.Sheet:
    """CPU time of a token, and its ratio to the first program's within rounds."""
    columns = ["program", "ms a token", "best", "time over the first"]
    table = report.Sheet("A step, one thread, by CPU time", columns)
    for row in rows:
        spent, share = row["timings"]["cpu_ms"], row["time over the first"]["median"]
        table.rows.append(
            [row["program"], f"{spent['median']:.2f}", f"{spent['smallest']:.2f}", f"{share:.3f}"]
        )
    return table


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = report.parser(COMMAND, __doc__)
    parser.prog = "python -m benchmarks.decode_bounds"
    parser.add_argument("--model", default="smollm2", help="a GGUF file, or smollm2")
    parser.add_argument("--weights", default="mxfp4", help="format of weights")
    parser.add_argument("--cache", help="format of keys and values")
    parser.add_argument("--context", type=int, default=128, help="rows of the caches")
    parser.add_argument("--position", type=int, default=0, help="of the first token")
    parser.add_argument("--dispatches", type=int, default=2, help="of one program in one round")
    add_pace(parser, seconds=60.0, min_rounds=7)
    options = parser.parse_args(arguments)
    described = environment.describe()
    rows = measure(options)
    result = {"environment": described, "rows": rows}
    report.publish(COMMAND, options, result, [sheet(rows)])


if __name__ == "__main__":
    main()
