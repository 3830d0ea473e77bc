"""The GPU kernels on a GPU, beside other libraries: how fast their products are.

`python -m mx_jax gpu` checks numbers, tunes, and times each kernel beside plain JAX. This asks what
it does not: where PyTorch and Triton are installed, how the same product does there
(`benchmarks.gpu_peers`), and how near all are to the machine's limits.

A product of few rows takes less time than starting it from Python. So one jitted function chains
square products, `x <- x w_1 w_2 ...`, each by weights of its own: together they are larger than the
L2 cache, and no product can be left out or merged with another. A sample is several calls of that
function. All cases of a comparison run in one process in alternating order, as `benchmarks.timing`
says; ratios are medians over rounds. Beside each ratio stands its upper bound: bytes over the
memory's bandwidth, or operations over the tensor cores' peak, whichever takes longer.

Before it is timed, a kernel's first product is compared with that of dequantized weights. What
fails is written down with its traceback, and the rest goes on.
"""

import argparse
import dataclasses
import json
import os
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

# PyTorch shares the GPU's memory.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp

from benchmarks import environment, gpu_peers, report
from benchmarks.gpu_products import BASELINE, DEQUANTIZE, Pair, Way, chained, products
from benchmarks.timing import Case, measure, ratio
from mx_jax.backends.base import Target
from mx_jax.backends.pallas_gpu.architecture import SM90, Architecture, architecture_of
from mx_jax.backends.pallas_gpu.products.rejections import rejects
from mx_jax.backends.select import current_target
from mx_jax.formats import MX_FORMATS, MXFP4, MXFP8_E4M3, NVFP4
from mx_jax.testing.cases import MatmulCase

FORMATS = {format.name: format for format in (*MX_FORMATS, NVFP4)}
# What one product may differ by from that of dequantized weights, over the mean magnitude: both are
# rounded to bfloat16.
_CLOSE = 2.0**-4

# Bytes and bfloat16 operations a second, from NVIDIA's data sheets (dense).
PEAKS = {
    "H200": (4.8e12, 989e12),
    "H100": (3.35e12, 989e12),
    "A100": (2.039e12, 312e12),
    "L40S": (0.864e12, 362e12),
}


def bound(facts: str, m: int, size: int, bits: float) -> float | None:
    """Seconds that a product takes at least; None on a GPU whose peaks are not known here."""
    peaks = next((peaks for name, peaks in PEAKS.items() if name in facts), None)
    if peaks is None:
        return None
    moved = size * size * bits / 8 + 2 * m * size * 2
    return max(moved / peaks[0], 2 * m * size * size / peaks[1])


def measure_all(
    options: argparse.Namespace, device: str, target: Target, deadline: float
) -> Iterator[dict[str, Any]]:
    """Rows of JSON, one for each pair of formats and number of rows."""
    with report.progress(len(options.pairs) * len(options.rows)) as step:
        for pair in options.pairs:
            known = products(pair, options.size, options.copies, target)
            weights = {}
            for m in options.rows:
                step(f"{pair}, {m} rows")
                if time.monotonic() > deadline:
                    continue
                makers = _makers(known, weights, m, options)
                makers += gpu_peers.cases(pair, m, options.size, options.copies, options.calls)
                yield _measure(pair, makers, m, options, device)


def _makers(
    known: dict[str, Way], weights: dict[str, list[Any]], m: int, options: argparse.Namespace
) -> list[tuple[str, Callable[[], Case]]]:
    """What makes each of our cases; `weights` keeps what was laid out for other numbers of rows."""
    x = jax.random.normal(jax.random.key(1), (m, options.size), jnp.bfloat16)

    def maker(name: str) -> Callable[[], Case]:
        def make() -> Case:
            for own in (name, DEQUANTIZE):
                if own not in weights:
                    weights[own] = known[own].weights(options.size, options.copies)
            if name != BASELINE:
                _check(known, weights, name, x)
            chain = chained(known[name].product, weights[name], options.calls, x)
            return Case(name, chain)

        return make

    return [(name, maker(name)) for name in known]


def _check(known: dict[str, Way], weights: dict[str, list[Any]], name: str, x: jax.Array) -> None:
    """Raises ArithmeticError unless a first product is that of dequantized weights."""
    found, expected = (
        jax.jit(known[own].product)(x, weights[own][0]).astype(jnp.float32)
        for own in (name, DEQUANTIZE)
    )
    error = float(jnp.max(jnp.abs(found - expected)) / jnp.mean(jnp.abs(expected)))
    if not error <= _CLOSE:
        raise ArithmeticError(f"{name} is wrong: error={error:.3g} of the mean magnitude")


