"""The GPU kernels on a GPU: first whether their numbers are right, then how fast they are.

Numbers. Every product of `CHECKS` that this GPU's kernel takes, on fresh random operands (the seed
is written down), compared with the reference's float32 product. Just before, an array of NaN as
large as the result is allocated and dropped, so that a tile which nobody writes is likely to show.

Time. A product of few rows takes less time than starting it from Python. So one jitted function
chains square products, `x <- x w_1 w_2 ...`, each by weights of its own: together they are larger
than the L2 cache, and no product can be left out or merged with another. A sample is several calls
of that function. All cases of a comparison run in one process in alternating order, as
`benchmarks.timing` says; ratios are medians over rounds. Beside each ratio stands its upper bound:
bytes over the memory's bandwidth, or operations over the tensor cores' peak, whichever takes
longer.
"""

import argparse
import dataclasses
import secrets
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks import environment, report
from benchmarks.gpu_products import BASELINE, chained, products
from benchmarks.timing import Case, measure, ratio
from mx_jax.backends.base import Operand
from mx_jax.backends.pallas_gpu import PallasGpuBackend, rejections
from mx_jax.backends.select import current_target
from mx_jax.formats import MX_FORMATS, MXFP4, MXFP8_E4M3, MXFP8_E5M2, NVFP4
from mx_jax.mxarray import MXArray
from mx_jax.reference.matmul import scaled_matmul
from mx_jax.testing.cases import MatmulCase

FORMATS = {format.name: format for format in (*MX_FORMATS, NVFP4)}
# Bytes and bfloat16 operations a second, from NVIDIA's data sheets (dense).
PEAKS = {
    "H200": (4.8e12, 989e12),
    "H100": (3.35e12, 989e12),
    "A100": (2.039e12, 312e12),
    "L40S": (0.864e12, 362e12),
}

_SIZES: tuple[dict[str, Any], ...] = (
    dict(m=(1,), n=(1000,), k=(2080,)),
    dict(m=(17,), n=(256,), k=(4096,)),
    dict(m=(40,), n=(384,), k=(1024,), rhs_k_first=True),
    dict(batch=(3,), m=(64,), n=(130,), k=(512,)),
    dict(m=(300,), n=(1024,), k=(1024,)),
)
_WEIGHTS = (
    *(
        MatmulCase(lhs=None, rhs=format, dtype="bfloat16", out_dtype="bfloat16", **sizes)
        for format in (MXFP4, MXFP8_E4M3)
        for sizes in _SIZES
    ),
    *(
        MatmulCase(lhs=None, rhs=format, dtype="float16", out_dtype="float32", **_SIZES[0])
        for format in FORMATS.values()
    ),
    MatmulCase(lhs=MXFP8_E4M3, rhs=MXFP4, m=(70,), n=(300,), k=(640,)),
    MatmulCase(lhs=NVFP4, rhs=None, dtype="bfloat16", m=(70,), n=(300,), k=(640,)),
)
_SCALED = (
    *(
        MatmulCase(lhs=format, rhs=format, out_dtype="bfloat16", **sizes)
        for format in (MXFP8_E4M3, MXFP4, NVFP4)
        for sizes in _SIZES
    ),
    MatmulCase(lhs=MXFP8_E5M2, rhs=MXFP8_E4M3, **_SIZES[0]),
    MatmulCase(lhs=MXFP4.with_block(16), rhs=MXFP4.with_block(16), **_SIZES[0]),
)
# What is checked, by architecture.
CHECKS = {
    name: _SCALED if name in rejections.BLOCK_SCALED else _WEIGHTS
    for name in rejections.ARCHITECTURES.values()
}


def check(backend: PallasGpuBackend, case: MatmulCase, rng: np.random.Generator) -> float:
    """The largest error of a product, over what the backend's bound and one rounding allow."""
    call = case.call
    lhs, rhs = case.operands(rng)
    exact = dataclasses.replace(call, out_dtype=jnp.dtype("float32"))
    reference = jax.jit(
        lambda lhs, rhs: scaled_matmul(
            lhs, rhs, exact.dimension_numbers, exact.out_dtype, lax.Precision.HIGHEST
        )
    )
    expected = np.asarray(reference(lhs, rhs), np.float64)
    magnitude = np.asarray(reference(_absolute(lhs), _absolute(rhs)), np.float64)
    run = jax.jit(lambda lhs, rhs: backend.scaled_matmul(lhs, rhs, call)).lower(lhs, rhs).compile()
    jax.block_until_ready(jnp.full(expected.shape, jnp.nan, call.out_dtype))
    actual = np.asarray(run(lhs, rhs)).astype(np.float64)
    # Twice: the reference has an error of its own.
    allowed = 2 * backend.epsilon_bound * 2.0**-24 * np.sqrt(case.num_products) * magnitude
    info = jnp.finfo(call.out_dtype)
    allowed += float(info.eps) / 2 * (np.abs(expected) + allowed) + float(info.smallest_normal)
    with np.errstate(invalid="ignore"):
        error = np.where(actual == expected, 0.0, np.abs(actual - expected) / allowed)
    # What is NaN on one side only is wrong by any measure.
    return float(np.max(np.where(np.isnan(error), np.inf, error)))


def _absolute(operand: Operand) -> jax.Array:
    values = operand.dequantize(jnp.float32) if isinstance(operand, MXArray) else operand
    return jnp.abs(values)


