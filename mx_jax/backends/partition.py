"""Products and casts that the compiler splits between devices: what moves are codes.

Left to itself, XLA dequantizes an operand where it lies and gathers values, also of gradients. Here
it asks, when it compiles and knows real shardings, how to split: codes and scales move, and codes
of less than a byte are packed on their way. Each device casts its part, and no value moves: where a
shard ends within a block, the devices that share it agree on its largest magnitude, and on that of
the whole array where there is a tensor scale.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mx_jax.backends import calls
from mx_jax.backends.calls import MatmulCall, OperandType, QuantizeCall
from mx_jax.backends.target import Target
from mx_jax.codecs import blocks as block_shapes
from mx_jax.codecs.rounding import ROUNDINGS
from mx_jax.mxarray import MXArray
from mx_jax.packed import PackedMXArray
from mx_jax.reference.quantize import find_tensor_scale
from mx_jax.reference.scale_rules import SCALE_RULES
from mx_jax.sharding import movement
from mx_jax.sharding.movement import Part, gathered_parts
from mx_jax.sharding.partition import (
    ArrayAxes,
    Division,
    FactorAxis,
    Factors,
    Placed,
    Shape,
    Split,
    axes_like,
    product_factors,
    split_product,
)

# Computes a call of these operands on one device: `compute(call, lhs, rhs)`.
Compute = Callable[..., Any]


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
            return all(isinstance(size, int) and size > 0 for size in shapes)
        case QuantizeCall(scale_rule=rule, rounding=rounding):
            return (
                not call.scale_axes
                and call.format.is_known
                and rule in SCALE_RULES
                and (rounding.is_stochastic or rounding in ROUNDINGS)
                and all(isinstance(size, int) and size > 0 for size in call.shape)
            )
    return False


# Products -----------------------------------------------------------------------------------------


def multiply(
    compute: Compute, call: MatmulCall, lhs: calls.AnyOperand, rhs: calls.AnyOperand
) -> jax.Array:
    """A product that the compiler splits between devices."""
    if isinstance(rhs, PackedMXArray):
        call, rhs = calls.unpacked_for(call, rhs)
    leaves, tree = jax.tree.flatten((lhs, rhs))
    (product,) = SplitProduct(compute, call, tree)(*leaves)
    return product


class SplitProduct(Split):
    """A product, split by `split_product`."""

    def axes(self, shapes: Sequence[Shape]) -> tuple[list[ArrayAxes], list[ArrayAxes]]:
        *of_operands, of_product = product_factors(self.call.lhs.axes, self.call.rhs.axes)
        structs = [jax.ShapeDtypeStruct(shape, np.uint8) for shape in shapes]
        arrays: list[ArrayAxes] = []
        operands = jax.tree.unflatten(self.tree, structs)
        for factors, x in zip(of_operands, operands, strict=True):
            blocks: list[int | None] = [1] * len(factors)
            for axis, size in x.blocks if isinstance(x, MXArray) else ():
                # One scale is that of all parts.
                blocks[axis] = size if isinstance(size, int) else None
            leaves = jax.tree.leaves(x)
            arrays += [axes_like(leaf.shape, x.shape, factors, blocks) for leaf in leaves]
        return arrays, [tuple(map(FactorAxis, of_product))]

    def divide(
        self,
        devices: Mapping[str, int],
        factors: Factors,
        operands: list[Placed],
        results: list[Placed],
    ) -> Division:
        sides: Any = jax.tree.unflatten(self.tree, range(len(operands)))
        firsts = [jax.tree.leaves(x)[0] for x in sides]
        lies = [operands[first].by_factor for first in firsts]
        parts, scattered = split_product(devices, factors, lies, results[0].by_factor)
        places = [
            tuple(() if axis is None else parts[axis.factor] for axis in array.axes)
            for array in operands
        ]
        moves = dict[int, tuple[int, tuple[Part, ...]]]()
        for x, first in zip(sides, firsts, strict=True):
            bits = x.format.element.bits if isinstance(x, MXArray) else 8
            # XLA gathers whole bytes by itself.
            if bits < 8 and (moved := gathered_parts(operands[first].parts, places[first])):
                moves[first] = bits, moved
                pairs = zip(places[first], moved, strict=True)
                places[first] = tuple((*part, *more) for part, more in pairs)
        names = [axis.factor for axis in results[0].axes if axis is not None]
        out = tuple((*parts.get(name, ()), *scattered.get(name, ())) for name in names)
        gone = {name for part in scattered.values() for name in part}
        over = [name for factor, part in parts.items() if factor[0] == "k" for name in part]
        summed = tuple(name for name in over if name not in gone)
        sums = summed, [scattered.get(name, ()) for name in names]
        return Division(places, [out], functools.partial(self.part, moves, *sums))

    def part(
        self,
        moves: Mapping[int, tuple[int, tuple[Part, ...]]],
        summed: Part,
        scattered: Sequence[Part],
        *leaves: jax.Array,
    ) -> list[jax.Array]:
        """One device's part: its codes gathered, its product, and its sums scattered or added."""
        arrays = list(leaves)
        for number, (bits, parts) in moves.items():
            gather = functools.partial(movement.all_gather, parts=parts)
            cut = [axis for axis, names in enumerate(parts) if names]
            codes = arrays[number]
            arrays[number] = movement.moved_packed(codes, bits, gather, codes.shape, cut)
        whole, dtype = self.call, self.call.out_dtype
        if summed or any(scattered):
            dtype = movement.reduced_in(dtype, whole.reduce_dtype)

        def multiply(*leaves: jax.Array) -> jax.Array:
            lhs, rhs = jax.tree.unflatten(self.tree, leaves)
            types = {
                "lhs": OperandType.of(lhs, whole.lhs.axes),
                "rhs": OperandType.of(rhs, whole.rhs.axes),
            }
            return self.compute(dataclasses.replace(whole, out_dtype=dtype, **types), lhs, rhs)

        product = self.mapped(multiply)(*arrays)
        for axis, names in enumerate(scattered):
            if names:
                product = lax.psum_scatter(product, names, scatter_dimension=axis, tiled=True)
        if summed:
            product = lax.psum(product, summed)
        return [product.astype(whole.out_dtype)]


