"""Optimizer states in 8 bits: what they cost the model of `examples/train_lm.py`, and an update.

Three ways to store Adam's moments train the same model from the same parameters on the same data:
float32, MXFP8 by `mx_jax.quantize_state`, and bitsandbytes' block-wise dynamic 8 bits by its
published definition (Dettmers et al., arXiv 2110.02861). Runs stay in --runs, so that a stopped
command goes on. `--times` measures updates instead.
"""

import dataclasses
import json
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks import environment, report
from benchmarks.language_model import (
    STATES,
    Corpus,
    Output,
    Settings,
    Trainer,
    intervals,
    standard_library_text,
)
from benchmarks.slim import LATE

# The example's with --quick.
SETTINGS = Settings(
    d_model=64,
    layers=2,
    heads=2,
    context=64,
    batch=16,
    steps=250,
    lr=1e-2,
    weight_decay=0.1,
    grad_clip=1.0,
    eval_every=50,
    eval_tokens=16384,
)
# Elements that share a scale in bitsandbytes, and the smallest array that it stores in 8 bits.
BLOCK, MIN_SIZE = 256, 4096
# Parameters of the updates that are measured: a matrix each, and those of a block of a transformer.
SHAPES = {
    "256 x 512": ((256, 512),),
    "1024 x 1024": ((1024, 1024),),
    "a block of width 1024": ((4096, 1024), (1024, 4096), *4 * ((1024, 1024),)),
    "4096 x 4096": ((4096, 4096),),
}


def dynamic_map(signed: bool) -> np.ndarray:
    """The 256 values of bitsandbytes' `create_dynamic_map(signed, 7, 8)`, ascending.

    Decades from 1e-6 to 1, each with twice as many steps as the one below it.
    """
    values = [0.0, 1.0]
    for decade in range(7):
        edges = np.linspace(0.1, 1, 2 ** (decade + (0 if signed else 1)) + 1)
        means = 10.0 ** (decade - 6) * (edges[:-1] + edges[1:]) / 2
        values += [*means, *(-means if signed else [])]
    return np.sort(np.array(values, np.float32))


class Dynamic(NamedTuple):
    """A moment in dynamic 8 bits: codes of blocks, and the largest magnitude of each."""

    codes: jax.Array
    largest: jax.Array


def dynamic_encode(x: jax.Array, signed: bool) -> Dynamic:
    """Nearest values of the map; a number never changes its sign."""
    table = dynamic_map(signed)
    blocks = jnp.pad(x.ravel(), (0, -x.size % BLOCK)).reshape(-1, BLOCK)
    largest = jnp.max(jnp.abs(blocks), axis=1, keepdims=True)
    scaled = blocks / jnp.where(largest > 0, largest, 1)
    codes = jnp.searchsorted((table[:-1] + table[1:]) / 2, scaled)
    if signed:
        flipped = jnp.signbit(jnp.asarray(table)[codes]) != jnp.signbit(scaled)
        codes = codes + jnp.where(flipped, jnp.where(scaled > 0, 1, -1), 0)
    return Dynamic(codes.astype(jnp.uint8), largest)


def dynamic_decode(x: Dynamic, shape: tuple[int, ...], signed: bool) -> jax.Array:
    """The values, of a shape."""
    values = jnp.asarray(dynamic_map(signed))[x.codes] * x.largest
    return values.ravel()[: int(np.prod(shape))].reshape(shape)


def dynamic(optimizer: Any) -> Any:
    """An optimizer of optax's whose Adam moments are stored in dynamic 8 bits."""

    def stored(state: Any) -> Any:
        def encode(leaf: jax.Array, signed: bool) -> Any:
            return dynamic_encode(leaf, signed) if leaf.size >= MIN_SIZE else leaf

        return _of_adam(state, lambda x, signed: jax.tree.map(lambda leaf: encode(leaf, signed), x))

    def update(updates: Any, state: Any, params: Any) -> Any:
        def decode(like: jax.Array, leaf: Any, signed: bool) -> jax.Array:
            return dynamic_decode(leaf, like.shape, signed) if like.size >= MIN_SIZE else leaf

        read = _of_adam(
            state,
            lambda x, signed: jax.tree.map(lambda p, leaf: decode(p, leaf, signed), params, x),
        )
        updates, state = optimizer.update(updates, read, params)
        return updates, stored(state)

    def init(params: Any) -> Any:
        # Behind a barrier: XLA would fold the cast of zeros, element by element.
        return stored(jax.lax.optimization_barrier(optimizer.init(params)))

    return optimizer._replace(init=init, update=update)


def _of_adam(state: Any, function: Any) -> Any:
    def is_adam(node: Any) -> bool:
        return isinstance(node, optax.ScaleByAdamState)

    def changed(node: Any) -> Any:
        if not is_adam(node):
            return node
        return node._replace(mu=function(node.mu, True), nu=function(node.nu, False))

    return jax.tree.map(changed, state, is_leaf=is_adam)


WAYS = {**STATES, "dynamic 8 bits": dynamic}


