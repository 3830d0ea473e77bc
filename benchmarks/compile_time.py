"""Time to trace, lower and compile the gradient of a stack of equal Dense layers.

`jax.jit(jax.grad(loss))` of a chain of products with relu between them, every layer written out and
not scanned, for each recipe: by the reference, and by the backends that a user gets. CPU time of a
process that is pinned to one core, where XLA compiles in one thread. Each round does every case
once, in an order drawn anew, after `jax.clear_caches()`. Instructions of HLO are counted as they
come to XLA, where equal casts share a function, and as it compiles them, where it has inlined every
call.
"""

import argparse
import contextlib
import dataclasses
import itertools
import random
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import mx_jax
from benchmarks import cores, environment, report
from benchmarks.timing import spread
from mx_jax import recipes

FLOAT32, REFERENCE, DEFAULT = "float32", "reference", "default"
PHASES = ("trace", "lower", "compile")
COUNTS = ("instructions given", "functions given", "instructions compiled", "computations compiled")
# By default; and those that take long, by name only.
QUICK = ("mxfp8", "mxfp4", "nvfp4", "float8_tensorwise")
SLOW = (
    "float8_rowwise",
    "mxfp4_stochastic",
    "nvfp4_pretraining",
    "nvfp4_unbiased",
    "nvfp4_four_over_six",
)
# By a case's name: its recipe and the dtype of its arrays.
CASES = {
    FLOAT32: ("high_precision", jnp.float32),
    "bfloat16": ("high_precision", jnp.bfloat16),
    **{name: (name, jnp.float32) for name in (*QUICK, *SLOW)},
}
_INSTRUCTION = re.compile(r"^ +(?:ROOT )?%?[\w.\-]+ = ", re.MULTILINE)
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?[\w.\-]+ .*\{$", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Case:
    """A recipe by its name in `CASES`, and the backends that may run it."""

    name: str
    backends: str


def gradient(name: str, layers: int, width: int) -> tuple[Callable[..., Any], Any]:
    """The gradient of a stack by all its kernels, and the shapes of its arguments."""
    recipe_name, dtype = CASES[name]
    recipe = recipes.from_name(recipe_name)

    def loss(kernels, x, keys):
        for kernel, key in zip(kernels, keys, strict=True):
            options = {"key": key} if recipe.is_stochastic else {}
            x = jax.nn.relu(mx_jax.matmul(x, kernel, recipe=recipe, **options))
        return jnp.square(x).sum()

    array = jax.ShapeDtypeStruct((width, width), dtype)
    key = jax.eval_shape(jax.random.key, 0)
    return jax.grad(loss), ([array] * layers, array, [key] * layers)


def count(hlo: str | None) -> dict[str, int]:
    """Instructions and computations of a printed HLO module."""
    text = hlo or ""
    patterns = {"instructions": _INSTRUCTION, "computations": _COMPUTATION}
    return {what: len(pattern.findall(text)) for what, pattern in patterns.items()}


def sample(case: Case, layers: int, width: int) -> dict[str, Any]:
    """CPU seconds of each phase, from nothing; sizes of the program before and after XLA."""
    function, shapes = gradient(case.name, layers, width)
    backends = contextlib.nullcontext()
    if case.backends == REFERENCE:
        backends = mx_jax.only_backend(REFERENCE)
    jax.clear_caches()
    with backends:
        clock = [time.process_time()]
        traced = jax.jit(function).trace(*shapes)
        clock.append(time.process_time())
        lowered = traced.lower()
        clock.append(time.process_time())
        compiled = lowered.compile()
        clock.append(time.process_time())
    seconds = [after - before for before, after in itertools.pairwise(clock)]
    return {
        "seconds": dict(zip(PHASES, seconds, strict=True)),
        "before": count(lowered.as_text("hlo")),
        "after": count(compiled.as_text()),
    }


def rows(options: argparse.Namespace) -> list[dict[str, Any]]:
    """One row a case, float32 of the same backends first."""
    cases = [Case(name, which) for which in options.backends for name in options.recipes]
    for case in cases:
        sample(case, 1, options.width)
    samples: dict[Case, list[dict[str, Any]]] = {case: [] for case in cases}
    order, shuffle = list(cases), random.Random(0).shuffle
    for _ in range(options.rounds):
        shuffle(order)
        for case in order:
            samples[case].append(sample(case, options.layers, options.width))
    return [_row(case, samples[case], samples[Case(FLOAT32, case.backends)]) for case in cases]


def _row(
    case: Case, samples: Sequence[dict[str, Any]], plain: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """Medians over rounds; ratios to float32 are taken within each round."""
    seconds = {
        phase: dataclasses.asdict(spread([one["seconds"][phase] for one in samples]))
        for phase in PHASES
    }
    over = [
        one["seconds"]["compile"] / max(base["seconds"]["compile"], 1e-9)
        for one, base in zip(samples, plain, strict=True)
    ]
    return {
        "case": case.name,
        "backends": case.backends,
        "seconds": seconds,
        "compile_of_float32": dataclasses.asdict(spread(over)),
        "before": samples[0]["before"],
        "after": samples[0]["after"],
        "rounds": len(samples),
    }


def sheets(result: dict[str, Any]) -> list[report.Sheet]:
    """One table for each choice of backends."""
    layers, width, tables = result["layers"], result["width"], []
    for which in dict.fromkeys(row["backends"] for row in result["rows"]):
        rows = [row for row in result["rows"] if row["backends"] == which]
        sheet = report.Sheet(
            f"{layers} Dense layers of {width}, batch {width}, {which}: CPU time in s",
            ["recipe", *PHASES, "compile / float32", *COUNTS],
            notes=[f"Medians of {rows[0]['rounds']} rounds, one core, from clear caches."],
        )
        sheet.rows += map(_cells, rows)
        tables.append(sheet)
    return tables


def _cells(row: dict[str, Any]) -> list[str]:
    counts = [row[when][what] for when in ("before", "after") for what in row["before"]]
    times = [f"{row['seconds'][phase]['median']:.2f}" for phase in PHASES]
    over = f"{row['compile_of_float32']['median']:.1f}"
    return [row["case"], *times, over, *map(str, counts)]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = report.parser("compile_time", __doc__, out="cpu/compile_time.json")
    parser.add_argument(
        "--recipes",
        nargs="+",
        choices=CASES,
        default=[name for name in CASES if name not in SLOW],
        help="float32 is always there",
    )
    parser.add_argument(
        "--backends", nargs="+", choices=(REFERENCE, DEFAULT), default=[REFERENCE, DEFAULT]
    )
    parser.add_argument("--layers", type=int, default=24, help="of the stack")
    parser.add_argument("--width", type=int, default=256, help="of layers, and the batch")
    parser.add_argument("--rounds", type=int, default=3, help="of which medians are taken")
    options = parser.parse_args(arguments)
    options.recipes = list(dict.fromkeys([FLOAT32, *options.recipes]))
    if DEFAULT in options.backends:
        environment.cpu_library("compile_time")
    result = {
        "environment": environment.describe(),
        "layers": options.layers,
        "width": options.width,
        "rows": cores.on_one_core(rows, options),
    }
    report.publish("compile_time", options, result, sheets(result))


if __name__ == "__main__":
    main()
