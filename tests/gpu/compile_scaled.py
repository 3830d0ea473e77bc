"""What XLA makes of the products that `xla_scaled` offers for a GPU; prints JSON.

    python tests/gpu/compile_scaled.py sm_100a

For each pair of formats that the table has in this version of JAX: how many scaled dots the
optimized product holds, and how many dots and calls of libraries beside them. What is lowered of
other forms, and on several devices: tests/backends/test_xla_scaled.py. A process of its own, as
`compile_for.py` is: an error may abort.
"""

import functools
import json
import os
import re
import sys
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np

from mx_jax import formats
from mx_jax.backends import xla_scaled
from mx_jax.backends.target import Target
from mx_jax.testing.cases import MatmulCase
from tests.gpu.compile_for import GPUS, Gpu, compile_on

FORMATS = {
    xla_scaled.kind_of(format): format
    for format in (formats.MXFP8_E4M3, formats.MXFP8_E5M2, formats.MXFP4, formats.NVFP4)
}
SIZES: dict[str, Any] = dict(m=(256,), n=(512,), k=(1024,), dtype="bfloat16", out_dtype="bfloat16")


def compiled(gpu: Gpu, case: MatmulCase) -> str:
    """The text of a product."""
    target = Target(platform="cuda", compute_capability=gpu.capability)
    assert xla_scaled.XLA_SCALED.rejects(case.call, target) is None, case
    product = functools.partial(xla_scaled.XLA_SCALED.run, case.call)
    return compile_on(gpu, product, case.operands(np.random.default_rng(0))).as_text()


def seen(text: str) -> dict[str, int]:
    """How many scaled dots there are, and how many dots and library calls beside them."""
    return {
        "scaled": len(re.findall(r" scaled-dot\(", text)),
        "other": len(re.findall(r" dot\(|custom_call_target=", text)),
    }


if __name__ == "__main__":
    cases = [
        MatmulCase(lhs=FORMATS[lhs], rhs=FORMATS[rhs], **SIZES)
        for (lhs, rhs), version in xla_scaled.NATIVE.items()
        if jax.__version_info__ >= version
    ]
    print(json.dumps({str(case): seen(compiled(GPUS[sys.argv[1]], case)) for case in cases}))
