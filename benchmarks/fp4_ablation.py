"""What each ingredient of four-bit training brings: the language model of `examples`, over seeds.

Each variant trains the transformer of `examples/train_lm.py`, made small, from the same parameters
on the same data as float32 of its seed; the gap of their last validation losses is the table. The
rows of a ladder add one ingredient each to the row before. Rounding alone sends a run down another
path: bf16's gap and the 95 % intervals over seeds show how much that matters. What a row brings is
its difference to another row with the same seeds; where the interval of that contains 0, these
seeds cannot tell.
"""

import argparse
import dataclasses
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from benchmarks import environment, page_pictures, report
from benchmarks.fp4_rows import check_settings, differences, joined, rows_of, when
from benchmarks.fp4_variants import BASELINE, Variant, variants
from benchmarks.language_model import (
    Corpus,
    Output,
    Settings,
    Trainer,
    file_text,
    intervals,
    standard_library_text,
)

GAPS = ("gaps_percent", "training_gaps_percent")

SETTINGS = Settings(
    d_model=64,
    layers=4,
    heads=2,
    context=64,
    batch=8,
    steps=1000,
    lr=8e-3,
    weight_decay=0.1,
    grad_clip=1.0,
    eval_every=100,
    eval_tokens=32768,
)


def train(
    output: Output, chosen: Sequence[Variant], seeds: Sequence[int], corpus: Corpus
) -> Iterator[str]:
    """Train what has not ended yet, seed by seed; yields the label of the next run."""
    for seed in seeds:
        for variant in chosen:
            run = output.run(variant.name, seed)
            yield run.label
            if run.ended:
                continue
            with output.checkpoints(run) as checkpoints:
                trainer = Trainer(run, output.settings, corpus, checkpoints, variant.precision)
                output.runs[run.name] = trainer.run
                trainer.train(checkpoint_every=output.settings.steps, stop=lambda: False)
                output.save()


def sheets(
    rows: Sequence[dict[str, Any]], settings: Settings, chosen: Sequence[Variant]
) -> list[report.Sheet]:
    """One table a group."""
    columns = [
        "variant",
        "what it is, or adds",
        "seeds",
        "validation loss",
        "validation gap (%)",
        "training gap (%)",
        "compared with",
        "validation (points)",
        "training (points)",
    ]
    result = []
    known = {row["name"]: row for row in rows if row["seeds"]}
    against = {variant.name: known.get(variant.against) for variant in chosen}
    for group in dict.fromkeys(row["group"] for row in rows):
        cells = [
            _cells(row, against[row["name"]])
            for row in rows
            if row["group"] == group and row["seeds"]
        ]
        if cells:
            result.append(report.Sheet(group, columns, cells))
    result[-1].notes = [
        f"Validation loss after {settings.steps} steps, in nats per character, and its gap to "
        "float32 with the same seed; training gap: that of the mean training loss over the last "
        "tenth of the steps. The last three columns: how far its gaps lie above another row's, "
        "seed by seed. Mean over seeds ± half the width of its 95 % interval (Student's t); the "
        "number of seeds in the column `seeds`, no interval for one seed.",
        f"d_model {settings.d_model}, {settings.layers} blocks, {settings.heads} heads, batch "
        f"{settings.batch} x {settings.context}, peak learning rate {settings.lr}; embedding, "
        "head, norms and attention products in float32 unless the row says otherwise.",
        *when(rows),
    ]
    return result


def _cells(row: dict[str, Any], other: dict[str, Any] | None) -> list[str]:
    seeds = f"{len(row['seeds'])}"
    if row["diverged"]:
        seeds += f", {len(row['diverged'])} diverged"
    is_base = row["name"] == BASELINE
    texts = ["" if is_base else intervals.text(row[of], "+.2f") for of in GAPS]
    losses = format(statistics.mean(row["losses"]), ".4f")
    cells = [row["name"], row["what"], seeds, losses, *texts]
    if other is None or other["name"] == BASELINE:
        return [*cells, "", "", ""]
    return [
        *cells,
        other["name"],
        *(intervals.text(differences(row, other, of), "+.2f") for of in GAPS),
    ]