# Casts --------------------------------------------------------------------------------------------


def quantize(compute: Compute, call: QuantizeCall, *operands: jax.Array | None) -> Any:
    """A cast that the compiler splits between devices."""
    leaves, tree = jax.tree.flatten(operands)
    results = SplitCast(compute, call, tree)(*leaves)
    return jax.tree.unflatten(jax.tree.structure(calls.result_of(call, *operands)), results)


class SplitCast(Split):
    """A cast of values, by random bits and under a tensor scale where there are such."""

    @functools.cached_property
    def blocks(self) -> list[int]:
        """The positions of a block along each axis."""
        blocks = [1] * len(self.call.shape)
        for axis, size in self.call.blocks:
            blocks[axis] = block_shapes.block_extent(size, self.call.shape[axis])
        return blocks

    def axes(self, shapes: Sequence[Shape]) -> tuple[list[ArrayAxes], list[ArrayAxes]]:
        values = jax.ShapeDtypeStruct(self.call.shape, np.float32)
        results = jax.tree.leaves(calls.result_of(self.call, values, None, None))
        factors = [f"a{axis}" for axis in range(len(values.shape))]

        def like(shape: Shape) -> ArrayAxes:
            return axes_like(shape, values.shape, factors, self.blocks)

        return list(map(like, shapes)), [like(result.shape) for result in results]

    def divide(
        self,
        devices: Mapping[str, int],
        factors: Factors,
        operands: list[Placed],
        results: list[Placed],
    ) -> Division:
        """By where the values lie, or their codes have to if the values are everywhere; an axis
        that cuts blocks unevenly is whole."""
        lies, sizes = operands[0].by_factor, factors.sizes
        if not any(lies.values()):
            lies = results[0].by_factor
        blocks = {f"a{axis}": size for axis, size in enumerate(self.blocks)}
        by_amax = not self.call.scale_rule.reads_values
        parts, whole = dict.fromkeys(sizes, Part()), dict.fromkeys(sizes, Part())
        for factor, part in lies.items():
            length, size = sizes[factor], blocks.get(factor, 1)
            outer: Part = ()
            while len(outer) < len(part) and not length // devices[part[len(outer)]] % size:
                length //= devices[part[len(outer)]]
                outer = part[: len(outer) + 1]
            inner = math.prod(devices[name] for name in part[len(outer) :])
            inside = by_amax and length == size and size % inner == 0 and size > inner
            parts[factor], whole[factor] = part if inside else outer, outer

        def place(array: Placed) -> tuple[Part, ...]:
            return tuple(
                () if axis is None else (parts if axis.unit == 1 else whole)[axis.factor]
                for axis in array.axes
            )

        of_axes = [[each.get(factor, ()) for factor in blocks] for each in (parts, whole)]
        part = self.mapped(functools.partial(self.part, *of_axes))
        return Division(list(map(place, operands)), list(map(place, results)), part)

    def part(
        self, parts: Sequence[Part], whole: Sequence[Part], *leaves: jax.Array
    ) -> list[jax.Array]:
        """One device's part, under the maxima of all devices that share a block."""
        x, bits, scale = jax.tree.unflatten(self.tree, leaves)
        call = self.call
        if scale is None and call.format.tensor_scale:
            names = [name for part in parts for name in part]
            largest = call.scale_rule.largest_value(call.format)
            # As the cast finds it, so that XLA computes a block's maximum once.
            scale = find_tensor_scale(x, call.blocks, largest, names)
        # For each axis whose blocks several devices share, from the end, the mesh axes.
        inner = ((axis, parts[axis][len(whole[axis]) :]) for axis, _ in call.blocks)
        shared = {axis: names for axis, names in inner if names}
        if not shared:
            local = dataclasses.replace(call, shape=x.shape)
            return jax.tree.leaves(self.compute(local, x, bits, scale))
        axis, names = next(iter(shared)), [name for part in shared.values() for name in part]
        if bits is not None and not call.scale_rule.rounding.random_bits:
            bits = jnp.concatenate([bits, lax.slice_in_dim(bits, 0, 1, axis=axis % x.ndim)], axis)
        x = movement.with_maxima(x, call.blocks, axis, names)
        local = dataclasses.replace(call, shape=x.shape)
        array = self.compute(local, x, bits, scale)
        return jax.tree.leaves(movement.without_maxima(array, axis))
