"""One product on automatic mesh axes: what moves are codes, where the compiler has to move them.

Left to itself, XLA dequantizes an operand where it lies and gathers values, those of a product and
those of its gradients. Here it is told how the product is split, and asked to move codes and scales
instead; codes of less than a byte are packed on their way.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from mx_jax.axes import ProductAxes, Side
from mx_jax.backends.calls import AnyOperand, MatmulCall, OperandType
from mx_jax.backends.records import active
from mx_jax.backends.select import Choice, find
from mx_jax.codecs import packing
from mx_jax.mxarray import MXArray
from mx_jax.ops import split_packed
from mx_jax.ops.placing import twice
from mx_jax.ops.split_batches import batched as batched_product
from mx_jax.packed import PackedMXArray
from mx_jax.sharding.movement import Part, spec_of
from mx_jax.sharding.partition import Factor, Factors, Share, fine_mesh, share, stored_parts


@dataclasses.dataclass(frozen=True)
class Split:
    """A product that the compiler splits between devices.

    Attributes:
      choice: what computes each device's part.
      call: the whole product.
      tree: of both operands.
    """

    choice: Choice
    call: MatmulCall
    tree: Any

    @functools.cached_property
    def axes(self) -> ProductAxes:
        """Of the operands."""
        return ProductAxes(self.call.lhs.axes, self.call.rhs.axes)

    @functools.cached_property
    def factors(self) -> Factors:
        """Of the operands and the product."""
        return Factors.of(self.axes)

    def run(self, call: MatmulCall, *leaves: jax.Array) -> jax.Array:
        """The product of all of it, or of one device's part."""
        lhs, rhs = jax.tree.unflatten(self.tree, leaves)
        return self.choice.offer.run(lhs, rhs, call)


