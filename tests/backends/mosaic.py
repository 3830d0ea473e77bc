"""Mosaic GPU's interpreter, by JAX version, and operands, for the tests of GPU kernels."""

import dataclasses
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mx_jax
from mx_jax.backends.calls import MatmulCall, PackCall, RaggedCall
from mx_jax.backends.pallas_gpu import backend_for, products, tiles
from mx_jax.backends.target import Backend, Offer
from mx_jax.mxarray import MXArray
from mx_jax.packed import PackedMXArray
from mx_jax.testing.cases import MatmulCase

needs_mosaic = pytest.mark.skipif(
    jax.__version_info__ < tiles.MIN_JAX or sys.version_info < (3, 12),
    reason="Mosaic GPU's interpreter needs jax>=0.12.0 and Python 3.12",
)


def with_any_jax(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the kernels had been compiled for every version of JAX."""
    monkeypatch.setattr(tiles, "MIN_JAX", (0,))


def interpreter() -> Any:
    """Parameters that interpret a kernel; a race raises, with both accesses in the message."""
    from jax.experimental.pallas import mosaic_gpu

    plgpu: Any = mosaic_gpu
    return plgpu.InterpretGPUParams(detect_races=True)


def packed(call: MatmulCall | RaggedCall, rhs: MXArray) -> PackedMXArray:
    """The weights of a product, packed."""
    return products.pack_weights(rhs, PackCall(weights=call.rhs, blocks=rhs.blocks))


def packing_backend() -> Backend:
    """The kernels, which pack a product's weights first: those of cases are not."""
    kernels = backend_for(interpreter())

    def run(lhs: Any, rhs: MXArray, *rest: Any) -> jax.Array:
        return kernels.run(rest[-1], lhs, packed(rest[-1], rhs), *rest[:-1])

    calls = MatmulCall, RaggedCall
    table = tuple(Offer(call=call, rejects=lambda *_: None, run=run) for call in calls)
    return dataclasses.replace(kernels, table=table)


def has_race(run: Callable[[], jax.Array]) -> bool:
    """Whether the interpreter finds a race.

    Or a barrier that nobody waited for before it was passed again, whichever comes first.
    """
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    try:
        jax.block_until_ready(run())
    except jax.errors.JaxRuntimeError as error:
        return any(what in str(error) for what in ("RACE DETECTED", "no threads observed"))
    finally:
        # What the interpreter asks for after a kernel that failed.
        gpu_callbacks.reset_gpu_interpret_mode_state()
    return False


def lowered(run: Callable[..., Any], *operands: Any) -> str:
    """A program for a GPU whose kernels are preferred."""
    with mx_jax.testing.target("cuda", (9, 0)), mx_jax.prefer_backends("pallas_gpu"):
        return jax.jit(run).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()


def few_octaves(rng: np.random.Generator, x: MXArray) -> MXArray:
    """Codes whose sums are exact in float32 in any order: few octaves of float8, else all."""
    element = x.format.element
    codes = rng.integers(0, 1 << element.bits, x.shape).astype(np.uint8)
    if element.kind == "float" and element.bits == 8:
        one = element.bias << element.mantissa_bits
        codes = (codes & 7) + one | (codes & 8) << 4
    x = dataclasses.replace(x, codes=jnp.asarray(codes))
    if x.tensor_scale is None:
        return x
    scales = jnp.asarray(rng.integers(0x30, 0x40, x.scales.shape).astype(np.uint8))
    return dataclasses.replace(x, scales=scales, tensor_scale=x.tensor_scale * 0 + 0.25)


def whole_numbers(rng: np.random.Generator, case: MatmulCase) -> tuple[Any, MXArray]:
    """Operands of a product by a quantized rhs, whose sums are exact in float32 in any order."""
    lhs, rhs = case.operands(rng, octaves=1)
    assert isinstance(rhs, MXArray)
    if isinstance(lhs, MXArray):
        return few_octaves(rng, lhs), few_octaves(rng, rhs)
    return jnp.asarray(rng.integers(-8, 9, lhs.shape), case.dtype), few_octaves(rng, rhs)
