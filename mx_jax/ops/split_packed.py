"""Packed weights in products that the compiler splits: which axes of their arrays count what."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from mx_jax.packed import Cut, PackedMXArray
from mx_jax.sharding.movement import Part
from mx_jax.sharding.partition import Factor, Share, stored_parts

KEPT: Factor = ("n", 0)
CONTRACTED: Factor = ("k", 0)


def cut_of(packed: PackedMXArray) -> Cut:
    """How devices may share packed weights that `is_split` let through."""
    assert packed.layout.cut is not None, packed
    return packed.layout.cut(packed)


def factors_of(packed: PackedMXArray) -> list[tuple[Factor | None, ...]]:
    """For each packed array what its axes count."""
    named: dict[Any, Factor] = {"n": KEPT, "k": CONTRACTED}
    named |= {axis: ("b", axis) for axis in range(len(packed.batch))}
    return [tuple(named.get(count) for count in own) for own in cut_of(packed).arrays]


def granules(packed: PackedMXArray) -> dict[Factor, int]:
    """Of what lengths a device has whole multiples, so that it has whole tiles and parts."""
    cut = cut_of(packed)
    return {KEPT: _rows(packed, cut), CONTRACTED: packed.k[0] // cut.parts}


def _rows(packed: PackedMXArray, cut: Cut) -> int:
    """Entries of the first kept axis in whole tiles."""
    return cut.rows // math.gcd(cut.rows, math.prod(packed.kept[1:]))


def stored(packed: PackedMXArray, factors: Sequence[Factor], mesh: Any) -> tuple[Part, ...]:
    """Where the values lie, by the first packed array."""
    array, counts = jax.tree.leaves(packed)[0], factors_of(packed)[0]
    parts = dict(zip(counts, stored_parts(array.sharding, array.shape, mesh), strict=True))
    return tuple(parts.get(factor, ()) for factor in factors)


def specs(packed: PackedMXArray, share: Share) -> list[tuple[Part, ...]]:
    """Where the packed arrays have to be for what each device computes."""
    return [
        tuple(() if factor is None else share.parts[factor] for factor in own)
        for own in factors_of(packed)
    ]


def local(packed: PackedMXArray, share: Share) -> PackedMXArray:
    """Packed weights made of one device's arrays, which tell no sizes."""
    sizes = dict(zip(share.mesh.axis_names, share.mesh.devices.shape, strict=True))
    kept, k = (
        math.prod(sizes[name] for name in share.parts[factor]) for factor in (KEPT, CONTRACTED)
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


def words(packed: PackedMXArray) -> tuple[Mapping[Factor, str], list[str], dict[str, int]]:
    """What Shardy is told of tiles and parts.

    Returns:
      What an array calls a factor that has an entry for each position, and not for each tile; what
      each packed array calls its axes; the sizes of names that are less than an axis.
    """
    cut = cut_of(packed)
    rows, entries = _rows(packed, cut), packed.kept[0]
    positions: dict[Factor, str] = {}
    tiles = {CONTRACTED: "k0", KEPT: "tiles"}
    sizes: dict[str, int] = {}
    if cut.parts > 1:
        sizes["k0_inside"] = packed.k[0] // cut.parts
        positions[CONTRACTED] = "(k0 k0_inside)" if sizes["k0_inside"] > 1 else "k0"
    # Shardy takes no factor of one beside another: a single tile is not split.
    if entries % rows == 0 and entries > rows:
        each = rows * math.prod(packed.kept[1:]) // cut.rows
        tiles[KEPT] = "(n0 n0_tiles)" if each > 1 else "n0"
        sizes |= {"n0_tiles": each} if each > 1 else {}
        positions[KEPT] = "(n0 n0_inside)" if rows > 1 else "n0"
        sizes |= {"n0_inside": rows} if rows > 1 else {}
    arrays = []
    for number, own in enumerate(factors_of(packed)):
        names = [
            tiles.get(factor, "".join(map(str, factor))) if factor else f"packed{number}_{axis}"
            for axis, factor in enumerate(own)
        ]
        arrays.append(" ".join(names))
    return positions, arrays, {name: size for name, size in sizes.items() if size > 1}
