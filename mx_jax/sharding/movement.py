"""Moving an operand to where its product multiplies it: values, or codes at their real width."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from mx_jax.codecs import packing
from mx_jax.codecs.blocks import Blocks
from mx_jax.codecs.explicit_axes import partitions
from mx_jax.formats import WHOLE
from mx_jax.mxarray import MXArray

# The mesh axes of one axis of an array, the slowest first; () where it is whole.
Part = tuple[str, ...]


def parts_of(sharding: Any, ndim: int) -> tuple[Part, ...]:
    """The mesh axes of each of an array's axes.

    Examples:
      >>> from jax.sharding import PartitionSpec
      >>> from mx_jax.sharding.movement import parts_of
      >>> parts_of(PartitionSpec("data", None, ("fsdp", "model")), 4)
      (('data',), (), ('fsdp', 'model'), ())
    """
    found = partitions(sharding, ndim)
    return tuple(part if isinstance(part, tuple) else (part,) if part else () for part in found)


def spec_of(parts: tuple[Part, ...]) -> PartitionSpec:
    """Undo `parts_of`."""
    return PartitionSpec(*(part if len(part) > 1 else part[0] if part else None for part in parts))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Movement:
    """Which mesh axes an operand is gathered along, on the mesh in context.

    Attributes:
      stored: where it lies.
      gathered: mesh axes that it is gathered along.
      as_codes: whether it moves once it is quantized, or before.
    """

    stored: tuple[Part, ...]
    gathered: frozenset[str]
    as_codes: bool

    @property
    def used(self) -> tuple[Part, ...]:
        """Where the product multiplies it."""
        return tuple(
            tuple(name for name in part if name not in self.gathered) for part in self.stored
        )

    def transposed(self, order: Sequence[int], inserted: int | None = None) -> "Movement":
        """The movement of an operand whose axes were permuted, and an axis of length one put in."""
        stored = [self.stored[axis] for axis in order]
        if inserted is not None:
            stored.insert(inserted, ())
        return dataclasses.replace(self, stored=tuple(stored))

    @property
    def manual(self) -> tuple[str, ...]:
        """Those of its mesh axes that shard_map has taken over, in the order of the mesh."""
        mesh = jax.sharding.get_abstract_mesh()
        return tuple(name for name in mesh.manual_axes if name in self.gathered)

    def gathered_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape that a product sees. Only inside shard_map it is another."""
        sizes = jax.sharding.get_abstract_mesh().shape
        return tuple(
            length * math.prod(sizes[name] for name in part if name in self.manual)
            for length, part in zip(shape, self.stored, strict=True)
        )

    def shard(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of one device's part. Inside shard_map an array has that shape already."""
        manual = manual_axes()
        sizes = jax.sharding.get_abstract_mesh().shape
        return tuple(
            length // math.prod(sizes[name] for name in part if name not in manual)
            for length, part in zip(shape, self.stored, strict=True)
        )

    def keeps_blocks(self, shape: tuple[int, ...], blocks: Blocks) -> bool:
        """Whether no block has a part on one device and a part on another."""
        shard = self.shard(shape)
        for axis, size in blocks:
            if not self.stored[axis]:
                continue
            whole = not isinstance(size, int)
            if whole and set(self.stored[axis]) & set(self.manual):
                return False
            if not whole and shard[axis] % size:
                return False
        return True

    def move(self, x: jax.Array) -> jax.Array:
        """An array with the operand's axes, gathered; axes of length one are whole already."""
        if self.gathered & manual_axes():
            x = self._all_gather(x)
        stored, used = (self._outside(parts, x.shape) for parts in (self.stored, self.used))
        if stored == used:
            return x
        mesh: Any = jax.sharding.get_abstract_mesh()
        if any(type_of(name) is AxisType.Explicit for name in self.gathered):
            return jax.sharding.reshard(x, NamedSharding(mesh, spec_of(used)))
        # Said twice, or XLA might gather what x was made of.
        x = lax.with_sharding_constraint(x, spec_of(stored))
        return lax.with_sharding_constraint(x, spec_of(used))

    def move_codes(self, x: MXArray) -> MXArray:
        """A quantized operand, gathered as packed codes and scales."""
        codes = _repacked(x.codes, x.format.element.bits, self)
        # An axis with one scale has the same on each device.
        single = {axis % x.ndim for axis, size in x.blocks if size is WHOLE}
        stored = tuple(() if axis in single else part for axis, part in enumerate(self.stored))
        scales = dataclasses.replace(self, stored=stored).move(x.scales)
        tensor_scale = x.tensor_scale
        if tensor_scale is not None and any(length > 1 for length in tensor_scale.shape):
            tensor_scale = self.move(tensor_scale)
        return dataclasses.replace(
            x, codes=codes, scales=scales, tensor_scale=tensor_scale, primal=None
        )

    def move_back(self, cotangent: jax.Array) -> jax.Array:
        """A cotangent of what was gathered, summed and scattered to where the operand lies."""
        manual = manual_axes()
        for axis, part in enumerate(self.stored):
            names = tuple(name for name in part if name in self.gathered & manual)
            if names:
                cotangent = lax.psum_scatter(cotangent, names, scatter_dimension=axis, tiled=True)
        stored, used = (self._outside(parts, cotangent.shape) for parts in (self.stored, self.used))
        if stored == used or any(type_of(name) is AxisType.Explicit for name in self.gathered):
            # On meshes with explicit axes a product says itself where it goes.
            return cotangent
        return lax.with_sharding_constraint(cotangent, spec_of(stored))

    def _all_gather(self, x: jax.Array) -> jax.Array:
        for axis, part in enumerate(self.stored):
            names = tuple(name for name in part if name in self.gathered & manual_axes())
            if names:
                x = lax.all_gather(x, names, axis=axis, tiled=True)
        return x

    def _outside(self, parts: tuple[Part, ...], shape: tuple[int, ...]) -> tuple[Part, ...]:
        """Parts that are not shard_map's own, of an array that may be whole along some axes."""
        manual = manual_axes()
        return tuple(
            tuple(name for name in part if name not in manual) if length > 1 else ()
            for part, length in zip(parts, shape, strict=True)
        )


# How both operands of a product move; None: not at all.
Moves = tuple[Movement | None, Movement | None]
STAY: Moves = (None, None)


def as_gathered(operand: Any, movement: Movement | None) -> Any:
    """What has the shape of an operand where a product multiplies it."""
    if movement is None:
        return operand
    return jax.ShapeDtypeStruct(movement.gathered_shape(operand.shape), operand.dtype)


def reduced_in(dtype: np.dtype, asked: np.dtype | None) -> np.dtype:
    """In which dtype devices add up their parts of a product: its own, or a wider one if asked.

    Examples:
      >>> import numpy as np
      >>> from mx_jax.sharding.movement import reduced_in
      >>> half = np.dtype("float16")
      >>> reduced_in(half, np.dtype("float32")), reduced_in(half, None)
      (dtype('float32'), dtype('float16'))
    """
    return dtype if asked is None else np.dtype(jnp.promote_types(dtype, asked))


def manual_axes() -> frozenset[str]:
    """The mesh axes that shard_map has taken over."""
    return frozenset(jax.sharding.get_abstract_mesh().manual_axes)


def type_of(name: str) -> AxisType:
    """The type of an axis of the mesh in context."""
    mesh = jax.sharding.get_abstract_mesh()
    return mesh.axis_types[mesh.axis_names.index(name)]


def _repacked(codes: jax.Array, bits: int, movement: Movement) -> jax.Array:
    """Codes moved at their real width, if whole bytes of them lie on each device along some axis.

    An axis that nothing shards is best: packing leaves it where it is.
    """
    group, shard = packing.codes_per_group(bits), movement.shard(codes.shape)
    fitting = [axis for axis in range(codes.ndim) if shard[axis] % group == 0]
    if group == 1 or not fitting:
        return movement.move(codes)
    axis = max(fitting, key=lambda axis: (not movement.stored[axis], axis))
    moved = _turned(movement, axis)
    packed = moved.move(packing.pack(jnp.moveaxis(codes, axis, -1), bits))
    length = packed.shape[-1] * 8 // bits
    return jnp.moveaxis(packing.unpack(packed, bits, length), -1, axis)


def _turned(movement: Movement, axis: int) -> Movement:
    """The same for an array whose axis was moved to the end."""
    parts = list(movement.stored)
    parts.append(parts.pop(axis))
    return dataclasses.replace(movement, stored=tuple(parts))
