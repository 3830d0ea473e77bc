"""Mosaic GPU's interpreter, by JAX version, and operands, for the tests of GPU kernels."""

import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mx_jax.backends.pallas_gpu import architecture
from mx_jax.mxarray import MXArray
from mx_jax.testing.cases import MatmulCase

_VERSIONS = [row.min_jax for row in architecture.ARCHITECTURES]
_MIN_JAX, _NEWER = min(_VERSIONS), max(_VERSIONS)
needs_mosaic = pytest.mark.skipif(
    jax.__version_info__ < _MIN_JAX or sys.version_info < (3, 12),
    reason=f"Mosaic GPU's interpreter needs jax>={'.'.join(map(str, _MIN_JAX))} and Python 3.12",
)


# Below it the interpreter fails on these kernels, which are rejected there too.
needs_newer_mosaic = pytest.mark.skipif(
    jax.__version_info__ < _NEWER or sys.version_info < (3, 12),
    reason=f"needs jax>={'.'.join(map(str, _NEWER))} and Python 3.12",
)


def with_any_jax(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the kernels had been compiled for every version of JAX."""
    rows = [dataclasses.replace(row, min_jax=(0, 0)) for row in architecture.ARCHITECTURES]
    monkeypatch.setattr(architecture, "ARCHITECTURES", tuple(rows))


def interpreter() -> Any:
    """Parameters that interpret a kernel; a race raises, with both accesses in the message."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    name = "InterpretParams" if hasattr(plgpu, "InterpretParams") else "InterpretGPUParams"
    return getattr(plgpu, name)(detect_races=True)


def reset_interpreter() -> None:
    """What the interpreter asks for after a kernel that failed."""
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    gpu_callbacks.reset_gpu_interpret_mode_state()


def race_of(run: Callable[[], jax.Array], capfd: pytest.CaptureFixture[str]) -> bool:
    """Whether the interpreter finds a race: it raises, or before JAX 0.12 only prints.

    Or a barrier that nobody waited for before it was passed again, whichever comes first.
    """
    try:
        jax.block_until_ready(run())
    except jax.errors.JaxRuntimeError as error:
        return any(what in str(error) for what in ("RACE DETECTED", "no threads observed"))
    finally:
        reset_interpreter()
    return "RACE DETECTED" in "".join(capfd.readouterr())


def mostly_slow(cases: Sequence[Any], *quick: Any) -> list[Any]:
    """Parameters of a test: all cases, of which only some run by default."""
    return [case if case in quick else pytest.param(case, marks=pytest.mark.slow) for case in cases]


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


def whole_numbers(rng: np.random.Generator, case: MatmulCase) -> tuple[jax.Array, MXArray]:
    """High precision by quantized, of sums that are exact in float32 in any order."""
    lhs, rhs = case.operands(rng, octaves=1)
    assert isinstance(rhs, MXArray)
    return jnp.asarray(rng.integers(-8, 9, lhs.shape), case.dtype), few_octaves(rng, rhs)
