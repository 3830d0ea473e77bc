"""Quantized arrays sent between devices inside shard_map, as codes: to experts, to stages."""

import dataclasses
import functools
from collections.abc import Callable, Iterable

import jax
from jax import lax

from mx_jax.codecs.explicit_axes import AxisNames
from mx_jax.mxarray import MXArray
from mx_jax.sharding.movement import moved_packed


def all_to_all(x: MXArray, axis_name: AxisNames, split_axis: int, concat_axis: int) -> MXArray:
    """`jax.lax.all_to_all` of a quantized array, tiled: codes at their real width and scales move.

    For mixtures of experts inside `jax.shard_map`: tokens are quantized where they are, sent to the
    devices that have their experts, and multiplied there by `ragged_dot` as they arrive. What was
    quantized in the same trace gets its gradient back the same way, in high precision.

    Args:
      x: quantized, blocked along neither axis.
      axis_name: mesh axis, or axes, of n devices.
      split_axis: axis that is cut into n parts, one for each device.
      concat_axis: axis along which the parts that arrive lie one after another.

    Returns:
      An MXArray whose `split_axis` is n times shorter, and whose `concat_axis` n times longer.

    Raises:
      ValueError: an axis that blocks lie along, a length that n does not divide, a tensor scale,
        which is each sender's own.
      TypeError: no MXArray.

    Examples:
      >>> import jax, jax.numpy as jnp, mx_jax
      >>> from jax.sharding import PartitionSpec as P
      >>> mesh = jax.make_mesh((1,), ("expert",), axis_types=(jax.sharding.AxisType.Auto,))
      >>> def send(x):
      ...     tokens = mx_jax.quantize(x, "mxfp4")
      ...     return mx_jax.sharding.all_to_all(tokens, "expert", 0, 0).dequantize()
      >>> run = jax.shard_map(send, mesh=mesh, in_specs=P("expert"), out_specs=P("expert"))
      >>> jax.jit(run)(jnp.ones((8, 64))).shape
      (8, 64)
    """
    _check_is_quantized("all_to_all", x)
    split_axis, concat_axis = split_axis % x.ndim, concat_axis % x.ndim
    _check(x, lax.axis_size(axis_name), split_axis, concat_axis)
    move = functools.partial(
        lax.all_to_all,
        axis_name=axis_name,
        split_axis=split_axis,
        concat_axis=concat_axis,
        tiled=True,
    )
    back = functools.partial(move, split_axis=concat_axis, concat_axis=split_axis)
    return _sent(x, move, back, taken=(split_axis, concat_axis))


def ppermute(x: MXArray, axis_name: AxisNames, perm: Iterable[tuple[int, int]]) -> MXArray:
    """`jax.lax.ppermute` of a quantized array: codes at their real width and all scales move.

    For pipelines inside `jax.shard_map`: what a stage hands to the next is quantized where it is.
    What was quantized in the same trace gets its gradient back the other way, in high precision.

    Args:
      x: quantized, whole on each device.
      axis_name: mesh axis.
      perm: pairs of a sender and a receiver; a device that receives nothing has zeros.

    Returns:
      An MXArray like x.

    Raises:
      TypeError: no MXArray.

    Examples:
      >>> import jax, jax.numpy as jnp, mx_jax
      >>> from jax.sharding import PartitionSpec as P
      >>> mesh = jax.make_mesh((1,), ("pipe",), axis_types=(jax.sharding.AxisType.Auto,))
      >>> def pass_on(x):
      ...     y = mx_jax.quantize(x, "mxfp8_e4m3")
      ...     return mx_jax.sharding.ppermute(y, "pipe", [(0, 0)]).dequantize()
      >>> run = jax.shard_map(pass_on, mesh=mesh, in_specs=P("pipe"), out_specs=P("pipe"))
      >>> jax.jit(run)(jnp.ones((8, 64))).sum()
      Array(512., dtype=float32)
    """
    _check_is_quantized("ppermute", x)
    pairs = tuple((int(sender), int(receiver)) for sender, receiver in perm)
    move = functools.partial(lax.ppermute, axis_name=axis_name, perm=pairs)
    reverse = tuple((receiver, sender) for sender, receiver in pairs)
    return _sent(x, move, functools.partial(move, perm=reverse))


def _check_is_quantized(operation: str, x: object) -> None:
    if not isinstance(x, MXArray):
        raise TypeError(
            f"{operation}: needs an MXArray, got {type(x).__name__}; jax.lax.{operation} takes "
            "others"
        )


def _check(x: MXArray, devices: int, split_axis: int, concat_axis: int) -> None:
    blocked = {axis % x.ndim: size for axis, size in x.blocks}
    for name, axis in (("split_axis", split_axis), ("concat_axis", concat_axis)):
        if axis in blocked:
            raise ValueError(
                f"all_to_all: blocks stay whole, got {name}={axis} of {x!r} with block="
                f"{blocked[axis]} along it; quantize along another axis"
            )
    if x.shape[split_axis] % devices:
        raise ValueError(
            f"all_to_all: each device gets an equal part, got shape={x.shape} with split_axis="
            f"{split_axis} for {devices} devices; pad it to a multiple"
        )
    if x.tensor_scale is not None:
        raise ValueError(
            f"all_to_all: rows that arrive would have their senders' tensor scales, got format="
            f"{x.format.name}; use a format without one, such as mxfp4"
        )


def _sent(
    x: MXArray,
    move: Callable[..., jax.Array],
    back: Callable[..., jax.Array],
    taken: tuple[int, ...] = (),
) -> MXArray:
    """Codes and all scales moved, along axes that are taken; gradients go back as values."""
    # Whole bytes lie along an axis that stays.
    sizes = [1 if axis in taken else length for axis, length in enumerate(x.shape)]
    moved = dataclasses.replace(
        x,
        codes=moved_packed(x.codes, x.format.element.bits, move, sizes),
        scales=move(x.scales),
        tensor_scale=None if x.tensor_scale is None else move(x.tensor_scale),
        primal=None,
    )
    if x.primal is None:
        return moved
    return dataclasses.replace(moved, primal=linked(back, x.primal, moved))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def linked(
    back: Callable[..., jax.Array], primal: jax.Array, moved: MXArray, *route: object
) -> jax.Array:
    """What arrives, as values that hand their gradient back to where they came from."""
    del back, route
    return moved.dequantize(primal.dtype)


linked.defvjp(
    lambda back, primal, moved, *route: (linked(back, primal, moved, *route), route),
    lambda back, route, g: (back(g, *route), None, *(None for _ in route)),
)