def losses(folder: Path, settings: Settings, seeds: Sequence[int], corpus: Corpus) -> list[Any]:
    """A row a way: last validation losses and late training losses, by seed."""
    STATES.update(WAYS)
    rows: dict[str, dict[str, Any]] = {way: {"states": way, "runs": []} for way in WAYS}
    for seed in seeds:
        for way, row in rows.items():
            with_states = dataclasses.replace(settings, states=way)
            output = Output(
                folder=folder / way.replace(" ", "_"),
                settings=with_states,
                fingerprint=corpus.fingerprint,
                environment={},
            )
            output.open(resume=True, overwrite=False)
            run = output.run("float32", seed)
            if not run.ended:
                with output.checkpoints(run) as checkpoints:
                    trainer = Trainer(run, with_states, corpus, checkpoints)
                    run = output.runs[run.name] = trainer.run
                    trainer.train(checkpoint_every=with_states.steps, stop=lambda: False)
                    output.save()
            late = statistics.mean(run.train_loss[-LATE:])
            row["runs"].append({"seed": seed, "loss": run.final_loss, "late_train_loss": late})
    return list(rows.values())


def times(of: str, seconds: float) -> list[dict[str, Any]]:
    """Seconds of an update with its sum to the parameters, donated; ways take turns."""
    params = {str(i): 0.02 * jnp.ones(shape) for i, shape in enumerate(SHAPES[of])}
    gradients = jax.tree.map(lambda x: 0.01 * jax.random.normal(jax.random.key(0), x.shape), params)
    running = {}
    for way in ("float32", "mxfp8"):
        optimizer = WAYS[way](optax.adamw(3e-4))

        def step(params: Any, state: Any, gradients: Any, optimizer: Any = optimizer) -> Any:
            updates, state = optimizer.update(gradients, state, params)
            return optax.apply_updates(params, updates), state

        copies = jax.tree.map(jnp.copy, params)
        state = jax.jit(optimizer.init)(copies)
        running[way] = [jax.jit(step, donate_argnums=(0, 1)), copies, state, []]
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(running["mxfp8"][3]) < 5:
        for entry in running.values():
            started = time.perf_counter(), time.process_time()
            entry[1], entry[2] = jax.block_until_ready(entry[0](*entry[1:3], gradients))
            ended = time.perf_counter(), time.process_time()
            entry[3].append(tuple(1e3 * (b - a) for a, b in zip(started, ended, strict=True)))
    size = sum(leaf.size for leaf in jax.tree.leaves(params))
    rows = []
    for way, (_, _, state, clocks) in running.items():
        walls, cpu = zip(*clocks[2:], strict=True)
        row = {
            "of": of,
            "threads": len(os.sched_getaffinity(0)),
            "states": way,
            "parameters": size,
            "bytes": sum(leaf.nbytes for leaf in jax.tree.leaves(state)) / size,
            "ms": statistics.median(walls),
            "smallest_ms": min(walls),
            "cpu_ms": statistics.median(cpu),
        }
        rows.append(row)
    return rows


def gaps(rows: Sequence[dict[str, Any]], what: str, way: str) -> list[float]:
    """Percent above float32, by seed."""
    by_states = {row["states"]: [run[what] for run in row["runs"]] for row in rows}
    pairs = zip(by_states[way], by_states["float32"], strict=True)
    return [100 * (lossy / exact - 1) for lossy, exact in pairs]


def sheets(result: dict[str, Any]) -> list[report.Sheet]:
    """Losses by way, and times."""
    rows = [
        [
            row["states"],
            str(len(row["runs"])),
            f"{statistics.mean(run['loss'] for run in row['runs']):.4f}",
            *(
                intervals.text(gaps(result["losses"], what, row["states"]), "+.2f")
                for what in ("loss", "late_train_loss")
            ),
        ]
        for row in result.get("losses", ())
    ]
    clocks: list[Sequence[str]] = []
    exact: dict[str, Any] = {}
    for row in result.get("times", ()):
        if row["states"] == "float32":
            exact = row
        both = (
            f"{row[what]:.2f} ({row[what] / exact[what]:.2f})"
            for what in ("ms", "smallest_ms", "cpu_ms")
        )
        clocks.append([row["of"], str(row["threads"]), row["states"], f"{row['bytes']:.2f}", *both])
    return [
        report.Sheet(
            "Loss by how optimizer states are stored",
            ["states", "seeds", "loss", "gap to float32 (%)", "training gap (%)"],
            rows,
        ),
        report.Sheet(
            "An update of AdamW, and how many times float32's",
            [
                "parameters",
                "threads",
                "states",
                "bytes a parameter",
                "median (ms)",
                "least (ms)",
                "CPU time (ms)",
            ],
            clocks,
        ),
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = report.parser("optimizer_states", __doc__)
    parser.add_argument("--runs", type=Path, default=Path("optimizer_states_runs"), help="folder")
    parser.add_argument("--seeds", type=int, default=8, help="number of seeds, from 0 on")
    parser.add_argument("--steps", type=int, default=SETTINGS.steps, help="steps of a run")
    parser.add_argument("--times", type=float, metavar="SECONDS", help="measure updates instead")
    options = parser.parse_args(arguments)
    result = json.loads(options.out.read_text()) if options.out.exists() else {}
    result["environment"] = environment.describe(("optax",))
    if options.times:
        # Of other numbers of threads, as taskset sets them, rows stay.
        new = [row for of in SHAPES for row in times(of, options.times)]
        old = [
            r for r in result.get("times", ()) if r.get("threads", 0) not in {0, new[0]["threads"]}
        ]
        result["times"] = sorted(old + new, key=lambda row: -row["threads"])
    else:
        settings = dataclasses.replace(SETTINGS, steps=options.steps)
        corpus = Corpus.from_text(
            standard_library_text(), batch=settings.batch, context=settings.context
        )
        result["settings"] = dataclasses.asdict(settings)
        result["losses"] = losses(options.runs, settings, range(options.seeds), corpus)
    report.publish("optimizer_states", options, result, sheets(result))


if __name__ == "__main__":
    main()
