"""A GPU that is not there: kernels in Mosaic's interpreter, to try the command on a CPU."""

import os
from typing import Any

import jax

from mx_jax.backends.pallas_gpu import backend_for
from mx_jax.backends.pallas_gpu.architecture import SM90
from mx_jax.backends.target import Backend, Target
from mx_jax.measure.cases import Wanted

TARGET = Target(
    platform="cuda",
    compute_capability=SM90.capabilities[0],
    device_kind="Mosaic's interpreter of sm90",
)
# Small enough to be interpreted in seconds: each copy, program and step takes its time.
WANTED = Wanted(
    formats=("mxfp4",),
    sizes=((64, 64),),
    rows=(1,),
    experts=((2, 64, 64),),
    ragged_rows=(8,),
)


def give_threads() -> None:
    """Let the interpreter run all warps of a program at once, before JAX starts.

    They wait for each other, and XLA has a few threads for each CPU device: with one device and two
    cores some kernels would wait forever.
    """
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", 8)


def backend() -> Backend:
    """The Pallas kernels, interpreted."""
    return backend_for(SM90, interpret=_interpreter())


def _interpreter() -> Any:
    # Missing from older versions of JAX, and named otherwise before 0.12.
    from jax.experimental.pallas import mosaic_gpu as plgpu

    name = "InterpretParams" if hasattr(plgpu, "InterpretParams") else "InterpretGPUParams"
    return getattr(plgpu, name)(detect_races=True)
