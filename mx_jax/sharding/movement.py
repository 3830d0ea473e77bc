"""Where operands and quantized arrays lie on a mesh, and how they move: values, or codes at their
real width.

Blocks that several devices have a part of are quantized under the maximum of all parts. A device's
part is given one position more, which holds the largest magnitude that any of them has in the
block, and loses it again behind the cast: every cast whose scale is a function of that maximum
gives the codes of the whole block, and what moves are maxima.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from mx_jax.axes import Side
from mx_jax.codecs import blocks as block_shapes
from mx_jax.codecs import float32, packing
from mx_jax.codecs.blocks import Blocks
from mx_jax.codecs.explicit_axes import Spec, partitions
from mx_jax.formats import WHOLE, Whole, block_format
from mx_jax.formats.block import FormatLike
from mx_jax.mxarray import ArrayOfCodes, MXArray
from mx_jax.packed import PackedMXArray

# The mesh axes of one axis of an array, the slowest first; () where it is whole.
Part = tuple[str, ...]

X = TypeVar("X", bound=jax.Array | ArrayOfCodes)


def parts_of(sharding: Spec, ndim: int) -> tuple[Part, ...]:
    """The mesh axes of each of an array's axes: `()` where it is not sharded."""
    entries = partitions(sharding, ndim)
    return tuple(part if isinstance(part, tuple) else (part,) if part else () for part in entries)


