"""Operations that the compiler splits between devices, by what the axes of their arrays count.

XLA asks when it compiles and knows real shardings. An operation names the axes of its operands and
results; Shardy's rule, shardings of all arrays, each device's part and batches follow from that.
"""

import dataclasses
import functools
import hashlib
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, Sharding

from mx_jax.axes import Axes
from mx_jax.sharding.movement import Part, spec_of

Shape = tuple[int, ...]


class FactorAxis(NamedTuple):
    """What an axis of an array counts: positions of a factor, or blocks of `unit` positions.

    Factors are axes of the operation, such as "m0"; those that begin with "k" are summed over. A
    factor that is no multiple of its unit cannot be divided.
    """

    factor: str
    unit: int = 1


# What devices may split of an array; None: that axis stays whole.
ArrayAxes = tuple[FactorAxis | None, ...]


def axes_like(
    shape: Sequence[int], whole: Sequence[int], factors: Sequence[str], blocks: Sequence[int | None]
) -> ArrayAxes:
    """The axes of an array, such as scales: an entry a position of `whole`, a block, or in all."""

    def axis(length: int, size: int, factor: str, block: int | None) -> FactorAxis | None:
        if length == size:
            return FactorAxis(factor)
        return None if block is None or length != -(-size // block) else FactorAxis(factor, block)

    return tuple(map(axis, shape, whole, factors, blocks))


class Placed(NamedTuple):
    """An array as it lies: what each of its axes counts, and the mesh axes that split it."""

    axes: ArrayAxes
    parts: tuple[Part, ...]

    @property
    def by_factor(self) -> dict[str, Part]:
        """The mesh axes of each factor."""
        pairs = zip(self.axes, self.parts, strict=True)
        return {axis.factor: part for axis, part in pairs if axis is not None}


class Factors(NamedTuple):
    """The factors of an operation."""

    sizes: dict[str, int]  # in positions
    units: dict[str, int]  # the fewest positions that are whole entries of every array

    @classmethod
    def of(
        cls, operands: Sequence[ArrayAxes], shapes: Sequence[Shape], results: Sequence[ArrayAxes]
    ) -> "Factors":
        """Those of operands of these shapes, and of results."""
        sizes, units = dict[str, int](), dict[str, int]()
        for axis in itertools.chain(*operands, *results):
            if axis is not None:
                units[axis.factor] = math.lcm(units.get(axis.factor, 1), axis.unit)
        for axis, length in zip(itertools.chain(*operands), itertools.chain(*shapes), strict=True):
            if axis is not None and axis.unit == 1:
                sizes[axis.factor] = length
        return cls(sizes, units)


def product_factors(lhs: Axes, rhs: Axes) -> tuple[tuple[str, ...], ...]:
    """The factors of both operands' axes and of their product's: "b" of a batch, "m" and "n" of
    what each keeps, "k" of what is contracted."""

    def named(axes: Axes, kept: str) -> tuple[str, ...]:
        groups = (("b", axes.batch), (kept, axes.kept), ("k", axes.contracting))
        names = {axis: f"{name}{i}" for name, group in groups for i, axis in enumerate(group)}
        return tuple(names[axis] for axis in range(axes.ndim))

    left, right = named(lhs, "m"), named(rhs, "n")
    of_product = [("b", lhs.batch), ("m", lhs.kept), ("n", rhs.kept)]
    return (
        left,
        right,
        tuple(f"{name}{i}" for name, group in of_product for i, _ in enumerate(group)),
    )


def split_product(
    devices: Mapping[str, int],
    factors: Factors,
    operands: Sequence[Mapping[str, Part]],
    product: Mapping[str, Part],
) -> tuple[dict[str, Part], dict[str, Part]]:
    """The mesh axes that split each factor of a product, by where its arrays lie; and for axes of
    the product those along which its sums are scattered.

    An operand is gathered only along mesh axes that the product has from the other one, as for
    `jax.lax.dot_general`.
    """
    owners = [
        {name: factor for factor, part in lies.items() for name in part}
        for lies in (*operands, product)
    ]
    # In the order that the product has, or else an operand.
    lies = [name for operand in operands for part in operand.values() for name in part]
    order = dict.fromkeys([*owners[2], *lies])
    parts: dict[str, Part] = dict.fromkeys(factors.sizes, ())
    scattered: dict[str, Part] = {}
    for name in order:
        lhs, rhs, out = (owner.get(name) for owner in owners)
        # What both operands split alike, else what one of them keeps.
        kept = [factor for factor in (out, lhs, rhs) if factor is not None and factor[0] != "k"]
        factor = lhs if lhs is not None and lhs == rhs else (*kept, lhs or rhs)[0]
        assert factor is not None
        wider = (*parts.get(factor, ()), name)
        each = math.prod(devices[axis] for axis in wider) * factors.units.get(factor, 1)
        if factor not in factors.sizes or factors.sizes[factor] % each:
            continue
        parts[factor] = wider
        if factor[0] == "k" and out in parts:
            scattered[out] = (*scattered.get(out, ()), name)
    # What is contracted lies as it does in an operand: in another order, all of it would move.
    for factor, part in parts.items():
        if factor[0] == "k":
            parts[factor] = tuple(sorted(part, key=lies.index))
    for factor, part in list(scattered.items()):
        if factors.sizes[factor] % math.prod(devices[axis] for axis in (*parts[factor], *part)):
            del scattered[factor]
    return parts, scattered


class Division(NamedTuple):
    """What each device computes: a function of its parts, and which parts of arrays these are."""

    operands: Sequence[tuple[Part, ...]]
    results: Sequence[tuple[Part, ...]]
    compute: Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Split:
    """An operation that the compiler splits between devices.

    Attributes:
      compute: `compute(call, *operands)`, for each device's part; a hashable value.
      call: what is computed.
      tree: of the operands.
      batches: for each `vmap`, the innermost first, which leaves have its axis in front.
    """

    compute: Callable[..., Any]
    call: Any
    tree: Any
    batches: tuple[tuple[bool, ...], ...] = ()

    def axes(self, shapes: Sequence[Shape]) -> tuple[list[ArrayAxes], list[ArrayAxes]]:
        """Of the operands' leaves, which have these shapes, and of the results."""
        raise NotImplementedError

    def divide(
        self,
        devices: Mapping[str, int],
        factors: Factors,
        operands: list[Placed],
        results: list[Placed],
    ) -> Division:
        """What each device computes, by where operands lie and results are wanted, on a mesh of so
        many devices along each axis."""
        raise NotImplementedError

    def __call__(self, *leaves: jax.Array) -> list[jax.Array]:
        return _operation(self, tuple(x.shape for x in leaves))(*leaves)

    def run(self, *leaves: jax.Array) -> list[jax.Array]:
        """The results' leaves, without a batch."""
        return jax.tree.leaves(self.compute(self.call, *jax.tree.unflatten(self.tree, leaves)))

    def mapped(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function of leaves without batches, of those with them."""
        for batched in self.batches:
            function = jax.vmap(
                function, tuple(0 if is_batched else None for is_batched in batched)
            )
        return function

    def all_axes(self, shapes: Sequence[Shape]) -> tuple[list[ArrayAxes], list[ArrayAxes]]:
        """The axes of operands and results, with those of batches."""
        every = [FactorAxis(f"v{number}") for number in reversed(range(len(self.batches)))]
        batches = [
            [axis for axis, batched in zip(every, self.batches[::-1], strict=True) if batched[leaf]]
            for leaf in range(len(shapes))
        ]
        inner = [shape[len(batch) :] for shape, batch in zip(shapes, batches, strict=True)]
        operands, results = self.axes(inner)
        operands = [(*batch, *axes) for batch, axes in zip(batches, operands, strict=True)]
        return operands, [(*every, *axes) for axes in results]


@functools.lru_cache(maxsize=4096)
def _operation(split: Split, shapes: tuple[Shape, ...]) -> Any:
    """A split as one operation, with its rules for devices and batches."""
    operands, results = split.all_axes(shapes)
    factors = Factors.of(operands, shapes, results)

    def divide(mesh: Mesh, arrays: Sequence[Any], wanted: Sequence[Any]) -> tuple[Mesh, Division]:
        mesh = fine_mesh(mesh, arrays[1])  # behind the name

        def placed(x: jax.ShapeDtypeStruct | None, axes: ArrayAxes) -> Placed:
            if x is None:
                return Placed(axes, ((),) * len(axes))
            return Placed(axes, stored_parts(x.sharding, x.shape, mesh))

        devices = dict(zip(mesh.axis_names, mesh.devices.shape, strict=True))
        lies = list(map(placed, arrays[1:], operands)), list(map(placed, wanted, results))
        return mesh, split.divide(devices, factors, *lies)

    def place(mesh: Mesh, arrays: Sequence[tuple[Part, ...]]) -> list[NamedSharding]:
        return [NamedSharding(mesh, spec_of(parts)) for parts in arrays]

    def infer(mesh: Mesh, arrays: Sequence[Any], wanted: object) -> list[NamedSharding]:
        # The older partitioner's question; the newer has the rule.
        mesh, division = divide(mesh, arrays, [None] * len(results))
        return place(mesh, division.results)

    def partition(mesh: Mesh, arrays: Sequence[Any], wanted: Sequence[Any]) -> Any:
        mesh, division = divide(mesh, arrays, wanted)

        def run(name: jax.Array, *leaves: jax.Array) -> Any:
            # Types have no mesh's explicit axes while the compiler asks.
            with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
                return division.compute(*leaves)

        places = (NamedSharding(mesh, PartitionSpec(None)), *place(mesh, division.operands))
        return mesh, run, place(mesh, division.results), places

    rule, summed, sizes = shardy_rule(operands, results, factors)
    partitioned: Any = custom_partitioning(lambda name, *leaves: split.mapped(split.run)(*leaves))
    partitioned.def_partition(
        partition=partition,
        infer_sharding_from_operands=infer,
        # A reshape may have cut a mesh axis in two, which no NamedSharding of its mesh says.
        decode_shardings=False,
        sharding_rule=f"name, {rule}",
        reduction_factors=summed,
        **sizes,
    )
    # Nothing reads the name: it tells programs apart in the key of a compilation cache.
    name = np.frombuffer(hashlib.sha256(repr(split).encode()).digest(), np.uint32)
    operation: Any = custom_vmap(functools.partial(partitioned, name))

    @operation.def_vmap
    def _(size: int, in_batched: Sequence[bool], *leaves: jax.Array) -> Any:
        wider = dataclasses.replace(split, batches=(*split.batches, tuple(in_batched)))
        return wider(*leaves), [True] * len(results)

    return operation


def shardy_rule(
    operands: Sequence[ArrayAxes], results: Sequence[ArrayAxes], factors: Factors
) -> tuple[str, tuple[str, ...], dict[str, int]]:
    """Shardy's rule, the factors that are summed over, and sizes of factors below an axis."""
    # Shardy rejects a factor of size 1 beside another in one axis.
    counts = [(name, size, factors.units[name]) for name, size in factors.sizes.items()]
    shared = {name for name, size, unit in counts if size > unit and size % unit == 0}
    sizes: dict[str, int] = {}
    summed: dict[str, None] = {}
    alone = itertools.count()

    def word(axis: FactorAxis | None) -> str:
        if axis is None or (axis.factor not in shared and axis.unit > 1):
            return f"alone{next(alone)}"
        names = [axis.factor]
        entries = 1
        if axis.factor in shared:
            entries = factors.units[axis.factor] // axis.unit
        if entries > 1:
            names.append(f"{axis.factor}_{entries}")
            sizes[names[-1]] = entries
        if axis.factor.startswith("k"):
            summed.update(dict.fromkeys(names))
        return names[0] if len(names) == 1 else f"({' '.join(names)})"

    sides = (", ".join(" ".join(map(word, axes)) for axes in side) for side in (operands, results))
    return " -> ".join(sides), tuple(summed), sizes


def fine_mesh(mesh: Mesh, x: jax.ShapeDtypeStruct) -> Mesh:
    """The devices of a mesh, or of x, in one of prime axes: a reshape may have cut the caller's."""
    devices = mesh.devices
    if mesh.empty:
        try:
            devices = np.array(list(x.sharding.devices_indices_map(x.shape)))
        except ValueError:  # split unevenly: `stored_parts` counts it as whole, in any order
            devices = np.array(sorted(x.sharding.device_set, key=lambda device: device.id))
    sizes = []
    for size in devices.shape:
        prime = 2
        while size > 1:
            while size % prime == 0:
                sizes.append(prime)
                size //= prime
            prime += 1
    return Mesh(devices.reshape(sizes), tuple(f"axis{i}" for i in range(len(sizes))))


def stored_parts(sharding: Sharding, shape: tuple[int, ...], mesh: Mesh) -> tuple[Part, ...]:
    """Along which axes of a fine mesh an array is split; one that is split unevenly is whole."""
    try:
        indices = sharding.devices_indices_map(shape)
    except ValueError:
        return ((),) * len(shape)
    names, devices = mesh.axis_names, mesh.devices
    origin = (0,) * devices.ndim
    starts = [
        [piece.start or 0 for piece in indices[devices[(*origin[:i], 1, *origin[i + 1 :])]]]
        for i in range(devices.ndim)
    ]
    return tuple(
        _part_of([start[axis] for start in starts], length, names, devices.shape)
        for axis, length in enumerate(shape)
    )


def _part_of(starts: list[int], length: int, names: Sequence[str], sizes: Sequence[int]) -> Part:
    """The mesh axes of one axis, by where the second device along each of them begins."""
    minor_first = sorted((start, i) for i, start in enumerate(starts) if start)
    devices = math.prod(sizes[i] for _, i in minor_first)
    if length % devices:
        return ()
    stride = length // devices
    for start, i in minor_first:
        if start != stride:
            return ()
        stride *= sizes[i]
    return tuple(names[i] for _, i in reversed(minor_first))