def check_all(backend: PallasGpuBackend, architecture: str, seed: int) -> list[dict[str, Any]]:
    """One row of JSON for each product; finite operands, so that every entry counts."""
    rng = np.random.default_rng(seed)
    rows = []
    cases = CHECKS[architecture]
    with report.progress(len(cases)) as step:
        for case in cases:
            step(f"check {case}")
            rows.append({"case": str(case), "error_over_allowed": check(backend, case, rng)})
    return rows


def bound(facts: str, m: int, size: int, bits: float) -> float | None:
    """Seconds that a product takes at least; None on a GPU whose peaks are not known here."""
    peaks = next((peaks for name, peaks in PEAKS.items() if name in facts), None)
    if peaks is None:
        return None
    moved = size * size * bits / 8 + 2 * m * size * 2
    return max(moved / peaks[0], 2 * m * size * size / peaks[1])


def measure_all(options: argparse.Namespace, device: str) -> list[dict[str, Any]]:
    """Rows of JSON, one for each format and number of rows."""
    rows = []
    with report.progress(len(options.formats) * len(options.rows)) as step:
        for name in options.formats:
            known = products(FORMATS[name], options.size, options.copies, options.architecture)
            for m in options.rows:
                step(f"{name}, {m} rows")
                rows.append(_measure(known, name, m, options, device))
    return rows


def _measure(
    known: dict[str, Any], name: str, m: int, options: argparse.Namespace, device: str
) -> dict[str, Any]:
    x = jax.random.normal(jax.random.key(1), (m, options.size), jnp.bfloat16)
    cases = [
        Case(case, chained(product, weights, options.calls, x))
        for case, (product, weights) in known.items()
    ]
    samples = measure(cases, seconds=options.seconds, max_rounds=1001)
    count = options.copies * options.calls
    bits = FORMATS[name].bits_per_element
    ours, base = (bound(device, m, options.size, b) for b in (bits, 16))
    return {
        "format": name,
        "m": m,
        "size": options.size,
        "microseconds": {
            case: 1e3 * of.summary()["wall_ms"]["median"] / count for case, of in samples.items()
        },
        "speedup": {
            case: dataclasses.asdict(ratio(samples[BASELINE], samples[case], "wall"))
            for case in samples
        },
        "speedup_bound": base / ours if base and ours else None,
    }


def sheets(checks: Sequence[dict[str, Any]], rows: Sequence[dict[str, Any]]) -> list[report.Sheet]:
    """Two tables: numbers, then times."""
    numbers = report.Sheet("Largest error over what is allowed", ("product", "error"))
    numbers.rows = [(row["case"], f"{row['error_over_allowed']:.3f}") for row in checks]
    names = [BASELINE, *(name for name in (rows[0]["speedup"] if rows else ()) if name != BASELINE)]
    columns = ("", *(f"{name}, us" for name in names))
    speeds = report.Sheet(
        "A square product, and its speed over the bfloat16 dot's", (*columns, *names[1:], "bound")
    )
    for row in rows:
        cells = [f"{row['format']}, {row['m']} x {row['size']} x {row['size']}"]
        cells += [f"{row['microseconds'][name]:.1f}" for name in names]
        cells += [f"{row['speedup'][name]['median']:.2f}" for name in names[1:]]
        cells.append("-" if row["speedup_bound"] is None else f"{row['speedup_bound']:.2f}")
        speeds.rows.append(cells)
    return [numbers, speeds]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command's options."""
    parser = report.parser("gpu", __doc__)
    parser.add_argument(
        "--formats", nargs="+", choices=list(FORMATS), default=["mxfp4", "mxfp8_e4m3", "nvfp4"]
    )
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 16, 64, 256, 4096])
    parser.add_argument("--size", type=int, default=8192, help="n and k")
    parser.add_argument("--copies", type=int, default=16, help="weights that a chain rotates over")
    parser.add_argument("--calls", type=int, default=10, help="of the chain, in one sample")
    parser.add_argument("--seconds", type=float, default=8.0, help="budget of a comparison")
    parser.add_argument(
        "--seed", type=int, default=None, help="of the checks; default: a fresh one"
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    options = parse(arguments)
    target = current_target()
    options.architecture = rejections.ARCHITECTURES.get(target.compute_capability or (0, 0), "sm90")
    reason = rejections.rejects(CHECKS[options.architecture][0].call, target)
    if reason is not None:
        raise SystemExit(f"benchmarks.gpu: needs a GPU that a kernel runs on: it {reason}")
    device = jax.devices()[0].device_kind
    seed = secrets.randbits(32) if options.seed is None else options.seed
    checks = check_all(PallasGpuBackend(), options.architecture, seed)
    wrong = [row["case"] for row in checks if not row["error_over_allowed"] <= 1]
    rows = [] if wrong else measure_all(options, device)
    result = {
        "environment": environment.describe() | {"gpu": device},
        "seed": seed,
        "checks": checks,
        "rows": rows,
    }
    out = report.RESULTS / "gpu" / f"{device.lower().replace(' ', '-')}.json"
    options.out = getattr(options, "out", out)
    report.publish("gpu", options, result, sheets(checks, rows))
    if wrong:
        raise SystemExit(f"benchmarks.gpu: wrong products, so no times: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
