"""MXArrays in `flax.serialization`: state dicts hold their arrays and what they are.

Linen takes every attribute of a module apart and puts it together again this way, also while it is
traced: so nothing is computed here, and codes lie one in a byte.
"""

from typing import Any

from flax import serialization

from mx_jax.checkpoint.wire import CODES, DESCRIPTION, SCALES, TENSOR_SCALE, description, from_wire
from mx_jax.mxarray import MXArray


def _state(x: MXArray) -> dict[str, Any]:
    state = {DESCRIPTION: description(x, packed=False), CODES: x.codes, SCALES: x.scales}
    return state if x.tensor_scale is None else state | {TENSOR_SCALE: x.tensor_scale}


def _restored(target: MXArray, state: Any) -> MXArray:
    """What was saved; its shape must be the target's, its format may be another."""
    own = {CODES: target.codes, SCALES: target.scales, TENSOR_SCALE: target.tensor_scale}
    if all(state.get(name) is array for name, array in own.items()):
        return target
    found = from_wire(state)
    if not isinstance(found, MXArray) or found.shape != target.shape:
        raise ValueError(
            f"flax.serialization: needs the state of an MXArray of shape={target.shape}, got "
            f"{type(found).__name__} of shape={getattr(found, 'shape', None)}"
        )
    return found


def register() -> None:
    """Tell `flax.serialization` of MXArrays."""
    serialization.register_serialization_state(MXArray, _state, _restored, override=True)