def spec_of(parts: Sequence[Part]) -> PartitionSpec:
    """Undo `parts_of`."""
    return PartitionSpec(*(part if len(part) > 1 else part[0] if part else None for part in parts))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Movement:
    """Which mesh axes an operand is gathered along, on the mesh in context."""

    stored: tuple[Part, ...]  # where it lies
    gathered: frozenset[str]
    maxima: int | None = None  # axis along which codes have the maxima of their blocks behind them

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

    def shard(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of one device's part. Inside shard_map an array has that shape already."""
        manual = manual_axes()
        sizes = jax.sharding.get_abstract_mesh().shape
        return tuple(
            length // math.prod(sizes[name] for name in part if name not in manual)
            for length, part in zip(shape, self.stored, strict=True)
        )

    def cut_axes(self, shape: tuple[int, ...], blocks: Blocks) -> list[int]:
        """The axes along which a block has a part on one device and a part on another."""
        shard, manual = self.shard(shape), set(self.manual)
        return [
            axis
            for axis, size in blocks
            if self.stored[axis]
            and (shard[axis] % size if isinstance(size, int) else manual & set(self.stored[axis]))
        ]

    def move(self, x: jax.Array) -> jax.Array:
        """An array with the operand's axes, gathered; axes of length one are whole already."""
        x = all_gather(x, self._by_shard_map())
        stored, used = self._by_compiler(x.shape)
        if stored == used:
            return x
        mesh = jax.sharding.get_abstract_mesh()
        counts = [math.prod(mesh.shape[name] for name in part) for part in stored]
        is_even = not any(length % count for length, count in zip(x.shape, counts, strict=True))
        if is_even and (gathered := gathered_parts(stored, used)):
            # XLA makes one of two equal ones, in both passes, and does not of constraints.
            return _gathering(mesh, stored, used, gathered)(x)
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
        for axis, names in enumerate(self._by_shard_map()):
            if names:
                cotangent = lax.psum_scatter(cotangent, names, scatter_dimension=axis, tiled=True)
        stored, used = self._by_compiler(cotangent.shape)
        if stored == used:
            return cotangent
        return lax.with_sharding_constraint(cotangent, spec_of(stored))

    def _by_shard_map(self) -> list[Part]:
        """Along which mesh axes of shard_map each axis is gathered."""
        return [tuple(name for name in part if name in self.manual) for part in self.stored]

    def _by_compiler(self, shape: tuple[int, ...]) -> tuple[tuple[Part, ...], tuple[Part, ...]]:
        """Where an array lies along other mesh axes, and where the product multiplies it."""
        manual = manual_axes()
        stored = tuple(
            tuple(name for name in part if name not in manual) if length > 1 else ()
            for part, length in zip(self.stored, shape, strict=True)
        )
        used = tuple(tuple(name for name in part if name not in self.gathered) for part in stored)
        return stored, used


def all_gather(x: jax.Array, parts: Sequence[Part]) -> jax.Array:
    """Inside shard_map: gathered along some mesh axes of each of its axes."""
    for axis, names in enumerate(parts):
        if names:
            x = lax.all_gather(x, names, axis=axis, tiled=True)
    return x


def gathered_parts(stored: tuple[Part, ...], used: tuple[Part, ...]) -> tuple[Part, ...] | None:
    """The mesh axes along which gathers alone bring an array to where it is used; None where there
    is nothing to gather, or more to do."""
    pairs = list(zip(stored, used, strict=True))
    if any(part[: len(kept)] != kept for part, kept in pairs if part):
        return None
    moved = tuple(part[len(kept) :] for part, kept in pairs)
    names, kept = ({name for part in parts for name in part} for parts in (moved, used))
    return moved if names and not names & kept else None


@functools.lru_cache(maxsize=4096)
def _gathering(
    mesh: AbstractMesh,
    stored: tuple[Part, ...],
    used: tuple[Part, ...],
    gathered: tuple[Part, ...],
) -> Callable[..., jax.Array]:
    """A function that gathers an array of automatic axes."""
    names = {name for part in stored for name in part}
    specs: Any = dict(in_specs=spec_of(stored), out_specs=spec_of(used), axis_names=names)
    run = functools.partial(all_gather, parts=gathered)
    return jax.jit(jax.shard_map(run, mesh=mesh, check_vma=False, **specs))


# How both operands of a product move; None: not at all.
Moves = tuple[Movement | None, Movement | None]
STAY: Moves = (None, None)


def as_gathered(operand: X, movement: Movement | None) -> X | jax.ShapeDtypeStruct:
    """What has the shape that a product sees; only inside shard_map it is another."""
    if movement is None:
        return operand
    sizes = jax.sharding.get_abstract_mesh().shape
    shape = tuple(
        length * math.prod(sizes[name] for name in part if name in movement.manual)
        for length, part in zip(operand.shape, movement.stored, strict=True)
    )
    return jax.ShapeDtypeStruct(shape, operand.dtype)


def reduced_in(dtype: np.dtype, wider: np.dtype | None) -> np.dtype:
    """In which dtype devices add up their parts of a product: its own, or a wider one if asked."""
    return dtype if wider is None else np.dtype(jnp.promote_types(dtype, wider))


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
    avoided: Collection[int],
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

    Examples:
      >>> import dataclasses, mx_jax
      >>> from jax.sharding import PartitionSpec as P
      >>> gather = mx_jax.sharding.Gather("fsdp", rhs=P("fsdp", "model"))
      >>> recipe = dataclasses.replace(mx_jax.recipes.mxfp4(), gather=gather)
    """

    axes: Sequence[str]
    _: dataclasses.KW_ONLY
    rhs: PartitionSpec | None = None
    lhs: PartitionSpec | None = None

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
    def of(cls, gather: GatherLike) -> "Gather | None":
        """A `Gather`, where a name or names of mesh axes stand for one.

        Raises:
          TypeError: what is neither.
        """
        return gather if gather is None or isinstance(gather, Gather) else cls(gather)

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
        stored = parts_of(spec, ndim)
        gathered = names & frozenset(name for part in stored for name in part)
        if not gathered:
            return None
        return Movement(stored=stored, gathered=gathered)


def with_maxima(x: jax.Array, blocks: Blocks, axis: int, names: Sequence[str]) -> jax.Array:
    """A device's part of an array, and behind it along an axis the maxima of its blocks."""
    pieces, inside = block_shapes.split(lax.stop_gradient(x), blocks)
    maxima = jnp.max(float32.float32_bits(pieces) & float32.ABS, axis=inside, initial=0)
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


# Arrays that lie on devices -----------------------------------------------------------------------


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
    codes = spec_of(parts)
    if isinstance(size, Whole):
        parts[axis] = ()
    each = (*parts[:num_batch], *((),) * (ndim - num_batch))
    scales = each if isinstance(kept_size, Whole) else parts
    return Specs(codes, spec_of(scales), spec_of(each) if format.tensor_scale else None)


def device_put(x: MXArray, sharding: NamedSharding) -> MXArray:
    """`jax.device_put` of an MXArray, its parts where the values are to lie.

    Args:
      x: quantized.
      sharding: of its values.

    Raises:
      ValueError: a shard that would have a part of a block; the message names axis, shard size,
        block and remedy.
      TypeError: no MXArray, or no NamedSharding.

    Examples:
      >>> import jax, jax.numpy as jnp, mx_jax
      >>> mesh = jax.make_mesh((1,), ("fsdp",))
      >>> place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("fsdp"))
      >>> mx_jax.sharding.device_put(mx_jax.quantize(jnp.ones((64, 32)), "mxfp4"), place).shape
      (64, 32)
    """
    if isinstance(x, PackedMXArray):
        raise TypeError(
            f"device_put: packed weights are one device's, got {x!r}; place the MXArray, and each "
            "device multiplies its part of the codes"
        )
    if not isinstance(x, MXArray) or not isinstance(sharding, NamedSharding):
        raise TypeError(
            "device_put: needs an MXArray and a NamedSharding, got "
            f"{type(x).__name__} and {type(sharding).__name__}; jax.device_put takes other arrays"
        )
    parts = parts_of(sharding, x.ndim)
    for axis, size in x.blocks:
        length, part = x.shape[axis], parts[axis]
        devices = math.prod(sharding.mesh.shape[name] for name in part)
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

    def put(array: jax.Array) -> jax.Array:
        lies = tuple(
            part if length == whole or length > 1 else ()
            for part, length, whole in zip(parts, array.shape, x.shape, strict=True)
        )
        return jax.device_put(array, NamedSharding(sharding.mesh, spec_of(lies)))

    return dataclasses.replace(
        x,
        codes=put(x.codes),
        scales=put(x.scales),
        tensor_scale=None if x.tensor_scale is None else put(x.tensor_scale),
        primal=None,
    )
