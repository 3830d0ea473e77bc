"""Packed kernels in layers: one row by a square kernel, as a token in decoding, beside float32.

The layers of mx_jax.nn and converted ones of Flax, linen and nnx, with parameters as arguments of
jit, in rounds with Flax's own layers in float32. One thread, pinned; process CPU time, which counts
the dispatch of the call as well; see `benchmarks.timing`.
"""

import argparse
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as flax_nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx as flax_nnx

import mx_jax
from benchmarks import cores, environment, report
from benchmarks.timing import Case, Samples, add_pace, measure, pace, ratio
from mx_jax import convert, recipes
from mx_jax.nn import linen, nnx
from mx_jax.packed import PackedMXArray

COMMAND = "packed_layers"
FLOAT32 = {"linen": "float32 flax.linen.Dense", "nnx": "float32 flax.nnx.Linear"}


def cases(recipe: recipes.Recipe, rows: int, size: int) -> list[Case]:
    """Layers of `[rows, size]` by `[size, size]`: float32, packed, and an MXArray."""
    assert recipe.output.rhs is not None
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((rows, size)), jnp.float32)
    drawn = rng.standard_normal((size, size)) / math.sqrt(size)
    kernel = jnp.asarray(drawn, jnp.float32)
    stored = mx_jax.quantize(kernel, recipe.output.rhs.format, axis=0)
    packed = mx_jax.pack_weights(stored)
    if not isinstance(packed, PackedMXArray):
        raise SystemExit(f"packed_layers: {len(jax.devices())} devices, needs one CPU device")
    rule = convert.Rule(".*", recipe)
    dense, rngs = flax_nn.Dense(size, use_bias=False), flax_nnx.Rngs(0)
    linear = flax_nnx.Linear(size, size, use_bias=False, rngs=rngs)
    ours = linen.Dense(size, use_bias=False, recipe=recipe)
    our_linear = nnx.Linear(size, size, use_bias=False, recipe=recipe, rngs=rngs)
    converted = convert.linen(dense, rule), convert.nnx(linear, rule)
    return [
        Case(FLOAT32["linen"], _linen(dense, kernel, x)),
        Case(FLOAT32["nnx"], _nnx(linear, kernel, x)),
        Case("packed, mx_jax.nn.linen.Dense", _linen(ours, packed, x)),
        Case("packed, mx_jax.nn.nnx.Linear", _nnx(our_linear, packed, x)),
        Case("packed, converted flax.linen.Dense", _linen(converted[0], packed, x)),
        Case("packed, converted flax.nnx.Linear", _nnx(converted[1], packed, x)),
        Case("MXArray, mx_jax.nn.linen.Dense", _linen(ours, stored, x)),
        Case("MXArray, mx_jax.nn.nnx.Linear", _nnx(our_linear, stored, x)),
    ]


def _linen(layer: Any, kernel: Any, x: jax.Array) -> Callable[[], jax.Array]:
    apply, variables = jax.jit(layer.apply), {"params": {"kernel": kernel}}
    return lambda: apply(variables, x)


def _nnx(layer: Any, kernel: Any, x: jax.Array) -> Callable[[], jax.Array]:
    layer.kernel.set_value(kernel)
    graph, state = flax_nnx.split(layer)
    # A copy: cases of one layer, and a converted one and its original, share their Variables.
    state = jax.tree.map(lambda leaf: leaf, state)
    call = jax.jit(lambda state, x: flax_nnx.merge(graph, state)(x))
    return lambda: call(state, x)


def rows(options: argparse.Namespace) -> list[dict[str, Any]]:
    """One row a case: CPU milliseconds and their ratio to float32's.

    Args:
      options: `formats` of weights, `both`, names of recipes, `rows` of the input, `size` of the
        kernel, `seconds` of a comparison, `min_rounds`.
    """
    environment.cpu_library("packed_layers")
    measured = []
    named = {format: recipes.weight_only(format) for format in options.formats}
    named |= {f"{name}, both operands": recipes.from_name(name) for name in options.both}
    groups = [(name, count) for name in named for count in options.rows]
    with report.progress(len(groups)) as step:
        for name, count in groups:
            step(f"{name}, {count} rows")
            samples = measure(cases(named[name], count, options.size), **pace(options))
            shape = (count, options.size, options.size)
            measured += [_row(name, shape, case, samples) for case in samples]
    return measured


def _row(
    format: str, shape: tuple[int, ...], name: str, samples: dict[str, Samples]
) -> dict[str, Any]:
    framework = "nnx" if "nnx" in name else "linen"
    over = ratio(samples[name], samples[FLOAT32[framework]], "cpu")
    return {
        "format": format,
        "shape": shape,
        "case": name,
        "timings": samples[name].summary(),
        "of_float32": dataclasses.asdict(over),
    }


def sheets(result: dict[str, Any]) -> list[report.Sheet]:
    """One table a format and shape."""
    tables = []
    for key in dict.fromkeys((row["format"], tuple(row["shape"])) for row in result["rows"]):
        format, shape = key
        sheet = report.Sheet(
            "{}, m x n x k = {} x {} x {}, one core, CPU time".format(format, *shape),
            ["layer", "CPU time (ms)", "quartiles (ms)", "time / float32 layer", "quartiles"],
            notes=[
                "time / float32 layer: this time divided by that of Flax's float32 layer of the "
                "same framework, median over the same rounds."
            ],
        )
        for row in result["rows"]:
            if (row["format"], tuple(row["shape"])) == key:
                sheet.rows.append(_cells(row))
        tables.append(sheet)
    return tables


def _cells(row: dict[str, Any]) -> list[str]:
    time, of = row["timings"]["cpu_ms"], row["of_float32"]
    return [
        row["case"],
        f"{time['median']:.3f}",
        f"{time['q1']:.3f} to {time['q3']:.3f}",
        f"{of['median']:.2f}",
        f"{of['q1']:.2f} to {of['q3']:.2f}",
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = report.parser(COMMAND, __doc__, out="cpu/packed_layers.json")
    parser.add_argument(
        "--formats", nargs="*", default=["mxfp4", "mxfp8_e4m3", "nvfp4"], help="weight_only recipes"
    )
    parser.add_argument("--both", nargs="*", default=[], help="recipes of both operands")
    parser.add_argument("--rows", type=int, nargs="*", default=[1], help="rows of the input")
    parser.add_argument("--size", type=int, default=2048, help="of the square kernel")
    add_pace(parser, seconds=20.0, min_rounds=21, max_rounds=301)
    options = parser.parse_args(arguments)
    described = environment.describe()
    result = {"environment": described, "rows": cores.on_one_core(rows, options)}
    report.publish(COMMAND, options, result, sheets(result))


if __name__ == "__main__":
    main()
