"""Products and casts that the compiler splits between devices: what moves are codes.

Left to itself, XLA dequantizes an operand where it lies and gathers values, also of gradients. Here
it asks, when it compiles and knows real shardings, how to split: codes and scales move, and codes
of less than a byte are packed on their way. Each device casts its part, and no value moves: where a
shard ends within a block, the devices that share it agree on its largest magnitude, and on that of
the whole array where there is a tensor scale.
"""

import dataclasses
import functools
import hashlib
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from mx_jax.axes import Axes, ProductAxes
from mx_jax.backends import calls
from mx_jax.backends.calls import MatmulCall, OperandType, QuantizeCall
from mx_jax.backends.stored import unpacked_for
from mx_jax.backends.target import Target
from mx_jax.codecs import blocks as block_shapes
from mx_jax.codecs.blocks import Blocks
from mx_jax.codecs.rounding import ROUNDINGS
from mx_jax.mxarray import MXArray
from mx_jax.packed import Cut, PackedMXArray, unpacked
from mx_jax.reference.quantize import block_amax, tensor_scale_of
from mx_jax.reference.scale_rules import SCALE_RULES
from mx_jax.sharding import movement
from mx_jax.sharding.movement import Part, spec_of
from mx_jax.sharding.partition import Factor, Factors, Share, fine_mesh, share, stored_parts

T = TypeVar("T")

# Computes a call of these operands on one device: `compute(call, lhs, rhs)`.
Compute = Callable[..., Any]
Struct = jax.ShapeDtypeStruct


def can_split(call: calls.Call, target: Target) -> bool:
    """Whether a machine's compiler can be told how a product or casts are split: of constant sizes.

    Of casts also one tensor scale, and numbers of the library's own: a name in the program tells
    them apart, for compilation caches, and a part says as much of a block as the whole array does.
    """
    if target.unsplit:
        return False
    match call:
        case MatmulCall():
            shapes = (*call.lhs.shape, *call.rhs.shape)
            return call.moves_codes and all(isinstance(size, int) and size > 0 for size in shapes)
        case calls.QuantizeBothCall():
            return can_split(call.first, target) and can_split(call.second, target)
        case QuantizeCall(scale_rule=rule, rounding=rounding):
            return (
                not call.scale_axes
                and call.format.is_known
                and rule in SCALE_RULES
                and (rounding.is_stochastic or rounding in ROUNDINGS)
                and all(isinstance(size, int) and size > 0 for size in call.shape)
            )
    return False


@dataclasses.dataclass(frozen=True)
class Split:
    """A call that the compiler splits between devices."""

    compute: Compute  # each device's part; a hashable value
    call: Any
    tree: Any  # of the operands

    def run(self, *leaves: jax.Array) -> Any:
        return self.compute(self.call, *jax.tree.unflatten(self.tree, leaves))

    def with_rules(
        self, infer: Callable[..., Any], partition: Callable[..., Any], rule: str, **factors: object
    ) -> Callable[..., Any]:
        """`run` as one operation, for both partitioners: a callback of each, and Shardy's rule.

        Args:
          infer: given a mesh and the operands, where the results come to lie: the older
            partitioner's question; the newer has the rule.
          partition: given a mesh, operands and results, a finer mesh, what each device computes,
            and where its results and operands have to be for it.
          rule: of operands and results, a name for the program before them.
          **factors: what else `custom_partitioning` takes.
        """

        def partition_named(mesh: Mesh, given: Sequence[Struct], wanted: Any) -> Any:
            mesh, local, results, operands = partition(mesh, given[1:], wanted)

            def run(name: jax.Array, *leaves: jax.Array) -> Any:
                # Types have no mesh's explicit axes while the compiler asks.
                with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
                    return local(*leaves)

            return mesh, run, results, (NamedSharding(mesh, PartitionSpec(None)), *operands)

        partitioned: Any = custom_partitioning(lambda name, *leaves: self.run(*leaves))
        partitioned.def_partition(
            partition=partition_named,
            infer_sharding_from_operands=lambda mesh, given, wanted: infer(mesh, given[1:]),
            # A reshape may have cut a mesh axis in two, which no NamedSharding of its mesh says.
            decode_shardings=False,
            sharding_rule=f"name, {rule}",
            **factors,
        )
        # Nothing reads the name: it tells programs apart in the key of a compilation cache.
        name = hashlib.sha256(repr((self.compute, self.call, self.tree)).encode()).digest()
        return functools.partial(partitioned, np.frombuffer(name, np.uint32))


