"""A cast's handler as a function that JAX may batch, split between devices, or lower elsewhere.

`jax.vmap` gives the handler one more leading axis, in one call. Devices each cast their own shard:
every axis may be split, a blocked one between blocks. Lowered for another platform than the CPU,
the reference's own code stands instead.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

from mx_jax.codecs.blocks import Blocks, scales_shape
from mx_jax.formats import WHOLE, Whole

Arrays = Sequence[jax.Array]
Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """What one operand or result holds of the tensor that is cast.

    Attributes:
      per: how often there is an entry; a tensor has one for each batch, or one for all.
      dtype: of the entries; None for an operand, which has its own.
      blocks: those that have an entry each: axes from the end with block sizes.
    """

    per: Literal["element", "block", "tensor"]
    dtype: np.dtype | None = None
    blocks: Blocks = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cast:
    """All that is known of a cast but shapes; its first operand holds elements.

    Attributes:
      target: the handler's name.
      attributes: the handler's attributes, sorted; tuples of numbers stand for arrays, whose dtype
        is the first entry.
      blocks: every axis that blocks lie along, from the end, with their size.
      operands: what the operands hold.
      results: what the results hold.
    """

    target: str
    attributes: tuple[tuple[str, Any], ...]
    blocks: Blocks
    operands: tuple[Entry, ...]
    results: tuple[Entry, ...]

    def shape_of(self, entry: Entry, shape: Shape) -> Shape:
        """Shape of an operand or result, given the tensor's."""
        return scales_shape(shape, entry.blocks) if entry.per == "block" else shape


def hashable(attributes: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Attributes as `Cast` keeps them."""
    return tuple(
        (name, (value.dtype.name, *value.tolist()) if isinstance(value, np.ndarray) else value)
        for name, value in sorted(attributes.items())
    )


def flat_blocks(blocks: Blocks) -> np.ndarray:
    """Axis from the end and size, in turn, ascending; 0 stands for WHOLE."""
    pairs = [(axis, 0 if size is WHOLE else size) for axis, size in sorted(blocks)]
    return np.array(pairs, np.int64).reshape(-1)


def run(cast: Cast, operands: Arrays, elsewhere: Callable[..., Arrays]) -> Arrays:
    """The results of a cast; `elsewhere` computes them on other platforms than the CPU."""
    function = _function(cast, tuple(operand.shape for operand in operands))
    return lax.platform_dependent(
        *operands, cpu=function, default=lambda *given: tuple(elsewhere(*given))
    )


def _call(cast: Cast, *operands: jax.Array) -> Arrays:
    """The handler on whole or local arrays."""
    attributes = {
        name: np.array(value[1:], value[0]) if isinstance(value, tuple) else value
        for name, value in cast.attributes
    }
    # Made from the operand's own type, a result varies along the same axes of a shard_map.
    like: Any = jax.typeof(operands[0])
    results = tuple(
        like.update(shape=cast.shape_of(entry, like.shape), dtype=entry.dtype, weak_type=False)
        for entry in cast.results
    )
    return jax.ffi.ffi_call(cast.target, results)(*operands, **attributes)


@functools.lru_cache(maxsize=4096)
def _function(cast: Cast, shapes: tuple[Shape, ...]) -> Any:
    """The call for operands of these shapes, with its rules for devices and batches."""
    partitioned = custom_partitioning(functools.partial(_call, cast))
    factors = _factors(cast, shapes)
    sizes: Any = factors.sizes
    partitioned.def_partition(
        partition=functools.partial(_partition, cast, shapes),
        sharding_rule=factors.rule,
        need_replication_factors=factors.replicated,
        **sizes,
    )
    batched: Any = custom_vmap(partitioned)
    batched.def_vmap(functools.partial(_batch, cast))
    return batched


def _batch(cast: Cast, size: int, in_batched: Sequence[bool], *operands: jax.Array) -> Any:
    """One more axis in front of everything; a tensor's entry may keep to one for all."""
    lifted = []
    for entry, batched, operand in zip(cast.operands, in_batched, operands, strict=True):
        if not batched:
            wide = 1 if entry.per == "tensor" else size
            operand = jnp.broadcast_to(operand, (wide, *operand.shape))
        lifted.append(operand)
    results = _function(cast, tuple(operand.shape for operand in lifted))(*lifted)
    return results, (True,) * len(cast.results)


# Partitioning -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Factors:
    """What Shardy is told: an axis for each name; two names in parentheses share one."""

    rule: str
    replicated: tuple[str, ...]
    sizes: dict[str, int]


def _factors(cast: Cast, shapes: tuple[Shape, ...]) -> _Factors:
    shape = shapes[0]
    sizes: dict[str, int] = {}
    replicated: list[str] = []
    elements = [f"a{axis}" for axis in range(len(shape))]
    for axis, size in cast.blocks:
        axis %= len(shape)
        inside, outside = f"c{axis}", f"b{axis}"
        replicated.append(inside)
        elements[axis] = inside
        # A symbolic axis counts as one that is cut nowhere.
        known = isinstance(shape[axis], int)
        if not isinstance(size, Whole) and known and shape[axis] > size and not shape[axis] % size:
            elements[axis] = f"({outside} {inside})"
            sizes[inside] = size
        else:
            replicated.append(outside)

    def named(entry: Entry) -> list[str]:
        blocked = {axis % len(shape) for axis, _ in entry.blocks}
        return [f"b{axis}" if axis in blocked else name for axis, name in enumerate(elements)]

    given = []
    for entry, operand in zip(cast.operands, shapes, strict=True):
        if entry.per != "tensor":
            given.append(named(entry))
            continue
        alone = [f"t{axis}" for axis in range(len(shape))]
        given.append(
            [a if n == 1 else f"a{i}" for i, (a, n) in enumerate(zip(alone, operand, strict=True))]
        )
        replicated += [name for name in given[-1] if name.startswith("t")]
    results = [named(entry) for entry in cast.results]
    left, right = (", ".join(" ".join(each) for each in side) for side in (given, results))
    return _Factors(
        rule=f"{left} -> {right}", replicated=tuple(dict.fromkeys(replicated)), sizes=sizes
    )


def _partition(cast: Cast, shapes: tuple[Shape, ...], mesh: Any, given: Any, wanted: Any) -> Any:
    """The same call on each device's shard, cut as the first result is wanted, between blocks."""
    shape = shapes[0]
    sharding = wanted[0].sharding
    spec = [*sharding.spec, *(None,) * (len(shape) - len(sharding.spec))]
    for axis, size in cast.blocks:
        axis %= len(shape)
        devices = _num_devices(sharding.mesh, spec[axis])
        known = isinstance(shape[axis], int)
        if isinstance(size, Whole) or not known or shape[axis] % (size * devices):
            spec[axis] = None

    def placed(entry: Entry, lengths: Shape) -> NamedSharding:
        parts = spec
        if entry.per == "tensor":
            parts = [None if n == 1 else part for n, part in zip(lengths, spec, strict=True)]
        return NamedSharding(sharding.mesh, PartitionSpec(*parts))

    operands = tuple(map(placed, cast.operands, shapes))
    results = tuple(placed(entry, shape) for entry in cast.results)
    return sharding.mesh, functools.partial(_call, cast), results, operands


def _num_devices(mesh: Any, part: Any) -> int:
    names = () if part is None else (part,) if isinstance(part, str) else part
    return int(np.prod([mesh.shape[name] for name in names], dtype=int))
