"""One product that the compiler splits between devices: what moves are codes.

Left to itself, XLA dequantizes an operand where it lies and gathers values, also of gradients. Here
it asks, when it compiles and knows real shardings, how to split: codes and scales move, and codes
of less than a byte are packed on their way.
"""

import dataclasses
import functools
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mx_jax.axes import Axes, ProductAxes, Side
from mx_jax.backends.calls import AnyOperand, MatmulCall, OperandType
from mx_jax.mxarray import MXArray
from mx_jax.packed import Cut, PackedMXArray, unpacked
from mx_jax.sharding.movement import Part, moved_packed, reduced_in, spec_of
from mx_jax.sharding.partition import Factor, Factors, Share, fine_mesh, share, stored_parts

T = TypeVar("T")

# Computes a call of these operands on one device: `compute(call, lhs, rhs)`.
Compute = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Split:
    """A call that the compiler splits between devices."""

    compute: Compute  # each device's part; a hashable value
    call: Any
    tree: Any  # of the operands

    def run(self, *leaves: jax.Array) -> Any:
        return self.compute(self.call, *jax.tree.unflatten(self.tree, leaves))

    def with_rules(
        self, partition: Callable[..., Any], infer: Callable[..., Any], rule: str, **factors: object
    ) -> Callable[..., Any]:
        """`run` as one operation, for both partitioners: a callback of each, and Shardy's rule."""
        partitioned: Any = custom_partitioning(lambda name, *leaves: self.run(*leaves))
        partitioned.def_partition(
            partition=functools.partial(partition, self),
            infer_sharding_from_operands=functools.partial(infer, self),
            # A reshape may have cut a mesh axis in two, which no NamedSharding of its mesh says.
            decode_shardings=False,
            sharding_rule=rule,
            **factors,
        )
        # Nothing reads the name: it tells programs apart in the key of a compilation cache.
        name = hashlib.sha256(repr((self.compute, self.call, self.tree)).encode()).digest()
        return functools.partial(partitioned, np.frombuffer(name, np.uint32))


class SplitProduct(Split):
    """A product that the compiler splits between devices."""

    @functools.cached_property
    def axes(self) -> ProductAxes:
        return ProductAxes(self.call.lhs.axes, self.call.rhs.axes)

    @functools.cached_property
    def factors(self) -> Factors:
        return Factors.of(self.axes)


def can_split(call: MatmulCall) -> bool:
    """Whether the compiler can be told how a product is split, and may move its codes."""
    shapes = (*call.lhs.shape, *call.rhs.shape)
    return call.moves_codes and all(isinstance(size, int) and size > 0 for size in shapes)


def multiply(compute: Compute, call: MatmulCall, lhs: AnyOperand, rhs: AnyOperand) -> jax.Array:
    """A product that the compiler splits between devices."""
    if isinstance(rhs, PackedMXArray) and rhs.layout.cut is None:
        rhs = unpacked(rhs)
        call = dataclasses.replace(call, rhs=OperandType.of(rhs, call.rhs.axes))
    leaves, tree = jax.tree.flatten((unpacked(lhs), rhs))
    shapes = tuple(leaf.shape for leaf in leaves)
    return _function(SplitProduct(compute, call, tree), shapes)(*leaves)


@functools.lru_cache(maxsize=4096)
def _function(split: SplitProduct, shapes: tuple[tuple[int, ...], ...]) -> Any:
    """The product with its rules for devices and batches."""
    rule, summed, sizes = _sharding_rule(split, shapes)
    product = split.with_rules(_partition, _infer, rule, reduction_factors=summed, **sizes)
    batched: Any = custom_vmap(product)

    @batched.def_vmap
    def _(size: int, in_batched: Sequence[bool], *leaves: jax.Array) -> Any:
        wide = _batched(split.tree, split.call, size, in_batched, leaves)
        product = multiply(split.compute, wide.call, wide.lhs, wide.rhs)
        return jnp.moveaxis(product, wide.axis, 0), True

    return batched


# Batches ------------------------------------------------------------------------------------------


class _Batched(NamedTuple):
    """One product that stands for many, with the batch among its operands' axes."""

    lhs: AnyOperand
    rhs: AnyOperand
    call: MatmulCall
    axis: int  # of the product that counts the batch


def _batched(
    tree: Any, call: MatmulCall, size: int, in_batched: Sequence[bool], leaves: Sequence[jax.Array]
) -> _Batched:
    """The product whose batch both operands have, or which keeps the batch of one."""
    lhs, rhs = jax.tree.unflatten(tree, leaves)
    of_lhs, of_rhs = map(jax.tree.leaves, jax.tree.unflatten(tree, in_batched))
    if any(of_rhs) and (any(of_lhs) or isinstance(rhs, PackedMXArray)):
        lhs, rhs = _filled(lhs, of_lhs, size), _filled(rhs, of_rhs, size)
        left, right = call.lhs.axes.in_batch(), call.rhs.axes.in_batch()
        return _Batched(lhs, rhs, _typed(call, lhs, rhs, left, right), 0)
    axis = len(call.lhs.axes.batch)
    if any(of_lhs):
        lhs, left = _kept(_filled(lhs, of_lhs, size), call.lhs.axes)
        return _Batched(lhs, rhs, _typed(call, lhs, rhs, left, call.rhs.axes), axis)
    rhs, right = _kept(_filled(rhs, of_rhs, size), call.rhs.axes)
    axis += len(call.lhs.axes.kept)
    return _Batched(lhs, rhs, _typed(call, lhs, rhs, call.lhs.axes, right), axis)


