"""Where packed weights lie: devices share them by whole tiles."""

import math
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from mx_jax.packed import Cut, PackedMXArray
from mx_jax.sharding.movement import Part, parts_of, spec_of


def put_packed(x: PackedMXArray, sharding: NamedSharding) -> PackedMXArray:
    """Packed weights placed as their values are to lie; cut along k, they are packed anew in parts.

    Raises:
      ValueError: a shard that would have a part of a tile or of a block.
    """
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


def _devices(mesh: Any, part: Part) -> int:
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
