"""One product as JAX sees it: a call of the handler that may be batched and partitioned."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

TARGET = "mx_jax_cpu_matmul"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Side:
    """One operand of the handler's call.

    Attributes:
      shape: of the elements, `[*batch, *kept, *k]`, or `[*batch, *k, *kept]` if k_first.
      k_first: whether the contracting axes precede the kept ones.
      element: name of the element format; `"none"` for high precision.
      scale: name of the scale format.
    """

    shape: tuple[int, ...]
    k_first: bool
    element: str
    scale: str

    def groups(self, static: "Static") -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Axes of batch, kept and k."""
        axes = tuple(range(len(self.shape)))
        batch, rest = axes[: static.num_batch], axes[static.num_batch :]
        if self.k_first:
            return batch, rest[static.num_k :], rest[: static.num_k]
        return batch, rest[: -static.num_k], rest[-static.num_k :]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Static:
    """All that one product knows before it is traced."""

    lhs: Side
    rhs: Side
    num_batch: int
    num_k: int
    block: int
    alpha_shape: tuple[int, ...]
    out_dtype: np.dtype

    @property
    def sides(self) -> tuple[Side, Side]:
        return self.lhs, self.rhs

    @property
    def batch(self) -> tuple[int, ...]:
        """Batch axes of the product; an operand may have one where the other has more."""
        pairs = zip(*(side.shape[: self.num_batch] for side in self.sides), strict=True)
        return tuple(right if left == 1 else left for left, right in pairs)

    @property
    def out_shape(self) -> tuple[int, ...]:
        kept = [[side.shape[axis] for axis in side.groups(self)[1]] for side in self.sides]
        return (*self.batch, *kept[0], *kept[1])


@functools.lru_cache(maxsize=1024)
def product(static: Static) -> Any:
    """The handler's call as a function that JAX may batch and partition."""
    partitioned = custom_partitioning(functools.partial(_call, static))
    partitioned.def_partition(
        partition=functools.partial(_partition, static),
        sharding_rule=_sharding_rule(static),
        need_replication_factors=_replicated(static),
    )

    product: Any = custom_vmap(partitioned)
    product.def_vmap(lambda *batched: (_batch(static, *batched), True))
    return product


def _call(
    static: Static,
    lhs: jax.Array,
    lhs_scales: jax.Array,
    rhs: jax.Array,
    rhs_scales: jax.Array,
    alpha: jax.Array,
) -> jax.Array:
    """The handler on whole or local arrays: each group of axes becomes one."""
    left, left_scales = _as_matrices(static, static.lhs, lhs, lhs_scales)
    right, right_scales = _as_matrices(static, static.rhs, rhs, rhs_scales)
    batch = tuple(
        b if a == 1 else a
        for a, b in zip(lhs.shape[: static.num_batch], rhs.shape[: static.num_batch], strict=True)
    )
    kept = [
        [array.shape[axis] for axis in side.groups(static)[1]]
        for side, array in ((static.lhs, lhs), (static.rhs, rhs))
    ]
    shape = (*batch, math.prod(kept[0]), math.prod(kept[1]))
    if math.prod(alpha.shape) > 1:
        alpha = jnp.broadcast_to(alpha, batch)
    result = jax.ShapeDtypeStruct(shape, static.out_dtype)
    product = jax.ffi.ffi_call(TARGET, result)(
        left,
        left_scales,
        right,
        right_scales,
        alpha,
        lhs_element=static.lhs.element,
        rhs_element=static.rhs.element,
        lhs_scale=static.lhs.scale,
        rhs_scale=static.rhs.scale,
        block=np.int32(static.block),
        lhs_k_first=static.lhs.k_first,
        rhs_k_first=static.rhs.k_first,
    )
    return product.reshape(*batch, *kept[0], *kept[1])


