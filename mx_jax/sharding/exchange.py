"""Rows sent to the devices of their experts and back, inside shard_map, as codes."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from mx_jax.codecs import packing
from mx_jax.codecs.explicit_axes import AxisNames, vary_alike
from mx_jax.mxarray import MXArray


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
      most: rows that any device sends to any other at most, the same on all devices.
    """

    sent: jax.Array
    starts: jax.Array
    received: jax.Array
    returned: jax.Array
    slot: jax.Array
    position: jax.Array
    sizes: jax.Array
    most: jax.Array

    @property
    def capacity(self) -> int:
        """Rows that there is room for from each device."""
        return self.slot.size // self.sent.size


def route(group_sizes: jax.Array, num_rows: int, axis_name: AxisNames, capacity: int) -> Route:
    """The route of rows that lie by expert, an equal part of the experts on each device."""
    devices, me = lax.axis_size(axis_name), lax.axis_index(axis_name)
    every = lax.all_gather(_at_most(group_sizes, num_rows), axis_name)
    # [sender, receiver, its experts]
    counts = every.reshape(devices, devices, -1)
    totals = counts.sum(2)
    starts = jnp.cumsum(totals, axis=1) - totals
    kept = jax.vmap(jax.vmap(functools.partial(_at_most, most=capacity)))(counts)
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
        most=kept.sum(2).max(),
    )


def _at_most(sizes: jax.Array, most: int) -> jax.Array:
    """Sizes that add up to no more than `most`: the last ones are cut off."""
    sizes = jnp.minimum(sizes, most)
    ends = lax.associative_scan(lambda a, b: jnp.minimum(a, most - b) + b, sizes)
    return jnp.diff(ends, prepend=jnp.zeros_like(ends[:1]))


