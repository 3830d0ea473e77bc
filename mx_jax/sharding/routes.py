"""Which rows go to which device of a mesh axis, and back: groups of any length, shapes static.

A device has room for `capacity` rows of each sender, one sender's after the other's. Platforms that
can send as many rows as there are do; elsewhere all of the room is sent.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from mx_jax.codecs.explicit_axes import vary_alike


class Route(NamedTuple):
    """How rows move, int32, on one of d devices; p = d times capacity.

    Attributes:
      sent: `[d]`, rows to each device.
      starts: `[d]`, the first of them among the device's own rows.
      received: `[d]`, rows from each device.
      returned: `[d]`, the first of them among the rows of the device that sent them.
      slot: `[p]`, where a row by expert is among those by sender; p behind the last.
      position: `[p]`, the inverse.
      sizes: rows of each of the device's own experts.
    """

    sent: jax.Array
    starts: jax.Array
    received: jax.Array
    returned: jax.Array
    slot: jax.Array
    position: jax.Array
    sizes: jax.Array


def route(group_sizes: jax.Array, num_rows: int, axis_name: Any, capacity: int) -> Route:
    """The route of rows that lie by expert, an equal part of the experts on each device.

    Args:
      group_sizes: int32 `[experts]`, the device's own rows for each of all experts.
      num_rows: of the device; what group sizes add up to beyond it is cut off.
      axis_name: of the devices.
      capacity: rows that a device sends to one device at most; those beyond it stay.
    """
    devices, me = lax.axis_size(axis_name), lax.axis_index(axis_name)
    every = lax.all_gather(_at_most(group_sizes, num_rows), axis_name)
    # [sender, receiver, its experts]
    wanted = every.reshape(devices, devices, -1)
    totals = wanted.sum(2)
    starts = jnp.cumsum(totals, axis=1) - totals
    kept = jax.vmap(jax.vmap(functools.partial(_at_most, most=capacity)))(wanted)
    arriving = kept[:, me]
    slot = _slots(arriving, capacity)
    empty = jnp.full_like(slot, slot.size)
    return Route(
        sent=kept[me].sum(1),
        starts=starts[me],
        received=arriving.sum(1),
        returned=starts[:, me],
        slot=slot,
        position=empty.at[slot].set(jnp.arange(slot.size, dtype=jnp.int32), mode="drop"),
        sizes=arriving.sum(0),
    )


def _at_most(sizes: jax.Array, most: int) -> jax.Array:
    """Sizes that add up to no more than `most`: the last ones are cut off."""
    sizes = jnp.minimum(sizes, most)
    ends = lax.associative_scan(lambda a, b: jnp.minimum(a, most - b) + b, sizes)
    return jnp.diff(ends, prepend=jnp.zeros_like(ends[:1]))


def _slots(arriving: jax.Array, capacity: int) -> jax.Array:
    """Where the rows of each expert, in the order of their senders, are among those by sender.

    Args:
      arriving: int32 `[sender, expert]`.
      capacity: rows between the first rows of two senders.
    """
    senders, experts = arriving.shape
    first = jnp.arange(senders, dtype=jnp.int32)[:, None] * capacity
    first = first + jnp.cumsum(arriving, axis=1) - arriving
    sizes, first = arriving.T.reshape(-1), first.T.reshape(-1)
    ends = jnp.cumsum(sizes)
    row = jnp.arange(senders * capacity, dtype=jnp.int32)
    run = jnp.searchsorted(ends, row, side="right", method="compare_all")
    run = jnp.minimum(run, senders * experts - 1)
    slot = first[run] + row - (ends - sizes)[run]
    return jnp.where(row < ends[-1], slot, senders * capacity).astype(jnp.int32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def go(axis_name: Any, num_rows: int, x: jax.Array, to: Route) -> jax.Array:
    """A device's rows `[m, c]` to where their experts are: `[p, c]` by expert, zeros behind."""
    del num_rows
    arrived = lax.platform_dependent(
        x,
        to,
        cpu=functools.partial(_go_padded, axis_name),
        default=functools.partial(_go_ragged, axis_name),
    )
    return _take(arrived, to.slot)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def come_back(axis_name: Any, num_rows: int, y: jax.Array, to: Route) -> jax.Array:
    """Undo `go`: `[p, c]` by expert to `[m, c]`, zeros in rows that stayed."""
    return lax.platform_dependent(
        _take(y, to.position),
        to,
        cpu=functools.partial(_back_padded, axis_name, num_rows),
        default=functools.partial(_back_ragged, axis_name, num_rows),
    )


def _take(x: jax.Array, rows: jax.Array) -> jax.Array:
    return jnp.take(x, rows, axis=0, mode="fill", fill_value=0)


def _capacity(to: Route) -> int:
    return to.slot.size // to.sent.size


def _go_padded(axis_name: Any, x: jax.Array, to: Route) -> jax.Array:
    """All of the room moves: XLA on CPU has no all-to-all of ragged arrays."""
    row = jnp.arange(_capacity(to), dtype=jnp.int32)
    source = jnp.where(row < to.sent[:, None], to.starts[:, None] + row, x.shape[0])
    return lax.all_to_all(_take(x, source.reshape(-1)), axis_name, 0, 0, tiled=True)


def _go_ragged(axis_name: Any, x: jax.Array, to: Route) -> jax.Array:
    room = jnp.zeros((to.slot.size, x.shape[1]), x.dtype)
    mine = jnp.full_like(to.sent, lax.axis_index(axis_name) * _capacity(to))
    return _ragged(axis_name, x, room, to.starts, to.sent, mine, to.received)


def _back_padded(axis_name: Any, num_rows: int, y: jax.Array, to: Route) -> jax.Array:
    capacity = _capacity(to)
    back = lax.all_to_all(y, axis_name, 0, 0, tiled=True)
    row = jnp.arange(num_rows, dtype=jnp.int32)
    device = jnp.searchsorted(to.starts, row, side="right", method="compare_all") - 1
    index = row - to.starts[device]
    slot = jnp.where(index < to.sent[device], device * capacity + index, to.slot.size)
    return _take(back, slot)


def _back_ragged(axis_name: Any, num_rows: int, y: jax.Array, to: Route) -> jax.Array:
    room = jnp.zeros((num_rows, y.shape[1]), y.dtype)
    senders = jnp.arange(to.sent.size, dtype=jnp.int32) * _capacity(to)
    return _ragged(axis_name, y, room, senders, to.received, to.returned, to.sent)


def _ragged(axis_name: Any, x: jax.Array, room: jax.Array, *numbers: jax.Array) -> jax.Array:
    return lax.ragged_all_to_all(*vary_alike((x, room, *numbers)), axis_name=axis_name)


def _go_fwd(axis_name, num_rows, x, to):
    return go(axis_name, num_rows, x, to), to


def _go_bwd(axis_name, num_rows, to, bar):
    return come_back(axis_name, num_rows, bar, to), None


def _back_fwd(axis_name, num_rows, y, to):
    return come_back(axis_name, num_rows, y, to), to


def _back_bwd(axis_name, num_rows, to, bar):
    return go(axis_name, num_rows, bar, to), None


go.defvjp(_go_fwd, _go_bwd)
come_back.defvjp(_back_fwd, _back_bwd)
