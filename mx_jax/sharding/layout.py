"""Where the parts of an MXArray lie, from where its values lie."""

import dataclasses
import math
from typing import Any, NamedTuple, TypeVar

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from mx_jax.formats import Whole, block_format
from mx_jax.formats.block import FormatLike
from mx_jax.mxarray import MXArray
from mx_jax.packed import Cut, PackedMXArray, Quantized
from mx_jax.sharding.movement import Part, parts_of, spec_of

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
    array_spec: PartitionSpec, format: FormatLike, *, axis: int = -1, num_batch: int = 0
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


def check_shards(x: MXArray, parts: tuple[Part, ...], mesh: Mesh | AbstractMesh) -> None:
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


def put_packed(x: PackedMXArray, sharding: NamedSharding) -> PackedMXArray:
    """Packed weights placed as their values are to lie; cut along k, they are packed anew."""
    if (reason := why_not_cut(x, sharding)) is not None:
        raise ValueError(f"device_put: {reason}")
    parts, mesh = parts_of(sharding, x.ndim), sharding.mesh
    if x.layout.cut is None:
        return jax.device_put(x, NamedSharding(mesh, PartitionSpec()))
    cut = x.layout.cut(x)
    if (k := _devices(mesh, parts[x.first_k])) != cut.parts:
        x = cut.in_parts(x, k)
        assert x.layout.cut is not None
        cut = x.layout.cut(x)
    lies = {"n": parts[x.first_kept], "k": parts[x.first_k]}
    lies |= {axis: parts[axis] for axis in range(len(x.batch))}
    leaves, tree = jax.tree.flatten(x)
    placed = [
        jax.device_put(leaf, NamedSharding(mesh, _spec(lies, counts)))
        for leaf, counts in zip(leaves, cut.arrays, strict=True)
    ]
    return jax.tree.unflatten(tree, placed)


def why_not_cut(x: PackedMXArray, sharding: NamedSharding) -> str | None:
    """Why packed weights cannot lie where their values are to lie; None: they can."""
    parts, mesh = parts_of(sharding, x.ndim), sharding.mesh
    devices = [_devices(mesh, part) for part in parts]
    may = {*range(len(x.batch)), x.first_kept, x.first_k} if x.layout.cut else set[int]()
    whole = [axis for axis, number in enumerate(devices) if number > 1 and axis not in may]
    if whole:
        return (
            f"packed weights cannot be cut along axis={whole[0]}, got {x!r} with sharding="
            f"{sharding.spec}; shard the first of the kept or contracted axes of weights packed "
            "for CPUs, or the MXArray"
        )
    if x.layout.cut is None:
        return None
    along = [(axis, devices[axis], parts[axis]) for axis in (x.first_kept, x.first_k)]
    return _about_rows(x, x.layout.cut(x), *along[0]) or _about_k(x, *along[1])


def _spec(lies: dict[Any, Part], counts: tuple[Any, ...]) -> PartitionSpec:
    return spec_of(tuple(lies.get(count, ()) for count in counts))


def _devices(mesh: Mesh | AbstractMesh, part: Part) -> int:
    return math.prod(mesh.shape[name] for name in part)


def _about_rows(x: PackedMXArray, cut: Cut, axis: int, devices: int, part: Part) -> str | None:
    rows = math.prod(x.kept)
    if devices == 1 or (x.kept[0] % devices == 0 and rows % (devices * cut.rows) == 0):
        return None
    return (
        f"every shard needs whole tiles of packed weights along axis={axis}, got shard size="
        f"{rows / devices:g} ({rows} rows over {devices} devices, mesh axes={part}) with tiles of "
        f"{cut.rows} rows, {x!r}; shard another axis, or along mesh axes that "
        f"{-(-rows // cut.rows)} tiles divide by, or the MXArray"
    )


def _about_k(x: PackedMXArray, axis: int, devices: int, part: Part) -> str | None:
    ((_, block),) = x.blocks
    first, *rest = x.k
    size = first / devices
    in_blocks = bool(rest) or (isinstance(block, int) and size % block == 0)
    if devices == 1 or (first % devices == 0 and in_blocks):
        return None
    return (
        f"every shard needs whole blocks along axis={axis}, got shard size={size:g} ({first} over "
        f"{devices} devices, mesh axes={part}) with block={block} of {x!r}; shard another axis, or "
        "along mesh axes that its blocks divide by"
    )
