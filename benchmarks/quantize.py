"""Speed of quantize and dequantize beside `x + 1` on the same array, a copy, and peers.

Every comparison (operation, format, dtype, shape) is measured as `benchmarks.timing` says, twice:
on all cores by the clock, and on one core with huge pages by CPU time. JAX functions are jitted.
Blocks lie along the last axis. Codes take one byte each, except in torchao, which packs FP4.
"""

import argparse
import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

import mx_jax
from benchmarks import cores, environment, peers, report
from benchmarks.timing import Case, Samples, add_pace, measure, pace, ratio

# Formats with the scale rules that recipes use them with; MXFP8 also with the specification's.
FORMATS = (
    ("mxfp8_e4m3", "rceil"),
    ("mxfp8_e4m3", "floor"),
    ("mxfp6_e2m3", "even"),
    ("mxfp4", "even"),
    ("mxint8", "floor"),
    ("nvfp4", "amax"),
)
OPERATIONS = ("quantize", "dequantize")
SHAPES = ((2048, 1024), (4096, 4096))
DTYPES = ("float32", "bfloat16")
CLOCKS = {"all": "wall", "one": "cpu"}

OURS, PLUS, COPY = "mx_jax", "x + 1", "copy"


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The operation, format and array that the cases of one comparison share."""

    operation: str
    format: str
    rule: str
    dtype: str
    shape: tuple[int, int]

    def __str__(self) -> str:
        size = "x".join(map(str, self.shape))
        return f"{self.operation} {self.format} {self.rule} {self.dtype} {size}"


def comparisons(options: argparse.Namespace) -> list[Comparison]:
    """Everything to be measured, small arrays first."""
    formats = [pair for pair in FORMATS if pair[0] in options.formats]
    products = itertools.product(options.shapes, OPERATIONS, formats, options.dtypes)
    return [
        Comparison(operation, *format, dtype, shape) for shape, operation, format, dtype in products
    ]


def cases(what: Comparison, with_peers: bool) -> tuple[list[Case], dict[str, str]]:
    """The cases of a comparison, and why a peer that knows the format is not among them."""
    x = jax.random.normal(jax.random.key(0), what.shape).astype(what.dtype)
    plus, copy = jax.jit(lambda x: x + 1), jax.jit(jnp.copy)
    timed = [Case(PLUS, lambda: plus(x)), Case(COPY, lambda: copy(x)), _ours(what, x)]
    missing = {}
    for peer in peers.PEERS if with_peers else ():
        case = peers.make(peer, what.operation, what.format, what.rule, x)
        if isinstance(case, Case):
            timed.append(case)
        elif case is not None:
            missing[peer.name] = case
    return timed, missing


def _ours(what: Comparison, x: jax.Array) -> Case:
    @jax.jit
    def quantize(x):
        return mx_jax.quantize(x, what.format, scale_rule=what.rule)

    if what.operation == "quantize":
        return Case(OURS, lambda: quantize(x))
    quantized, dequantize = quantize(x), jax.jit(lambda q: q.dequantize(x.dtype))
    return Case(OURS, lambda: dequantize(quantized))


def measure_all(options: argparse.Namespace, which_cores: str) -> list[dict[str, Any]]:
    """Rows of JSON, one a comparison."""
    rows = []
    todo = comparisons(options)
    with report.progress(len(todo)) as step:
        for what in todo:
            step(f"{which_cores} core(s): {what}")
            timed, missing = cases(what, options.peers)
            samples = measure(timed, **pace(options))
            rows.append(_row(what, which_cores, samples, missing))
    return rows


def _row(
    what: Comparison, which_cores: str, samples: dict[str, Samples], missing: dict[str, str]
) -> dict[str, Any]:
    clock = CLOCKS[which_cores]
    return {
        **dataclasses.asdict(what),
        "cores": which_cores,
        "clock": clock,
        "ratio_to_x_plus_1": dataclasses.asdict(ratio(samples[OURS], samples[PLUS], clock)),
        "ratio_to_bound": ratio(samples[OURS], samples[COPY], clock).median / _bound_share(what),
        "ratio_of_peer_to_mx_jax": {
            name: dataclasses.asdict(ratio(samples[name], samples[OURS], clock))
            for name in samples
            if name not in (OURS, PLUS, COPY)
        },
        "peers_left_out": missing,
        "timings": {name: of.summary() for name, of in samples.items()},
    }


def _bound_share(what: Comparison) -> float:
    """Bytes that the case must move over those that a copy of x moves."""
    x = jax.ShapeDtypeStruct(what.shape, what.dtype)
    quantized = jax.eval_shape(lambda x: mx_jax.quantize(x, what.format), x)
    size = x.size * x.dtype.itemsize
    return (size + quantized.nbytes) / (2 * size)


def sheets(rows: Sequence[dict[str, Any]]) -> list[report.Sheet]:
    """One table for each shape and each choice of cores."""
    keys = sorted({(tuple(row["shape"]), row["cores"]) for row in rows})
    return [
        _sheet(shape, which, [r for r in rows if (tuple(r["shape"]), r["cores"]) == (shape, which)])
        for shape, which in keys
    ]


def _sheet(shape: tuple[int, int], which: str, rows: Sequence[dict[str, Any]]) -> report.Sheet:
    names = [peer.name for peer in peers.PEERS]
    names = [name for name in names if any(name in r["ratio_of_peer_to_mx_jax"] for r in rows)]
    unit = "time (ms)" if which == "all" else "CPU time (ms)"
    where = "all cores" if which == "all" else "one core, huge pages"
    columns = ["", unit, "quartiles (ms)", f"{PLUS} (ms)", f"time / {PLUS}", "time / bound"]
    sheet = report.Sheet(
        title=f"{shape[0]} x {shape[1]}, {where}",
        columns=[*columns, *(f"speedup over {name}" for name in names)],
        notes=_notes(rows),
    )
    for row in rows:
        timings = {name: timing[f"{row['clock']}_ms"] for name, timing in row["timings"].items()}
        ours = timings[OURS]
        name = f"{row['operation']} {row['format']} {row['rule']}, {row['dtype']}"
        cells = [name, f"{ours['median']:.2f}", f"{ours['q1']:.2f} to {ours['q3']:.2f}"]
        cells.append(f"{timings[PLUS]['median']:.2f}")
        cells.append(f"{row['ratio_to_x_plus_1']['median']:.2f}")
        cells.append(f"{row['ratio_to_bound']:.2f}")
        ratios = row["ratio_of_peer_to_mx_jax"]
        cells += [f"{ratios[n]['median']:.1f}" if n in ratios else "-" for n in names]
        sheet.rows.append(cells)
    return sheet


def _notes(rows: Sequence[dict[str, Any]]) -> list[str]:
    timings = [row["timings"] for row in rows if row["dtype"] == rows[0]["dtype"]]
    faults = {name: max(of[name]["minor_faults"] for of in timings) for name in (PLUS, COPY, OURS)}
    notes = [
        f"Page faults per call, {rows[0]['dtype']}, at most: "
        + ", ".join(f"{name} {number:.0f}" for name, number in faults.items())
        + "."
    ]
    if faults[PLUS] > 2000:
        notes.append("`x + 1` is limited by page faults here, not by memory bandwidth.")
    left_out = {
        f"{name}, {row['operation']} {row['format']}: {why}"
        for row in rows
        for name, why in row["peers_left_out"].items()
    }
    return notes + [f"Left out: {text}" for text in sorted(left_out)]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command's options."""
    parser = report.parser("quantize", __doc__)
    names = sorted({name for name, _ in FORMATS})
    parser.add_argument("--formats", nargs="+", choices=names, default=names)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--shapes", nargs="+", type=report.shape, default=list(SHAPES))
    parser.add_argument("--cores", choices=("all", "one", "both"), default="both")
    add_pace(parser, seconds=2.0, min_rounds=7)
    parser.add_argument(
        "--peers", action=argparse.BooleanOptionalAction, default=True, help="measure peers too"
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    options = parse(arguments)
    facts = environment.describe(peers.DISTRIBUTIONS)
    rows = []
    if options.cores != "one":
        rows += measure_all(options, "all")
    if options.cores != "all":
        rows += cores.on_one_core(measure_all, options, "one")
    report.publish("quantize", options, {"environment": facts, "rows": rows}, sheets(rows))


if __name__ == "__main__":
    main()
