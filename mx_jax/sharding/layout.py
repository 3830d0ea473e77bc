"""Where the parts of an MXArray lie, from where its values lie."""

import dataclasses
import math
from typing import Any, NamedTuple, TypeVar

import jax
from jax.sharding import NamedSharding, PartitionSpec

from mx_jax.formats import Whole, block_format
from mx_jax.mxarray import MXArray
from mx_jax.packed import PackedMXArray, Quantized
from mx_jax.sharding.movement import Part, parts_of, spec_of
from mx_jax.sharding.packed_layout import put_packed

Q = TypeVar("Q", bound=Quantized)


class Specs(NamedTuple):
    """Where codes, block scales and the tensor scale lie; None: the format has no tensor scale.

    Examples:
      >>> import mx_jax
      >>> from jax.sharding import PartitionSpec as P
      >>> mx_jax.sharding.spec_for(P("fsdp", "model"), "nvfp4")
      Specs(codes=P('fsdp', 'model'), scales=P('fsdp', 'model'), tensor_scale=P(None, None))
    """

    codes: PartitionSpec
    scales: PartitionSpec
    tensor_scale: PartitionSpec | None


def spec_for(
    array_spec: PartitionSpec, format: Any, *, axis: int = -1, num_batch: int = 0
) -> Specs:
    """Where the parts of an MXArray lie whose values lie as a PartitionSpec says.

    Codes lie as the values do, and scales with the blocks that they belong to: along an axis with
    one scale they are whole. Shards hold whole blocks: `device_put` checks it.

    Args:
      array_spec: of the values, with an entry for each axis.
      format: as `mx_jax.quantize` takes it.
      axis: the axis that blocks lie along.
      num_batch: first axes along which each tensor was quantized alone (`jax.vmap`), such as the
        experts of a layer: tensor scales lie there as the values do.

    Raises:
      ValueError: an axis without an entry.

    Examples:
      >>> import mx_jax
      >>> from jax.sharding import PartitionSpec as P
      >>> specs = mx_jax.sharding.spec_for(P("fsdp", "model"), "mxfp4", axis=0)
      >>> specs.scales, mx_jax.sharding.spec_for(P("fsdp", "model"), "nvfp4").tensor_scale
      (P('fsdp', 'model'), P(None, None))
    """
    format, ndim = block_format(format), len(array_spec)
    if not -ndim <= axis < ndim:
        raise ValueError(
            f"spec_for: array_spec needs an entry for each axis, got array_spec={array_spec} with "
            f"axis={axis}; write None where an axis is whole"
        )
    parts = list(parts_of(array_spec, ndim))
    kept_size, size = format.block
    codes = spec_of(tuple(parts))
    if isinstance(size, Whole):
        parts[axis] = ()
    each = (*parts[:num_batch], *((),) * (ndim - num_batch))
    scales = each if isinstance(kept_size, Whole) else tuple(parts)
    return Specs(codes, spec_of(scales), spec_of(each) if format.tensor_scale else None)


def device_put(x: Q, sharding: NamedSharding) -> Q:
    """`jax.device_put` of an MXArray or packed weights, their parts where the values are to lie.

    Args:
      x: quantized; packed weights are cut by whole tiles, and along k packed anew in parts.
      sharding: of its values.

    Raises:
      ValueError: a shard that would have a part of a block or tile; the message names axis, shard
        size, block and remedy.
      TypeError: no MXArray or packed weights, or no NamedSharding.

    Examples:
      >>> import jax, jax.numpy as jnp, mx_jax
      >>> mesh = jax.make_mesh((1,), ("fsdp",))
      >>> place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("fsdp"))
      >>> mx_jax.sharding.device_put(mx_jax.quantize(jnp.ones((64, 32)), "mxfp4"), place).shape
      (64, 32)
    """
    if isinstance(x, PackedMXArray) and isinstance(sharding, NamedSharding):
        placed: Any = put_packed(x, sharding)
        return placed
    if not isinstance(x, MXArray) or not isinstance(sharding, NamedSharding):
        raise TypeError(
            "device_put: needs an MXArray and a NamedSharding, got "
            f"{type(x).__name__} and {type(sharding).__name__}; jax.device_put takes other arrays"
        )
    parts = parts_of(sharding, x.ndim)
    check_shards(x, parts, sharding.mesh)

    def put(array: jax.Array) -> jax.Array:
        own = tuple(
            part if length == whole or length > 1 else ()
            for part, length, whole in zip(parts, array.shape, x.shape, strict=True)
        )
        return jax.device_put(array, NamedSharding(sharding.mesh, spec_of(own)))

    moved: Any = dataclasses.replace(
        x,
        codes=put(x.codes),
        scales=put(x.scales),
        tensor_scale=None if x.tensor_scale is None else put(x.tensor_scale),
        primal=None,
    )
    return moved


def check_shards(x: MXArray, parts: tuple[Part, ...], mesh: Any) -> None:
    """Raise ValueError if shards of an MXArray would have parts of blocks."""
    for axis, size in x.blocks:
        length, part = x.shape[axis], parts[axis]
        devices = math.prod(mesh.shape[name] for name in part)
        if devices == 1 or not isinstance(size, int) or length % (devices * size) == 0:
            continue
        whole = f"along mesh axes whose devices divide {length // size} blocks evenly"
        padded = f"pad to a multiple of {devices * size}"
        raise ValueError(
            f"device_put: every shard needs whole blocks along axis={axis % x.ndim}, got shard "
            f"size={length / devices:g} ({length} over {devices} devices, mesh axes={part}) with "
            f"block={size} of {x.format.name}, shape={x.shape}; shard another axis, or "
            f"{padded if length % size or length == size else whole}"
        )
