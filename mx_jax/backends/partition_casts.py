"""One cast that the compiler splits between devices: each casts its part, and no value moves.

Where a shard ends within a block, the devices that share it agree on its largest magnitude, and on
that of the whole array where there is a tensor scale.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mx_jax.backends.calls import Call, QuantizeCall, result_of
from mx_jax.backends.partition import Compute, Split, without_mesh
from mx_jax.codecs import blocks as block_shapes
from mx_jax.codecs.blocks import Blocks
from mx_jax.codecs.rounding import ROUNDINGS
from mx_jax.reference.quantize import block_amax, tensor_scale_of
from mx_jax.reference.scale_rules import SCALE_RULES
from mx_jax.sharding.movement import Part, spec_of, with_maxima, without_maxima
from mx_jax.sharding.partition import fine_mesh, stored_parts


class SplitCast(Split):
    """A cast that the compiler splits between devices, of values, random bits, a tensor scale."""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.call.shape

    @functools.cached_property
    def block_of(self) -> Mapping[int, int]:
        """For each blocked axis the positions of a block."""
        return {
            axis % len(self.shape): block_shapes.block_extent(size, self.shape[axis])
            for axis, size in self.call.blocks
        }

    def run(self, *leaves: jax.Array) -> list[jax.Array]:
        return jax.tree.leaves(super().run(*leaves))


def can_split(call: Call) -> bool:
    """Whether the compiler can be told how a cast is split: constant sizes, one tensor scale.

    And numbers of the library's own: a name in the program tells them apart, for compilation
    caches, and a part says as much of a block as the whole array does.
    """
    if not isinstance(call, QuantizeCall) or call.scale_axes or not call.format.is_known:
        return False
    rule, rounding = call.scale_rule, call.rounding
    if rule not in SCALE_RULES or rule.group > max(_lengths(call), default=1):
        return False
    is_own = rounding.is_stochastic or rounding in ROUNDINGS
    return is_own and all(isinstance(size, int) and size > 0 for size in call.shape)


def _lengths(call: QuantizeCall) -> list[int]:
    """Of blocks, where they are no whole axes."""
    return [size for _, size in call.blocks if isinstance(size, int)]


def quantize(compute: Compute, call: QuantizeCall, *operands: jax.Array | None) -> Any:
    """A cast that the compiler splits between devices."""
    leaves, tree = jax.tree.flatten(operands)
    found = _function(SplitCast(compute, call, tree), tuple(leaf.shape for leaf in leaves))(*leaves)
    return jax.tree.unflatten(jax.tree.structure(result_of(call, *operands)), found)


@functools.lru_cache(maxsize=4096)
def _function(split: SplitCast, shapes: tuple[tuple[int, ...], ...]) -> Any:
    rule, sizes = _sharding_rule(split, shapes)
    return split.with_rules(_partition, _infer, rule, **sizes)


def _sharding_rule(split: SplitCast, shapes: Sequence[Any]) -> tuple[str, dict[str, int]]:
    """What Shardy is told, and the sizes of factors that are less than an axis."""
    words, blocks, sizes = [], {}, {}
    for axis, length in enumerate(split.shape):
        size = split.block_of.get(axis, 1)
        if size > 1 and length > size and length % size == 0:
            words.append(f"(a{axis} a{axis}_inside)")
            blocks[axis], sizes[f"a{axis}_inside"] = f"a{axis}", size
        else:
            words.append(f"a{axis}")
    count = 0

    def named(shape: Sequence[int]) -> str:
        nonlocal count
        found = []
        for axis, (length, whole) in enumerate(zip(shape, split.shape, strict=True)):
            if length == whole:
                found.append(words[axis])
            elif axis in blocks and length == whole // split.block_of[axis]:
                found.append(blocks[axis])
            else:
                found.append(f"own{count}")
                count += 1
        return " ".join(found)

    given = ", ".join(["name", *map(named, shapes)])
    return f"{given} -> {', '.join(named(result.shape) for result in _results(split))}", sizes


def _results(split: SplitCast) -> list[Any]:
    x = jax.ShapeDtypeStruct(split.shape, np.float32)
    return jax.tree.leaves(result_of(split.call, x, None, None))


@dataclasses.dataclass(frozen=True)
class Share:
    """What each device casts."""

    parts: tuple[Part, ...]  # for each axis of the values the mesh axes that split it
    whole: tuple[Part, ...]  # of them, those that leave blocks whole

    @property
    def names(self) -> Part:
        return tuple(name for part in self.parts for name in part)

    def shared(self, blocks: Blocks) -> dict[int, Part]:
        """For each axis whose blocks several devices share, from the end, the mesh axes."""
        pairs = ((axis, self.parts[axis][len(self.whole[axis]) :]) for axis, _ in blocks)
        return {axis: names for axis, names in pairs if names}

    def place(self, shape: Sequence[int], whole: Sequence[int]) -> PartitionSpec:
        """Where an array of the values' axes lies, of which some count blocks, or one position."""
        parts = []
        for axis, (length, values) in enumerate(zip(shape, whole, strict=True)):
            part = self.parts[axis] if length == values else self.whole[axis] if length > 1 else ()
            parts.append(part)
        return spec_of(tuple(parts))


