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
      ratio: time of XLA's product of the same weights over the kernel's: the least of all rows.
      date: ISO day.
    """

    backend: str
    chip: str
    jax: str
    format: BlockFormat
    elements: int
    ratio: float
    date: str

    def __str__(self) -> str:
        where = f"measured on {self.chip}, {self.date}"
        return f"{where}: {self.ratio:.2g} times the speed of XLA's product"


H200 = "NVIDIA H200"
# 1 row was measured, and 16; packed weights meet any number, as to unpack them takes longer.
ROWS = (
    Row("pallas_gpu", H200, "0.12", MXFP4, 2**22, 3.3, "2026-11-26"),
    Row("pallas_gpu", H200, "0.12", MXFP4, 2**24, 5.8, "2026-11-26"),
    Row("pallas_gpu", H200, "0.12", MXFP4, 2**26, 5.5, "2026-11-26"),
    Row("pallas_gpu", H200, "0.12", MXFP4, 2**28, 3.1, "2026-11-26"),
    Row("pallas_gpu", H200, "0.12", MXFP8_E4M3, 2**22, 2.4, "2026-11-26"),
    Row("pallas_gpu", H200, "0.12", MXFP8_E4M3, 2**24, 3.8, "2026-11-26"),
    Row("pallas_gpu", H200, "0.12", MXFP8_E4M3, 2**26, 6.0, "2026-11-26"),
    Row("pallas_gpu", H200, "0.12", MXFP8_E4M3, 2**28, 5.4, "2026-11-26"),
    Row("pallas_gpu", H200, "0.12", NVFP4, 2**22, 3.9, "2026-11-26"),
    Row("pallas_gpu", H200, "0.12", NVFP4, 2**24, 6.7, "2026-11-26"),
    Row("pallas_gpu", H200, "0.12", NVFP4, 2**26, 5.5, "2026-11-26"),
    Row("pallas_gpu", H200, "0.12", NVFP4, 2**28, 3.2, "2026-11-26"),
)
# GPUs that differ from a measured one in a slower memory alone: they gain as much at least.
_ALIKE = {"NVIDIA H100 80GB HBM3": H200}


def row_about(call: Call, target: Target) -> Row | None:
    """What was measured of a call on one device of a machine; None if nothing was."""
    if target.device_kind is None or target.num_devices > 1 or rejects_symbolic(call):
        return None
    match call:
        case PackCall(weights=weights, lhs_format=None) if not weights.axes.batch:
            dtypes = {call.dtype} - {None}
        case MatmulCall(lhs=lhs, rhs=weights) if lhs.format is None and not call.num_batch:
            dtypes = {lhs.dtype, call.out_dtype}
        case _:
            return None
    chip = _ALIKE.get(target.device_kind, target.device_kind)
    series = "{}.{}".format(*jax.__version_info__)
    fitting = (
        row
        for row in ROWS
        if (row.chip, row.jax, row.format) == (chip, series, weights.format)
        and row.elements // 4 < math.prod(weights.shape) <= row.elements
        and (isinstance(call, PackCall) or weights.packed_by == row.backend)
        and dtypes <= {np.dtype("bfloat16")}
    )
    return max(fitting, key=lambda row: row.ratio, default=None)
