"""Bytes that XLA's kernels and this package's move to cast one tensor, counted in compiled code.

    python tests/gpu/traffic.py sm_90a

A process of its own, as `compile_for` is. One line for each cast, as JSON: what was cast, whose
kernels, how many of them, bytes an element. Counted, not measured: every kernel of the optimized
module is taken to read each of its operands once and to write its results, and no cache to help.
"""

import dataclasses
import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp

from mx_jax import formats
from mx_jax.backends.calls import QuantizeBothCall
from mx_jax.backends.pallas_gpu import backend_for
from mx_jax.backends.pallas_gpu.architecture import architecture_of
from mx_jax.backends.reference import REFERENCE
from mx_jax.backends.target import Backend
from mx_jax.testing.cases import QuantizeCase, dequantize_call
from tests.gpu.compile_for import GPUS, Gpu, compile_on

SHAPE = (8192, 8192)
AXES = {"rows": (-1,), "columns": (-2,), "both": (-1, -2)}
# What moves nothing of its own.
_FREE = ("parameter", "bitcast", "get-tuple-element", "tuple", "constant")


def kernels(module: str, computation: str = "ENTRY") -> Iterator[int]:
    """Bytes that each kernel of an optimized module's entry reads and writes; of loops, in one
    iteration."""
    sizes: dict[str, int] = {}
    for line in module[module.index(f"\n{computation} ") :].partition("\n}")[0].splitlines()[2:]:
        found = re.match(r"\s+(?:ROOT )?%(\S+) = (\(.*?\)|\S+) ([a-z-]+)\((.*?)\)", line)
        if not found:
            continue
        name, type_, operation, operands = found.groups()
        sizes[name] = sum(_bytes(*array) for array in re.findall(r"([a-z]\w+)\[([\d,]*)\]", type_))
        if operation == "while":
            for part in re.findall(r"(?:condition|body)=(%[\w.-]+)", line):
                yield from kernels(module, part)
        elif operation not in _FREE:
            read = set(re.findall(r"%([\w.-]+)", operands))
            yield sizes[name] + sum(sizes[operand] for operand in read)


def _bytes(dtype: str, lengths: str) -> int:
    digits = re.search(r"\d+", dtype)
    # Booleans have none, and take a byte.
    bits = int(digits[0]) if digits else 8
    return math.prod(int(n) for n in lengths.split(",") if n) * bits // 8


def kernel_on(gpu: Gpu) -> Backend:
    """This package's kernels, compiled."""
    return backend_for(architecture=architecture_of(gpu.capability))


def cast_by(
    backend: Backend,
    format: formats.BlockFormat,
    dtype: str,
    axes: tuple[int, ...],
    shape: tuple[int, int] = SHAPE,
) -> Callable[[jax.Array], Any]:
    """A tensor quantized along one axis or two: in one call where the backend takes both."""
    calls = [QuantizeCase(format=format, shape=shape, dtype=dtype, axis=a).call for a in axes]
    # As if it were known: what finds it reads the tensor once more.
    scale = jnp.ones((1, 1)) if format.tensor_scale else None
    if len(calls) > 1 and backend != REFERENCE:
        both = QuantizeBothCall(first=calls[0], second=calls[1])
        return lambda x: backend.run(both, x, (None, None), scale)
    return lambda x: [backend.run(call, x, None, scale) for call in calls]


def quantizing(gpu: Gpu) -> Iterator[dict[str, Any]]:
    """Every way to quantize, by XLA's fusions and by the kernel."""
    backends = {
        "XLA": REFERENCE,
        "kernel": kernel_on(gpu),
    }
    for dtype in ("bfloat16", "float32"):
        x = jax.ShapeDtypeStruct(SHAPE, jnp.dtype(dtype))
        for way, axes in AXES.items():
            for name, backend in backends.items():
                cast = cast_by(backend, formats.MXFP8_E4M3, dtype, axes)
                found = list(kernels(compile_on(gpu, cast, (x,)).as_text()))
                yield summary(f"quantize {way}", dtype, name, found)


def dequantizing(gpu: Gpu) -> dict[str, Any]:
    """By XLA's fusion."""
    case = QuantizeCase(format=formats.MXFP8_E4M3, shape=SHAPE, dtype="bfloat16")
    call = dequantize_call(case)
    backend = REFERENCE
    x = jax.ShapeDtypeStruct(SHAPE, call.dtype)
    q = jax.eval_shape(lambda x: backend.run(case.call, x, None, None), x)

    def values(codes: jax.Array, scales: jax.Array) -> jax.Array:
        parts = {"codes": codes, "scales": scales}
        return backend.run(call, dataclasses.replace(q, **parts))

    found = list(kernels(compile_on(gpu, values, (q.codes, q.scales)).as_text()))
    return summary("dequantize", "bfloat16", "XLA", found)


def summary(what: str, dtype: str, by: str, found: list[int]) -> dict[str, Any]:
    """One line of the table."""
    elements = math.prod(SHAPE)
    bytes_ = round(sum(found) / elements, 3)
    return {"what": what, "dtype": dtype, "by": by, "kernels": len(found), "bytes": bytes_}


if __name__ == "__main__":
    target = GPUS[sys.argv[1]]
    for line in (*quantizing(target), dequantizing(target)):
        print(json.dumps(line))
