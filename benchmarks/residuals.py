"""Bytes kept between forward and backward pass for each choice, and the error that each costs.

A recipe keeps the operands of its products as they came and quantizes them anew for the backward
products, or keeps the forward's codes and requantizes them along the other axis, or leaves
grad_weight in high precision. Bytes are those of the arrays that `jax.vjp` holds on to, without
the parameters, which are in memory anyway; nothing is rematerialized. What each choice does to a
training run is in the table of `benchmarks.fp4_ablation`.
"""

import argparse
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import mx_jax
from benchmarks import environment, report
from benchmarks.language_model import Precision, Settings, build_model, initial_state, mean_loss
from benchmarks.sqnr import all_recipes, operands, size, three_products
from mx_jax import recipes
from mx_jax.inspect import sqnr_db
from mx_jax.recipes import Recipe

MIB = 2**20
DTYPES = (jnp.float32, jnp.bfloat16)
VOCABULARY = 128


def choices(recipe: Recipe) -> dict[str, Recipe]:
    """The three choices by their names in the table."""
    return {
        "operands as they came, requantized": recipe,
        "codes, requantized along the other axis": dataclasses.replace(
            recipe, name=f"{recipe.name}, codes kept", residuals="quantized"
        ),
        "grad_weight in high precision": recipe.with_(
            name=f"{recipe.name}, high dW", grad_weight=None
        ),
    }


def kept_bytes(function: Callable[[Any], Any], params: Any) -> int:
    """Bytes of what `jax.vjp` of a function keeps, without the parameters themselves."""
    _, pullback = jax.vjp(function, params)
    parameters = {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(params)}
    kept = {}
    for leaf in jax.tree.leaves(pullback):
        is_key = jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        array = jax.random.key_data(leaf) if is_key else leaf
        # One buffer may be there under several names.
        kept[array.unsafe_buffer_pointer()] = array.nbytes
    return sum(size for pointer, size in kept.items() if pointer not in parameters)


def model_bytes(recipe: Recipe, dtype: Any, settings: Settings) -> int:
    """Bytes that a step of the language model keeps: activations, norms, attention and all."""
    model = build_model(Precision(recipe=recipe, dtype=dtype), settings, VOCABULARY)
    params = initial_state(0, settings=settings, vocabulary=VOCABULARY).params
    tokens = jnp.zeros((settings.batch, settings.context + 1), jnp.int32)
    key = jax.random.key(0)
    return kept_bytes(lambda params: mean_loss(params, tokens, model, key), params)


def linear_bytes(recipe: Recipe, dtype: Any, settings: Settings) -> int:
    """Bytes that the linear layers of its blocks keep: x, and W where it is no parameter."""
    width, rows = settings.d_model, settings.batch * settings.context
    total = 0
    for k, n in ((width, 3 * width), (width, width), (width, 4 * width), (4 * width, width)):
        w = jax.random.normal(jax.random.key(0), (k, n))
        key = jax.random.key(0) if recipe.is_stochastic else None

        def layer(params, key=key):
            x, w = params
            # x is an activation: it counts as kept, also where it is an argument here.
            w = w if w.dtype == dtype else w.astype(dtype)
            return mx_jax.matmul(x + 0, w, recipe=recipe, key=key)

        total += kept_bytes(layer, (jax.random.normal(jax.random.key(1), (rows, k), dtype), w))
    return settings.layers * total


def measure(recipe: Recipe, what: str, settings: Settings, mkn: tuple[int, int, int]) -> dict:
    """One row."""
    arrays = operands(mkn)
    exact = three_products(recipes.high_precision(), *arrays)
    approximate = three_products(recipe, *arrays)
    sqnr = [sqnr_db(left, right) for left, right in zip(exact, approximate, strict=True)]
    names = [np.dtype(dtype).name for dtype in DTYPES]
    return {
        "recipe": recipe.name,
        "what": what,
        "model_bytes": {
            name: model_bytes(recipe, dtype, settings)
            for name, dtype in zip(names, DTYPES, strict=True)
        },
        "linear_bytes": {
            name: linear_bytes(recipe, dtype, settings)
            for name, dtype in zip(names, DTYPES, strict=True)
        },
        "sqnr_db": dict(
            zip(("output", "grad_input", "grad_weight"), map(_finite, sqnr), strict=True)
        ),
    }


def _finite(value: float) -> float | None:
    return round(value, 2) if np.isfinite(value) else None


def sheets(result: dict[str, Any]) -> list[report.Sheet]:
    """Bytes and errors in one table."""
    config = result["config"]
    columns = ["recipe", "keeps", "step, MiB", "linear layers, MiB"]
    columns += [
        "step in bf16, MiB",
        "linear layers in bf16, MiB",
        "SQNR of dx, dB",
        "SQNR of dW, dB",
    ]
    rows = []
    for row in result["rows"]:
        sizes = [
            f"{row[what][dtype] / MIB:.2f}"
            for dtype in ("float32", "bfloat16")
            for what in ("model_bytes", "linear_bytes")
        ]
        errors = [row["sqnr_db"][name] for name in ("grad_input", "grad_weight")]
        text = ["exact" if value is None else f"{value:.1f}" for value in errors]
        rows.append([row["recipe"], row["what"], *sizes, *text])
    note = (
        f"d_model {config['d_model']}, {config['layers']} blocks, {config['batch']} x "
        f"{config['context']} tokens, without rematerialization; parameters not counted. Codes are "
        f"one byte each, four-bit ones too. SQNR: normal data, {result['size']} (m, k, n)."
    )
    return [report.Sheet("Kept between forward and backward pass", columns, rows, [note])]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = report.parser("residuals", __doc__, out="residuals/results.json")
    parser.add_argument("--recipes", nargs="+", default=["mxfp8", "mxfp4"], metavar="NAME")
    parser.add_argument("--size", type=size, default=(512, 512, 512), metavar="MxKxN")
    parser.add_argument("--d-model", type=int, default=128, metavar="N")
    parser.add_argument("--layers", type=int, default=4, metavar="N")
    parser.add_argument("--batch", type=int, default=16, metavar="N")
    parser.add_argument("--context", type=int, default=64, metavar="N")
    options = parser.parse_args(arguments)
    settings = _settings(options)
    rows = [measure(recipes.high_precision(), "operands as they came", settings, options.size)]
    for recipe in all_recipes(options.recipes):
        for what, choice in choices(recipe).items():
            rows.append(measure(choice, what, settings, options.size))
    result = {
        "environment": environment.describe(),
        "config": dataclasses.asdict(settings),
        "size": options.size,
        "rows": rows,
    }
    report.publish("residuals", options, result, sheets(result))


def _settings(options: argparse.Namespace) -> Settings:
    return Settings(
        d_model=options.d_model,
        layers=options.layers,
        heads=max(1, options.d_model // 32),
        context=options.context,
        batch=options.batch,
        steps=1,
        lr=1e-3,
        weight_decay=0.1,
        grad_clip=1.0,
        eval_every=1,
        eval_tokens=options.batch * options.context,
    )


if __name__ == "__main__":
    main()
