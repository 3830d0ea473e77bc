"""MXArrays in `flax.serialization`: state dicts and msgpack hold codes at their real width."""

from typing import Any

from flax import serialization

from mx_jax.checkpoint.wire import from_wire, to_wire
from mx_jax.mxarray import MXArray
from mx_jax.packed import PackedMXArray


def _restored(target: MXArray, state: Any) -> MXArray:
    """What was saved; its shape must be the target's, its format may be another."""
    found = from_wire(state)
    if not isinstance(found, MXArray) or found.shape != target.shape:
        raise ValueError(
            f"flax.serialization: needs the state of an MXArray of shape={target.shape}, got "
            f"{type(found).__name__} of shape={getattr(found, 'shape', None)}"
        )
    return found


def _refused(target: PackedMXArray, state: Any) -> Any:
    del state
    raise ValueError(
        f"flax.serialization: {target!r} was packed for this machine, and a state "
        "holds the MXArray of it; restore into target.unpack(), then mx_jax.pack_weights"
    )


def register() -> None:
    """Tell `flax.serialization` of quantized weights."""
    serialization.register_serialization_state(MXArray, to_wire, _restored, override=True)
    serialization.register_serialization_state(PackedMXArray, to_wire, _refused, override=True)
