"""The sharding in an array's aval, and the shard_map axes along which it varies.

On meshes with explicit axes JAX asks of a reshape or broadcast how its result shall be sharded,
unless only one answer makes sense. Elsewhere functions that reshape here just reshape.
"""

import math
from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import ShapedArray
from jax.sharding import AxisType, NamedSharding, PartitionSpec

Spec = NamedSharding | PartitionSpec

AxisNames = str | tuple[str, ...]

A = TypeVar("A", jax.Array, np.ndarray)


def has_explicit_axes() -> bool:
    """Whether the mesh in use has axes of `AxisType.Explicit`."""
    return AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types


def explicit_sharding(x: jax.Array | np.ndarray) -> NamedSharding | None:
    """The sharding in an array's aval; None of NumPy's, and on meshes without explicit axes."""
    return jax.typeof(x).sharding if has_explicit_axes() and not isinstance(x, np.ndarray) else None


def partitions(sharding: Spec, ndim: int) -> list[Any]:
    """The mesh axes of each of an array's axes, None where it is whole."""
    spec = list(sharding.spec if isinstance(sharding, NamedSharding) else sharding)
    return spec + [None] * (ndim - len(spec))


def with_partitions(sharding: Spec, parts: Sequence[Any]) -> Spec:
    """A sharding of the same kind and mesh with other mesh axes."""
    spec = PartitionSpec(*parts)
    return NamedSharding(sharding.mesh, spec) if isinstance(sharding, NamedSharding) else spec


def broadcast_like(x: jax.Array, like: jax.Array) -> jax.Array:
    """x broadcast to the shape and the sharding of another array."""
    return jnp.broadcast_to(x, like.shape, out_sharding=explicit_sharding(like))


def reshape_along(x: jax.Array, shape: Sequence[int], like: jax.Array, axes: int = 1) -> jax.Array:
    """x reshaped, its first axes sharded as the first of `like`, the others not at all."""
    sharding = explicit_sharding(like)
    if sharding is None:
        return x.reshape(shape)
    first = partitions(sharding, like.ndim)[:axes]
    place = with_partitions(sharding, [*first, *[None] * (len(shape) - axes)])
    return lax.reshape(x, tuple(shape), out_sharding=place)


def split_axes(x: A, shape: Sequence[int], inside: Sequence[int]) -> A:
    """x reshaped so that each axis of `inside`, with the one before it, was one axis of x."""
    # A sharded axis hands its mesh axes to the blocks if they divide evenly, or to the positions if
    # there is one block; otherwise blocks would be cut between devices, and the axis is gathered.
    sharding = explicit_sharding(x)
    if sharding is None:
        return x.reshape(shape)
    old, new = partitions(sharding, x.ndim), []
    for axis in range(len(shape)):
        if axis in inside:
            part, count = new[-1], shape[axis - 1]
            names = part if isinstance(part, tuple) else (part,) if part else ()
            devices = math.prod(sharding.mesh.shape[name] for name in names)
            new[-1] = part if count > 1 and count % devices == 0 else None
            new.append(part if count == 1 else None)
        else:
            new.append(old.pop(0))
    assert isinstance(x, jax.Array)
    return lax.reshape(x, tuple(shape), out_sharding=with_partitions(sharding, new))


def join_axes(y: A, shape: Sequence[int], inside: Sequence[int]) -> A:
    """Undo `split_axes`: each axis of `inside` joins the one before, sharded as either was."""
    sharding = explicit_sharding(y)
    if sharding is None:
        return y.reshape(shape)
    parts: list[Any] = []
    for axis, part in enumerate(partitions(sharding, y.ndim)):
        if axis in inside:
            parts[-1] = parts[-1] or part
        else:
            parts.append(part)
    assert isinstance(y, jax.Array)
    return lax.reshape(y, tuple(shape), out_sharding=with_partitions(sharding, parts))


def result_aval(like: ShapedArray, shape: Sequence[int], dtype: jax.typing.DTypeLike) -> Any:
    """The aval of a primitive's result, made from an operand's: it varies along the same axes."""
    sharding = like.sharding.update(spec=PartitionSpec(*(None for _ in shape)))
    return like.update(shape=tuple(shape), dtype=dtype, weak_type=False, sharding=sharding)


def varying(x: jax.Array) -> frozenset[str]:
    """The shard_map axes along which a value differs, under either of JAX's names for them."""
    kind: Any = jax.typeof(x)
    return frozenset(kind.vma if hasattr(kind, "vma") else kind.mat.varying)


def vary_alike(arrays: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
    """The same values, each differing along the axes of all of them, as JAX wants of operands."""
    each = [varying(x) for x in arrays]
    axes = frozenset[str]().union(*each)
    return tuple(
        lax.pcast(x, tuple(sorted(axes - names)), to="varying") if axes - names else x
        for x, names in zip(arrays, each, strict=True)
    )
