"""Registers to memory, for every version of JAX that kernels run on.

Device code; imports Mosaic GPU, so only kernels import this file.
"""

from typing import Any

from jax.experimental.pallas import mosaic_gpu

# Its declared types differ between versions of JAX, and none fits its own use.
plgpu: Any = mosaic_gpu


def store(ref: Any, value: Any) -> None:
    """Write an array from where its layout has it, however many bytes of a thread lie together."""
    if hasattr(plgpu, "store"):
        plgpu.store(ref, value, optimized=False)
    else:
        # Before JAX 0.12 an assignment is the same; what it reads first, nobody uses.
        ref[...] = value
