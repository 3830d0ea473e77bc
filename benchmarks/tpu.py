"""What programs cost on TPUs, by libtpu's own schedule, on a machine without a TPU.

libtpu compiles for v5e, v6e and tpu7x ahead of time, and dumps the bundles that each kernel
executes. `benchmarks.tpu_schedule` counts how often, and `benchmarks.tpu_cost` makes an estimate of
it. Nothing here has run on a TPU.

Each program is compiled in a process of its own, since libtpu takes the folder that it dumps to
when it is loaded. What does not compile is written down with its error, and the rest goes on.
"""

import argparse
import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
from jax import lax

import mx_jax
from benchmarks import environment, report
from benchmarks.tpu_cost import DEVICES, ENVIRONMENT, cost, require_libtpu
from mx_jax import recipes

_MIB = 2**20


class Program(NamedTuple):
    """A program to compile.

    Attributes:
      title: in the table.
      function: of arrays.
      shapes: its arguments.
    """

    title: str
    function: Callable[..., Any]
    shapes: tuple[Any, ...]


def array(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    """An argument."""
    return jax.ShapeDtypeStruct(shape, dtype)


SIDE, WIDE = 4096, 8192
TOKENS, FEATURES, UNITS, HEADS = 2048, 2048, 4096, 8
RECIPES = ("mxfp8", "float8_rowwise", "float8_tensorwise", "deepseek_v3", "int8_rowwise")
BLOCKS = (None, "mxfp8")
WEIGHTS = ("mxfp4", "mxfp8")
ROWS = (1, 16)


def step(recipe: str | None) -> Program:
    """The step of a Dense layer: output and both gradients; in bfloat16 if there is no recipe."""

    def run(x: jax.Array, w: jax.Array, g: jax.Array) -> Any:
        multiply = jnp.matmul
        if recipe is not None:
            multiply = functools.partial(mx_jax.matmul, recipe=recipe)
        y, pullback = jax.vjp(multiply, x, w)
        return y, *pullback(g)

    title = f"step of Dense {TOKENS} x {FEATURES} -> {UNITS}, {recipe or 'bfloat16'}"
    return Program(
        title, run, (array(TOKENS, FEATURES), array(FEATURES, UNITS), array(TOKENS, UNITS))
    )


def block(recipe: str | None) -> Program:
    """The step of a transformer's block: output and gradients of its weights and of x."""
    multiply = jnp.matmul if recipe is None else functools.partial(mx_jax.matmul, recipe=recipe)

    def forward(w: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        normed = jax.nn.standardize(x)
        q, k, v = (multiply(normed, w[name]).reshape(1, TOKENS, HEADS, -1) for name in "qkv")
        x = x + multiply(jax.nn.dot_product_attention(q, k, v).reshape(x.shape), w["o"])
        return x + multiply(jax.nn.gelu(multiply(jax.nn.standardize(x), w["up"])), w["down"])

    def run(w: dict[str, jax.Array], x: jax.Array, g: jax.Array) -> Any:
        y, pullback = jax.vjp(forward, w, x)
        return y, *pullback(g)

    x, square = array(TOKENS, FEATURES), array(FEATURES, FEATURES)
    w = {"up": array(FEATURES, 4 * FEATURES), "down": array(4 * FEATURES, FEATURES)}
    title = f"step of a block {FEATURES} wide, {TOKENS} tokens, {recipe or 'bfloat16'}"
    return Program(title, run, (w | dict.fromkeys("qkvo", square), x, x))


def cast(axis: int) -> Program:
    """Of bfloat16 to MXFP8."""
    function = functools.partial(mx_jax.quantize, format="mxfp8", axis=axis)
    return Program(f"cast of {SIDE} x {SIDE} to MXFP8, axis {axis}", function, (array(SIDE, SIDE),))


def dequantized(axis: int) -> Program:
    """Normal numbers in MXFP8 to bfloat16."""
    codes = jax.eval_shape(cast(axis).function, array(SIDE, SIDE))
    title = f"dequantize of {SIDE} x {SIDE} in MXFP8, axis {axis}"
    return Program(title, lambda x: x.dequantize(jnp.bfloat16), (codes,))


def usual(
    predicate: jax.Array, function: Callable[..., Any], _: Callable[..., Any], *operands: Any
) -> Any:
    """`lax.cond` in programs here: the first branch alone, as of normal numbers. A schedule has
    both."""
    return lax.optimization_barrier((function(*operands), predicate))[0]


def weights(format: str | None, rows: int) -> Program:
    """Few rows of bfloat16 by stored weights; in bfloat16 if there is no format."""
    title = f"{rows} row{'s' * (rows > 1)} by {WIDE} x {WIDE} weights, {format or 'bfloat16'}"
    x, w = array(rows, WIDE), array(WIDE, WIDE)
    if format is None:
        return Program(title, jnp.matmul, (x, w))
    recipe = recipes.weight_only(format)
    stored = jax.eval_shape(functools.partial(mx_jax.quantize, format=format, axis=0), w)
    return Program(title, functools.partial(mx_jax.matmul, recipe=recipe), (x, stored))


def packed(format: str, rows: int) -> Program:
    """The same by weights that were packed on a machine with a TPU."""
    title, function, (x, stored) = weights(format, rows)

    def run(x: jax.Array, w: Any) -> jax.Array:
        with mx_jax.testing.target("tpu"):
            return function(x, w)

    with mx_jax.testing.target("tpu"):
        laid_out = jax.eval_shape(mx_jax.pack_weights, stored)
    return Program(title.replace("weights", "packed weights"), run, (x, laid_out))


PROGRAMS: Mapping[str, Callable[[], Program]] = {
    "product": lambda: Program(
        f"bfloat16 product {SIDE}^3", jnp.matmul, (array(SIDE, SIDE), array(SIDE, SIDE))
    ),
    "copy": lambda: Program(
        "copy of 256 MiB, times two", lambda x: x * 2, (array(SIDE, 8 * SIDE),)
    ),
    **{
        f"step-{recipe or 'bfloat16'}": functools.partial(step, recipe)
        for recipe in (None, *RECIPES)
    },
    **{f"block-{recipe or 'bfloat16'}": functools.partial(block, recipe) for recipe in BLOCKS},
    "cast-both": lambda: Program(
        f"casts of {SIDE} x {SIDE} to MXFP8, both axes",
        lambda x: mx_jax.quantize_both(x, "mxfp8"),
        (array(SIDE, SIDE),),
    ),
    **{f"cast{axis}": functools.partial(cast, axis) for axis in (-1, 0)},
    **{f"dequantize{axis}": functools.partial(dequantized, axis) for axis in (-1, 0)},
    **{
        f"weights-{format or 'bfloat16'}-{rows}": functools.partial(weights, format, rows)
        for rows in ROWS
        for format in (None, *WEIGHTS)
    },
    **{
        f"packed-{format}-{rows}": functools.partial(packed, format, rows)
        for rows in ROWS
        for format in (*WEIGHTS, "mxint8", "nvfp4")
    },
}


def rows(names: Sequence[str], device: str) -> list[dict[str, Any]]:
    """The cost of each program on a device, a process for each."""
    with report.progress(len(names)) as step:
        measured = []
        for name in names:
            step(f"{device}: {name}")
            measured.append(_in_a_process(name, device))
    return measured


def _in_a_process(name: str, device: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.tpu", "--worker", name, "--devices", device]
    variables = os.environ | ENVIRONMENT
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    known = {"program": name, "title": PROGRAMS[name]().title}
    if done.returncode:
        return known | {"device": device, "failed": done.stderr.strip()[-3000:]}
    return known | json.loads(done.stdout.splitlines()[-1])


def _work(name: str, device: str) -> None:
    program = PROGRAMS[name]()
    with mock.patch.object(lax, "cond", usual):
        result = cost(program.function, *program.shapes, device=device)
    print(json.dumps(result.as_json()))


def sheet(rows: Sequence[dict[str, Any]], device: str) -> report.Sheet:
    """A row for each program."""
    facts = DEVICES[device]
    result = report.Sheet(
        f"{device}, by libtpu's schedule: nothing has run on a TPU",
        (
            *("program", "microseconds", "bundles", "MiB read", "MiB written"),
            *("unit in use most", "kernels", "compiled in seconds"),
        ),
        notes=[
            f"At {facts.clock / 1e9:.2f} GHz, {facts.bandwidth / 1e12:.2f} TB/s of HBM, "
            f"{facts.peak / 1e12:.0f} TFLOP/s in bfloat16. MiB are of DMAs to and from HBM; units "
            "are named as libtpu names their slots: MATMUL is the MXU.",
            *(f"{row['title']}: {row['doubt']}." for row in rows if row.get("doubt")),
            *(
                f"{row['title']} failed: {report.last_line(row['failed'])}"
                for row in rows
                if "failed" in row
            ),
        ],
    )
    for row in rows:
        if "failed" in row:
            result.rows.append([row["title"], *"-" * (len(result.columns) - 1)])
            continue
        # The top level is none.
        calls = sum(kernel["calls"] for kernel in row["kernels"]) - 1
        moved = (f"{row[way] / _MIB:.1f}" for way in ("read", "written"))
        unit = f"{row['unit']} {100 * row['share']:.0f} %"
        seconds = f"{row['compile_seconds']:.1f}"
        cells = (
            f"{row['microseconds']:.1f}",
            f"{row['bundles']:,}",
            *moved,
            unit,
            str(calls),
            seconds,
        )
        result.rows.append([row["title"], *cells])
    return result


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = report.parser("tpu", __doc__, out=f"tpu/{report.DEVICE}.json")
    parser.add_argument(
        "--devices",
        nargs="+",
        choices=tuple(DEVICES),
        default=list(DEVICES),
        help="to compile for, each with a file",
    )
    parser.add_argument(
        "--programs",
        nargs="+",
        choices=tuple(PROGRAMS),
        default=list(PROGRAMS),
        metavar="PROGRAM",
        help="by name",
    )
    parser.add_argument("--worker", default=None, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    try:
        require_libtpu("benchmarks.tpu")
    except ModuleNotFoundError as error:
        raise SystemExit(str(error)) from None
    if options.worker is not None:
        return _work(options.worker, *options.devices)
    if report.DEVICE not in str(options.out) and len(options.devices) > 1:
        parser.error(f"--out is a file for one device, got --devices {' '.join(options.devices)}")
    for device in options.devices:
        measured = rows(options.programs, device)
        result = {"environment": environment.describe(["libtpu"]), "rows": measured}
        to_device = argparse.Namespace(out=report.of_device(options.out, device))
        report.publish("tpu", to_device, result, [sheet(measured, device)])
    return None


if __name__ == "__main__":
    main()
