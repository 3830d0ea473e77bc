"""A mixture of experts on the CPU: rows in groups by stored experts, and a training step.

`mx_jax.ragged_dot` by tiles of each group's rows, beside its reference (XLA's ragged product of
dequantized experts) and `jax.lax.ragged_dot` in float32, in the same rounds. One thread, pinned;
process CPU time; see `benchmarks.timing`. The bound is what multiplying each row by its own expert
takes: `jnp.dot` of as many float32 rows by one matrix, a share for each expert.
"""

import argparse
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import mx_jax
from benchmarks import cores, environment, report
from benchmarks.timing import Case, Samples, add_pace, measure, pace, ratio
from mx_jax import recipes

COMMAND = "ragged"
FLOAT32 = "jax.lax.ragged_dot, float32"
REFERENCE = "mx_jax, reference"


def cases(format: str, work: str, tokens: int, experts: int, size: int) -> list[Case]:
    """Products of `[tokens, size]` by `[experts, size, size]`, or those of a training step."""
    rng = np.random.default_rng(0)
    x, g = (jnp.asarray(rng.standard_normal((tokens, size)), jnp.float32) for _ in range(2))
    drawn = rng.standard_normal((experts, size, size)) / math.sqrt(size)
    weights = jnp.asarray(drawn, jnp.float32)
    shares = rng.dirichlet([2.0] * experts)
    sizes = jnp.asarray(rng.multinomial(tokens, shares), jnp.int32)

    def dot(x: jax.Array, weights: Any, sizes: jax.Array) -> jax.Array:
        return mx_jax.ragged_dot(x, weights, sizes, recipe=recipe)

    def plain(x: jax.Array, weights: jax.Array, sizes: jax.Array) -> jax.Array:
        return jax.lax.ragged_dot(x, weights, sizes)

    if work == "forward":
        recipe: Any = recipes.weight_only(format)
        stored = mx_jax.quantize(weights, format, axis=1)
        ours, theirs, operands = dot, plain, (x, stored, sizes)
    else:
        recipe = format.removesuffix("_e4m3")
        ours, theirs, operands = _step(dot), _step(plain), (x, weights, sizes, g)
    rows = jnp.asarray(rng.standard_normal((-(-tokens // experts), size)), jnp.float32)
    timed = [
        Case(FLOAT32, _jitted(theirs, (x, weights, *operands[2:]))),
        Case("mx_jax, by tiles", _jitted(ours, operands)),
        Case(REFERENCE, _jitted(ours, operands, backend="reference")),
    ]
    if work == "forward":
        packed = mx_jax.pack_weights(stored, contracting=1, num_batch=1)
        timed.insert(2, Case("mx_jax, packed, by tiles", _jitted(ours, (x, packed, sizes))))
        bound = jax.jit(lambda rows, weights: [rows @ matrix for matrix in weights])
        timed.append(Case("bound: jnp.dot, each expert once", lambda: bound(rows, weights)))
    return timed


def _step(dot: Callable[..., jax.Array]) -> Callable[..., Any]:
    def step(
        x: jax.Array, weights: jax.Array, sizes: jax.Array, g: jax.Array
    ) -> tuple[jax.Array, ...]:
        product, pullback = jax.vjp(lambda x, weights: dot(x, weights, sizes), x, weights)
        return product, *pullback(g)

    return step


def _jitted(
    function: Callable[..., Any], operands: tuple[Any, ...], backend: str | None = None
) -> Callable[[], Any]:
    with mx_jax.only_backend(backend):
        compiled = jax.jit(function).lower(*operands).compile()
    return lambda: compiled(*operands)


def rows(options: argparse.Namespace) -> list[dict[str, Any]]:
    """One row a case: CPU milliseconds and their ratio to float32's.

    Args:
      options: `formats`, `tokens`, `experts`, `size` of an expert's square matrix, `seconds` of a
        comparison, `min_rounds`.
    """
    environment.cpu_library("ragged")
    measured = []
    groups = [
        (format, work, count)
        for format in options.formats
        for work in ("forward", "step")
        for count in options.tokens
    ]
    with report.progress(len(groups)) as step:
        for format, work, count in groups:
            step(f"{format}, {work}, {count} tokens")
            samples = measure(
                cases(format, work, count, options.experts, options.size), **pace(options)
            )
            shape = (count, options.experts, options.size)
            measured += [_row(format, work, shape, name, samples) for name in samples]
    return measured


def _row(
    format: str, work: str, shape: tuple[int, ...], name: str, samples: dict[str, Samples]
) -> dict[str, Any]:
    of = {
        key: dataclasses.asdict(ratio(samples[name], samples[other], "cpu"))
        for key, other in (("of_float32", FLOAT32), ("of_reference", REFERENCE))
    }
    timings = samples[name].summary()
    return {"format": format, "work": work, "shape": shape, "case": name, "timings": timings} | of


def sheets(result: dict[str, Any]) -> list[report.Sheet]:
    """One table a format, work and shape."""
    tables: dict[Any, report.Sheet] = {}
    for row in result["rows"]:
        key = row["format"], row["work"], tuple(row["shape"])
        tokens, experts, size = row["shape"]
        title = (
            f"{row['format']}, {row['work']}: {tokens} tokens, {experts} experts of {size} x "
            f"{size}, one core, CPU time"
        )
        columns = ["case", "CPU time (ms)", "quartiles (ms)", "time / float32", "time / reference"]
        note = "Ratios are medians over the same rounds; forward is weight-only, of stored experts."
        sheet = tables.setdefault(key, report.Sheet(title, columns, notes=[note]))
        time = row["timings"]["cpu_ms"]
        sheet.rows.append(
            [
                row["case"],
                f"{time['median']:.2f}",
                f"{time['q1']:.2f} to {time['q3']:.2f}",
                f"{row['of_float32']['median']:.3f}",
                f"{row['of_reference']['median']:.3f}",
            ]
        )
    return list(tables.values())


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = report.parser(COMMAND, __doc__, out="cpu/ragged.json")
    parser.add_argument("--formats", nargs="*", default=["mxfp4", "mxfp8_e4m3", "nvfp4"])
    parser.add_argument("--tokens", type=int, nargs="*", default=[64, 512], help="rows")
    parser.add_argument("--experts", type=int, default=8, help="groups")
    parser.add_argument("--size", type=int, default=1024, help="of an expert's square matrix")
    add_pace(parser, seconds=20.0, min_rounds=5)
    options = parser.parse_args(arguments)
    described = environment.describe()
    result = {"environment": described, "rows": cores.on_one_core(rows, options)}
    report.publish(COMMAND, options, result, sheets(result))


if __name__ == "__main__":
    main()
