"""The GPU kernels on a GPU: first whether their numbers are right, then how fast they are.

Numbers. Everything that `benchmarks.gpu_checks` asks of this machine, on fresh random operands (the
seed is written down).

Time. A product of few rows takes less time than starting it from Python. So one jitted function
chains square products, `x <- x w_1 w_2 ...`, each by weights of its own: together they are larger
than the L2 cache, and no product can be left out or merged with another. A sample is several calls
of that function. All cases of a comparison run in one process in alternating order, as
`benchmarks.timing` says; ratios are medians over rounds. Beside each ratio stands its upper bound:
bytes over the memory's bandwidth, or operations over the tensor cores' peak, whichever takes
longer. Where PyTorch and Triton are installed, `benchmarks.gpu_peers` multiplies too. Casts are
timed by `benchmarks.gpu_casts`.

What fails is written down, and the rest goes on.
"""

import argparse
import dataclasses
import json
import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

# PyTorch shares the GPU's memory.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp

from benchmarks import environment, gpu_casts, gpu_peers, report
from benchmarks.gpu_checks import FORMATS, checks, products_of, run_all, wrong
from benchmarks.gpu_products import BASELINE, Pair, Way, chained, products
from benchmarks.timing import Case, measure, ratio
from mx_jax.backends.base import Target
from mx_jax.backends.pallas_gpu.architecture import SM90, Architecture, architecture_of
from mx_jax.backends.pallas_gpu.products.rejections import rejects
from mx_jax.backends.select import current_target
from mx_jax.formats import MXFP4, MXFP8_E4M3, NVFP4

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
            if name not in weights:
                weights[name] = known[name].weights(options.size, options.copies)
            chain = chained(known[name].product, weights[name], options.calls, x)
            return Case(name, chain)

        return make

    return [(name, maker(name)) for name in known]


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
        except Exception as error:
            failed[name] = report.first_line(error)
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
    """Numbers, times, speeds, and casts."""
    checks, rows = result["checks"], result["rows"]
    numbers = report.Sheet("Largest error over what is allowed", ("check", "error"))
    numbers.rows = [
        (row["case"], row["failed"] if "failed" in row else f"{row['error_over_allowed']:.3f}")
        for row in checks
    ]
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
        f"{row['pair']}, {row['m']} rows: {name} failed: {why}"
        for row in rows
        for name, why in row["failed"].items()
    ]
    return [numbers, times, speeds, gpu_casts.sheet(result["casts"])]


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
    parser.add_argument(
        "--seed", type=int, default=None, help="of the checks; default: a fresh one"
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
    reason = rejects(products_of(architecture)[0].call, target)
    if reason is not None:
        raise SystemExit(f"benchmarks.gpu: needs a GPU that a kernel runs on: it {reason}")
    options.pairs = options.pairs or pairs_of(architecture)
    device = jax.devices()[0].device_kind
    seed = secrets.randbits(32) if options.seed is None else options.seed
    result = {"environment": environment.describe(["torch", "triton"]) | {"gpu": device}}
    result |= {"seed": seed, "checks": [], "casts": [], "rows": []}
    out = report.RESULTS / "gpu" / f"{device.lower().replace(' ', '-')}.json"
    options.out = getattr(options, "out", out)
    # Written after each part, and each row: what hangs or crashes must not cost the answers before.
    result["checks"] = run_all(list(checks(target, architecture)), seed, deadline)
    report.publish("gpu", options, result, sheets(result))
    for row in measure_all(options, device, target, deadline):
        result["rows"].append(row)
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    report.publish("gpu", options, result, sheets(result))
    result["casts"] = gpu_casts.measure_all(options, target, deadline)
    report.publish("gpu", options, result, sheets(result))
    if failed := wrong(result["checks"]):
        raise SystemExit(f"benchmarks.gpu: not right, so no time counts: {', '.join(failed)}")


if __name__ == "__main__":
    main()
