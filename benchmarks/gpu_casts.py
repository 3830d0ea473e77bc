"""How fast a GPU quantizes: its bandwidth, relative to that of a plain copy in the same run.

A sample quantizes several arrays, together larger than the L2 cache, in one jitted function. The
bandwidth is the bytes that a cast must read and write, once, divided by its time; a copy reads and
writes the input. So a cast at 100 % reads its input once and is bound by memory.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import report
from benchmarks.timing import Case, Samples, measure, spread
from mx_jax.backends.base import Backend, Target
from mx_jax.backends.calls import QuantizeBothCall, QuantizeCall
from mx_jax.backends.pallas_gpu import PALLAS_GPU
from mx_jax.backends.reference import REFERENCE
from mx_jax.formats import MXFP4, MXFP8_E4M3, NVFP4_ONE_LEVEL, BlockFormat
from mx_jax.testing.cases import QuantizeCase

COPY, PLAIN, BOTH = "copy", "plain JAX", "both axes"
FORMATS = (MXFP8_E4M3, MXFP4, NVFP4_ONE_LEVEL)
DTYPES = ("bfloat16", "float32")
AXES: dict[str, tuple[int, ...]] = {"last axis": (-1,), "first axis": (-2,), BOTH: (-1, -2)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cast:
    """What is timed.

    Attributes:
      format: of the result.
      dtype: of the input.
      axes: the axes that blocks lie along; two are two results of one input.
    """

    format: BlockFormat
    dtype: str
    axes: tuple[int, ...]

    def calls(self, size: int) -> list[QuantizeCall]:
        """One call for each axis of a square array."""
        return [
            QuantizeCase(format=self.format, shape=(size, size), axis=axis, dtype=self.dtype).call
            for axis in self.axes
        ]

    def moved(self, size: int) -> float:
        """Bytes to be read and written, the input once."""
        _, block = self.format.block
        assert isinstance(block, int)
        written = len(self.axes) * (1 + 1 / block)
        return size * size * (jnp.dtype(self.dtype).itemsize + written)


def measure_all(options: Any, target: Target, deadline: float) -> list[dict[str, Any]]:
    """Rows of JSON: microseconds of one cast, and its bandwidth over a copy's."""
    casts = [
        (f"{format.name} from {dtype}, {name}", Cast(format=format, dtype=dtype, axes=axes))
        for format in FORMATS
        for dtype in DTYPES
        for name, axes in AXES.items()
    ]
    rows = []
    with report.progress(len(casts)) as step:
        for title, cast in casts:
            step(title)
            if time.monotonic() <= deadline:
                rows.append({"cast": title} | _measure(cast, options, target))
    return rows


def _measure(cast: Cast, options: Any, target: Target) -> dict[str, Any]:
    keys = jax.random.split(jax.random.key(0), options.copies)
    shape = (options.size, options.size)
    arrays = [jax.random.normal(key, shape, jnp.dtype(cast.dtype)) for key in keys]
    cases, failed = [], {}
    for name, one in ways(cast, options.size, target).items():
        case = Case(name, _sample(one, arrays))
        try:
            jax.block_until_ready(case.run())
            cases.append(case)
        except Exception as error:
            failed[name] = report.first_line(error)
    samples = measure(cases, seconds=options.seconds / 2, max_rounds=101)
    copied = options.size**2 * 2 * jnp.dtype(cast.dtype).itemsize
    return {
        "microseconds": {
            name: 1e3 * of.summary()["wall_ms"]["median"] / options.copies
            for name, of in samples.items()
        },
        "share_of_copy": {
            name: _bandwidth(samples[COPY], of, cast.moved(options.size) / copied)
            for name, of in samples.items()
            if name != COPY and COPY in samples
        },
        "failed": failed,
    }


def ways(cast: Cast, size: int, target: Target) -> dict[str, Callable[[jax.Array], Any]]:
    """A copy, and every backend of a GPU that takes the cast."""
    calls = cast.calls(size)
    # Not x + 0, which XLA knows to be x.
    known: dict[str, Callable[[jax.Array], Any]] = {COPY: lambda x: -x}
    for name, backend in ((PLAIN, REFERENCE), ("pallas_gpu", PALLAS_GPU)):
        taken: Any = QuantizeBothCall(first=calls[0], second=calls[1]) if calls[1:] else calls[0]
        if backend.rejects(taken, target) is None:
            known[name] = _together(backend, taken)
        elif all(backend.rejects(call, target) is None for call in calls):
            known[name] = _one_by_one(backend, calls)
    return known


def _together(backend: Backend, call: Any) -> Callable[[jax.Array], Any]:
    if isinstance(call, QuantizeBothCall):
        return lambda x: backend.run(call, x, (None, None), None)
    return lambda x: backend.run(call, x, None, None)


def _one_by_one(backend: Backend, calls: Sequence[QuantizeCall]) -> Callable[[jax.Array], Any]:
    return lambda x: [backend.run(call, x, None, None) for call in calls]


def _sample(one: Callable[[jax.Array], Any], arrays: list[jax.Array]) -> Callable[[], Any]:
    run = jax.jit(lambda arrays: [one(x) for x in arrays])
    return lambda: run(arrays)


def _bandwidth(copy: Samples, cast: Samples, bytes_over_copys: float) -> float:
    pairs = zip(copy.wall, cast.wall, strict=True)
    return spread([bytes_over_copys * c / max(q, 1e-9) for c, q in pairs]).median


def sheet(rows: Sequence[dict[str, Any]]) -> report.Sheet:
    """Microseconds and bandwidths, side by side."""
    names = list(dict.fromkeys(name for row in rows for name in row["microseconds"]))
    others = [name for name in names if name != COPY]
    columns = (
        "",
        *(f"{name} (us)" for name in names),
        *(f"{name}, bandwidth in % of a copy" for name in others),
    )
    result = report.Sheet("Quantizing a square array", columns)
    for row in rows:
        percent = {name: 100 * share for name, share in row["share_of_copy"].items()}
        times = [report.number(row["microseconds"].get(name), 1) for name in names]
        shares = [report.number(percent.get(name), 0) for name in others]
        result.rows.append([row["cast"], *times, *shares])
    result.notes = [
        f"{row['cast']}: {name} failed: {why}"
        for row in rows
        for name, why in row["failed"].items()
    ]
    return result
