"""What XLA makes of the cudnn backend's products on a B200; prints the calls of each, as JSON.

    python tests/gpu/compile_cudnn.py

A process of its own, as `compile_for.py` is.
"""

import json
import os
import re

os.environ["JAX_PLATFORMS"] = "cpu"

import numpy as np

from mx_jax.backends.cudnn import CUDNN, PAIRS
from mx_jax.testing.cases import MatmulCase
from tests.gpu.compile_for import GPUS, compile_on

# Rows and k that fill no tile, an ordinary shape, and several batch and contracted axes.
SHAPES = (
    dict(m=(1,), n=(7,), k=(96,)),
    dict(m=(256,), n=(512,), k=(1024,)),
    dict(batch=(2, 3), m=(2, 5), n=(9,), k=(2, 64)),
)


def calls(case: MatmulCase) -> list[str]:
    """Custom calls and dots of the compiled product."""
    operands = case.operands(np.random.default_rng(0))

    def product(lhs, rhs):
        return CUDNN.run(case.call, lhs, rhs)

    text = compile_on(GPUS["sm_100a"], product, operands).as_text()
    return re.findall(r'custom_call_target="([^"]*)"', text) + re.findall(r"\bdot\(", text)


if __name__ == "__main__":
    cases = [
        MatmulCase(lhs=lhs, rhs=rhs, out_dtype=out_dtype, **shape)
        for (lhs, rhs) in PAIRS
        for shape, out_dtype in zip(SHAPES, ("float32", "bfloat16", "float16"), strict=True)
    ]
    print(json.dumps({str(case): calls(case) for case in cases}))
