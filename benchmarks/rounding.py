"""Is a cast right on average, and at what error? NVFP4's ways to round gradients, side by side.

A slope is <Q(x), x> / <x, x>: 1 if the mean of Q(x) has x's length. An error is
|Q(x) - x|^2 / |x|^2. What no average over random bits removes of it is the bias,
|E[Q(x)] - x|^2 / |x|^2, estimated by two casts of the same data as
<Q1(x) - x, Q2(x) - x> / |x|^2. Every draw has new data and new random bits; an interval is the mean
of all draws +- half the width of its 95 % interval (Student's t). What is "rotated" goes through a
Hadamard transform of 128 with random signs, and back. Gradients are those of a linear layer, beside
the exact ones: what the forward product lost is in their slopes and biases too. Nothing is timed.
"""

import argparse
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import mx_jax
from benchmarks import environment, report
from benchmarks.language_model import intervals
from examples.recipes.quartet_ii import MS_EDEN
from mx_jax import recipes
from mx_jax.ops.arguments import draw_bits
from mx_jax.reference import hadamard
from mx_jax.reference.scale_rules import (
    AMAX,
    AMAX_HEADROOM,
    AMAX_SUBNORMAL,
    FOUR_OVER_SIX,
    ScaleRule,
)

RECIPES = (
    "nvfp4",
    "nvfp4_pretraining",
    "nvfp4_unbiased",
    "nvfp4_four_over_six",
    "mxfp4",
    "mxfp4_hadamard",
    "mxfp4_stochastic",
    "mxfp4_backward",
)
DATA: dict[str, Callable[[jax.Array, tuple[int, ...]], jax.Array]] = {
    "normal": jax.random.normal,
    "Laplace": jax.random.laplace,
    # Rows whose sizes differ as those of gradients do.
    "normal, rows of many sizes": lambda key, shape: (
        jax.random.normal(key, shape)
        * jnp.exp2(2 * jax.random.normal(jax.random.fold_in(key, 1), (*shape[:-1], 1)))
    ),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Way:
    """One way to cast to NVFP4.

    Attributes:
      name: in the table.
      rule: of the scales.
      rounding: of the elements.
      rotated: whether the values are rotated first, and back afterwards.
    """

    name: str
    rule: ScaleRule
    rounding: str = "nearest"
    rotated: bool = True


WAYS = (
    Way(name="nearest, amax", rule=AMAX, rotated=False),
    Way(name="nearest, 4/6", rule=FOUR_OVER_SIX, rotated=False),
    Way(name="stochastic, amax_subnormal", rule=AMAX_SUBNORMAL, rounding="stochastic"),
    Way(name="stochastic, 4/6", rule=FOUR_OVER_SIX, rounding="stochastic"),
    Way(name="stochastic, amax_headroom", rule=AMAX_HEADROOM, rounding="stochastic"),
    Way(name="MS-EDEN", rule=MS_EDEN),
    Way(name="MS-EDEN without rotation", rule=MS_EDEN, rotated=False),
)


def cast(x: jax.Array, way: Way, key: jax.Array) -> jax.Array:
    """x as a way casts it."""
    signs_key, key = jax.random.split(key)
    signs = draw_bits(signs_key, (128,), 32)
    rotated = hadamard.apply(x, signs) if way.rotated else x
    draws = way.rounding != "nearest" or way.rule.rounding.random_bits
    cast = mx_jax.quantize(
        rotated,
        "nvfp4",
        scale_rule=way.rule,
        rounding=way.rounding,
        key=key if draws else None,
    ).dequantize()
    if not way.rotated:
        return cast
    # The transform without signs is its own inverse.
    back = hadamard.apply(cast, jnp.ones(128)).reshape(*x.shape[:-1], -1, 128)
    return (back * jnp.where(signs < 0, -1, 1)).reshape(x.shape)


def compared(first: jax.Array, second: jax.Array, exact: jax.Array) -> dict[str, jax.Array]:
    """Slope, relative squared error and bias of two independent draws."""
    length, off = jnp.vdot(exact, exact), first - exact
    return {
        "slope": jnp.vdot(first, exact) / length,
        "error": jnp.vdot(off, off) / length,
        "bias": jnp.vdot(off, second - exact) / length,
    }


def interval(values: jax.Array) -> dict[str, float]:
    """Mean, and half the width of its 95 % interval."""
    estimate = intervals.interval(np.asarray(values, np.float64).tolist())
    assert estimate is not None and estimate.half_width is not None
    return {"mean": estimate.mean, "half": estimate.half_width}


def cast_rows(options: argparse.Namespace, step: Callable[[str], None]) -> list[dict[str, Any]]:
    """One row a way and kind of data."""
    rows = []
    for way in (way for way in WAYS if way.name in options.ways):
        for name in options.data:
            draw = DATA[name]
            step(f"{way.name}, {name}")

            @jax.jit
            def one(key, way=way, draw=draw):
                x = draw(key, (options.size, options.size))
                keys = jax.random.split(jax.random.fold_in(key, 2))
                return compared(*lax.map(lambda each: cast(x, way, each), keys), x)

            draws = lax.map(one, jax.random.split(jax.random.key(0), options.draws))
            row = {"way": way.name, "rotated": way.rotated, "data": name}
            rows.append(row | {what: interval(values) for what, values in draws.items()})
    return rows


def gradient_rows(options: argparse.Namespace, step: Callable[[str], None]) -> list[dict[str, Any]]:
    """One row a recipe: both gradients of a linear layer."""
    rows = []
    for name in options.recipes:
        step(name)
        recipe = recipes.from_name(name)

        @jax.jit
        def one(key, recipe=recipe):
            x, w, g = (
                jax.random.normal(each, (options.size, options.size))
                for each in jax.random.split(key, 3)
            )

            def gradients(drawn):
                key = drawn if recipe.is_stochastic else None
                run = functools.partial(mx_jax.matmul, recipe=recipe, key=key)
                return jax.vjp(run, x, w)[1](g)

            dx, dw = lax.map(gradients, jax.random.split(jax.random.fold_in(key, 2)))
            highest = lax.Precision.HIGHEST
            exact_dx = jnp.matmul(g, w.T, precision=highest)
            exact_dw = jnp.matmul(x.T, g, precision=highest)
            return {"dx": compared(*dx, exact_dx), "dw": compared(*dw, exact_dw)}

        draws = lax.map(one, jax.random.split(jax.random.key(1), options.draws))
        rows.append({"recipe": name} | jax.tree.map(interval, draws))
    return rows


def sheets(result: dict[str, Any]) -> list[report.Sheet]:
    """The two tables."""
    size, draws = result["size"], result["draws"]
    base = {r["data"]: r["error"]["mean"] for r in result["casts"] if "headroom" in r["way"]}
    casts = report.Sheet(
        f"Casts of {size} x {size} to NVFP4, {draws} draws",
        ["way", "data", "rotated", "slope", "error (%)", "error / stochastic's", "bias (%)"],
        [
            [
                row["way"],
                row["data"],
                "yes" if row["rotated"] else "",
                _text(row["slope"], 5),
                _text(row["error"], 3, 100),
                report.number(
                    row["error"]["mean"] / base[row["data"]] if row["data"] in base else None, 2
                ),
                _text(row["bias"], 3, 100),
            ]
            for row in result["casts"]
        ],
        ["`error / stochastic's`: divided by that of `stochastic, amax_headroom`, also unbiased."],
    )
    gradients = report.Sheet(
        f"Gradients of a linear layer, {size} x {size} x {size}, normal data, {draws} draws",
        ["recipe"]
        + [f"{what} of {of}" for what in ("slope", "error (%)", "bias (%)") for of in ("dx", "dW")],
        [
            [row["recipe"]]
            + [_text(row[of]["slope"], 5) for of in ("dx", "dw")]
            + [_text(row[of][what], 2, 100) for what in ("error", "bias") for of in ("dx", "dw")]
            for row in result["gradients"]
        ],
        ["No backward cast can undo what the forward product's operands lost: biases have it too."],
    )
    return [casts, gradients]


def _text(value: dict[str, float], digits: int, times: float = 1) -> str:
    return f"{times * value['mean']:.{digits}f} ± {times * value['half']:.{digits}f}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = report.parser("rounding", __doc__)
    parser.add_argument("--size", type=int, default=512, help="rows and columns of every matrix")
    parser.add_argument("--draws", type=int, default=16, help="at least two")
    names = [way.name for way in WAYS]
    parser.add_argument("--ways", nargs="+", default=names, choices=names, metavar="NAME")
    parser.add_argument("--data", nargs="+", default=list(DATA), choices=DATA, metavar="NAME")
    parser.add_argument("--recipes", nargs="+", default=RECIPES, choices=RECIPES, metavar="NAME")
    options = parser.parse_args(arguments)
    if options.draws < 2:
        parser.error(f"--draws needs at least two, for intervals, got {options.draws}")
    facts = environment.describe()
    with report.progress(len(options.ways) * len(options.data) + len(options.recipes)) as step:
        casts, gradients = cast_rows(options, step), gradient_rows(options, step)
    result = {
        "environment": facts,
        "size": options.size,
        "draws": options.draws,
        "casts": casts,
        "gradients": gradients,
    }
    report.publish("rounding", options, result, sheets(result))


if __name__ == "__main__":
    main()