# Products -----------------------------------------------------------------------------------------


def multiply(
    compute: Compute, call: MatmulCall, lhs: calls.AnyOperand, rhs: calls.AnyOperand
) -> jax.Array:
    """A product that the compiler splits between devices."""
    if isinstance(rhs, PackedMXArray) and rhs.layout.cut is None:
        call, rhs = unpacked_for(call, rhs)
    leaves, tree = jax.tree.flatten((unpacked(lhs), rhs))
    return _product(SplitProduct(compute, call, tree), tuple(x.shape for x in leaves))(*leaves)


class SplitProduct(Split):
    """A product that the compiler splits between devices."""

    @functools.cached_property
    def axes(self) -> ProductAxes:
        return ProductAxes(self.call.lhs.axes, self.call.rhs.axes)

    @functools.cached_property
    def factors(self) -> Factors:
        return Factors.of(self.axes)

    def sides(self, leaves: Sequence[Any]) -> list[tuple[tuple[Factor, ...], Any]]:
        """The factors of both operands, and these, made of anything that has a shape."""
        lhs, rhs = jax.tree.unflatten(self.tree, leaves)
        return [(self.factors.lhs, lhs), (self.factors.rhs, rhs)]

    def rule(self, shapes: Sequence[Any]) -> tuple[str, tuple[str, ...], dict[str, int]]:
        """Shardy's rule, the factors that are summed over, the sizes of factors below an axis."""
        sides = self.sides([Struct(shape, np.uint8) for shape in shapes])
        names = {factor: f"{factor[0]}{factor[1]}" for own, _ in sides for factor in own}
        arrays, sizes = [], {}
        if isinstance(rhs := sides[1][1], PackedMXArray):
            positions, arrays, sizes = _words(rhs)
            names |= positions
            sides = sides[:1]
        given, count = [], itertools.count()
        for own, operand in sides:
            leaves = jax.tree.leaves(operand)
            for leaf in leaves:
                axes = zip(own, leaf.shape, leaves[0].shape, strict=True)
                words = (names[f] if n == whole else f"own{next(count)}" for f, n, whole in axes)
                given.append(" ".join(words))
        wanted = " ".join(names[factor] for factor in self.factors.out)
        summed = [f"k{number}" for number in range(len(self.axes.lhs.contracting))]
        summed += [name for name in sizes if name.startswith("k")]
        return f"{', '.join([*given, *arrays])} -> {wanted}", tuple(summed), sizes

    def share(self, mesh: Mesh, leaves: Sequence[Any], wanted: Struct | None) -> Any:
        """What each device computes, and where both operands lie now."""
        sizes, granules, stored = {}, defaultdict(list), []
        for own, operand in self.sides(leaves):
            array, counts = jax.tree.leaves(operand)[0], own
            if isinstance(operand, PackedMXArray):
                # By the first packed array; a device has whole tiles and parts.
                counts, cut = _factors_of(operand)[0], _cut_of(operand)
                granules[_KEPT].append(_rows(operand, cut))
                granules[_CONTRACTED].append(operand.k[0] // cut.parts)
            for axis, size in operand.blocks if isinstance(operand, MXArray) else ():
                if isinstance(size, int):
                    granules[own[axis]].append(size)
            lies = stored_parts(array.sharding, array.shape, mesh)
            parts = dict(zip(counts, lies, strict=True))
            stored.append(tuple(parts.get(factor, ()) for factor in own))
            sizes |= dict(zip(own, operand.shape, strict=True))
        out = ((),) * len(self.factors.out)
        if wanted is not None:
            out = stored_parts(wanted.sharding, wanted.shape, mesh)
        return share(mesh, self.factors, (*stored, out), sizes, granules), stored

    def infer(self, mesh: Mesh, leaves: Sequence[Struct]) -> NamedSharding:
        mesh = fine_mesh(mesh, leaves[0])
        each, _ = self.share(mesh, leaves, None)
        return NamedSharding(mesh, spec_of(each.product(self.factors.out)))

    def partition(self, mesh: Mesh, leaves: Sequence[Struct], wanted: Struct) -> Any:
        mesh = fine_mesh(mesh, wanted)
        each, stored = self.share(mesh, leaves, wanted)
        moves: list[tuple[Part, ...]] = []
        places: list[Any] = []
        for (own, operand), lies in zip(self.sides(leaves), stored, strict=True):
            if isinstance(operand, PackedMXArray):
                moves.append(())
                for counts in _factors_of(operand):
                    parts = tuple(() if f is None else each.parts[f] for f in counts)
                    places.append(NamedSharding(mesh, spec_of(parts)))
                continue
            used = each.operand(own)
            moved = _packed_moves(operand, lies, used)
            moves.append(moved)
            before = tuple((*part, *more) for part, more in zip(used, moved, strict=True))
            codes, *scales = jax.tree.leaves(operand)
            places.append(NamedSharding(mesh, spec_of(before)))
            places += [each.sharding(used, leaf.shape, codes.shape) for leaf in scales]
        result = NamedSharding(mesh, spec_of(each.product(self.factors.out)))
        return mesh, functools.partial(self.local, each, moves), result, places

    def local(self, each: Share, moves: Sequence[tuple[Part, ...]], *leaves: jax.Array) -> Any:
        """One device's part: its codes gathered, its product, and its sums scattered or added."""
        operands: list[Any] = []
        for (_, operand), moved in zip(self.sides(leaves), moves, strict=True):
            if isinstance(operand, PackedMXArray):
                operand = _local_packed(operand, each)
            elif any(moved):
                codes, bits = operand.codes, operand.format.element.bits
                gather = functools.partial(movement.all_gather, parts=moved)
                cut = [axis for axis, names in enumerate(moved) if names]
                codes = movement.moved_packed(codes, bits, gather, codes.shape, cut)
                operand = dataclasses.replace(operand, codes=codes)
            operands.append(operand)
        lhs, rhs = operands
        own, dtype = self.call, self.call.out_dtype
        if each.summed or each.scattered:
            dtype = movement.reduced_in(dtype, own.reduce_dtype)
        left, right = OperandType.of(lhs, self.axes.lhs), OperandType.of(rhs, self.axes.rhs)
        call = dataclasses.replace(own, lhs=left, rhs=right, out_dtype=dtype)
        product = self.compute(call, lhs, rhs)
        for axis, factor in enumerate(self.factors.out):
            if names := each.scattered.get(factor, ()):
                product = lax.psum_scatter(product, names, scatter_dimension=axis, tiled=True)
        if each.summed:
            product = lax.psum(product, each.summed)
        return product.astype(own.out_dtype)


@functools.lru_cache(maxsize=4096)
def _product(split: SplitProduct, shapes: tuple[tuple[int, ...], ...]) -> Any:
    """The product with its rules for devices and batches."""
    rule, summed, sizes = split.rule(shapes)
    rules = dict(sizes, reduction_factors=summed)
    product: Any = custom_vmap(split.with_rules(split.infer, split.partition, rule, **rules))

    @product.def_vmap
    def _(size: int, in_batched: Sequence[bool], *leaves: jax.Array) -> Any:
        """One product: both operands have the batch, or the one that has it keeps it."""
        call, (left, right) = split.call, (split.call.lhs.axes, split.call.rhs.axes)
        lhs, rhs = jax.tree.unflatten(split.tree, leaves)
        of_lhs, of_rhs = map(jax.tree.leaves, jax.tree.unflatten(split.tree, in_batched))
        if any(of_rhs) and (any(of_lhs) or isinstance(rhs, PackedMXArray)):
            lhs, rhs = _filled(lhs, of_lhs, size), _filled(rhs, of_rhs, size)
            left, right, axis = left.in_batch(), right.in_batch(), 0
        elif any(of_lhs):
            axis = len(left.batch)
            lhs, left = _kept(_filled(lhs, of_lhs, size), left)
        else:
            axis = len(left.batch) + len(left.kept)
            rhs, right = _kept(_filled(rhs, of_rhs, size), right)
        operands = {"lhs": OperandType.of(lhs, left), "rhs": OperandType.of(rhs, right)}
        found = multiply(split.compute, dataclasses.replace(call, **operands), lhs, rhs)
        return jnp.moveaxis(found, axis, 0), True

    return product


def _filled(operand: T, in_batched: Sequence[bool], size: int) -> T:
    """An operand each of whose arrays has the batch; of a tensor scale that all share, once."""
    leaves, tree = jax.tree.flatten(operand)
    packed = isinstance(operand, PackedMXArray)
    shared = not packed and len(leaves) == 3
    filled = [
        leaf
        if own
        else leaf[None]
        if shared and number == 2
        else jnp.broadcast_to(leaf, (size, *leaf.shape))
        for number, (leaf, own) in enumerate(zip(leaves, in_batched, strict=True))
    ]
    return jax.tree.unflatten(tree, filled)


def _kept(operand: calls.AnyOperand, axes: Axes) -> tuple[calls.AnyOperand, Axes]:
    """An operand that keeps its batch as the first of the axes that the product has from it."""
    first = min(axes.kept or axes.contracting)
    order = (*range(1, first + 1), 0, *range(first + 1, axes.ndim + 1))
    moved = operand.transpose(order)
    if isinstance(moved, MXArray):
        moved = dataclasses.replace(moved, primal=None)
    return moved, Axes.ordered(
        batch=len(axes.batch),
        kept=len(axes.kept) + 1,
        contracting=len(axes.contracting),
        k_first=axes.k_first,
    )


def _packed_moves(
    operand: calls.AnyOperand, lies: tuple[Part, ...], used: tuple[Part, ...]
) -> tuple[Part, ...]:
    """The mesh axes along which codes are gathered packed; XLA gathers whole bytes by itself."""
    none = ((),) * len(lies)
    if not isinstance(operand, MXArray) or operand.format.element.bits == 8:
        return none
    taken = {name for part in used for name in part}
    if any(part[: len(own)] != own for part, own in zip(lies, used, strict=True) if part):
        return none
    moved = tuple(part[len(own) :] for part, own in zip(lies, used, strict=True))
    return none if taken & {name for part in moved for name in part} else moved


# Packed weights -----------------------------------------------------------------------------------

_KEPT: Factor = ("n", 0)
_CONTRACTED: Factor = ("k", 0)


def _cut_of(packed: PackedMXArray) -> Cut:
    """How devices may share packed weights that are split."""
    assert packed.layout.cut is not None, packed
    return packed.layout.cut(packed)


def _factors_of(packed: PackedMXArray) -> list[tuple[Factor | None, ...]]:
    """For each packed array what its axes count."""
    named: dict[Any, Factor] = {"n": _KEPT, "k": _CONTRACTED}
    named |= {axis: ("b", axis) for axis in range(len(packed.batch))}
    return [tuple(named.get(count) for count in own) for own in _cut_of(packed).arrays]


def _rows(packed: PackedMXArray, cut: Cut) -> int:
    """Entries of the first kept axis in whole tiles."""
    return cut.rows // math.gcd(cut.rows, math.prod(packed.kept[1:]))


def _local_packed(packed: PackedMXArray, share: Share) -> PackedMXArray:
    """Packed weights made of one device's arrays, which tell no sizes."""
    sizes = dict(zip(share.mesh.axis_names, share.mesh.devices.shape, strict=True))
    kept, k = (
        math.prod(sizes[name] for name in share.parts[factor]) for factor in (_KEPT, _CONTRACTED)
    )
    layout = packed.layout
    if layout.parts is not None:
        layout = dataclasses.replace(layout, parts=layout.parts // k)
    return dataclasses.replace(
        packed,
        layout=layout,
        kept=(packed.kept[0] // kept, *packed.kept[1:]),
        k=(packed.k[0] // k, *packed.k[1:]),
    )


def _words(packed: PackedMXArray) -> tuple[Mapping[Factor, str], list[str], dict[str, int]]:
    """Shardy's names of tiles and parts, for its rule.

    Returns:
      What an array calls a factor that has an entry for each position, and not for each tile; what
      each packed array calls its axes; the sizes of names that are less than an axis.
    """
    cut = _cut_of(packed)
    rows, entries = _rows(packed, cut), packed.kept[0]
    positions: dict[Factor, str] = {}
    tiles = {_CONTRACTED: "k0", _KEPT: "tiles"}
    sizes: dict[str, int] = {}
    if cut.parts > 1:
        sizes["k0_inside"] = packed.k[0] // cut.parts
        positions[_CONTRACTED] = "(k0 k0_inside)" if sizes["k0_inside"] > 1 else "k0"
    # Shardy takes no factor of one beside another: a single tile is not split.
    if entries % rows == 0 and entries > rows:
        each = rows * math.prod(packed.kept[1:]) // cut.rows
        tiles[_KEPT] = "(n0 n0_tiles)" if each > 1 else "n0"
        positions[_KEPT] = "(n0 n0_inside)" if rows > 1 else "n0"
        sizes |= {"n0_tiles": each, "n0_inside": rows}
    arrays = []
    for number, own in enumerate(_factors_of(packed)):
        names = [
            tiles.get(factor, "".join(map(str, factor))) if factor else f"packed{number}_{axis}"
            for axis, factor in enumerate(own)
        ]
        arrays.append(" ".join(names))
    return positions, arrays, {name: size for name, size in sizes.items() if size > 1}


# Casts --------------------------------------------------------------------------------------------


def quantize(compute: Compute, call: QuantizeCall, *operands: jax.Array | None) -> Any:
    """A cast that the compiler splits between devices."""
    leaves, tree = jax.tree.flatten(operands)
    found = _cast(SplitCast(compute, call, tree), tuple(leaf.shape for leaf in leaves))(*leaves)
    return jax.tree.unflatten(jax.tree.structure(calls.result_of(call, *operands)), found)


@functools.lru_cache(maxsize=4096)
def _cast(split: "SplitCast", shapes: tuple[tuple[int, ...], ...]) -> Any:
    rule, sizes = split.rule(shapes)
    return split.with_rules(split.infer, split.partition, rule, **sizes)


@dataclasses.dataclass(frozen=True)
class CastShare:
    """What each device casts."""

    parts: tuple[Part, ...]  # for each axis of the values the mesh axes that split it
    whole: tuple[Part, ...]  # of them, those that leave blocks whole


class SplitCast(Split):
    """A cast that the compiler splits between devices, of values, random bits, a tensor scale."""

    @functools.cached_property
    def block_of(self) -> Mapping[int, int]:
        """For each blocked axis the positions of a block."""
        shape = self.call.shape
        return {
            axis % len(shape): block_shapes.block_extent(size, shape[axis])
            for axis, size in self.call.blocks
        }

    @functools.cached_property
    def results(self) -> list[Any]:
        """Codes, scales, a tensor scale."""
        return jax.tree.leaves(
            calls.result_of(self.call, Struct(self.call.shape, np.float32), None, None)
        )

    def run(self, *leaves: jax.Array) -> list[jax.Array]:
        return jax.tree.leaves(super().run(*leaves))

    def rule(self, shapes: Sequence[Any]) -> tuple[str, dict[str, int]]:
        """What Shardy is told, and the sizes of factors that are less than an axis."""
        words, blocks, sizes = [], {}, {}
        for axis, length in enumerate(self.call.shape):
            size = self.block_of.get(axis, 1)
            if size > 1 and length > size and length % size == 0:
                words.append(f"(a{axis} a{axis}_inside)")
                blocks[axis], sizes[f"a{axis}_inside"] = f"a{axis}", size
            else:
                words.append(f"a{axis}")
        count = itertools.count()

        def named(shape: Sequence[int]) -> str:
            found = []
            for axis, (length, whole) in enumerate(zip(shape, self.call.shape, strict=True)):
                if length == whole:
                    found.append(words[axis])
                elif axis in blocks and length == whole // self.block_of[axis]:
                    found.append(blocks[axis])
                else:
                    found.append(f"own{next(count)}")
            return " ".join(found)

        given = ", ".join(map(named, shapes))
        return f"{given} -> {', '.join(named(result.shape) for result in self.results)}", sizes

    def share(
        self, mesh: Mesh, leaves: Sequence[Any], wanted: Sequence[Struct] | None
    ) -> CastShare:
        """What each device casts: by where the values lie, or their codes have to if the values are
        everywhere; an axis that cuts blocks unevenly is whole."""
        shape, count = self.call.shape, dict(zip(mesh.axis_names, mesh.devices.shape, strict=True))
        lies = stored_parts(leaves[0].sharding, shape, mesh)
        if not any(lies) and wanted is not None:
            lies = stored_parts(wanted[0].sharding, shape, mesh)
        by_amax = not self.call.scale_rule.reads_values
        parts, whole = [], []
        for axis, part in enumerate(lies):
            length, size = shape[axis], self.block_of.get(axis, 1)
            outer: Part = ()
            while len(outer) < len(part) and not length // count[part[len(outer)]] % size:
                length //= count[part[len(outer)]]
                outer = part[: len(outer) + 1]
            devices = math.prod(count[name] for name in part[len(outer) :])
            inside = by_amax and length == size and size % devices == 0 and size > devices
            parts.append(part if inside else outer)
            whole.append(outer)
        return CastShare(tuple(parts), tuple(whole))

    def places(self, mesh: Mesh, each: CastShare, arrays: Sequence[Any]) -> list[NamedSharding]:
        """Where arrays of the values' axes lie, of which some count blocks, or one position."""
        found = []
        for array in arrays:
            sizes = zip(array.shape, self.call.shape, each.parts, each.whole, strict=True)
            parts = (
                part if length == values else whole if length > 1 else ()
                for length, values, part, whole in sizes
            )
            found.append(NamedSharding(mesh, spec_of(tuple(parts))))
        return found

    def infer(self, mesh: Mesh, leaves: Sequence[Any]) -> list[NamedSharding]:
        mesh = fine_mesh(mesh, leaves[0])
        return self.places(mesh, self.share(mesh, leaves, None), self.results)

    def partition(self, mesh: Mesh, leaves: Sequence[Any], wanted: Sequence[Struct]) -> Any:
        mesh = fine_mesh(mesh, leaves[0])
        each = self.share(mesh, leaves, wanted)
        results, operands = (self.places(mesh, each, own) for own in (self.results, leaves))
        return mesh, functools.partial(self.local, each), results, operands

    def local(self, each: CastShare, *leaves: jax.Array) -> list[jax.Array]:
        """One device's part, under the maxima of all devices that share a block."""
        x, bits, scale = jax.tree.unflatten(self.tree, leaves)
        call = self.call
        if scale is None and call.format.tensor_scale:
            names = [name for part in each.parts for name in part]
            largest = call.scale_rule.largest_value(call.format)
            scale = agreed_scale(x, call.blocks, largest, names)
        # For each axis whose blocks several devices share, from the end, the mesh axes.
        inner = ((axis, each.parts[axis][len(each.whole[axis]) :]) for axis, _ in call.blocks)
        shared = {axis: names for axis, names in inner if names}
        if not shared:
            own = dataclasses.replace(call, shape=x.shape)
            return jax.tree.leaves(self.compute(own, x, bits, scale))
        axis, names = next(iter(shared)), [name for part in shared.values() for name in part]
        if bits is not None and not call.scale_rule.rounding.random_bits:
            bits = jnp.concatenate([bits, lax.slice_in_dim(bits, 0, 1, axis=axis % x.ndim)], axis)
        x = movement.with_maxima(x, call.blocks, axis, names)
        own = dataclasses.replace(call, shape=x.shape)
        found = self.compute(own, x, bits, scale)
        return jax.tree.leaves(movement.without_maxima(found, axis))


def agreed_scale(x: jax.Array, blocks: Blocks, largest: float, names: Sequence[str]) -> jax.Array:
    """The tensor scale of all devices' parts."""
    # Found as the cast finds them, so that XLA computes a block's maximum once.
    amax = block_amax(*block_shapes.split(lax.stop_gradient(x), blocks))
    return tensor_scale_of(amax, largest, x.ndim, tuple(names))
