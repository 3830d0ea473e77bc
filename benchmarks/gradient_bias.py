"""How far each recipe bends the mean gradient: the model of `examples/train_lm.py`, at checkpoints.

A float32 run of each seed is stopped at some steps. There the gradients of the same batches are
taken with every variant of `fp4_ablation`, and with some of them in one pass alone;
`benchmarks.bias` compares their mean with that of exact gradients. Each row of a
checkpoint is a result of its own, written as soon as it is there: a stopped command goes on where
it was.
"""

import argparse
import contextlib
import dataclasses
import functools
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks import bias, environment, report
from benchmarks.fp4_variants import BASELINE, Variant, variants
from benchmarks.language_model import (
    Corpus,
    Interrupted,
    Output,
    Precision,
    Run,
    Settings,
    Trainer,
    build_model,
    mean_loss,
    precision,
    standard_library_text,
)
from benchmarks.page_tables import loss_increase, over_seeds

# The example's own.
SETTINGS = Settings(
    d_model=128,
    layers=4,
    heads=4,
    context=64,
    batch=16,
    steps=800,
    lr=3e-3,
    weight_decay=0.1,
    grad_clip=1.0,
    eval_every=100,
    eval_tokens=32768,
)
# Rows that are split into their passes, and of which single parameters are kept.
SPLIT = ("mxfp8", "mxfp4_floor", "mxfp4", "nvfp4")
SPLIT_GROUP = "One pass alone"


def rows_to_measure(layers: int) -> list[Variant]:
    """Every variant of the ablation but the baseline, and the passes of some."""
    chosen = [variant for variant in variants(layers) if variant.name != BASELINE]
    for variant in [variant for variant in chosen if variant.name in SPLIT]:
        alone = list(bias.passes(variant.precision.recipe).values())[1:]
        chosen += [
            Variant(
                name=f"{variant.name}, {which} alone",
                what=f"{variant.what}, {which} pass alone",
                group=SPLIT_GROUP,
                precision=Precision(recipe=recipe),
                against=variant.name,
            )
            for which, recipe in zip(("forward", "backward"), alone, strict=True)
        ]
    return chosen


def checkpoints(output: Output, seed: int, steps: Sequence[int], corpus: Corpus) -> dict[int, Path]:
    """Parameters of a float32 run after each of these steps, trained if they are not there yet."""
    files = {step: output.folder / f"{BASELINE}-seed{seed}-step{step}.npz" for step in steps}
    missing = [step for step in sorted(steps) if not files[step].exists()]
    if not missing:
        return files
    run = Run(recipe=BASELINE, seed=seed)
    with output.checkpoints(run) as kept:
        trainer = Trainer(run, output.settings, corpus, kept, precision(BASELINE))
    if trainer.run.step > missing[0]:  # gone by: once more from the seed
        run = Run(recipe=f"{BASELINE}-to-{missing[0]}", seed=seed)
    with output.checkpoints(run) as kept:
        trainer = Trainer(run, output.settings, corpus, kept, precision(BASELINE))
        for step in missing:
            reached = functools.partial(_reached, trainer, step)
            with contextlib.suppress(Interrupted):
                trainer.train(checkpoint_every=step, stop=reached)
            leaves = jax.tree.leaves(jax.device_get(trainer.state.params))
            part = files[step].with_suffix(".part.npz")
            np.savez(part, *leaves)
            part.replace(files[step])
    return files


def _reached(trainer: Trainer, step: int) -> bool:
    return trainer.run.step >= step


def load(path: Path, corpus: Corpus, settings: Settings) -> Any:
    """Parameters of a checkpoint, with the model's structure."""
    model = build_model(precision(BASELINE), settings, len(corpus.vocabulary))
    tokens = jax.ShapeDtypeStruct((1, settings.context), np.int32)
    shapes = jax.eval_shape(lambda x: model.init(jax.random.key(0), x)["params"], tokens)
    with np.load(path) as arrays:
        leaves = [arrays[name] for name in arrays.files]
    return jax.tree.unflatten(jax.tree.structure(shapes), leaves)


