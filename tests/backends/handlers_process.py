"""Random casts and products by the compiled handlers: `handlers_process.py [cases [seed]]`.

A program of its own, since MX_JAX_CPU_ISA is read once a process. Prints what it compared.
"""

import dataclasses
import hashlib
import math
import sys

import jax
import jax.numpy as jnp
import numpy as np

from mx_jax import formats
from mx_jax.backends.calls import QuantizeCall
from mx_jax.backends.cpu_ffi import CPU_FFI, library, products
from mx_jax.backends.target import Target
from mx_jax.reference.scale_rules import SCALE_RULES
from mx_jax.testing.backend_suite import (
    check_dequantize,
    check_matmul,
    check_quantize_both,
    compare_casts,
)
from mx_jax.testing.cases import MatmulCase, QuantizeBothCase, QuantizeCase
from mx_jax.testing.draw import draw_any_bits

CPU = Target(platform="cpu")


def draw_case(rng: np.random.Generator) -> QuantizeCase:
    """A format, a rule that fits it, and any shape."""
    format = formats.BLOCK_FORMATS[rng.integers(len(formats.BLOCK_FORMATS))]
    fitting = [rule for rule in SCALE_RULES if format.scale.kind in rule.kinds]
    rules = [rule.name for rule in fitting if not rule.rounding.random_bits]
    shape = tuple(int(n) for n in rng.integers(1, 12, rng.integers(1, 3)))
    width = int(rng.integers(1, 12)) * 32 if rng.random() < 0.5 else int(rng.integers(1, 300))
    whole = format.block[0] != 1 or not isinstance(format.block[1], int)
    return QuantizeCase(
        format=format,
        shape=(*shape, width),
        axis=int(rng.choice([-1, -1, 0, -2])),
        block_size=None if whole else [None, None, 1, 7, 16, 64, 128][rng.integers(7)],
        scale_rule=str(rng.choice(rules)),
        rounding=str(rng.choice(["nearest", "nearest", "away", "toward_zero", "stochastic"])),
        dtype=str(rng.choice(["float32", "bfloat16", "float16"])),
    )


def draw_values(rng: np.random.Generator, call: QuantizeCall) -> jax.Array:
    """Any bits; or tame numbers, mostly zeros, ties, subnormals."""
    wild = draw_any_bits(rng, call.shape, call.dtype)
    kind = rng.integers(4)
    if kind == 1:
        tame = rng.standard_normal(call.shape) * 2.0 ** rng.integers(-10, 10)
        wild = (tame * (rng.random(call.shape) < rng.choice([0.02, 1.0]))).astype(call.dtype)
    if kind == 2:
        wild = (rng.integers(-2048, 2048, call.shape) / 128).astype(call.dtype)
    if kind == 3:
        sign_and_mantissa = {"float32": 0x807FFFFF, "bfloat16": 0x807F, "float16": 0x83FF}
        bits = wild.view(f"uint{8 * call.dtype.itemsize}")
        wild = (bits & bits.dtype.type(sign_and_mantissa[call.dtype.name])).view(call.dtype)
    return jnp.asarray(wild)


def check(rng: np.random.Generator) -> int:
    """Cast there and back by both, and along two axes in one call; how many are compared."""
    case = draw_case(rng)
    if CPU_FFI.rejects(case.call, CPU):
        return 0
    compare_casts(CPU_FFI, case.call, draw_values(rng, case.call), rng)
    check_dequantize(CPU_FFI, case)
    others = [
        axis
        for axis in range(-len(case.shape), 0)
        if axis != case.axis % len(case.shape) - len(case.shape)
    ]
    other = dataclasses.replace(case, axis=int(rng.choice(others)))
    if rng.random() < 0.3:
        other = dataclasses.replace(other, rounding="away", block_size=None)
    both = QuantizeBothCase(first=case, second=other)
    if not CPU_FFI.rejects(both.call, CPU):
        check_quantize_both(CPU_FFI, both)
    return math.prod(case.shape)


def multiply() -> str:
    """Compare products with float64's; a hash of those of integers, which no set may change."""
    digest = hashlib.sha256()
    shapes: list[dict] = [
        dict(m=(1,), n=(33,), k=(100,)),
        dict(m=(70,), n=(40,), k=(530,), lhs_k_first=True, rhs_k_first=True),
    ]
    pairs = [(f, f) for f in (*formats.MX_FORMATS, formats.NVFP4)]
    pairs += [(None, formats.MXFP4), (None, formats.MXFP8_E5M2)]
    pairs += [(formats.MXFP8_E4M3, formats.MXFP4), (formats.MXINT8, formats.MXFP6_E3M2)]
    for index, (lhs, rhs) in enumerate(pairs):
        for shape in shapes if index % 3 == 0 else shapes[1:]:
            case = MatmulCase(lhs=lhs, rhs=rhs, **shape)
            check_matmul(CPU_FFI, case)
            if lhs is None or "e4m3" in lhs.name or "e5m2" in lhs.name:
                continue
            left, right = case.operands(np.random.default_rng(0))
            digest.update(np.asarray(CPU_FFI.run(case.call, left, right)).tobytes())
    return digest.hexdigest()


def main() -> None:
    """Run the command."""
    cases, seed = (int(text) for text in (*sys.argv[1:], *("40", "0")[len(sys.argv) - 1 :]))
    loaded = library.load()
    if isinstance(loaded, str):
        sys.exit(f"no handlers: {loaded}")
    rng = np.random.default_rng(seed)
    compared = [check(rng) for _ in range(cases)]
    print(f"{loaded.isa}: {sum(map(bool, compared))} casts, {sum(compared)} elements")
    products.FLOAT32_ROWS[loaded.isa] = 2**31  # kernels, not XLA's dot
    print(multiply())


if __name__ == "__main__":
    main()