def _typed(
    call: MatmulCall, lhs: AnyOperand, rhs: AnyOperand, left: Axes, right: Axes
) -> MatmulCall:
    return dataclasses.replace(call, lhs=OperandType.of(lhs, left), rhs=OperandType.of(rhs, right))


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


def _kept(operand: AnyOperand, axes: Axes) -> tuple[AnyOperand, Axes]:
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


# Devices ------------------------------------------------------------------------------------------


def _sides(
    split: SplitProduct, leaves: Sequence[Any]
) -> list[tuple[Side, tuple[Factor, ...], Any]]:
    """Both operands, made of anything that has a shape, and their factors."""
    lhs, rhs = jax.tree.unflatten(split.tree, leaves)
    return [("lhs", split.factors.lhs, lhs), ("rhs", split.factors.rhs, rhs)]


def _sharding_rule(
    split: SplitProduct, shapes: Sequence[Any]
) -> tuple[str, tuple[str, ...], dict[str, int]]:
    """Shardy's rule, the factors that are summed over, the sizes of factors below an axis."""
    structs = [jax.ShapeDtypeStruct(shape, np.uint8) for shape in shapes]
    sides = _sides(split, structs)
    rhs = sides[1][2]
    is_packed = isinstance(rhs, PackedMXArray)
    positions, arrays, sizes = _words(rhs) if is_packed else ({}, [], {})
    count = 0

    def word(factor: Factor) -> str:
        return positions.get(factor, f"{factor[0]}{factor[1]}")

    def named(factors: Sequence[Factor], shape: Sequence[int], whole: Sequence[int]) -> str:
        nonlocal count
        words = []
        for factor, length, size in zip(factors, shape, whole, strict=True):
            words.append(word(factor) if length == size else f"own{count}")
            count += length != size
        return " ".join(words)

    given = ["name"]
    for _, factors, operand in sides[:1] if is_packed else sides:
        leaves = jax.tree.leaves(operand)
        given += [named(factors, leaf.shape, leaves[0].shape) for leaf in leaves]
    wanted = " ".join(map(word, split.factors.out))
    rule = f"{', '.join([*given, *arrays])} -> {wanted}"
    summed = [f"k{number}" for number in range(len(split.axes.lhs.contracting))]
    summed += [name for name in sizes if name.startswith("k")]
    return rule, tuple(summed), sizes


def _shared(
    split: SplitProduct, mesh: Mesh, leaves: Sequence[Any], wanted: jax.ShapeDtypeStruct | None
) -> Any:
    """What each device computes, and where both operands lie now."""
    sizes, granules, stored = {}, {}, []
    for _, own, operand in _sides(split, leaves):
        if isinstance(operand, PackedMXArray):
            stored.append(_stored(operand, own, mesh))
            sizes |= dict(zip(own, operand.shape, strict=True))
            for factor, size in _granules(operand).items():
                granules.setdefault(factor, []).append(size)
            continue
        codes = jax.tree.leaves(operand)[0]
        stored.append(stored_parts(codes.sharding, codes.shape, mesh))
        sizes |= dict(zip(own, codes.shape, strict=True))
        for axis, size in operand.blocks if isinstance(operand, MXArray) else ():
            if isinstance(size, int):
                granules.setdefault(own[axis], []).append(size)
    anywhere = ((),) * len(split.factors.out)
    out = anywhere if wanted is None else stored_parts(wanted.sharding, wanted.shape, mesh)
    return share(mesh, split.factors, (*stored, out), sizes, granules), stored


def _infer(
    split: SplitProduct,
    mesh: Mesh,
    given: tuple[jax.ShapeDtypeStruct, ...],
    wanted: jax.ShapeDtypeStruct,
) -> NamedSharding:
    """Where the product comes to lie: the older partitioner's question; the newer has the rule."""
    mesh = fine_mesh(mesh, given[1])
    each, _ = _shared(split, mesh, given[1:], None)
    return NamedSharding(mesh, spec_of(each.product(split.factors.out)))


