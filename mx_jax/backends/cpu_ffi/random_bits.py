"""Random bits by the compiled handler: those of `jax.random`."""

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
    # A key of `split` and what `fold_in` makes are the same function of their numbers.
    indices = np.array([index for index, _ in call.derivations], np.int64)
    handler = Handler(
        target=TARGET,
        axes=f"*b 2 -> *b ({' '.join(names)})",
        dtypes=(np.dtype("int32"),),
        attributes=hashable({"width": np.int32(call.width), "derivations": indices}),
        sizes=tuple(zip(names, call.shape, strict=True)),
    )
    (bits,) = handler(data)
    return bits
