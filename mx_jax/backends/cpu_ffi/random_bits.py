"""Random bits for stochastic rounding by the compiled handler: those of `jax.random.bits`.

XLA compiles threefry anew for each shape, which takes longer than the rest of a layer.
"""

import jax
import numpy as np

from mx_jax.backends.calls import RandomBitsCall, rejects_symbolic
from mx_jax.backends.cpu_ffi import library
from mx_jax.backends.cpu_ffi.handler import Handler, hashable

TARGET = "mx_jax_cpu_random_bits"


def rejects(call: RandomBitsCall) -> str | None:
    """Why the handler does not take a call, or None."""
    loaded = library.load()
    if isinstance(loaded, str) or TARGET not in loaded.targets:
        return "was built without random bits; build it again"
    if call.implementation != "threefry2x32" or not call.is_partitionable:
        return (
            "draws by jax_threefry_partitionable alone, got implementation="
            f"{call.implementation!r}, partitionable={call.is_partitionable}"
        )
    if not call.shape:
        return "draws for an axis at least, got shape=()"
    return rejects_symbolic(call)


def random_bits(data: jax.Array, call: RandomBitsCall) -> jax.Array:
    """int32 of `call.shape`, by the handler."""
    names = [f"e{axis}" for axis in range(len(call.shape))]
    handler = Handler(
        target=TARGET,
        axes=f"*b 2 -> *b ({' '.join(names)})",
        dtypes=(np.dtype("int32"),),
        attributes=hashable({"width": np.int32(call.width)}),
        sizes=tuple(zip(names, call.shape, strict=True)),
    )
    (bits,) = handler(data)
    return bits