def _partition(
    split: SplitProduct,
    mesh: Mesh,
    given: tuple[jax.ShapeDtypeStruct, ...],
    wanted: jax.ShapeDtypeStruct,
) -> Any:
    """What each device computes, and where its operands have to be for it."""
    leaves, factors = given[1:], split.factors
    mesh = fine_mesh(mesh, wanted)
    each, stored = _shared(split, mesh, leaves, wanted)
    moves: list[tuple[Part, ...]] = []
    shardings: list[Any] = [NamedSharding(mesh, PartitionSpec(None))]
    for (_, own, operand), lies in zip(_sides(split, leaves), stored, strict=True):
        if isinstance(operand, PackedMXArray):
            moves.append(())
            parts = _specs(operand, each)
            shardings += [NamedSharding(mesh, spec_of(part)) for part in parts]
            continue
        used = each.operand(own)
        codes, *scales = jax.tree.leaves(operand)
        moves.append(_packed_moves(operand, lies, used))
        shardings.append(NamedSharding(mesh, spec_of(_joined(used, moves[-1]))))
        shardings += [each.sharding(used, leaf.shape, codes.shape) for leaf in scales]
    result = NamedSharding(mesh, spec_of(each.product(factors.out)))
    local = without_mesh(functools.partial(_local, split, each, moves))
    return mesh, local, result, tuple(shardings)


def without_mesh(compute: Callable[..., Any]) -> Callable[..., Any]:
    """What one device computes, with no mesh's explicit axes in types while the compiler asks."""

    def run(*leaves: jax.Array) -> Any:
        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
            return compute(*leaves)

    return run


def _joined(used: tuple[Part, ...], moved: tuple[Part, ...]) -> tuple[Part, ...]:
    return tuple((*part, *more) for part, more in zip(used, moved, strict=True))


def _packed_moves(
    operand: AnyOperand, lies: tuple[Part, ...], used: tuple[Part, ...]
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


def _local(
    split: SplitProduct,
    each: Share,
    moves: Sequence[tuple[Part, ...]],
    name: jax.Array,
    *leaves: jax.Array,
) -> jax.Array:
    """One device's part: its codes gathered, its product, and its sums scattered or added up."""
    del name
    operands: list[Any] = []
    for (_, _, operand), moved in zip(_sides(split, leaves), moves, strict=True):
        if isinstance(operand, PackedMXArray):
            operand = _local_packed(operand, each)
        elif any(moved):
            codes, bits = operand.codes, operand.format.element.bits
            gather = functools.partial(_gathered, moved=moved)
            cut = [axis for axis, names in enumerate(moved) if names]
            codes = moved_packed(codes, bits, gather, codes.shape, cut)
            operand = dataclasses.replace(operand, codes=codes)
        operands.append(operand)
    lhs, rhs = operands
    partial, own = bool(each.summed or each.scattered), split.call
    call = dataclasses.replace(
        own,
        lhs=OperandType.of(lhs, split.axes.lhs),
        rhs=OperandType.of(rhs, split.axes.rhs),
        out_dtype=reduced_in(own.out_dtype, own.reduce_dtype) if partial else own.out_dtype,
    )
    product = split.compute(call, lhs, rhs)
    for axis, factor in enumerate(split.factors.out):
        if names := each.scattered.get(factor, ()):
            product = lax.psum_scatter(product, names, scatter_dimension=axis, tiled=True)
    if each.summed:
        product = lax.psum(product, each.summed)
    return product.astype(own.out_dtype)


def _gathered(x: jax.Array, moved: tuple[Part, ...]) -> jax.Array:
    for axis, names in enumerate(moved):
        if names:
            x = lax.all_gather(x, names, axis=axis, tiled=True)
    return x


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


def _granules(packed: PackedMXArray) -> dict[Factor, int]:
    """Of what lengths a device has whole multiples, so that it has whole tiles and parts."""
    cut = _cut_of(packed)
    return {_KEPT: _rows(packed, cut), _CONTRACTED: packed.k[0] // cut.parts}


def _rows(packed: PackedMXArray, cut: Cut) -> int:
    """Entries of the first kept axis in whole tiles."""
    return cut.rows // math.gcd(cut.rows, math.prod(packed.kept[1:]))


def _stored(packed: PackedMXArray, factors: Sequence[Factor], mesh: Mesh) -> tuple[Part, ...]:
    """Where the values lie, by the first packed array."""
    array, counts = jax.tree.leaves(packed)[0], _factors_of(packed)[0]
    parts = dict(zip(counts, stored_parts(array.sharding, array.shape, mesh), strict=True))
    return tuple(parts.get(factor, ()) for factor in factors)


def _specs(packed: PackedMXArray, share: Share) -> list[tuple[Part, ...]]:
    """Where the packed arrays have to be for what each device computes."""
    return [
        tuple(() if factor is None else share.parts[factor] for factor in own)
        for own in _factors_of(packed)
    ]


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
        sizes |= {"n0_tiles": each} if each > 1 else {}
        positions[_KEPT] = "(n0 n0_inside)" if rows > 1 else "n0"
        sizes |= {"n0_inside": rows} if rows > 1 else {}
    arrays = []
    for number, own in enumerate(_factors_of(packed)):
        names = [
            tiles.get(factor, "".join(map(str, factor))) if factor else f"packed{number}_{axis}"
            for axis, factor in enumerate(own)
        ]
        arrays.append(" ".join(names))
    return positions, arrays, {name: size for name, size in sizes.items() if size > 1}