def _slots(arriving: jax.Array, capacity: int) -> jax.Array:
    """Where the rows of each expert, in the order of their senders, are among those by sender."""
    row = jnp.arange(capacity, dtype=jnp.int32)
    search = functools.partial(jnp.searchsorted, side="right", method="compare_all")
    # Behind the last row of a sender all experts are past.
    expert = jax.vmap(search, (0, None))(jnp.cumsum(arriving, axis=1), row).reshape(-1)
    slot = jnp.argsort(expert, stable=True).astype(jnp.int32)
    return jnp.where(jnp.arange(slot.size) < arriving.sum(), slot, slot.size)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def exchange(axis_name: AxisNames, num_rows: int, back: bool, x: jax.Array, to: Route) -> jax.Array:
    """A device's rows `[m, c]` to where their experts are, `[p, c]` by expert, zeros behind; or
    back: `[p, c]` by expert to `[m, c]`, zeros in rows that stayed."""
    room = jnp.zeros((num_rows if back else to.slot.size, x.shape[1]), x.dtype)
    slots = jnp.arange(to.sent.size, dtype=jnp.int32) * to.capacity
    share = min(max(-(-num_rows // to.sent.size), 1), to.capacity)
    x = _take(x, to.position) if back else x

    def as_ragged(x: jax.Array, to: Route) -> jax.Array:
        if back:
            sizes = slots, to.received, to.returned, to.sent
        else:
            mine = jnp.full_like(to.sent, lax.axis_index(axis_name) * to.capacity)
            sizes = to.starts, to.sent, mine, to.received
        return lax.ragged_all_to_all(*vary_alike((x, room, *sizes)), axis_name=axis_name)

    def padded(x: jax.Array, to: Route) -> jax.Array:
        here, there = (to.starts, to.sent), (slots, to.received)
        sides = (there, here) if back else (here, there)
        most = to.most if to.capacity > share else None
        return _in_turns(axis_name, x, room, sides, share, most)

    moved = lax.platform_dependent(x, to, cpu=padded, default=as_ragged)
    return moved if back else _take(moved, to.slot)


# Each way is the other's transpose.
exchange.defvjp(
    lambda axis, rows, back, x, to: (exchange(axis, rows, back, x, to), to),
    lambda axis, rows, back, to, g: (exchange(axis, rows, not back, g, to), None),
)


def _take(x: jax.Array, rows: jax.Array) -> jax.Array:
    if not x.shape[0]:
        return jnp.zeros((rows.size, *x.shape[1:]), x.dtype)
    return jnp.take(x, rows, axis=0, mode="fill", fill_value=0)


def _in_turns(
    axis_name: AxisNames,
    x: jax.Array,
    room: jax.Array,
    sides: tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, jax.Array]],
    share: int,
    most: jax.Array | None,
) -> jax.Array:
    """`lax.ragged_all_to_all`, which CPUs do not have, by shares of equal numbers of rows.

    Args:
      axis_name: mesh axis.
      x: rows.
      room: where those that arrive go.
      sides: first row for each device, and how many; first row of each sender in the room, and how
        many.
      share: rows to each device in a turn.
      most: rows from any device to any other; None: no more than a share.
    """
    row, at = (jnp.arange(size, dtype=jnp.int32) for size in (share, len(room)))
    (starts, sizes), (first_rows, numbers) = sides
    sender = jnp.searchsorted(first_rows, at, side="right", method="compare_all") - 1
    index = at - first_rows[sender]
    index = jnp.where(index < numbers[sender], index, -1)

    def turn(first: jax.Array, room: jax.Array) -> jax.Array:
        source = jnp.where(first + row < sizes[:, None], starts[:, None] + first + row, len(x))
        moved = lax.all_to_all(_take(x, source.reshape(-1)), axis_name, 0, 0, tiled=True)
        is_in = (first <= index) & (index < first + share)
        rows = jnp.where(is_in, sender * share + index - first, 0)
        return jnp.where(is_in[:, None], moved[rows], room)

    room, *_ = vary_alike((room, x, sizes, numbers))
    if most is None:
        return turn(jnp.zeros_like(row[0]), room)
    step = lambda state: (state[0] + share, turn(*state))  # noqa: E731
    return lax.while_loop(lambda state: state[0] < most, step, (jnp.zeros_like(most), room))[1]


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("rows", "group_sizes", "route"),
    meta_fields=("axis_name", "num_rows"),
)
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Dispatched:
    """Rows that arrived at one device, by expert.

    Attributes:
      rows: `[p, k]`, an MXArray where one was sent; zeros behind the last group.
      group_sizes: int32 `[experts of this device]`, as `ragged_dot` takes them.
      route: how they came.
      axis_name: mesh axis that they came along.
      num_rows: m, of this device before.

    Examples:
      >>> import jax, jax.numpy as jnp, mx_jax
      >>> from jax.sharding import PartitionSpec as P
      >>> mesh = jax.make_mesh((1,), ("expert",), axis_types=(jax.sharding.AxisType.Auto,))
      >>> def arrived(x, group_sizes):
      ...     sent = mx_jax.sharding.dispatch(x, group_sizes, "expert")
      ...     return sent.rows[:, 0], sent.group_sizes
      >>> run = jax.shard_map(arrived, mesh=mesh, in_specs=P("expert"), out_specs=P("expert"))
      >>> jax.jit(run)(jnp.ones((3, 32)), jnp.array([1, 1]))
      (Array([1., 1., 0.], dtype=float32), Array([1, 1], dtype=int32))
    """

    rows: Any
    group_sizes: jax.Array
    route: Route
    axis_name: AxisNames
    num_rows: int

    def send_back(self, y: jax.Array) -> jax.Array:
        """`[p, n]`, what was made of the rows, to where they came from: `[m, n]`, in y's dtype.

        Rows of no group, and rows beyond the capacity, get zeros.
        """
        if y.ndim != 2 or y.shape[0] != self.rows.shape[0]:
            raise ValueError(
                f"send_back: needs a row for each that arrived, got y.shape={y.shape} for "
                f"rows.shape={self.rows.shape}; pass what ragged_dot makes of rows"
            )
        return exchange(self.axis_name, self.num_rows, True, y, self.route)


