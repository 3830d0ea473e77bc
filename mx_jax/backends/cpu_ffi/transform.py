"""Block Hadamard transforms by the compiled handler, in sums and differences."""

import jax
import numpy as np

from mx_jax.backends.calls import TransformCall, rejects_symbolic
from mx_jax.backends.cpu_ffi import library
from mx_jax.backends.cpu_ffi.handler import Handler, hashable

TARGET = "mx_jax_cpu_transform"
_LARGEST = 1024


def rejects(call: TransformCall) -> str | None:
    """Why the handler does not take a call, or None."""
    loaded = library.load()
    if isinstance(loaded, str) or TARGET not in loaded.targets:
        return "was built without Hadamard transforms; build it again"
    if call.size > _LARGEST:
        return f"turns groups of at most {_LARGEST}, got size={call.size}"
    return rejects_symbolic(call)


def transform(x: jax.Array, signs: jax.Array, call: TransformCall) -> jax.Array:
    """`reference.hadamard.apply`, or `invert`, by the handler."""
    names = [f"e{axis}" for axis in range(len(call.shape))]
    before, after = " ".join(names[: call.axis]), " ".join(names[call.axis + 1 :])
    handler = Handler(
        target=TARGET,
        axes=f"*b ({before}) k ({after}), *b size -> *b ({before}) turned ({after})",
        dtypes=(np.dtype("float32"),),
        attributes=hashable({"is_inverse": call.length is not None}),
        sizes=(("turned", call.result_length),),
    )
    (turned,) = handler(x, signs)
    return turned
