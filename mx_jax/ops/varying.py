"""Sums and maxima over what differs from shard to shard below shard_map."""

import jax
import jax.numpy as jnp
from jax import lax

from mx_jax.codecs.explicit_axes import varying


def sum_over(bar: jax.Array, own: frozenset[str]) -> jax.Array:
    """A cotangent summed over the shard_map axes along which its value did not vary.

    Args:
      bar: the cotangent, of one shard's share.
      own: the axes along which the value varies.
    """
    extra = varying(bar) - own
    return lax.psum(bar, tuple(sorted(extra))) if extra else bar


def max_like(value: jax.Array, state: jax.Array) -> jax.Array:
    """The largest over vmap's lanes and shard_map's shards that share a state.

    With `check_vma=False` JAX does not say what differs: all axes of the mesh count then.
    """
    axes = frozenset(jax.sharding.get_abstract_mesh().manual_axes)
    if any(varying(lax.axis_index(axis)) for axis in axes):
        axes = varying(value) - varying(state)
    value = lax.pmax(value, tuple(sorted(axes))) if axes else value
    return _max_of_lanes(value, state)


@jax.custom_batching.custom_vmap
def _max_of_lanes(value: jax.Array, state: jax.Array) -> jax.Array:
    del state
    return value


@_max_of_lanes.def_vmap
def _max_of_lanes_vmap(axis_size, in_batched, value, state):
    value_batched, state_batched = in_batched
    if state_batched:
        # Lanes with states of their own are from here on parts of one value.
        if not value_batched:
            value = jnp.broadcast_to(value, (axis_size, *value.shape))
        return _max_of_lanes(value, state), True
    return _max_of_lanes(jnp.max(value, axis=0) if value_batched else value, state), False