def loss_of(settings: Settings, vocabulary: int) -> Any:
    """`loss(params, tokens, precision, key)` of the example's model."""

    def loss(params: Any, tokens: jax.Array, chosen: Precision, key: jax.Array) -> jax.Array:
        return mean_loss(params, tokens, build_model(chosen, settings, vocabulary), key)

    return loss


def measure(
    loss: Any, params: Any, batches: Sequence[np.ndarray], chosen: Sequence[Variant], seed: int
) -> Iterator[dict[str, Any]]:
    """The rows of one checkpoint, some at a time: exact gradients are taken once for each group."""
    by_group: dict[str, list[Variant]] = {}
    for variant in chosen:
        by_group.setdefault(variant.group, []).append(variant)
    for group in by_group.values():
        biases = bias.gradient_bias(
            loss,
            params,
            batches,
            {variant.name: variant.precision for variant in group},
            exact=precision(BASELINE),
            key=jax.random.key(seed),
            scanned=r"blocks/.*",
        )
        for row in biases.whole:
            facts = dataclasses.asdict(row)
            del facts["parameter"]
            entry = {"name": facts.pop("recipe"), **facts, "loss": biases.exact_loss}
            if row.recipe in SPLIT:
                entry["parameters"] = {
                    each.parameter: round(each.bias, 5) for each in biases.parameters(row.recipe)
                }
            yield entry


def batches_of(corpus: Corpus, settings: Settings, seed: int, number: int) -> list[np.ndarray]:
    """Batches of the training text that no run of the seed has seen in this order."""
    return [
        corpus.batch(seed=10_000 + seed, step=i, batch=settings.batch, context=settings.context)
        for i in range(number)
    ]


def known(path: Path, config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Results of an earlier command with the same settings."""
    if not path.exists():
        return []
    stored = json.loads(path.read_text())
    # Results from before healing was a setting have none.
    if {"heal": 0.0, **stored["config"]} != dict(config):
        raise SystemExit(f"--out={path} was made with other settings; choose another")
    return stored["rows"]


def cells(rows: Sequence[dict[str, Any]], variant: Variant, steps: Sequence[int]) -> list[str]:
    """One line of the table: means over seeds, with their intervals."""
    measured = [row for row in rows if row["name"] == variant.name]
    seeds = {row["seed"] for row in measured}
    over = functools.partial(over_seeds, measured)
    middle = steps[len(steps) // 2]
    draws = sorted({row["draws"] for row in measured})
    return [
        variant.name,
        variant.what,
        f"{len(seeds)} x {', '.join(map(str, draws))}",
        *(over(step, lambda row: 100 * row["bias"], ".1f") for step in steps),
        over(middle, lambda row: 100 * row["one_batch"], ".0f"),
        over(middle, lambda row: row["slope"], ".3f"),
        over(middle, loss_increase, "+.2f"),
    ]


def sheets(rows: Sequence[dict[str, Any]], chosen: Sequence[Variant]) -> list[report.Sheet]:
    """One table a group."""
    steps = sorted({row["step"] for row in rows})
    middle = steps[len(steps) // 2]
    columns = ["variant", "what it is, or adds", "seeds x batches"]
    columns += [f"bias at {step} (%)" for step in steps]
    columns += [f"one batch at {middle} (%)", f"slope at {middle}", f"loss at {middle} (%)"]
    measured = {row["name"] for row in rows}
    tables = [
        report.Sheet(
            group,
            columns,
            [
                cells(rows, variant, steps)
                for variant in chosen
                if variant.group == group and variant.name in measured
            ],
        )
        for group in dict.fromkeys(v.group for v in chosen if v.name in measured)
    ]
    tables[-1].notes = [
        "Bias of the mean gradient, |E q - E g| / |E g|, of the whole model at checkpoints of "
        "float32 runs, without what the noise of the batches adds to it; one batch: relative "
        "error of a single batch's gradient; slope: E q . E g / |E g|^2; loss: how far the mean "
        "loss lies above the exact one, before any training with the recipe. Mean over seeds ± "
        "half the width of its 95 % interval (Student's t); each seed has its own run and batches.",
    ]
    return tables


def save(path: Path, result: Mapping[str, Any]) -> None:
    """Whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(result, indent=1) + "\n")
    part.replace(path)


