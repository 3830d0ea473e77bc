"""Random bits and keys by the compiled handlers: those of `jax.random`."""

import jax
import numpy as np

from mx_jax.backends.calls import DeriveKeysCall, RandomBitsCall, RandomCall, rejects_symbolic
from mx_jax.backends.cpu_ffi import library
from mx_jax.backends.cpu_ffi.handler import Handler, hashable

TARGET = "mx_jax_cpu_random_bits"
KEYS = "mx_jax_cpu_derive_keys"


def rejects(call: RandomBitsCall) -> str | None:
    """Why the handler does not take a call, or None."""
    reason = rejects_keys(call)
    if reason is not None:
        return reason
    if not call.shape:
        return "draws for an axis at least, got shape=()"
    return rejects_symbolic(call)


def rejects_keys(call: RandomCall) -> str | None:
    """Why the handlers do not know a key, or None."""
    loaded = library.load()
    if isinstance(loaded, str) or not {TARGET, KEYS} <= loaded.targets:
        return "was built without random bits; build it again"
    if call.implementation != "threefry2x32" or not call.is_partitionable:
        return (
            "draws by jax_threefry_partitionable alone, got implementation="
            f"{call.implementation!r}, partitionable={call.is_partitionable}"
        )
    return None


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


def derive_keys(data: jax.Array, call: DeriveKeysCall) -> jax.Array:
    """The data of keys, uint32 of `call.shape`, by the handler."""
    number = 1 if call.number is None else call.number
    handler = Handler(
        target=KEYS,
        axes="*b 2 -> *b number 2",
        dtypes=(np.dtype("uint32"),),
        attributes=hashable({"first": np.uint32(call.first)}),
        sizes=(("number", number),),
    )
    (keys,) = handler(data)
    return keys[..., 0, :] if call.number is None else keys
