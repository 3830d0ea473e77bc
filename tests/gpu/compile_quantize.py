"""Compile casts for a GPU on a machine without one; ptxas's reports land in a folder.

    MOSAIC_GPU_DUMP_TO=<existing folder> python tests/gpu/compile_quantize.py sm_90a \
        mxfp8_e4m3:bfloat16:rows mxfp4:float32:both

Prints, as JSON, how many elements a thread of each cast quantizes, in order. The files' names end
in the count of compiles before.

A process of its own, as `compile_for.py` is.
"""

import json
import math
import os
import sys

os.environ["JAX_PLATFORMS"] = "cpu"

import jax

from mx_jax.backends.pallas_gpu.views import View
from mx_jax.testing.cases import QuantizeCase
from tests.gpu.compile_for import FORMATS, GPUS, Gpu, compile_on
from tests.gpu.traffic import AXES, cast_by, kernel_on

SHAPE = (4096, 4096)


def compile_cast(gpu: Gpu, name: str, dtype: str, way: str) -> int:
    """One cast of a square array: how many elements a thread quantizes."""
    axes = AXES[way]
    x = jax.ShapeDtypeStruct(SHAPE, dtype)
    compile_on(gpu, cast_by(kernel_on(gpu), FORMATS[name], dtype, axes, SHAPE), (x,))
    cases = [QuantizeCase(format=FORMATS[name], shape=SHAPE, dtype=dtype, axis=a) for a in axes]
    view = View.of(SHAPE, sorted(case.call.blocks[0] for case in cases))
    return math.prod(view.tile(x.dtype.itemsize).shape) // 128


if __name__ == "__main__":
    target, *names = sys.argv[1:]
    print(json.dumps([compile_cast(GPUS[target], *name.split(":")) for name in names]))
