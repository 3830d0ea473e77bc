"""Compile casts for a GPU on a machine without one; ptxas's reports land in a folder.

    MOSAIC_GPU_DUMP_TO=<existing folder> python tests/gpu/compile_quantize.py sm_90a \
        mxfp8_e4m3:bfloat16:rows mxfp4:float32:both

Prints, as JSON, how many elements a thread of each cast quantizes, in order. The files' names end
in the count of compiles before.

    python tests/gpu/compile_quantize.py product mxfp8_e4m3

Prints, as JSON, the operations of a Blackwell product of two operands that were just quantized.

A process of its own, as `compile_for.py` is.
"""

import json
import math
import os
import re
import sys

os.environ["JAX_PLATFORMS"] = "cpu"

import jax

from mx_jax.backends.pallas_gpu.casts.views import View
from mx_jax.testing.cases import MatmulCase, QuantizeCase
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


def product_operations(name: str) -> list[str]:
    """What is left of a product and its two casts once XLA has optimized them."""
    format, gpu, shape = FORMATS[name], GPUS["sm_100a"], (512, 1024)
    backend = kernel_on(gpu)
    cast = cast_by(backend, format, "bfloat16", (-1,), shape)
    rows, k = (shape[0],), (shape[1],)
    case = MatmulCase(lhs=format, rhs=format, m=rows, n=rows, k=k, out_dtype="bfloat16")

    def product(x: jax.Array, w: jax.Array) -> jax.Array:
        return backend.run(case.call, *cast(x), *cast(w))

    operands = (jax.ShapeDtypeStruct(shape, "bfloat16"),) * 2
    module = compile_on(gpu, product, operands).as_text()
    entry = module[module.index("\nENTRY") :]
    return re.findall(r"= (?:\(.*?\)|\S+) ([a-z-]+)\(", entry)


if __name__ == "__main__":
    what, *names = sys.argv[1:]
    if what == "product":
        print(json.dumps([product_operations(name) for name in names]))
    else:
        print(json.dumps([compile_cast(GPUS[what], *name.split(":")) for name in names]))