def parse(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, Settings]:
    """Options and the settings they make."""
    parser = report.parser("gradient_bias", __doc__)
    add = functools.partial(parser.add_argument, metavar="N", type=int)
    add("--seeds", nargs="+", default=[0, 1, 2])
    add("--checkpoints", nargs="+", default=[100, 300, 800])
    add("--batches", default=16)
    parser.add_argument("--variants", nargs="+", default=[], metavar="NAME", help="default: all")
    parser.add_argument(
        "--report", action="store_true", help="measure nothing: write the table of --out anew"
    )
    parser.add_argument(
        "--work",
        type=Path,
        default=Path("gradient_bias_out"),
        metavar="FOLDER",
        help="for the float32 runs",
    )
    names = ("steps", "d_model", "heads", "layers", "context", "batch")
    for name in names:
        add(f"--{name.replace('_', '-')}", default=getattr(SETTINGS, name))
    options = parser.parse_args(arguments)
    changes = {name: getattr(options, name) for name in names}
    settings = dataclasses.replace(SETTINGS, **changes)
    outside = [step for step in options.checkpoints if not 0 < step <= settings.steps]
    if outside:
        parser.error(f"--checkpoints must lie in 1..{settings.steps}, got {outside}")
    return options, settings


def choose(names: Sequence[str], layers: int) -> list[Variant]:
    """The variants by name."""
    every = rows_to_measure(layers)
    report.check_names("--variants", names, [variant.name for variant in every])
    return [variant for variant in every if not names or variant.name in names]


def measure_all(
    options: argparse.Namespace, settings: Settings, corpus: Corpus, result: dict[str, Any]
) -> None:
    """Measure the missing rows, the middle checkpoint of all seeds first; save every row."""
    output = Output(
        folder=options.work, settings=settings, fingerprint=corpus.fingerprint, environment={}
    )
    output.open(resume=True, overwrite=False)
    chosen = choose(options.variants, settings.layers)
    loss = loss_of(settings, len(corpus.vocabulary))
    files = {seed: checkpoints(output, seed, options.checkpoints, corpus) for seed in options.seeds}
    steps = sorted(options.checkpoints)
    middle = steps[len(steps) // 2]
    for step in sorted(steps, key=lambda step: step != middle):
        for seed in options.seeds:
            done = {r["name"] for r in result["rows"] if (r["seed"], r["step"]) == (seed, step)}
            missing = [variant for variant in chosen if variant.name not in done]
            batches = batches_of(corpus, settings, seed, options.batches)
            params = load(files[seed][step], corpus, settings)
            print(f"seed {seed}, step {step}: {len(missing)} rows", file=sys.stderr, flush=True)
            for row in measure(loss, params, batches, missing, seed):
                result["rows"].append({"seed": seed, "step": step, **row})
                save(options.out, result)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    options, settings = parse(arguments)
    corpus = Corpus.from_text(
        standard_library_text(), batch=settings.batch, context=settings.context
    )
    config = {
        **dataclasses.asdict(settings),
        "data_sha256": corpus.fingerprint,
        "batches": options.batches,
    }
    if options.report:
        result = json.loads(options.out.read_text())
    else:
        facts = environment.describe()
        result = {"environment": facts, "config": config, "rows": known(options.out, config)}
        with jax.default_matmul_precision("float32"):
            measure_all(options, settings, corpus, result)
    chosen = rows_to_measure(settings.layers)
    report.publish("gradient_bias", options, result, sheets(result["rows"], chosen))


if __name__ == "__main__":
    main()
