"""Time of one training-like product in each recipe, beside float32: forward and both gradients.

`y = x W`, `dx = g W^T`, `dW = x^T g`, jitted as one function, for x [m, k], W [k, n], g [m, n].
The parts of a step are timed as functions of their own, in the same rounds: quantizing all its
operands (transforms with it), and the three products of quantized operands, which
on a CPU means dequantizing and multiplying. What the parts do not explain is the cost, or gain, of
running them in one XLA program. Method: see `benchmarks.timing`.
"""

import argparse
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

import mx_jax
from benchmarks import cores, environment, report
from benchmarks.sqnr import all_recipes, operands, size
from benchmarks.timing import Case, Samples, add_pace, measure, pace, ratio
from mx_jax import recipes
from mx_jax.axes import SIDES, Axes, ProductAxes
from mx_jax.mxarray import MXArray
from mx_jax.ops.product import (
    MatmulPass,
    QuantizedMatmul,
    gradient_pass,
    multiply,
    quantize_operands,
)
from mx_jax.recipes import Recipe

CLOCKS = {"all": "wall", "one": "cpu"}
FLOAT32, STEP, QUANTIZE, MULTIPLY = "float32", "step", "quantize", "dequantize and multiply"
FLOAT = np.dtype(np.float32)
# x is [m, k] and w is [k, n], as the layers hold them: no product needs a transposed copy.
FORWARD = ProductAxes(Axes.ordered(), Axes.ordered(k_first=True))


def step_function(recipe: Recipe) -> Callable[..., Any]:
    """Output and both gradients, jitted."""
    key = jax.random.key(7) if recipe.is_stochastic else None

    @jax.jit
    def step(x, w, g):
        y, backward = jax.vjp(lambda x, w: mx_jax.matmul(x, w, recipe=recipe, key=key), x, w)
        return y, backward(g)

    return step


def products(recipe: Recipe) -> list[tuple[QuantizedMatmul, MatmulPass, str]]:
    """The three products, as the library runs them, and their operands."""
    matmul = QuantizedMatmul(
        recipe=recipe,
        axes=FORWARD,
        out_dtype=FLOAT,
        quantizer=quantize_operands,
        multiplier=multiply,
    )
    output = MatmulPass("output", recipe.output, FORWARD, FLOAT)
    grad_input, grad_weight = (
        gradient_pass(matmul, side, FORWARD.gradient_axes(side)) for side in SIDES
    )
    return [(matmul, output, "xw"), (matmul, grad_input, "gw"), (matmul, grad_weight, "xg")]


def quantize_function(recipe: Recipe) -> Callable[..., Any]:
    """The operands of all three products as the recipe prepares them, jitted."""

    @jax.jit
    def quantize(x, w, g):
        arrays, prepared = {"x": x, "w": w, "g": g}, []
        for _, this, (lhs, rhs) in products(recipe):
            key = jax.random.key(7) if this.spec.is_stochastic else None
            prepared.append(quantize_operands(this, (arrays[lhs], arrays[rhs]), key)[0])
        return prepared

    return quantize


def multiply_function(recipe: Recipe) -> Callable[..., Any]:
    """The three products of prepared operands, on the backend that takes them, jitted."""

    @jax.jit
    def run(prepared):
        each = zip(products(recipe), prepared, strict=True)
        return [
            multiply(matmul, this, operands, None, (), lambda: (None, None))
            for (matmul, this, _), operands in each
        ]

    return run


def cases(recipe: Recipe, x: jax.Array, w: jax.Array, g: jax.Array) -> list[Case]:
    """The step in float32 and in the recipe, and its parts."""
    plain, step = step_function(recipes.high_precision()), step_function(recipe)
    quantize, multiply = quantize_function(recipe), multiply_function(recipe)
    prepared = quantize(x, w, g)
    return [
        Case(FLOAT32, lambda: plain(x, w, g)),
        Case(STEP, lambda: step(x, w, g)),
        Case(QUANTIZE, lambda: _arrays(quantize(x, w, g))),
        Case(MULTIPLY, lambda: multiply(prepared)),
    ]


def _arrays(prepared: list[tuple[Any, Any]]) -> list[jax.Array]:
    """The quantized operands alone: those in high precision pass through."""
    made = [side for pair in prepared for side in pair if isinstance(side, MXArray)]
    return jax.tree.leaves(made)


def measure_all(options: argparse.Namespace, which_cores: str) -> list[dict[str, Any]]:
    """One row a recipe."""
    x, w, g = operands(options.size)
    rows = []
    chosen = [r for r in all_recipes(options.recipes) if not r.is_high_precision]
    with report.progress(len(chosen)) as step:
        for recipe in chosen:
            step(f"{which_cores} core(s): {recipe.name}")
            samples = measure(cases(recipe, x, w, g), **pace(options))
            rows.append(_row(recipe, which_cores, samples))
    return rows


def _row(recipe: Recipe, which_cores: str, samples: dict[str, Samples]) -> dict[str, Any]:
    clock = CLOCKS[which_cores]
    over = {name: ratio(of, samples[FLOAT32], clock) for name, of in samples.items()}
    return {
        "recipe": recipe.name,
        "cores": which_cores,
        "clock": clock,
        "overhead_percent": 100 * (over[STEP].median - 1),
        "ratio_to_float32": {name: dataclasses.asdict(of) for name, of in over.items()},
        "timings": {name: of.summary() for name, of in samples.items()},
    }


def sheets(result: dict[str, Any]) -> list[report.Sheet]:
    """One table for each choice of cores, slowest recipe first."""
    tables = []
    for which in dict.fromkeys(row["cores"] for row in result["rows"]):
        rows = [row for row in result["rows"] if row["cores"] == which]
        rows.sort(key=lambda row: -row["overhead_percent"])
        tables.append(_sheet(which, rows, " x ".join(map(str, result["size"]))))
    return tables


def _sheet(which: str, rows: Sequence[dict[str, Any]], sizes: str) -> report.Sheet:
    unit, cores_text = ("time", "all cores") if which == "all" else ("CPU time", "one core")
    parts = (FLOAT32, STEP, QUANTIZE, MULTIPLY)
    sheet = report.Sheet(
        f"Step of a product, {sizes} (m x k x n), {cores_text}, {unit} in ms",
        ["recipe", *parts, "overhead over float32", "quartiles of the overhead"],
    )
    for row in rows:
        times = [row["timings"][part][f"{row['clock']}_ms"]["median"] for part in parts]
        spread = row["ratio_to_float32"][STEP]
        quartiles = f"{100 * (spread['q1'] - 1):.0f} to {100 * (spread['q3'] - 1):.0f} %"
        overhead = f"{row['overhead_percent']:.0f} %"
        sheet.rows.append([row["recipe"], *(f"{t:.2f}" for t in times), overhead, quartiles])
    return sheet


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = report.parser("train_step", __doc__)
    parser.add_argument("--size", type=size, default=(1024, 128, 512), metavar="MxKxN")
    parser.add_argument("--recipes", nargs="+", default=[], metavar="NAME", help="default: all")
    parser.add_argument("--cores", choices=("all", "one", "both"), default="both")
    add_pace(parser, seconds=1.0, min_rounds=7)
    options = parser.parse_args(arguments)
    facts = environment.describe()
    rows = [] if options.cores == "one" else measure_all(options, "all")
    if options.cores != "all":
        rows += cores.on_one_core(measure_all, options, "one")
    result = {"environment": facts, "size": options.size, "rows": rows}
    report.publish("train_step", options, result, sheets(result))


if __name__ == "__main__":
    main()