def _as_matrices(
    static: Static, side: Side, array: jax.Array, scales: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """`[*batch, kept, k]` or `[*batch, k, kept]` of both; a row of blocks ends with a block."""
    batch, kept, k = side.groups(static)
    last = array.shape[k[-1]]
    if len(k) > 1 and last % static.block:
        padding = [(0, 0)] * array.ndim
        padding[k[-1]] = (0, -last % static.block)
        array = jnp.pad(array, padding)

    def merged(x):
        sizes = [math.prod(x.shape[axis] for axis in group) for group in (kept, k)]
        return x.reshape(*(x.shape[axis] for axis in batch), *sizes[:: -1 if side.k_first else 1])

    return merged(array), merged(scales) if side.element != "none" else scales


# Batching -----------------------------------------------------------------------------------------


def _batch(static: Static, size: int, in_batched: Any, *operands: jax.Array) -> jax.Array:
    """One more batch axis in front; what is not batched gets one of length one."""
    lifted = []
    for index, (is_batched, operand) in enumerate(zip(in_batched, operands, strict=True)):
        no_scales = index in (1, 3) and static.sides[index // 2].element == "none"
        if is_batched or no_scales:
            lifted.append(operand)
        else:
            lifted.append(operand[None])
    lhs, rhs = (
        dataclasses.replace(side, shape=lifted[index].shape)
        for side, index in zip(static.sides, (0, 2), strict=True)
    )
    if lhs.shape[0] == rhs.shape[0] == 1 != size:
        # Only alpha or the scales differ.
        lifted[0] = jnp.broadcast_to(lifted[0], (size, *lhs.shape[1:]))
        lhs = dataclasses.replace(lhs, shape=lifted[0].shape)
    for index, side in ((1, lhs), (3, rhs)):
        if side.element != "none" and lifted[index].shape[0] != side.shape[0]:
            wide = max(lifted[index].shape[0], side.shape[0])
            lifted[index - 1], lifted[index] = (
                jnp.broadcast_to(x, (wide, *x.shape[1:])) for x in lifted[index - 1 : index + 1]
            )
    lhs, rhs = (
        dataclasses.replace(side, shape=lifted[index].shape) for side, index in ((lhs, 0), (rhs, 2))
    )
    more = dataclasses.replace(
        static, lhs=lhs, rhs=rhs, num_batch=static.num_batch + 1, alpha_shape=lifted[4].shape
    )
    return product(more)(*lifted)


# Partitioning -------------------------------------------------------------------------------------
#
# Batch and kept axes may be sharded any way; a contracting axis is gathered: its shards may cut
# blocks, and codes are a quarter of what their values would be.


def _factors(static: Static) -> tuple[list[list[str]], list[str]]:
    """Names of the axes of the five operands and of the product."""
    out_batch = [f"b{axis}" for axis in range(static.num_batch)]
    operands: list[list[str]] = []
    out = list(out_batch)
    for side, letter in ((static.lhs, "m"), (static.rhs, "n")):
        batch, kept, k = side.groups(static)
        names = [""] * len(side.shape)
        for axis in batch:
            alone = side.shape[axis] == 1 != static.batch[axis]
            names[axis] = f"{letter}one{axis}" if alone else out_batch[axis]
        for index, axis in enumerate(kept):
            names[axis] = f"{letter}{index}"
            out.append(names[axis])
        scale_names = list(names)
        for index, axis in enumerate(k):
            names[axis] = f"k{index}"
            scale_names[axis] = f"k{index}" if index < len(k) - 1 else f"{letter}blocks"
        operands += [names, scale_names if side.element != "none" else [f"{letter}none"]]
    alone = [f"alpha{axis}" for axis in range(static.num_batch)]
    alpha = [
        one if size == 1 != wide else name
        for one, name, size, wide in zip(
            alone, out_batch, static.alpha_shape, static.batch, strict=True
        )
    ]
    return [*operands, alpha], out


def _sharding_rule(static: Static) -> str:
    operands, out = _factors(static)
    return f"{', '.join(' '.join(names) for names in operands)} -> {' '.join(out)}"


def _replicated(static: Static) -> tuple[str, ...]:
    operands, out = _factors(static)
    names = dict.fromkeys(name for operand in operands for name in operand)
    return tuple(name for name in names if name not in out)


def _partition(static: Static, mesh: Any, operands: Any, result: Any) -> Any:
    """The same call on each device's shards: whatever the product's axes follow."""
    names, out = _factors(static)
    mesh = result.sharding.mesh
    spec = (*result.sharding.spec, *(None,) * len(out))
    placed = dict(zip(out, spec, strict=False))
    shardings = tuple(
        NamedSharding(mesh, PartitionSpec(*(placed.get(name) for name in operand)))
        for operand in names
    )
    return mesh, functools.partial(_call, static), result.sharding, shardings
