"""Mosaic GPU's interpreter, by JAX version, for the tests of GPU kernels."""

import sys
from collections.abc import Sequence
from typing import Any

import jax
import pytest

from mx_jax.backends.pallas_gpu.matmul import MIN_JAX

needs_mosaic = pytest.mark.skipif(
    jax.__version_info__ < MIN_JAX or sys.version_info < (3, 12),
    reason=f"Mosaic GPU's interpreter needs jax>={'.'.join(map(str, MIN_JAX))} and Python 3.12",
)


def interpreter() -> Any:
    """Parameters that interpret a kernel; a race raises, with both accesses in the message."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    name = "InterpretParams" if hasattr(plgpu, "InterpretParams") else "InterpretGPUParams"
    return getattr(plgpu, name)(detect_races=True)


def reset_interpreter() -> None:
    """What the interpreter asks for after a kernel that failed."""
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    gpu_callbacks.reset_gpu_interpret_mode_state()


def mostly_slow(cases: Sequence[Any], *quick: Any) -> list[Any]:
    """Parameters of a test: all cases, of which only some run by default."""
    return [case if case in quick else pytest.param(case, marks=pytest.mark.slow) for case in cases]