def parse(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, Settings]:
    """Options and the settings they make."""
    parser = report.parser("fp4_ablation", __doc__, out="train_lm_fp4/results.json")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], metavar="N")
    parser.add_argument("--variants", nargs="+", default=[], metavar="NAME", help="default: all")
    parser.add_argument("--data", type=Path, metavar="FILE", help="UTF-8 text")
    parser.add_argument(
        "--report",
        action="store_true",
        help="train nothing: write tables and picture of the results in --out anew",
    )
    parser.add_argument(
        "--keep",
        action="store_true",
        help="keep rows of --out that are not trained now, if float32 ends at the same losses",
    )
    parser.add_argument(
        "--work",
        type=Path,
        default=Path("fp4_ablation_out"),
        metavar="FOLDER",
        help="for checkpoints; a stopped command goes on where it was",
    )
    names = ("steps", "d_model", "heads", "layers", "context", "batch", "eval_tokens")
    for name in names:
        default = getattr(SETTINGS, name)
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default, metavar="N")
    options = parser.parse_args(arguments)
    changes = {name: getattr(options, name) for name in names}
    return options, dataclasses.replace(SETTINGS, **changes)


def choose(names: Sequence[str], layers: int) -> list[Variant]:
    """The variants by name; the baseline is always among them."""
    every = variants(layers)
    report.check_names("--variants", names, [variant.name for variant in every])
    return [v for v in every if not names or v.name in names or v.name == BASELINE]


def publish(options: argparse.Namespace, result: dict[str, Any], settings: Settings) -> None:
    """Write results, tables and picture."""
    every = variants(settings.layers)
    report.publish("fp4_ablation", options, result, sheets(result["rows"], settings, every))
    page_pictures.save_gaps(options.out, page_pictures.ablation_gaps(result["rows"]))


def _earlier(options: argparse.Namespace, option: str) -> dict[str, Any]:
    """Results that were written before."""
    try:
        return json.loads(options.out.read_text())
    except FileNotFoundError:
        raise SystemExit(f"{option}: there are no results in --out={options.out}") from None


def publish_again(options: argparse.Namespace) -> None:
    """The same of results that were written before."""
    result = _earlier(options, "--report")
    names = {field.name for field in dataclasses.fields(Settings)}
    config = {name: value for name, value in result["config"].items() if name in names}
    publish(options, result, dataclasses.replace(SETTINGS, **config))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    options, settings = parse(arguments)
    if options.report:
        return publish_again(options)
    chosen = choose(options.variants, settings.layers)
    facts = environment.describe()
    before = _earlier(options, "--keep") if options.keep else None
    text = standard_library_text() if options.data is None else file_text(options.data)
    corpus = Corpus.from_text(text, batch=settings.batch, context=settings.context)
    config = {**dataclasses.asdict(settings), "data_sha256": corpus.fingerprint}
    if before is not None:
        check_settings(before["config"], config)
    output = Output(
        folder=options.work, settings=settings, fingerprint=corpus.fingerprint, environment={}
    )
    if options.out.resolve() == output.results.resolve():
        raise SystemExit(f"--out={options.out} is where --work keeps its runs; choose another")
    output.open(resume=True, overwrite=False)
    with jax.default_matmul_precision("float32"):
        for label in train(output, chosen, options.seeds, corpus):
            print(label, file=sys.stderr, flush=True)
    rows = rows_of(chosen, list(output.runs.values()))
    result = {"environment": facts, "config": config, "rows": rows}
    if before is not None:
        result = joined(before, result, variants(settings.layers))
    publish(options, result, settings)


if __name__ == "__main__":
    main()
