"""Loading a model's file and quantizing it to packed weights, beside reading the file and no more.

A safetensors file of square matrices, float32 or bfloat16. "Read" fetches its bytes into one buffer
that is used again and again: the least that anybody can do. "safetensors" is that library's
`load_file`, arrays of NumPy. "Load" is `checkpoint.read`, arrays of JAX. "Load and quantize" makes
each matrix packed MXFP4, what products read, while the next one is read. Warm: the file lies in the
system's page cache. Cold: it was dropped from there before each round; what lies behind it, a disk
or the host of a virtual machine, may hold it still.
"""

import argparse
import dataclasses
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import safetensors.numpy

import mx_jax
from benchmarks import environment, report
from benchmarks.timing import Samples, ratio
from mx_jax import checkpoint
from mx_jax.checkpoint.files import Entry, write
from mx_jax.packed import PackedMXArray

COMMAND = "loading"
DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
READ, LOADED = "read", "load and quantize"
_BUFFER = 8 << 20
# The rule that loses least for the format.
_RULES = {"mxfp4": "even", "nvfp4": "amax"}


def read_bytes(path: Path, buffer: np.ndarray) -> None:
    """Every byte of a file, one after the other into the same memory."""
    with path.open("rb", buffering=0) as file:
        while file.readinto(memoryview(buffer)):
            pass


def load(path: Path) -> dict[str, Any]:
    """Its tensors on the device."""
    return jax.block_until_ready(dict(checkpoint.read(path)))


def load_packed(path: Path, pack: Callable[[Any], Any]) -> dict[str, Any]:
    """Its matrices `[out, in]` as packed kernels `[in, out]`."""
    weights, made, last = checkpoint.read(path), dict[str, Any](), None
    for name in weights:
        # jax computes in the background; two matrices in high precision are in memory.
        kernel = pack(weights[name])
        jax.block_until_ready(last)
        made[name] = last = kernel.T
    return jax.block_until_ready(made)


def cases(path: Path, format: str) -> dict[str, Callable[[], Any]]:
    """The timed functions by name."""
    buffer = np.empty(_BUFFER, np.uint8)
    rule = _RULES.get(format)
    pack = jax.jit(lambda w: mx_jax.pack_weights(mx_jax.quantize(w, format, scale_rule=rule)))
    if not isinstance(next(iter(load_packed(path, pack).values())), PackedMXArray):
        raise SystemExit(f"loading: {format} is not packed here; see python -m mx_jax env")
    return {
        READ: lambda: read_bytes(path, buffer),
        "safetensors": lambda: safetensors.numpy.load_file(path),
        "load": lambda: load(path),
        LOADED: lambda: load_packed(path, pack),
    }


def rounds(
    named: dict[str, Callable[[], Any]], path: Path, count: int, *, cold: bool
) -> dict[str, Samples]:
    """Each case once a round, in an order drawn anew."""
    samples = {name: Samples() for name in named}
    for _ in range(count):
        for name in random.sample(sorted(named), len(named)):
            if cold:
                drop(path)
            cpu, wall = time.process_time(), time.perf_counter()
            result = named[name]()
            samples[name].wall.append(time.perf_counter() - wall)
            samples[name].cpu.append(time.process_time() - cpu)
            samples[name].faults.append(0)
            del result
    return samples


def drop(path: Path) -> None:
    """Take a file out of the system's cache."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def rows(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One row a dtype, cache and case."""
    with report.progress(2 * len(options.dtypes)) as step, tempfile.TemporaryDirectory() as folder:
        for dtype in options.dtypes:
            path = Path(folder, f"{dtype}.safetensors")
            rng = np.random.default_rng(0)
            draw = rng.standard_normal((options.size, options.size), np.float32)
            tensors = {
                f"layers.{i}.weight": draw.astype(DTYPES[dtype]) for i in range(options.count)
            }
            write(path, {n: Entry.of(x) for n, x in tensors.items()}, {}, lambda *_: None)
            named = cases(path, options.format)
            for cold in (False, True):
                step(f"{dtype}, {'cold' if cold else 'warm'}")
                samples = rounds(named, path, options.rounds, cold=cold)
                for name, sample in samples.items():
                    yield _row(dtype, cold, name, samples, path.stat().st_size, sample)
            path.unlink()


def _row(
    dtype: str, cold: bool, name: str, samples: dict[str, Samples], nbytes: int, sample: Samples
) -> dict[str, Any]:
    return {
        "dtype": dtype,
        "cache": "cold" if cold else "warm",
        "case": name,
        "bytes": nbytes,
        "timings": sample.summary(),
        "gigabytes_a_second": nbytes / statistics.median(sample.wall) / 1e9,
        "pace": dataclasses.asdict(ratio(samples[READ], sample, "wall")),
        "cpu_pace": dataclasses.asdict(ratio(samples[READ], sample, "cpu")),
        "pace_of_safetensors": dataclasses.asdict(ratio(samples["safetensors"], sample, "wall")),
    }


def sheets(rows: Sequence[dict[str, Any]]) -> list[report.Sheet]:
    """One table a dtype and cache."""
    made = []
    for dtype, cache in dict.fromkeys((row["dtype"], row["cache"]) for row in rows):
        cases = [row for row in rows if (row["dtype"], row["cache"]) == (dtype, cache)]
        sheet = report.Sheet(
            f"{dtype}, {cache}, {cases[0]['bytes'] / 1e6:.0f} MB",
            [
                *("", "wall, ms", "CPU, ms", "GB/s", "pace / read", "quartiles"),
                *("by CPU time", "pace / safetensors"),
            ],
            notes=["Pace: the other's time over this one's, by the clock, median over rounds."],
        )
        for row in cases:
            pace = row["pace"]
            sheet.rows.append(
                [
                    row["case"],
                    f"{row['timings']['wall_ms']['median']:.0f}",
                    f"{row['timings']['cpu_ms']['median']:.0f}",
                    f"{row['gigabytes_a_second']:.2f}",
                    f"{pace['median']:.2f}",
                    f"{pace['q1']:.2f} to {pace['q3']:.2f}",
                    f"{row['cpu_pace']['median']:.2f}",
                    f"{row['pace_of_safetensors']['median']:.2f}",
                ]
            )
        made.append(sheet)
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = report.parser(COMMAND, __doc__, out="cpu/loading.json")
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=list(DTYPES))
    parser.add_argument("--format", default="mxfp4", help="of the packed weights")
    parser.add_argument("--size", type=int, default=4096, help="of the square matrices")
    parser.add_argument("--count", type=int, default=8, help="matrices in the file")
    parser.add_argument("--rounds", type=int, default=11)
    options = parser.parse_args(arguments)
    facts = environment.describe()
    measured = list(rows(options))
    report.publish(COMMAND, options, {"environment": facts, "rows": measured}, sheets(measured))


if __name__ == "__main__":
    main()