def _measure(
    pair: Pair,
    makers: list[tuple[str, Callable[[], Case]]],
    m: int,
    options: argparse.Namespace,
    device: str,
) -> dict[str, Any]:
    cases, failed = [], {}
    for name, make in makers:
        # What cannot be compiled or started must not cost the times of the others.
        try:
            case = make()
            jax.block_until_ready(case.run())
            cases.append(case)
        except Exception:
            failed[name] = traceback.format_exc()
    samples = measure(cases, seconds=options.seconds, max_rounds=1001)
    count = options.copies * options.calls
    ours, base = (bound(device, m, options.size, b) for b in (pair.rhs.bits_per_element, 16))
    return {
        "pair": str(pair),
        "m": m,
        "size": options.size,
        "microseconds": {
            name: 1e3 * of.summary()["wall_ms"]["median"] / count for name, of in samples.items()
        },
        "speedup": {
            name: dataclasses.asdict(ratio(samples[BASELINE], samples[name], "wall"))
            for name in samples
            if BASELINE in samples
        },
        "speedup_bound": base / ours if base and ours else None,
        "failed": failed,
    }


def sheets(result: dict[str, Any]) -> list[report.Sheet]:
    """Times and speeds."""
    rows = result["rows"]
    found = dict.fromkeys(name for row in rows for name in (*row["microseconds"], *row["failed"]))
    names = [BASELINE, *(name for name in found if name != BASELINE)]
    times = report.Sheet("Microseconds of a square product", ("", *names))
    speeds = report.Sheet("Speed over the bfloat16 dot's", ("", *names[1:], "bound"))
    for row in rows:
        title = f"{row['pair']}, {row['m']} x {row['size']} x {row['size']}"
        times.rows.append(
            [title, *(report.number(row["microseconds"].get(name), 1) for name in names)]
        )
        medians = [row["speedup"].get(name, {}).get("median") for name in names[1:]]
        numbered = [report.number(value, 2) for value in (*medians, row["speedup_bound"])]
        speeds.rows.append([title, *numbered])
    times.notes = [
        f"{row['pair']}, {row['m']} rows: {name} failed: {why.strip().splitlines()[-1]}"
        for row in rows
        for name, why in row["failed"].items()
    ]
    return [times, speeds]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command's options."""
    parser = report.parser("gpu", __doc__)
    parser.add_argument(
        "--pairs",
        nargs="+",
        type=_pair,
        default=None,
        metavar="[LHS,]RHS",
        help="formats of both sides; without LHS x stays in bfloat16 (default: by GPU)",
    )
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 16, 64, 256, 4096])
    parser.add_argument("--size", type=int, default=8192, help="n and k")
    parser.add_argument("--copies", type=int, default=16, help="weights that a chain rotates over")
    parser.add_argument("--calls", type=int, default=10, help="of the chain, in one sample")
    parser.add_argument("--seconds", type=float, default=4.0, help="budget of a comparison")
    parser.add_argument(
        "--minutes", type=float, default=8.5, help="after which nothing more is begun"
    )
    return parser.parse_args(arguments)


def _pair(text: str) -> Pair:
    """`"mxfp4"` or `"mxfp8_e4m3,mxfp4"`; an argparse type."""
    try:
        *lhs, rhs = (FORMATS[name] for name in text.split(","))
        return Pair(lhs=lhs[0] if lhs else None, rhs=rhs)
    except KeyError:
        known = ", ".join(FORMATS)
        raise argparse.ArgumentTypeError(f"needs [LHS,]RHS of {known}; got {text!r}") from None


def pairs_of(architecture: Architecture) -> list[Pair]:
    """What is timed, unless the command names pairs."""
    if architecture.kernel(MXFP4, MXFP4) != architecture.decoding:
        return [Pair(rhs=MXFP4), *(Pair(lhs=f, rhs=f) for f in (MXFP8_E4M3, MXFP4, NVFP4))]
    return [
        Pair(rhs=MXFP4),
        Pair(rhs=MXFP8_E4M3),
        Pair(lhs=MXFP8_E4M3, rhs=MXFP8_E4M3),
        Pair(rhs=NVFP4),
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    options = parse(arguments)
    deadline = time.monotonic() + 60 * options.minutes
    target = current_target()
    architecture = architecture_of(target.compute_capability) or SM90
    case = MatmulCase(lhs=None, rhs=MXFP4, dtype="bfloat16", out_dtype="bfloat16")
    reason = rejects(case.call, target)
    if reason is not None:
        raise SystemExit(f"benchmarks.gpu: needs a GPU that a kernel runs on: it {reason}")
    options.pairs = options.pairs or pairs_of(architecture)
    device = jax.devices()[0].device_kind
    known = environment.describe(["torch", "triton"]) | {"gpu": device}
    result: dict[str, Any] = {"environment": known, "rows": []}
    out = report.RESULTS / "gpu" / f"{device.lower().replace(' ', '-')}.json"
    options.out = getattr(options, "out", out)
    report.publish("gpu", options, result, sheets(result))
    # Written after each row: what hangs or crashes must not cost the answers before.
    for row in measure_all(options, device, target, deadline):
        result["rows"].append(row)
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    report.publish("gpu", options, result, sheets(result))


if __name__ == "__main__":
    main()