def _share(split: SplitCast, mesh: Mesh, lies: tuple[Part, ...]) -> Share:
    """What each device casts of values that lie so; an axis that cuts blocks unevenly is whole."""
    count = dict(zip(mesh.axis_names, mesh.devices.shape, strict=True))
    by_amax = not split.call.scale_rule.reads_values
    parts, whole = [], []
    for axis, part in enumerate(lies):
        length, size = split.shape[axis], split.block_of.get(axis, 1)
        outer: Part = ()
        while len(outer) < len(part) and not length // count[part[len(outer)]] % size:
            length //= count[part[len(outer)]]
            outer = part[: len(outer) + 1]
        devices = math.prod(count[name] for name in part[len(outer) :])
        inside = by_amax and length == size and size % devices == 0 and size > devices
        parts.append(part if inside else outer)
        whole.append(outer)
    return Share(tuple(parts), tuple(whole))


def _shared(
    split: SplitCast,
    mesh: Mesh,
    leaves: Sequence[Any],
    wanted: Sequence[jax.ShapeDtypeStruct] | None,
) -> Share:
    """By where the values lie, or their codes have to if the values are everywhere."""
    lies = stored_parts(leaves[0].sharding, split.shape, mesh)
    if not any(lies) and wanted is not None:
        lies = stored_parts(wanted[0].sharding, split.shape, mesh)
    return _share(split, mesh, lies)


def _infer(
    split: SplitCast, mesh: Mesh, given: Sequence[Any], wanted: Sequence[Any]
) -> list[NamedSharding]:
    """Where codes and scales come to lie: the older partitioner's question."""
    mesh = fine_mesh(mesh, given[1])
    each = _shared(split, mesh, given[1:], None)
    return [NamedSharding(mesh, each.place(r.shape, split.shape)) for r in _results(split)]


def _partition(split: SplitCast, mesh: Mesh, given: Sequence[Any], wanted: Sequence[Any]) -> Any:
    """What each device computes, and where its operands have to be for it."""
    mesh = fine_mesh(mesh, given[1])
    each = _shared(split, mesh, given[1:], wanted)
    places = [NamedSharding(mesh, each.place(x.shape, split.shape)) for x in given[1:]]
    results = [NamedSharding(mesh, each.place(r.shape, split.shape)) for r in _results(split)]
    local = without_mesh(functools.partial(_local, split, each))
    return mesh, local, results, (NamedSharding(mesh, PartitionSpec(None)), *places)


def _local(split: SplitCast, each: Share, name: jax.Array, *leaves: jax.Array) -> list[jax.Array]:
    del name
    x, bits, scale = jax.tree.unflatten(split.tree, leaves)
    call, shared = split.call, each.shared(split.call.blocks)
    if scale is None and call.format.tensor_scale:
        scale = agreed_scale(x, call.blocks, call.scale_rule.largest_value(call.format), each.names)
    if not shared:
        own = dataclasses.replace(call, shape=x.shape)
        return jax.tree.leaves(split.compute(own, x, bits, scale))
    # Under the maxima of all devices that share a block.
    axis, names = next(iter(shared)), [name for part in shared.values() for name in part]
    if bits is not None and not call.scale_rule.rounding.random_bits:
        bits = jnp.concatenate([bits, lax.slice_in_dim(bits, 0, 1, axis=axis % x.ndim)], axis)
    x = with_maxima(x, call.blocks, axis, names)
    own = dataclasses.replace(call, shape=x.shape)
    return jax.tree.leaves(without_maxima(split.compute(own, x, bits, scale), axis))


def agreed_scale(x: jax.Array, blocks: Blocks, largest: float, names: Sequence[str]) -> jax.Array:
    """The tensor scale of all devices' parts."""
    # Found as the cast finds them, so that XLA computes a block's maximum once.
    amax = block_amax(*block_shapes.split(lax.stop_gradient(x), blocks))
    return tensor_scale_of(amax, largest, x.ndim, tuple(names))
