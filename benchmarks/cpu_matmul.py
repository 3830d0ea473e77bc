"""Products of the CPU library, beside XLA's own dot in float32 and bfloat16 and the reference.

`[m, k]` by `[n, k]`, square ones and those of few rows, as decoding has them, against weights as
they come and packed ahead of time. The machine's own peaks run in the same rounds: float32 FMA,
bfloat16 and int8 dot products, on registers alone. One thread, pinned; process CPU time; see
`benchmarks.timing`.
"""

import argparse
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks import cores, environment, limits, report
from benchmarks.data import KINDS, draw
from benchmarks.timing import Case, Samples, add_pace, measure, pace, ratio
from mx_jax import formats
from mx_jax.backends.calls import MatmulCall, Operand
from mx_jax.backends.cpu_ffi import CPU_FFI
from mx_jax.backends.reference import REFERENCE
from mx_jax.mxarray import MXArray
from mx_jax.ops.packing import pack_weights
from mx_jax.ops.quantize import quantize
from mx_jax.packed import PackedMXArray
from mx_jax.testing.cases import MatmulCase

FLOAT32, FLOAT32_KN, BFLOAT16 = "jnp.dot float32", "jnp.dot float32, w [k, n]", "jnp.dot bfloat16"
DOTS = (FLOAT32, FLOAT32_KN, BFLOAT16)
SQUARE = (
    (formats.MXFP4, formats.MXFP4),
    (formats.MXFP6_E2M3, formats.MXFP6_E2M3),
    (formats.MXINT8, formats.MXINT8),
    (formats.NVFP4, formats.NVFP4),
    (formats.MXFP6_E3M2, formats.MXFP6_E3M2),
    (formats.MXFP8_E4M3, formats.MXFP8_E4M3),
    (None, formats.MXFP4),
    (None, formats.MXFP8_E4M3),
)
DECODING = (
    (None, formats.MXFP4),
    (None, formats.MXFP8_E4M3),
    (None, formats.MXFP6_E2M3),
    (None, formats.MXFP6_E3M2),
    (None, formats.NVFP4),
    (formats.MXINT8, formats.MXFP4),
    (formats.MXFP4, formats.MXFP4),
    (formats.MXFP6_E2M3, formats.MXFP6_E2M3),
    (formats.MXFP6_E3M2, formats.MXFP6_E3M2),
    (formats.MXFP8_E4M3, formats.MXFP8_E4M3),
)


def dot(a: jax.Array, b: jax.Array) -> jax.Array:
    """XLA's product of `[m, k]` and `[n, k]`, summed in float32."""
    dimensions = (((1,), (1,)), ((), ()))
    return lax.dot_general(a, b, dimensions, preferred_element_type=jnp.float32)


def plain_cases(m: int, n: int, k: int) -> list[Case]:
    """XLA's dots of high-precision operands."""
    rng = np.random.default_rng(0)
    a, b = (jnp.asarray(rng.standard_normal(s), jnp.float32) for s in ((m, k), (n, k)))
    bt, a16, b16 = jnp.asarray(np.asarray(b).T), a.astype(jnp.bfloat16), b.astype(jnp.bfloat16)
    product, product_kn = jax.jit(dot), jax.jit(jnp.dot)
    return [
        Case(FLOAT32, lambda: product(a, b)),
        Case(FLOAT32_KN, lambda: product_kn(a, bt)),
        Case(BFLOAT16, lambda: product(a16, b16)),
    ]


def operands(case: MatmulCase, data: str) -> tuple[Operand, Operand]:
    """Operands of a product: weights of a kind of `benchmarks.data`, activations always normal."""
    values = draw("normal", case.call.lhs.shape, 1), draw(data, case.call.rhs.shape)
    left, right = (
        jnp.asarray(x) if format is None else quantize(jnp.asarray(x), format, axis=-1)
        for x, format in zip(values, (case.lhs, case.rhs), strict=True)
    )
    return left, right


def quantized_cases(
    shape: tuple[int, int, int], pairs: Sequence[Any], packed: bool, data: str
) -> list[Case]:
    """This backend's products and the reference's, of the same operands."""
    m, n, k = shape
    cases = []
    for lhs, rhs in pairs:
        case = MatmulCase(lhs=lhs, rhs=rhs, m=(m,), n=(n,), k=(k,))
        name = f"{lhs.name if lhs else 'float32'} x {rhs.name}"
        left, right = operands(case, data)
        for backend in (CPU_FFI, REFERENCE):
            cases.append(Case(f"{backend.name} {name}", _run(backend, case.call, left, right)))
        if packed:
            assert isinstance(right, MXArray)
            cases.append(Case(f"cpu_ffi {name}, packed", _run_packed(case.call, left, right)))
    return cases


def _run(backend: Any, call: MatmulCall, left: Operand, right: Operand) -> Callable[[], jax.Array]:
    function = jax.jit(lambda left, right: backend.run(call, left, right))
    return lambda: function(left, right)


