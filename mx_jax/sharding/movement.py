"""Moving an operand to where its product multiplies it: values, or codes at their real width.

Blocks that several devices have a part of are quantized under the maximum of all parts. A device's
part is given one position more, which holds the largest magnitude that any of them has in the
block, and loses it again behind the cast: every cast whose scale is a function of that maximum
gives the codes of the whole block, and what moves are maxima.
"""

import dataclasses
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from mx_jax.axes import Side
from mx_jax.codecs import blocks as block_shapes
from mx_jax.codecs import float32, packing
from mx_jax.codecs.blocks import Blocks
from mx_jax.codecs.explicit_axes import Spec, partitions
from mx_jax.formats import WHOLE
from mx_jax.mxarray import ArrayOfCodes, MXArray

# The mesh axes of one axis of an array, the slowest first; () where it is whole.
Part = tuple[str, ...]

X = TypeVar("X", bound=jax.Array | ArrayOfCodes)


def parts_of(sharding: Spec, ndim: int) -> tuple[Part, ...]:
    """The mesh axes of each of an array's axes: `()` where it is not sharded."""
    found = partitions(sharding, ndim)
    return tuple(part if isinstance(part, tuple) else (part,) if part else () for part in found)


def spec_of(parts: tuple[Part, ...]) -> PartitionSpec:
    """Undo `parts_of`."""
    return PartitionSpec(*(part if len(part) > 1 else part[0] if part else None for part in parts))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Movement:
    """Which mesh axes an operand is gathered along, on the mesh in context."""

    stored: tuple[Part, ...]  # where it lies
    gathered: frozenset[str]
    as_codes: bool  # whether it moves once it is quantized, or before
    maxima: int | None = None  # axis along which codes have the maxima of their blocks behind them

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
        if self.maxima is not None:
            x = without_maxima(x, self.maxima)
        sharded = [axis for axis, part in enumerate(self.stored) if part]
        bits, sizes = x.format.element.bits, self.shard(x.codes.shape)
        codes = moved_packed(x.codes, bits, self.move, sizes, sharded)
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


def as_gathered(operand: X, movement: Movement | None) -> X | jax.ShapeDtypeStruct:
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


