"""Which part of a product each device computes, once the compiler knows where its operands lie.

What each device multiplies, along which mesh axes sums are added up, and so what has to move. An
operand is gathered only along mesh axes that the product has from the other one, as for
`jax.lax.dot_general`.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, Sharding

from mx_jax.axes import ProductAxes
from mx_jax.sharding.movement import Part, spec_of

# An axis of the product: its group ("b", "m", "n" or "k") and its number there.
Factor = tuple[str, int]


@dataclasses.dataclass(frozen=True)
class Factors:
    """The axes of both operands and of their product, by what they have in common."""

    lhs: tuple[Factor, ...]
    rhs: tuple[Factor, ...]
    out: tuple[Factor, ...]

    @classmethod
    def of(cls, axes: ProductAxes) -> "Factors":
        """Those of operands in canonical order, as `("k", 0)`."""
        sides = []
        for kept, own in (("m", axes.lhs), ("n", axes.rhs)):
            names: dict[int, Factor] = {}
            for group, found in (("b", own.batch), (kept, own.kept), ("k", own.contracting)):
                names |= {axis: (group, number) for number, axis in enumerate(found)}
            sides.append(tuple(names[axis] for axis in range(own.ndim)))
        out = (
            *(("b", number) for number in range(len(axes.lhs.batch))),
            *(("m", number) for number in range(len(axes.lhs.kept))),
            *(("n", number) for number in range(len(axes.rhs.kept))),
        )
        return cls(sides[0], sides[1], out)


@dataclasses.dataclass(frozen=True)
class Share:
    """What each device computes of a product."""

    mesh: Mesh  # of axes as fine as any sharding can cut them
    parts: Mapping[Factor, Part]  # for each factor the mesh axes that split it
    # For axes of the product, the mesh axes along which its sums are scattered.
    scattered: Mapping[Factor, Part]

    @property
    def summed(self) -> Part:
        """The mesh axes along which sums are added up and not scattered."""
        names = [name for factor, part in self.parts.items() if factor[0] == "k" for name in part]
        gone = {name for part in self.scattered.values() for name in part}
        return tuple(name for name in names if name not in gone)

    def operand(self, factors: Sequence[Factor]) -> tuple[Part, ...]:
        """Where an operand lies as it is multiplied."""
        return tuple(self.parts[factor] for factor in factors)

    def product(self, factors: Sequence[Factor]) -> tuple[Part, ...]:
        """Where the product lies."""
        return tuple((*self.parts[factor], *self.scattered.get(factor, ())) for factor in factors)

    def sharding(self, parts: tuple[Part, ...], shape: Sequence[int], whole: Sequence[int]) -> Any:
        """The sharding of an array with one entry along some axes of an operand `whole`."""
        own = tuple(
            part if length > 1 or size == 1 else ()
            for part, length, size in zip(parts, shape, whole, strict=True)
        )
        return NamedSharding(self.mesh, spec_of(own))


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


def share(
    mesh: Mesh,
    factors: Factors,
    stored: tuple[tuple[Part, ...], tuple[Part, ...], tuple[Part, ...]],
    sizes: Mapping[Factor, int],
    granules: Mapping[Factor, Sequence[int]],
) -> Share:
    """What each device computes."""
    owners = [
        {name: factor for factor, part in zip(own, parts, strict=True) for name in part}
        for own, parts in zip((factors.lhs, factors.rhs, factors.out), stored, strict=True)
    ]
    # In the order that the product has, or else an operand.
    order = dict.fromkeys(
        name for parts in (stored[2], *stored[:2]) for part in parts for name in part
    )
    count = dict(zip(mesh.axis_names, mesh.devices.shape, strict=True))
    parts: dict[Factor, Part] = dict.fromkeys(sizes, ())
    scattered: dict[Factor, Part] = {}
    for name in order:
        lhs, rhs, out = (owner.get(name) for owner in owners)
        factor = _factor_of(lhs, rhs, out)
        if factor is None:
            continue
        wider = (*parts[factor], name)
        each, rest = divmod(sizes[factor], math.prod(count[own] for own in wider))
        if rest or any(each % granule for granule in granules.get(factor, ())):
            continue
        parts[factor] = wider
        if factor[0] == "k" and out is not None:
            scattered[out] = (*scattered.get(out, ()), name)
    # What is contracted lies as it does in an operand: in another order, all of it would move.
    lies = [name for parts in stored[:2] for part in parts for name in part]
    for factor, part in parts.items():
        if factor[0] == "k":
            parts[factor] = tuple(sorted(part, key=lies.index))
    for factor, part in list(scattered.items()):
        if sizes[factor] % math.prod(count[own] for own in (*parts[factor], *part)):
            del scattered[factor]
    return Share(mesh, parts, scattered)


def _factor_of(lhs: Factor | None, rhs: Factor | None, out: Factor | None) -> Factor | None:
    """What a mesh axis splits, by what it splits of operands and product as they lie."""
    if lhs is not None and lhs == rhs:
        return lhs
    if out is not None:
        return out
    for own in (lhs, rhs):
        if own is not None and own[0] != "k":
            return own
    return lhs or rhs
