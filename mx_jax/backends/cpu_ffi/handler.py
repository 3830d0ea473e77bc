"""One call of a compiled handler as JAX sees it: batched, split between devices, of open sizes.

All of that follows from a string that names the axes of its operands and results: see `geometry`.
`vmap` adds a batch axis in front. Devices split batch axes and those that a result has too, blocked
ones between blocks. An axis that no result has is gathered: its shards may cut blocks, and codes
are a quarter of their values.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

from mx_jax.backends.cpu_ffi.geometry import Axis, Geometry, Shapes, parse
from mx_jax.backends.primitive import on_one_device
from mx_jax.codecs.explicit_axes import vary_alike
from mx_jax.sharding.partition import fine_mesh, stored_parts

Arrays = tuple[jax.Array, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Handler:
    """A compiled handler, with all that a call knows but shapes; calling it gives its results.

    Attributes:
      target: the name that it is registered by.
      axes: of the operands and results, as `geometry` reads them.
      dtypes: of the results.
      attributes: as `hashable` makes them.
      sizes: of the axes that no operand has in full.
    """

    target: str
    axes: str
    dtypes: tuple[np.dtype, ...]
    attributes: tuple[tuple[str, Any], ...]
    sizes: tuple[tuple[str, int], ...] = ()

    def geometry(self, shapes: Shapes) -> Geometry:
        """The axes of a call with operands of these shapes."""
        return Geometry(self.axes, shapes, dict(self.sizes))

    def __call__(self, *operands: jax.Array) -> Arrays:
        if jax.sharding.get_abstract_mesh().manual_axes:
            operands = vary_alike(operands)
        shapes = tuple(operand.shape for operand in operands)
        return _function(self, shapes, not on_one_device.value)(*operands)


def hashable(attributes: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Attributes as `Handler` keeps them: the dtype's name is the first entry of an array."""
    return tuple(
        (name, (value.dtype.name, *value.tolist()) if isinstance(value, np.ndarray) else value)
        for name, value in sorted(attributes.items())
    )


@functools.lru_cache(maxsize=4096)
def _function(handler: Handler, shapes: Shapes, is_split: bool) -> Any:
    """The call for operands of these shapes, with its rules for devices and batches."""
    call: Any = functools.partial(_call, handler)
    if is_split:
        partitioned: Any = custom_partitioning(call)
        partitioned.def_partition(
            partition=functools.partial(_partition, handler, shapes),
            # A reshape may have cut a mesh axis, which no NamedSharding can say.
            decode_shardings=False,
            sharding_rule=lambda mesh, given, wanted: _sharding_rule(handler.geometry(shapes)),
        )
        call = partitioned
    batched: Any = custom_vmap(call)
    batched.def_vmap(functools.partial(_batch, handler))
    return batched


def _call(handler: Handler, *operands: jax.Array) -> Arrays:
    """The handler on whole or local arrays: axes in parentheses become one."""
    geometry = handler.geometry(tuple(operand.shape for operand in operands))
    attributes = {
        name: np.array(value[1:], value[0]) if isinstance(value, tuple) else value
        for name, value in handler.attributes
    }
    # Made from an operand's own type, results vary along the same axes of a shard_map.
    like: Any = jax.typeof(operands[0])
    shapes = geometry.result_shapes()
    types = tuple(
        like.update(
            shape=shape,
            dtype=dtype,
            weak_type=False,
            sharding=like.sharding.update(spec=PartitionSpec(*(None for _ in shape))),
        )
        for (shape, _), dtype in zip(shapes, handler.dtypes, strict=True)
    )
    found = jax.ffi.ffi_call(handler.target, types)(*geometry.merge(operands), **attributes)
    return tuple(
        result if shape == merged else result.reshape(shape)
        for (merged, shape), result in zip(shapes, found, strict=True)
    )


def _batch(handler: Handler, size: int, in_batched: Sequence[bool], *operands: jax.Array) -> Any:
    """One more batch axis in front; a batch that has none gets one of length one."""
    arrays, results = parse(handler.axes)
    wide = {array.batch for array, batched in zip(arrays, in_batched, strict=True) if batched}
    for result in results:
        if wide.isdisjoint(result.batch):
            wide.add(result.batch[0])
    lifted = []
    for array, batched, operand in zip(arrays, in_batched, operands, strict=True):
        if array.batch and not batched:
            # What two batches give together is as long as the results.
            length = size if array.batch in wide or len(array.batch) > 1 else 1
            operand = jnp.broadcast_to(operand, (length, *operand.shape))
        lifted.append(operand)
    return handler(*lifted), (True,) * len(results)


# Devices ------------------------------------------------------------------------------------------


def _sharding_rule(geometry: Geometry) -> tuple[str, dict[str, Any]]:
    """What Shardy is told: a factor for each axis, which of them stay whole, and sizes."""
    whole: set[str] = set()
    sizes: dict[str, int] = {}

    def named(factor: str | None, axis: Axis | None) -> str:
        if factor is None:
            # Numbers are no names, and one operand may have two of them.
            alike = axis is not None and axis.block is None and not axis.name.isdigit()
            factor = f"whole_{axis.name}" if axis is not None and alike else f"whole{len(whole)}"
            whole.add(factor)
            return factor
        block = None if axis is None else geometry.blocks.get(axis.name)
        if axis is None or block is None:
            return factor
        size, inside = geometry.sizes[axis.name], f"{factor}_inside"
        whole.add(inside)
        # A symbolic axis counts as one that is cut nowhere.
        if isinstance(block, int) and isinstance(size, int) and size > block and not size % block:
            sizes[inside] = block
            return f"({factor} {inside})" if axis.block is None else factor
        whole.add(factor)
        return inside if axis.block is None else factor

    given, wanted = (
        ", ".join(
            " ".join(named(factor, axis) for factor, axis in geometry.factors(array))
            for array in side
        )
        for side in (geometry.operands, geometry.results)
    )
    rule = f"{given} -> {wanted}"
    ordered = dict.fromkeys(re.findall(r"\w+", rule))
    return rule, {"need_replication_factors": tuple(f for f in ordered if f in whole), **sizes}


def _partition(handler: Handler, shapes: Shapes, mesh: Any, given: Any, wanted: Any) -> Any:
    """The same call on each device's shard, cut as the first result is wanted, between blocks."""
    geometry, result = handler.geometry(shapes), wanted[0]
    mesh = fine_mesh(mesh, result)
    found = stored_parts(result.sharding, result.shape, mesh)
    parts: dict[str | None, Any] = {
        factor: part
        for (factor, axis), part in zip(geometry.factors(geometry.results[0]), found, strict=False)
        if factor is not None and part and geometry.splits(axis, _num_devices(mesh, part))
    }
    results, operands = (
        tuple(
            NamedSharding(mesh, PartitionSpec(*(parts.get(f) for f, _ in geometry.factors(array))))
            for array in side
        )
        for side in (geometry.results, geometry.operands)
    )
    sizes = tuple(
        (name, size // _num_devices(mesh, parts.get(name, ()))) for name, size in handler.sizes
    )
    local = functools.partial(_call, dataclasses.replace(handler, sizes=sizes))
    return mesh, local, results, operands


def _num_devices(mesh: Any, part: Sequence[str]) -> int:
    return math.prod(mesh.shape[name] for name in part)
