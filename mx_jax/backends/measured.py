"""Which kernels were measured to be right and faster than all else, on which GPU.

A kernel behind the reference is not asked, unless a row says so of the call: weights that it packed
itself, of as many elements, down to a quarter. `python -m benchmarks.gpu` prints rows.
"""

import math
from typing import NamedTuple

import jax
import numpy as np

from mx_jax.backends.calls import Call, MatmulCall, PackCall, rejects_symbolic
from mx_jax.backends.target import Target
from mx_jax.formats import MXFP4, MXFP8_E4M3, NVFP4, BlockFormat


class Row(NamedTuple):
    """One measurement: activations in bfloat16 by weights that a kernel packed, to bfloat16.

    Attributes:
      backend, chip: their names; the chip's as JAX has it.
      jax: series of its versions.
      format: of the weights.
      elements: of the weights.
      rows: of the activations, at least and at most.
      ratio: time of XLA's product of the same weights over the kernel's.
      date: ISO day.
    """

    backend: str
    chip: str
    jax: str
    format: BlockFormat
    elements: int
    rows: tuple[int, float]
    ratio: float
    date: str

    def __str__(self) -> str:
        where = f"measured on {self.chip}, {self.date}"
        return f"{where}: {self.ratio:.2g} times the speed of XLA's product"


H200 = "NVIDIA H200"
# 1 row was measured, and 16; packed weights meet any number, as to unpack them takes longer.
ONE, MORE = (1, 1), (2, math.inf)
ROWS = (
    Row("pallas_gpu", H200, "0.12", MXFP4, 2**22, ONE, 3.3, "2026-11-26"),
    Row("pallas_gpu", H200, "0.12", MXFP4, 2**22, MORE, 3.3, "2026-11-26"),
    Row("pallas_gpu", H200, "0.12", MXFP4, 2**24, ONE, 6.2, "2026-11-26"),
    Row("pallas_gpu", H200, "0.12", MXFP4, 2**24, MORE, 5.8, "2026-11-26"),
    Row("pallas_gpu", H200, "0.12", MXFP4, 2**26, ONE, 5.7, "2026-11-26"),
    Row("pallas_gpu", H200, "0.12", MXFP4, 2**26, MORE, 5.5, "2026-11-26"),
    Row("pallas_gpu", H200, "0.12", MXFP4, 2**28, ONE, 3.1, "2026-11-26"),
    Row("pallas_gpu", H200, "0.12", MXFP4, 2**28, MORE, 3.8, "2026-11-26"),
    Row("pallas_gpu", H200, "0.12", MXFP8_E4M3, 2**22, ONE, 2.4, "2026-11-26"),
    Row("pallas_gpu", H200, "0.12", MXFP8_E4M3, 2**22, MORE, 2.4, "2026-11-26"),
    Row("pallas_gpu", H200, "0.12", MXFP8_E4M3, 2**24, ONE, 3.9, "2026-11-26"),
    Row("pallas_gpu", H200, "0.12", MXFP8_E4M3, 2**24, MORE, 3.8, "2026-11-26"),
    Row("pallas_gpu", H200, "0.12", MXFP8_E4M3, 2**26, ONE, 6.1, "2026-11-26"),
    Row("pallas_gpu", H200, "0.12", MXFP8_E4M3, 2**26, MORE, 6.0, "2026-11-26"),
    Row("pallas_gpu", H200, "0.12", MXFP8_E4M3, 2**28, ONE, 5.4, "2026-11-26"),
    Row("pallas_gpu", H200, "0.12", MXFP8_E4M3, 2**28, MORE, 5.8, "2026-11-26"),
    Row("pallas_gpu", H200, "0.12", NVFP4, 2**22, ONE, 4.0, "2026-11-26"),
    Row("pallas_gpu", H200, "0.12", NVFP4, 2**22, MORE, 3.9, "2026-11-26"),
    Row("pallas_gpu", H200, "0.12", NVFP4, 2**24, ONE, 6.8, "2026-11-26"),
    Row("pallas_gpu", H200, "0.12", NVFP4, 2**24, MORE, 6.7, "2026-11-26"),
    Row("pallas_gpu", H200, "0.12", NVFP4, 2**26, ONE, 5.5, "2026-11-26"),
    Row("pallas_gpu", H200, "0.12", NVFP4, 2**26, MORE, 5.9, "2026-11-26"),
    Row("pallas_gpu", H200, "0.12", NVFP4, 2**28, ONE, 3.2, "2026-11-26"),
    Row("pallas_gpu", H200, "0.12", NVFP4, 2**28, MORE, 3.8, "2026-11-26"),
)
# GPUs that differ from a measured one in a slower memory alone: they gain as much at least.
_ALIKE = {"NVIDIA H100 80GB HBM3": H200}


def row_about(call: Call, target: Target) -> Row | None:
    """What was measured of a call on one device of a machine; None if nothing was."""
    if target.device_kind is None or target.num_devices > 1 or rejects_symbolic(call):
        return None
    match call:
        # The rows of their products are unknown.
        case PackCall(weights=weights, lhs_format=None) if not weights.axes.batch:
            packed_by, rows, dtypes = None, None, {call.dtype} - {None}
        case MatmulCall(lhs=lhs, rhs=weights) if lhs.format is None and not call.num_batch:
            packed_by, rows, dtypes = weights.packed_by, lhs.rows, {lhs.dtype, call.out_dtype}
        case _:
            return None
    chip = _ALIKE.get(target.device_kind, target.device_kind)
    series = "{}.{}".format(*jax.__version_info__)
    fitting = (
        row
        for row in ROWS
        if (row.chip, row.jax, row.format) == (chip, series, weights.format)
        and row.elements // 4 < math.prod(weights.shape) <= row.elements
        and (rows is None or (packed_by == row.backend and row.rows[0] <= rows <= row.rows[1]))
        and dtypes <= {np.dtype("bfloat16")}
    )
    return max(fitting, key=lambda row: row.ratio, default=None)