def is_split(rhs: AnyOperand, call: MatmulCall, choice: Choice) -> bool:
    """Whether the compiler will be told how a product is split.

    With automatic axes of a mesh in context, and no others: shard_map's have been split already,
    and explicit ones say while JAX traces where everything lies.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.size == 1 or set(mesh.axis_types) != {AxisType.Auto}:
        return False
    shapes = (*call.lhs.shape, *call.rhs.shape)
    concrete = all(isinstance(size, int) and size > 0 for size in shapes)
    return choice.offer.is_plain and concrete and not isinstance(rhs, PackedMXArray)


def part_choice(rhs: AnyOperand, call: MatmulCall, whole: Choice) -> Choice | None:
    """What multiplies each device's part of packed weights; None: nothing does.

    On one device the compiler leaves the whole product to it.
    """
    if not isinstance(rhs, PackedMXArray) or rhs.layout.cut is None:
        return None
    if any(kind is not AxisType.Auto for kind in jax.sharding.get_abstract_mesh().axis_types):
        return None
    choice = find(call, dataclasses.replace(whole.target, num_devices=1, counted=True))
    return choice if choice is not None and choice.backend.name == rhs.backend else None


def multiply_split(lhs: AnyOperand, rhs: AnyOperand, call: MatmulCall, choice: Choice) -> jax.Array:
    """A product that the compiler splits between devices."""
    if (recorder := active.value) is not None:
        axes = jax.sharding.get_abstract_mesh().axis_names
        what = "whole tiles" if isinstance(rhs, PackedMXArray) else "codes and scales"
        recorder.entries.append(
            f"operands of lhs.shape={call.lhs.shape}, rhs.shape={call.rhs.shape} -> {what}, where "
            f"the compiler moves them along mesh axes={axes}{twice(lhs)}{twice(rhs)}"
        )
    return _run(lhs, rhs, call, choice)


def _run(lhs: AnyOperand, rhs: AnyOperand, call: MatmulCall, choice: Choice) -> jax.Array:
    leaves, tree = jax.tree.flatten((lhs, rhs))
    split = Split(choice, call, tree)
    return _function(split, tuple(leaf.shape for leaf in leaves))(*leaves)


@functools.lru_cache(maxsize=4096)
def _function(split: Split, shapes: tuple[tuple[int, ...], ...]) -> Any:
    """The product with its rules for devices, batches and tangents."""
    plain = functools.partial(split.run, split.call)
    partitioned: Any = custom_partitioning(lambda name, *leaves: plain(*leaves))
    rule, summed, sizes = _sharding_rule(split, shapes)
    partitioned.def_partition(
        partition=functools.partial(_partition, split),
        # A reshape may have cut a mesh axis in two, which no NamedSharding of its mesh says.
        decode_shardings=False,
        sharding_rule=rule,
        reduction_factors=summed,
        **sizes,
    )
    batched: Any = custom_vmap(functools.partial(partitioned, _name_of(split)))

    @batched.def_vmap
    def _(size: int, in_batched: Sequence[bool], *leaves: jax.Array) -> Any:
        wide = batched_product(split.tree, split.call, size, in_batched, leaves)
        return jnp.moveaxis(_run(wide.lhs, wide.rhs, wide.call, split.choice), wide.axis, 0), True

    differentiable: Any = jax.custom_jvp(lambda *leaves: batched(*leaves))

    @differentiable.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        return jax.jvp(plain, primals, tangents)

    return differentiable


def _name_of(split: Split) -> np.ndarray:
    """An operand that nothing reads: it tells programs apart that differ in what they compute.

    The compiler sees shapes alone, and so does the key of a compilation cache.
    """
    text = repr((split.choice.backend.name, split.call, split.tree))
    return np.frombuffer(hashlib.sha256(text.encode()).digest(), np.uint32)


# Devices ------------------------------------------------------------------------------------------


def _sides(split: Split, leaves: Sequence[Any]) -> list[tuple[Side, tuple[Factor, ...], Any]]:
    """Both operands, made of anything that has a shape, and their factors."""
    lhs, rhs = jax.tree.unflatten(split.tree, leaves)
    return [("lhs", split.factors.lhs, lhs), ("rhs", split.factors.rhs, rhs)]


def _sharding_rule(
    split: Split, shapes: Sequence[Any]
) -> tuple[str, tuple[str, ...], dict[str, int]]:
    """What Shardy is told: a product of codes. Scales have been placed by their cast.

    Returns:
      The rule, the factors that are summed over, the sizes of those that are less than an axis.
    """
    structs = [jax.ShapeDtypeStruct(shape, np.uint8) for shape in shapes]
    sides = _sides(split, structs)
    rhs = sides[1][2]
    is_packed = isinstance(rhs, PackedMXArray)
    positions, arrays, sizes = split_packed.words(rhs) if is_packed else ({}, [], {})
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


def _partition(split: Split, mesh: Any, given: Any, wanted: Any) -> Any:
    """What each device computes, and where its operands have to be for it."""
    factors, leaves = split.factors, given[1:]
    mesh = fine_mesh(mesh, wanted)
    sides = _sides(split, leaves)
    sizes, granules, stored = {}, {}, []
    for _, own, operand in sides:
        if isinstance(operand, PackedMXArray):
            stored.append(split_packed.stored(operand, own, mesh))
            sizes |= dict(zip(own, operand.shape, strict=True))
            for factor, size in split_packed.granules(operand).items():
                granules.setdefault(factor, []).append(size)
            continue
        codes = jax.tree.leaves(operand)[0]
        stored.append(stored_parts(codes.sharding, codes.shape, mesh))
        sizes |= dict(zip(own, codes.shape, strict=True))
        for axis, size in operand.blocks if isinstance(operand, MXArray) else ():
            if isinstance(size, int):
                granules.setdefault(own[axis], []).append(size)
    stored.append(stored_parts(wanted.sharding, wanted.shape, mesh))
    each = share(mesh, factors, tuple(stored), sizes, granules)
    moves: list[tuple[Part, ...]] = []
    shardings: list[Any] = [NamedSharding(mesh, PartitionSpec(None))]
    for (_, own, operand), lies in zip(sides, stored[:2], strict=True):
        if isinstance(operand, PackedMXArray):
            moves.append(())
            parts = split_packed.specs(operand, each)
            shardings += [NamedSharding(mesh, spec_of(part)) for part in parts]
            continue
        used = each.operand(own)
        codes, *scales = jax.tree.leaves(operand)
        moves.append(_packed_moves(operand, lies, used))
        shardings.append(NamedSharding(mesh, spec_of(_joined(used, moves[-1]))))
        shardings += [each.sharding(used, leaf.shape, codes.shape) for leaf in scales]
    result = NamedSharding(mesh, spec_of(each.product(factors.out)))
    return mesh, functools.partial(_local, split, each, moves), result, tuple(shardings)


def _joined(used: tuple[Part, ...], moved: tuple[Part, ...]) -> tuple[Part, ...]:
    return tuple((*part, *more) for part, more in zip(used, moved, strict=True))


def _packed_moves(operand: Any, lies: tuple[Part, ...], used: tuple[Part, ...]) -> tuple[Part, ...]:
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
    split: Split, each: Share, moves: Sequence[tuple[Part, ...]], name: Any, *leaves: jax.Array
) -> jax.Array:
    """One device's part: its codes gathered, its product, and its sums scattered or added up."""
    del name
    operands: list[Any] = []
    for (_, _, operand), moved in zip(_sides(split, leaves), moves, strict=True):
        if isinstance(operand, PackedMXArray):
            operand = split_packed.local(operand, each)
        elif any(moved):
            codes = _gathered(operand.codes, operand.format.element.bits, moved)
            operand = dataclasses.replace(operand, codes=codes)
        operands.append(operand)
    lhs, rhs = operands
    partial = bool(each.summed or each.scattered)
    call = dataclasses.replace(
        split.call,
        lhs=OperandType.of(lhs, split.axes.lhs),
        rhs=OperandType.of(rhs, split.axes.rhs),
        # What devices add up is added before it is rounded.
        out_dtype=np.dtype(np.float32) if partial else split.call.out_dtype,
    )
    product = split.choice.offer.run(lhs, rhs, call)
    for axis, factor in enumerate(split.factors.out):
        if names := each.scattered.get(factor, ()):
            product = lax.psum_scatter(product, names, scatter_dimension=axis, tiled=True)
    if each.summed:
        product = lax.psum(product, each.summed)
    return product.astype(split.call.out_dtype)


def _gathered(codes: jax.Array, bits: int, moved: tuple[Part, ...]) -> jax.Array:
    """Codes gathered at their real width, if whole bytes of them lie along some axis."""
    group = packing.codes_per_group(bits)
    fitting = [axis for axis in range(codes.ndim) if codes.shape[axis] % group == 0]
    last = max(fitting, key=lambda axis: (not moved[axis], axis), default=None)
    if last is not None:
        codes = jnp.moveaxis(packing.pack(jnp.moveaxis(codes, last, -1), bits), -1, last)
    for axis, names in enumerate(moved):
        if names:
            codes = lax.all_gather(codes, names, axis=axis, tiled=True)
    if last is None:
        return codes
    packed = jnp.moveaxis(codes, last, -1)
    return jnp.moveaxis(packing.unpack(packed, bits, packed.shape[-1] * 8 // bits), -1, last)