def dispatch(
    rows: jax.Array | MXArray,
    group_sizes: jax.typing.ArrayLike,
    axis_name: AxisNames,
    *,
    capacity: int | None = None,
    same_scale: bool = False,
) -> Dispatched:
    """Send rows to the devices that have their experts; inside `jax.shard_map`.

    For layers of several products between the two all-to-alls; `mx_jax.expert_ragged_dot` is one
    product with both. Of d devices each has the same number of consecutive experts. An MXArray
    moves as codes at their real width and scales, as one array of bytes; what was quantized in the
    same trace gets its gradient back the same way, in high precision. As many rows as there are
    move (`jax.lax.ragged_all_to_all`); on CPUs padded ones, in turns of m / d to each device until
    all have moved. Either way nothing is lost unless a capacity says so.

    Args:
      rows: `[m, k]`, this device's, by expert: values, or an MXArray with blocks along k alone.
      group_sizes: integers `[experts]`, this device's rows for each of all experts.
      axis_name: mesh axis, or axes, of d devices.
      capacity: rows that one device sends to another at most; those beyond it get zeros back.
        Default: m, which is always enough, and makes room for d m rows.
      same_scale: whether a tensor scale (NVFP4) is the same on all devices. Otherwise each row
        takes its sender's along, in four bytes.

    Returns:
      A `Dispatched` with p = d capacity rows.

    Raises:
      ValueError: shapes that do not fit, blocks along the rows, a capacity below one.

    Examples:
      >>> import jax, jax.numpy as jnp, mx_jax
      >>> from jax.sharding import PartitionSpec as P
      >>> mesh = jax.make_mesh((1,), ("expert",), axis_types=(jax.sharding.AxisType.Auto,))
      >>> def double(x, group_sizes):
      ...     tokens = mx_jax.quantize(x, "mxfp4")
      ...     sent = mx_jax.sharding.dispatch(tokens, group_sizes, "expert")
      ...     return sent.send_back(2 * sent.rows.dequantize())
      >>> run = jax.shard_map(double, mesh=mesh, in_specs=P("expert"), out_specs=P("expert"))
      >>> jax.jit(run)(jnp.ones((3, 32)), jnp.array([1, 1]))[:, 0]
      Array([2., 2., 0.], dtype=float32)
    """
    devices, sizes = lax.axis_size(axis_name), jnp.asarray(group_sizes)
    if rows.ndim != 2 or sizes.ndim != 1 or not jnp.issubdtype(sizes.dtype, jnp.integer):
        raise ValueError(
            f"dispatch: needs rows [m, k] and integer group_sizes [experts], got rows.shape="
            f"{rows.shape}, group_sizes.shape={sizes.shape}, dtype={sizes.dtype}"
        )
    if not sizes.size or sizes.size % devices:
        raise ValueError(
            f"dispatch: each device has an equal part of the experts, got {sizes.size} group sizes "
            f"for {devices} devices; group_sizes has an entry for each of all experts"
        )
    if isinstance(rows, MXArray) and any(axis % 2 == 0 for axis, _ in rows.blocks):
        raise ValueError(
            f"dispatch: rows move one by one, got {rows!r} with blocks={rows.blocks} along rows; "
            "quantize along the last axis alone, or send values"
        )
    num_rows = rows.shape[0]
    if capacity is not None and capacity < 1:
        raise ValueError(f"dispatch: room for a row is needed, got capacity={capacity}")
    most = max(num_rows, 1)
    room = most if capacity is None else min(capacity, most)
    to = route(as_int32(sizes, num_rows), num_rows, axis_name, room)
    if isinstance(rows, MXArray):
        arrived = _go_coded(axis_name, rows, to, same_scale)
    else:
        arrived = exchange(axis_name, num_rows, False, rows, to)
    return Dispatched(
        rows=arrived, group_sizes=to.sizes, route=to, axis_name=axis_name, num_rows=num_rows
    )


def as_int32(sizes: jax.Array, most: int) -> jax.Array:
    """Sizes of which none exceeds `most`, as int32."""
    # Narrow integers would overflow in sums, wide ones when they are made narrow.
    if sizes.dtype.itemsize >= 4:
        sizes = jnp.minimum(sizes, jnp.asarray(most, sizes.dtype))
    return sizes.astype(jnp.int32)


def _go_coded(axis_name: AxisNames, rows: MXArray, to: Route, same_scale: bool) -> MXArray:
    """Codes and all scales of a row, moved as its bytes."""
    bits, num_rows = rows.format.element.bits, rows.shape[0]
    parts = [packing.pack(rows.codes, bits), rows.scales]
    if rows.tensor_scale is not None and not same_scale:
        parts.append(jnp.broadcast_to(rows.tensor_scale, (num_rows, 1)))
    as_bytes = [lax.bitcast_convert_type(part, jnp.uint8).reshape(num_rows, -1) for part in parts]
    moved: Any = exchange(axis_name, num_rows, False, jnp.concatenate(as_bytes, axis=1), to)
    arrays, start = [], 0
    for part in parts:
        width, itemsize = part.shape[1], part.dtype.itemsize
        piece = moved[:, start : start + width * itemsize]
        start += width * itemsize
        if itemsize > 1:
            piece = piece.reshape(-1, width, itemsize)
        arrays.append(lax.bitcast_convert_type(piece, part.dtype))
    codes, scales, *piece = arrays
    arrived = dataclasses.replace(
        rows,
        codes=packing.unpack(codes, bits, rows.shape[1]),
        scales=scales,
        tensor_scale=piece[0] if piece else rows.tensor_scale,
        primal=None,
    )
    if rows.primal is None:
        return arrived
    linked = _linked(axis_name, num_rows, rows.primal, arrived, to)
    return dataclasses.replace(arrived, primal=linked)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _linked(
    axis_name: AxisNames, num_rows: int, primal: jax.Array, arrived: MXArray, to: Route
) -> jax.Array:
    """What arrived, as values that hand their gradient back to where they came from."""
    return arrived.dequantize(primal.dtype)


_linked.defvjp(
    lambda axis, rows, primal, arrived, to: (arrived.dequantize(primal.dtype), to),
    lambda axis, rows, to, g: (exchange(axis, rows, True, g, to), None, None),
)