def moved_packed(
    codes: jax.Array,
    bits: int,
    move: Callable[[jax.Array], jax.Array],
    sizes: Sequence[int],
    avoided: Collection[int] = (),
) -> jax.Array:
    """Codes moved at their real width, if a device has whole bytes of them along some axis."""
    # `sizes`: of each axis, as many codes as whole bytes may be made of. Axes that are `avoided`
    # are packed along only if no other fits: packing leaves the others in place.
    group = packing.codes_per_group(bits)
    fitting = [axis for axis, size in enumerate(sizes) if size % group == 0]
    if group == 1 or not fitting:
        return move(codes)
    axis = max(fitting, key=lambda axis: (axis not in avoided, axis))
    packed = move(jnp.moveaxis(packing.pack(jnp.moveaxis(codes, axis, -1), bits), -1, axis))
    packed = jnp.moveaxis(packed, axis, -1)
    return jnp.moveaxis(packing.unpack(packed, bits, packed.shape[-1] * 8 // bits), -1, axis)


# What a `gather` argument may be.
GatherLike = Any


@dataclasses.dataclass(frozen=True)
class Gather:
    """Mesh axes along which operands are stored in shards, and gathered for each product as codes.

    Each shard is quantized where it lies; what moves is codes at their real width and scales, in
    the orientation that the product needs, and the gradient comes back in high precision, summed
    and scattered. Nothing is gathered without a mesh in context (`jax.set_mesh`, `jax.shard_map`).

    Attributes:
      axes: names of mesh axes, e.g. `("fsdp",)`; a single name stands for itself.
      rhs: where the right operand, the weight, lies: mesh axes of each of its axes. None: what its
        type says, on a mesh with explicit axes; in layers, what Flax's metadata say.
      lhs: likewise for the left operand; None on other meshes: it is not gathered.
      as_codes: False gathers values in place of codes, once for a product and its gradients where
        XLA keeps what it gathered: bfloat16 has 16 bits an element, MXFP8 in two orientations 16.5.

    Examples:
      >>> import jax, mx_jax
      >>> from jax.sharding import PartitionSpec as P
      >>> gather = mx_jax.sharding.Gather("fsdp", rhs=P("fsdp", "model"))
      >>> recipe = mx_jax.recipes.mxfp4().with_(gather=gather)
    """

    axes: Sequence[str]
    _: dataclasses.KW_ONLY
    rhs: PartitionSpec | None = None
    lhs: PartitionSpec | None = None
    as_codes: bool = True

    def __post_init__(self):
        axes: Any = (self.axes,) if isinstance(self.axes, str) else self.axes
        if not isinstance(axes, Sequence) or not all(isinstance(name, str) for name in axes):
            raise TypeError(
                f"Gather: axes must be names of mesh axes, got axes={self.axes!r}; e.g. 'fsdp'"
            )
        object.__setattr__(self, "axes", tuple(axes))
        for side in ("lhs", "rhs"):
            spec = getattr(self, side)
            if spec is not None:
                object.__setattr__(self, side, PartitionSpec(*spec))

    @classmethod
    def of(cls, given: GatherLike) -> "Gather | None":
        """A `Gather`, where a name or names of mesh axes stand for one.

        Raises:
          TypeError: what is neither.
        """
        return given if given is None or isinstance(given, Gather) else cls(given)

    def with_leading(self, lhs: int, rhs: int) -> "Gather":
        """The same for operands with more axes in front, which are whole."""
        specs = (
            None if spec is None else PartitionSpec(*(None,) * added, *spec)
            for spec, added in ((self.lhs, lhs), (self.rhs, rhs))
        )
        return dataclasses.replace(self, **dict(zip(("lhs", "rhs"), specs, strict=True)))

    def on_mesh(self) -> frozenset[str]:
        """The axes that operands are gathered along on the mesh in context; none without one.

        Raises:
          ValueError: axes that the mesh does not have.
        """
        mesh = jax.sharding.get_abstract_mesh()
        if mesh.empty:
            return frozenset()
        missing = [name for name in self.axes if name not in mesh.axis_names]
        if missing:
            raise ValueError(
                f"gather: the mesh in context has no axis {missing[0]!r}, got gather axes="
                f"{self.axes} and mesh axes={mesh.axis_names}; name axes of the mesh, or None"
            )
        return frozenset(self.axes)

    def movement(self, side: Side, ndim: int) -> Movement | None:
        """How an operand moves where no type says where it lies; None: it does not.

        Raises:
          ValueError: a right operand of which nobody says where it lies.
        """
        names = frozenset(name for name in self.on_mesh() if type_of(name) is not AxisType.Explicit)
        spec = self.rhs if side == "rhs" else self.lhs
        if not names or (spec is None and side == "lhs"):
            return None
        if spec is None:
            raise ValueError(
                f"gather: nobody says where {side} lies along mesh axes={sorted(names)}, which are "
                f"not explicit, got gather axes={self.axes}, rhs=None; pass Gather({self.axes}, "
                "rhs=PartitionSpec(...)), or give the layer's kernel_init to nn.with_partitioning"
            )
        if len(spec) > ndim:
            raise ValueError(
                f"gather: a spec has at most one entry for each axis, got {side}={spec} for an "
                f"operand with ndim={ndim}"
            )
        return moving(parts_of(spec, ndim), names, as_codes=self.as_codes)


def moving(stored: tuple[Part, ...], names: frozenset[str], *, as_codes: bool) -> Movement | None:
    """The movement along those of some mesh axes that an operand is sharded along."""
    gathered = names & frozenset(name for part in stored for name in part)
    if not gathered:
        return None
    return Movement(stored=stored, gathered=gathered, as_codes=as_codes)


def with_maxima(x: jax.Array, blocks: Blocks, axis: int, names: Sequence[str]) -> jax.Array:
    """A device's part of an array, and behind it along an axis the maxima of its blocks."""
    pieces, inside = block_shapes.split(lax.stop_gradient(x), blocks)
    maxima = jnp.max(float32.to_bits(pieces) & float32.ABS, axis=inside, initial=0)
    maxima = float32.from_bits(lax.pmax(maxima, tuple(names)), x.dtype)
    for other, size in blocks:
        if other != axis:
            extent, length = block_shapes.block_extent(size, x.shape[other]), x.shape[other]
            maxima = lax.slice_in_dim(
                jnp.repeat(maxima, extent, other), 0, length, axis=other % x.ndim
            )
    return jnp.concatenate([x, maxima], axis)


def without_maxima(array: MXArray, axis: int) -> MXArray:
    """The part alone, quantized."""
    length = array.codes.shape[axis] - 1
    codes = lax.slice_in_dim(array.codes, 0, length, axis=axis % array.ndim)
    return dataclasses.replace(array, codes=codes, primal=None)
