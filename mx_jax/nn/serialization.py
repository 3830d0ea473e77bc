"""MXArrays and key-value caches in `flax.serialization`.

State dicts hold their arrays, and of MXArrays what they are: a cache needs a target.

Linen takes every attribute of a module apart and puts it together again this way, also while it is
traced: so nothing is computed here, and codes lie one in a byte.
"""

import dataclasses
from typing import Any

import jax
from flax import serialization

from mx_jax.mxarray import MXArray
from mx_jax.nn.cache import CacheRows, KVCache


def _state(x: MXArray) -> dict[str, Any]:
    # Late, as below: whoever imports the layers pays for no reader of checkpoints.
    from mx_jax.checkpoint import wire

    state = {
        wire.DESCRIPTION: wire.description(x, packed=False),
        wire.CODES: x.codes,
        wire.SCALES: x.scales,
    }
    return state if x.tensor_scale is None else state | {wire.TENSOR_SCALE: x.tensor_scale}


def _restored(target: MXArray, state: Any) -> MXArray:
    """What was saved; its shape must be the target's, its format may be another."""
    from mx_jax.checkpoint import wire

    own = {
        wire.CODES: target.codes,
        wire.SCALES: target.scales,
        wire.TENSOR_SCALE: target.tensor_scale,
    }
    if all(state.get(name) is array for name, array in own.items()):
        return target
    found = wire.from_wire(state)
    if not isinstance(found, MXArray) or found.shape != target.shape:
        raise ValueError(
            f"flax.serialization: needs the state of an MXArray of shape={target.shape}, got "
            f"{type(found).__name__} of shape={getattr(found, 'shape', None)}"
        )
    return found


def _arrays(x: Any) -> dict[str, Any]:
    """The state dict of a cache, or of its rows: what of it is arrays."""
    children, _ = jax.tree_util.default_registry.flatten_one_level_with_keys(x)
    return {
        key.name: serialization.to_state_dict(child) for key, child in children if child is not None
    }


def _with_arrays(target: Any, state: Any) -> Any:
    """What was saved; the target's own fields say what it is."""
    own = _arrays(target)
    if own.keys() != state.keys():
        raise ValueError(
            f"flax.serialization: needs the state of a {type(target).__name__} with the fields "
            f"{sorted(own)}, got {sorted(state)}; take a target of the same format"
        )
    restored = {
        name: serialization.from_state_dict(getattr(target, name), part, name)
        for name, part in state.items()
    }
    return dataclasses.replace(target, **restored)


def register() -> None:
    """Tell `flax.serialization` of MXArrays, and of key-value caches."""
    serialization.register_serialization_state(MXArray, _state, _restored, override=True)
    for own in (CacheRows, KVCache):
        serialization.register_serialization_state(own, _arrays, _with_arrays, override=True)