def _run_packed(call: MatmulCall, left: Operand, right: MXArray) -> Callable[[], jax.Array]:
    packed = pack_weights(right)
    assert isinstance(packed, PackedMXArray)
    backend = CPU_FFI
    function = jax.jit(lambda left, packed: backend.run(call, left, packed))
    return lambda: function(left, packed)


def rows(options: argparse.Namespace) -> list[dict[str, Any]]:
    """One row a case: CPU milliseconds, ratios to XLA's dots, shares of the peaks.

    Args:
      options: `seconds` of a group, `min_rounds`, `sizes` of square products, `rows` of thin ones,
        kinds of `data` in the weights of thin ones.
    """
    environment.cpu_library("cpu_matmul")
    groups = [((size,) * 3, SQUARE, False, "normal") for size in options.sizes]
    for m in options.rows:
        groups += [((m, 4096, 4096), DECODING, True, data) for data in options.data]
    measured = []
    with report.progress(len(groups)) as step:
        for shape, pairs, packed, data in groups:
            step(f"{shape} {data}")
            cases = [*plain_cases(*shape), *quantized_cases(shape, pairs, packed, data)]
            cases += [Case(f"peak {name}", run) for name, run in limits.peaks().items()]
            samples = measure(cases, **pace(options))
            measured += [{"data": data, **_row(shape, name, samples)} for name in samples]
    return measured


def _row(shape: tuple[int, int, int], name: str, samples: dict[str, Samples]) -> dict[str, Any]:
    summary = samples[name].summary()
    row: dict[str, Any] = {"shape": shape, "case": name, "timings": summary}
    if name.startswith("peak "):
        products = 12 * limits.PEAK_ROUNDS * limits.PEAKS[name.removeprefix("peak ")]
        row["gop_per_second"] = 2e-6 * products / summary["cpu_ms"]["median"]
        return row
    m, n, k = shape
    row["gop_per_second"] = 2e-6 * m * n * k / summary["cpu_ms"]["median"]
    best = min(DOTS, key=lambda dot: samples[dot].summary()["cpu_ms"]["median"])
    floats = min(DOTS[:2], key=lambda dot: samples[dot].summary()["cpu_ms"]["median"])
    for key, other in (("float32", floats), ("best", best)):
        row[f"over_{key}"] = dataclasses.asdict(ratio(samples[other], samples[name], "cpu"))
    for peak_name, products in limits.PEAKS.items():
        of = samples.get(f"peak {peak_name}")
        if of is not None:
            pace = 24e-6 * limits.PEAK_ROUNDS * products / of.summary()["cpu_ms"]["median"]
            row[f"share_of_{peak_name}"] = row["gop_per_second"] / pace
    return row


COLUMNS = (
    "case",
    "CPU time (ms)",
    "quartiles (ms)",
    "GOP/s",
    "speedup over float32 dot",
    "speedup over the fastest dot",
    "% of the VNNI peak",
)


def sheets(result: dict[str, Any]) -> list[report.Sheet]:
    """One table a shape and kind of data."""
    tables = []
    for shape, data in dict.fromkeys(map(_place, result["rows"])):
        sheet = report.Sheet(
            "m x n x k = {} x {} x {}, {}, one core, CPU time".format(*shape, data),
            COLUMNS,
            notes=["Speedup: XLA's time divided by this one, median over the same rounds."],
        )
        for row in result["rows"]:
            if _place(row) == (shape, data):
                sheet.rows.append(_cells(row))
        tables.append(sheet)
    return tables


def _place(row: dict[str, Any]) -> tuple[tuple[int, ...], str]:
    return tuple(row["shape"]), row["data"]


def _cells(row: dict[str, Any]) -> list[str]:
    time = row["timings"]["cpu_ms"]
    cells = [row["case"], f"{time['median']:.3f}", f"{time['q1']:.3f} to {time['q3']:.3f}"]
    cells.append(f"{row['gop_per_second']:.0f}")
    for key in ("over_float32", "over_best"):
        cells.append(f"{row[key]['median']:.2f}" if key in row else "")
    share = row.get("share_of_vnni")
    return [*cells, "" if share is None else f"{100 * share:.0f} %"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = report.parser("cpu_matmul", __doc__, out="cpu/matmul.json")
    parser.add_argument("--sizes", type=int, nargs="*", default=[1024, 2048], help="square ones")
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 8, 32], help="of thin ones")
    parser.add_argument("--data", nargs="*", choices=KINDS, default=KINDS, help="of weights")
    add_pace(parser, seconds=4.0, min_rounds=7)
    options = parser.parse_args(arguments)
    result = {
        "environment": environment.describe(),
        "rows": cores.on_one_core(rows, options),
    }
    report.publish("cpu_matmul", options, result, sheets(result))


if __name__ == "__main__":
    main()
