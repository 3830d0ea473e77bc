"""Questions that only a TPU answers, in ten minutes: bits, its units' habits, times.

Everything that this project says of TPUs follows from what libtpu compiles; nothing of it has run
on one. On a machine with a TPU this command

- casts all bfloat16 numbers to every format along both axes, and compares codes, scales and values
  with the CPU's, bit for bit;
- asks what the schedule does not tell: whether the MXU keeps float8 subnormals, whether a maximum
  keeps NaN, whether float32 subnormals become zero;
- times the programs of `benchmarks.tpu` beside the estimates in benchmarks/results/tpu/.

Elsewhere it does the same for the device that JAX has, but for the estimates.
"""

import argparse
import functools
import json
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

import mx_jax
from benchmarks import environment, report
from benchmarks.gpu_compare import (
    Comparison,
    Measured,
    Repeated,
    chain_of,
    compare,
    copies_exceeding_cache,
)
from benchmarks.tpu import PROGRAMS, Program
from benchmarks.tpu_cost import DEVICES
from mx_jax.formats import MX_FORMATS, NVFP4

# By `device_kind`.
KINDS = {"TPU v5 lite": "v5e", "TPU v6 lite": "v6e", "TPU7x": "tpu7x", "TPU v7": "tpu7x"}
CALLS = 8


def bits() -> dict[str, list[str]]:
    """Differences from the CPU's bits, by format and axis: codes, scales, values."""
    patterns = np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16).reshape(256, 256)
    (cpu, *_), differing = jax.devices("cpu"), dict[str, list[str]]()
    for format in (*MX_FORMATS, NVFP4):
        for axis in (-1, 0):
            cast = functools.partial(_cast, format=format, axis=axis)
            here, there = (jax.jit(cast)(x) for x in (patterns, jax.device_put(patterns, cpu)))
            names = ("codes", "scales", "values")
            pairs = zip(names, here, there, strict=True)
            differing[f"{format.name}, axis {axis}"] = [
                name for name, x, y in pairs if np.asarray(x).tobytes() != np.asarray(y).tobytes()
            ]
    return differing


def _cast(x: jax.Array, format: Any, axis: int) -> tuple[jax.Array, ...]:
    blocks = mx_jax.quantize(x, format, axis=axis)
    return blocks.codes, blocks.scales, blocks.dequantize(jnp.float32)


def habits() -> dict[str, bool]:
    """Behaviour of the units that no schedule shows."""
    one = np.float32(1)
    observed: dict[str, bool] = {}
    for dtype in (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2):
        tiny = np.full((256, 256), ml_dtypes.finfo(dtype).smallest_subnormal, dtype)
        for left in (ml_dtypes.bfloat16, dtype):
            dot = jax.jit(functools.partial(jnp.dot, preferred_element_type=jnp.float32))
            sums = np.asarray(dot(np.eye(256, dtype=left), tiny))
            name = f"the MXU keeps subnormals of {np.dtype(dtype)} beside {np.dtype(left)}"
            observed[name] = bool((sums == tiny.astype(np.float32)).all())
    for dtype in (ml_dtypes.bfloat16, np.float32):
        x = np.ones((8, 256), dtype)
        x[3, 7] = np.nan
        largest = jax.jit(lambda x: jnp.max(x, axis=-1))(x)
        observed[f"a maximum of {np.dtype(dtype)} keeps NaN"] = bool(
            np.isnan(np.float32(largest[3]))
        )
    half = jax.jit(lambda x: x * np.float32(0.5))(np.full(8, one * 2.0**-126, np.float32))
    observed["float32 subnormals stay"] = bool((np.asarray(half) > 0).all())
    return observed


def drawn(shapes: Any) -> Any:
    """Random bits for a program's arguments, of moderate size: times do not depend on them."""
    rng = np.random.default_rng(0)

    def draw(x: Any) -> jax.Array:
        if jnp.issubdtype(x.dtype, jnp.integer):
            return jnp.asarray(rng.integers(64, 127, x.shape, np.uint8).astype(x.dtype))
        return jnp.asarray(rng.normal(size=x.shape), x.dtype)

    return jax.tree.map(draw, shapes)


def timed(program: Program, seconds: float) -> Measured:
    """Microseconds of a program, whose arguments come from memory each time."""
    size = sum(8 * x.size * x.dtype.itemsize for x in jax.tree.leaves(program.shapes))

    def one(_: Any, copy: Any) -> Any:
        return program.function(*copy)

    def make() -> Any:
        copies = [drawn(program.shapes)] * copies_exceeding_cache(size)
        copies = [jax.tree.map(jnp.copy, copy) for copy in copies]
        return chain_of("here", Repeated(one=one, x=jnp.zeros(()), copies=copies), CALLS)

    count = CALLS * copies_exceeding_cache(size)
    comparison = Comparison(
        what=program.title, makers=[("here", make)], baseline="here", count=count
    )
    return compare(comparison, seconds)


def estimates(device: str | None) -> dict[str, dict[str, Any]]:
    """Rows of the committed table by program; none of a device that has no table."""
    path = report.RESULTS / "tpu" / f"{device}.json"
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    return {row["program"]: row for row in rows if "failed" not in row}


def sheets(result: dict[str, Any]) -> list[report.Sheet]:
    """Bits and habits, then times."""
    facts = report.Sheet("What the device does", ("", "here"))
    facts.rows += [[name, "yes" if value else "no"] for name, value in result["habits"].items()]
    same = [name for name, names in result["bits"].items() if not names]
    facts.rows.append(["casts with the CPU's bits", f"{len(same)} of {len(result['bits'])}"])
    facts.rows += [[name, ", ".join(names)] for name, names in result["bits"].items() if names]
    times = report.Sheet("Times", ("program", "microseconds", "estimate", "ratio", "bundles a us"))
    for row in result["times"]:
        estimate, here = row["estimate"], row["microseconds"]
        known = estimate is not None and here is not None
        times.rows.append(
            [
                row["title"],
                report.number(here, 1),
                report.number(estimate, 1),
                report.number(here / estimate if known else None, 2),
                report.number(row["bundles"] / here if known else None, 0),
            ]
        )
    if device := result["device"]:
        clock = DEVICES[device].clock
        times.notes = [f"A program that waits for no memory has {clock / 1e6:.0f} bundles a us."]
    return [facts, times]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = report.parser("tpu_hardware", __doc__)
    parser.add_argument(
        "--programs",
        nargs="*",
        choices=tuple(PROGRAMS),
        default=list(PROGRAMS),
        metavar="PROGRAM",
        help="of benchmarks.tpu, by name",
    )
    parser.add_argument("--seconds", type=float, default=5.0, help="for each program")
    options: argparse.Namespace = parser.parse_args(arguments)
    device = KINDS.get(jax.devices()[0].device_kind)
    known, times = estimates(device), list[dict[str, Any]]()
    result = {"environment": environment.describe(["libtpu"]), "device": device}
    with report.progress(len(options.programs) + 2) as step:
        step("bits")
        result["bits"] = bits()
        step("habits")
        result["habits"] = habits()
        for name in options.programs:
            step(name)
            program = PROGRAMS[name]()
            measurement, row = timed(program, options.seconds), known.get(name, {})
            times.append(
                {
                    "program": name,
                    "title": program.title,
                    "microseconds": measurement.microseconds.get("here"),
                    "estimate": row.get("microseconds"),
                    "bundles": row.get("bundles"),
                    "failed": measurement.failed.get("here"),
                }
            )
    result["times"] = times
    report.publish("tpu_hardware", options, result, sheets(result))


if __name__ == "__main__":
    main()
