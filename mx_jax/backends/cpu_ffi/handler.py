"""One call of a compiled handler as JAX sees it: batched, split between devices, of open sizes.

All of that follows from a string that names the axes of its operands and results: see `geometry`.
`vmap` adds a batch axis in front. Devices split batch axes and those that a result has too, blocked
ones between blocks. An axis that no result has is gathered: its shards may cut blocks.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mx_jax.backends.target import devices_sharing, on_one_device, show_devices
from mx_jax.codecs.blocks import num_blocks
from mx_jax.codecs.explicit_axes import result_type, vary_alike
from mx_jax.codecs.lowering import eager
from mx_jax.formats import WHOLE, BlockSize, Whole
from mx_jax.sharding.partition import fine_mesh, stored_parts

Shape = tuple[int, ...]
Shapes = tuple[Shape, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Axis:
    """A name or number; with a block size, it counts blocks."""

    name: str
    block: BlockSize | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Array:
    """One operand or result."""

    batch: str  # letters of its batch
    groups: tuple[tuple[Axis, ...], ...]  # its other axes; the handler takes a group as one
    axes: tuple[Axis, ...]  # the same, one by one


@functools.lru_cache(maxsize=4096)
def parse(axes: str) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    """The operands and the results that a string names."""
    operands, results = (side.split(",") for side in axes.split("->"))
    return tuple(map(_parse_array, operands)), tuple(map(_parse_array, results))


def _parse_array(array: str) -> Array:
    batch, groups = "", []
    for letters, group, single in re.findall(r"\*(\w+)|\(([^)]*)\)|([\w/]+)", array):
        batch += letters
        if not letters:
            parts = [axis.partition("/") for axis in ([single] if single else group.split())]
            blocks = (size and (WHOLE if size == name else int(size)) for name, _, size in parts)
            groups.append(
                tuple(
                    Axis(name=name, block=block or None)
                    for (name, _, _), block in zip(parts, blocks, strict=True)
                )
            )
    return Array(batch=batch, groups=tuple(groups), axes=tuple(chain(*groups)))


class Geometry:
    """The axes of a call's operands and results, with their lengths; of batches by letters."""

    def __init__(self, axes: str, shapes: Shapes, sizes: Mapping[str, int]):
        self.operands, self.results = parse(axes)
        self.batches: dict[str, Shape] = {}
        self.sizes: dict[str, Any] = dict(sizes)
        self.blocks: dict[str, BlockSize] = {}
        for array, shape in zip(self.operands, shapes, strict=True):
            num_batch = len(shape) - len(array.axes)
            if array.batch:
                self.batches[array.batch] = shape[:num_batch]
            for axis, length in zip(array.axes, shape[num_batch:], strict=True):
                if axis.block is None:
                    self.sizes[axis.name] = length
        for array in (*self.operands, *self.results):
            for axis in array.axes:
                if axis.name.isdigit():
                    self.sizes[axis.name] = int(axis.name)
                if axis.block is not None:
                    self.blocks[axis.name] = axis.block
        for letters in {array.batch for array in self.results}:
            lengths = zip(*(self.batches[letter] for letter in letters), strict=True)
            self.batches[letters] = tuple(next((n for n in m if n != 1), 1) for m in lengths)

    def merge(self, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        """Operands as the handler takes them: each group of axes is one."""
        merged = []
        for array, x in zip(self.operands, arrays, strict=True):
            if any(len(group) != 1 for group in array.groups):
                batch = self.batches[array.batch]
                missing = [
                    -self.sizes[axis.name] % block
                    if len(group) > 1 and axis.block is None and isinstance(block, int)
                    else 0
                    for group in array.groups
                    for axis in group
                    for block in [self.blocks.get(axis.name)]
                ]
                if any(missing):
                    x = jnp.pad(x, [(0, 0)] * len(batch) + [(0, number) for number in missing])
                rest = iter(x.shape[len(batch) :])
                lengths = [math.prod([next(rest) for _ in group]) for group in array.groups]
                x = x.reshape(*batch, *lengths)
            merged.append(x)
        return merged

    def result_shapes(self) -> list[tuple[Shape, Shape]]:
        """Of each result, as the handler gives it, with groups of axes as one, and as it is."""
        shapes = []
        for array in self.results:
            groups = [
                [
                    self.sizes[axis.name]
                    if axis.block is None
                    else num_blocks(axis.block, self.sizes[axis.name])
                    for axis in group
                ]
                for group in array.groups
            ]
            batch = self.batches[array.batch]
            shapes.append(((*batch, *map(math.prod, groups)), (*batch, *chain(*groups))))
        return shapes

    def is_merged(self) -> bool:
        """Whether operands and results are as the handler takes them, of sizes that are known."""
        arrays = (*self.operands, *self.results)
        lengths = (*self.sizes.values(), *chain(*self.batches.values()))
        known = all(isinstance(n, int) for n in lengths)
        return known and all(len(group) == 1 for array in arrays for group in array.groups)

    def factors(self, array: Array) -> list[tuple[str | None, Axis | None]]:
        """What devices split of each axis, by one name for all that have it; None: they do not."""
        # A place in any batch is one, except where a single matrix stands for many; it is no
        # `Axis`.
        given, wanted = (
            {axis.name for array in side for axis in array.axes}
            for side in (self.operands, self.results)
        )
        batch, full = self.batches.get(array.batch, ()), self.batches[self.results[0].batch]
        pairs: list[tuple[str | None, Axis | None]] = [
            (f"batch{place}" if own != 1 or wide == 1 else None, None)
            for place, (own, wide) in enumerate(zip(batch, full, strict=False))
        ]
        shared = {name for name in given & wanted if not name.isdigit()}
        return pairs + [(axis.name if axis.name in shared else None, axis) for axis in array.axes]

    def splits(self, axis: Axis | None, num_devices: int) -> bool:
        """Whether an axis falls into so many parts without cutting a block."""
        block = None if axis is None else self.blocks.get(axis.name)
        if axis is None or block is None:
            return True
        size = self.sizes[axis.name]
        if isinstance(block, Whole) or not isinstance(size, int):
            return False
        return size % (block * num_devices) == 0


Arrays = tuple[jax.Array, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Handler:
    """A compiled handler, with all that a call knows but shapes; calling it gives its results."""

    target: str  # the name that it is registered by
    axes: str  # of the operands and results, as `geometry` reads them
    dtypes: tuple[np.dtype, ...]  # of the results
    attributes: tuple[tuple[str, Any], ...]  # as `hashable` makes them
    sizes: tuple[tuple[str, int], ...] = ()  # of the axes that no operand has in full

    @property
    def arguments(self) -> dict[str, Any]:
        return {
            name: np.array(value[1:], value[0]) if isinstance(value, tuple) else value
            for name, value in self.attributes
        }

    def geometry(self, shapes: Shapes) -> Geometry:
        return Geometry(self.axes, shapes, dict(self.sizes))

    def __call__(self, *operands: jax.Array) -> Arrays:
        if jax.sharding.get_abstract_mesh().manual_axes:
            operands = vary_alike(operands)
        return tuple(_HANDLER.bind(*operands, handler=self, is_split=not on_one_device.value))


def hashable(attributes: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Attributes as `Handler` keeps them: the dtype's name is the first entry of an array."""
    return tuple(
        (name, (value.dtype.name, *value.tolist()) if isinstance(value, np.ndarray) else value)
        for name, value in sorted(attributes.items())
    )


# The primitive ------------------------------------------------------------------------------------

_HANDLER: Any = Primitive("mx_cpu_ffi")
_HANDLER.multiple_results = True
_HANDLER.is_high = lambda *types, **params: False


_HANDLER.def_impl(functools.partial(eager, _HANDLER))


@_HANDLER.def_abstract_eval
def _types(*types: ShapedArray, handler: Handler, **_: object) -> tuple[Any, ...]:
    shapes = handler.geometry(tuple(x.shape for x in types)).result_shapes()
    every = zip(shapes, handler.dtypes, strict=True)
    return tuple(result_type(types[0], shape, dtype) for (_, shape), dtype in every)


def _lower(ctx: Any, *values: mlir.ir.Value, handler: Handler, is_split: bool) -> Any:
    shapes, module = tuple(x.shape for x in ctx.avals_in), ctx.module_context
    # Exported programs hold no partitioning.
    is_split &= devices_sharing(module.axis_context) > 1
    is_split &= not module.lowering_parameters.for_export
    if not is_split and handler.geometry(shapes).is_merged():
        return jax.ffi.ffi_lowering(handler.target)(ctx, *values, **handler.arguments)
    call: Any = functools.partial(_call, handler)
    if is_split:
        ctx = show_devices(ctx, "cpu") or ctx
        call = custom_partitioning(call)
        call.def_partition(
            partition=functools.partial(_partition, handler, shapes),
            # A reshape may have cut a mesh axis, which no NamedSharding can say.
            decode_shardings=False,
            sharding_rule=lambda mesh, given, wanted: _sharding_rule(handler.geometry(shapes)),
        )
    return mlir.lower_fun(call, multiple_results=True)(ctx, *values)


# `Work` is what equal calls share: a function for each handler inside would be a second.
mlir.register_lowering(_HANDLER, _lower, cacheable=False)


def _call(handler: Handler, *operands: jax.Array) -> Arrays:
    """The handler on whole or local arrays: axes in parentheses become one."""
    geometry = handler.geometry(tuple(operand.shape for operand in operands))
    shapes = geometry.result_shapes()
    like, every = jax.typeof(operands[0]), zip(shapes, handler.dtypes, strict=True)
    types = tuple(result_type(like, merged, dtype) for (merged, _), dtype in every)
    found = jax.ffi.ffi_call(handler.target, types)(*geometry.merge(operands), **handler.arguments)
    return tuple(
        result if shape == merged else result.reshape(shape)
        for (merged, shape), result in zip(shapes, found, strict=True)
    )


def _batch(
    operands: Sequence[jax.Array], axes: Sequence[int | None], *, handler: Handler, is_split: bool
) -> Any:
    """One more batch axis in front; a batch that has none gets one of length one."""
    (size, *_) = [x.shape[a] for x, a in zip(operands, axes, strict=True) if a is not None]
    arrays, results = parse(handler.axes)
    wide = {array.batch for array, axis in zip(arrays, axes, strict=True) if axis is not None}
    for result in results:
        if wide.isdisjoint(result.batch):
            wide.add(result.batch[0])
    lifted = []
    for array, axis, operand in zip(arrays, axes, operands, strict=True):
        if axis is not None:
            operand = jnp.moveaxis(operand, axis, 0)
        elif array.batch:
            # What two batches give together is as long as the results.
            length = size if array.batch in wide or len(array.batch) > 1 else 1
            operand = jnp.broadcast_to(operand, (length, *operand.shape))
        lifted.append(operand)
    return _HANDLER.bind(*lifted, handler=handler, is_split=is_split), (0,) * len(results)


batching.primitive_batchers[_HANDLER] = _batch


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


def _partition(
    handler: Handler,
    shapes: Shapes,
    mesh: Mesh,
    given: tuple[jax.ShapeDtypeStruct, ...],
    wanted: Sequence[jax.ShapeDtypeStruct],
) -> Any:
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


def _num_devices(mesh: Mesh, part: Sequence[str]) -> int:
    return math.prod(mesh.shape[name] for name in part)
