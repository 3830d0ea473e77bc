"""Products by the compiled handler: which calls it takes, and how it is called."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

from mx_jax.backends.base import MatmulCall, Operand
from mx_jax.backends.cpu_ffi import library
from mx_jax.formats import WHOLE, BlockFormat
from mx_jax.mxarray import MXArray

TARGET = "mx_jax_cpu_matmul"

ELEMENTS = ("e4m3", "e5m2", "e2m3", "e3m2", "e2m1", "int8")
_BLOCKS = (16, 32)
_DTYPES = tuple(map(jnp.dtype, ("float32", "bfloat16", "float16")))


def rejects(call: MatmulCall) -> str | None:
    """Why the handler does not take a call, or None."""
    loaded = library.load()
    if isinstance(loaded, str) or TARGET not in loaded.targets:
        return "was built without products; build it again"
    if call.out_sharding is not None:
        return f"takes no out_sharding, got out_sharding={call.out_sharding}"
    if call.out_dtype not in _DTYPES:
        return f"gives float32, bfloat16 or float16, got out_dtype={call.out_dtype}"
    formats = [f for f in (call.lhs_format, call.rhs_format) if f is not None]
    for format in formats:
        reason = rejects_format(format)
        if reason is not None:
            return reason
    blocks = {format.block[1] for format in formats}
    if len(blocks) > 1:
        return f"needs one block size, got lhs={call.lhs_format}, rhs={call.rhs_format}"
    return None


def block_size(format: BlockFormat) -> int:
    """Positions of one block along k, of a format that is taken."""
    size = format.block[1]
    assert isinstance(size, int), format
    return size


def rejects_format(format: BlockFormat) -> str | None:
    """Why operands of a format are not taken, or None."""
    if format.element.name not in ELEMENTS:
        return f"multiplies elements in {', '.join(ELEMENTS)}, got {format.element.name}"
    if format.scale.name not in ("e8m0", "e4m3"):
        return f"needs scales in e8m0 or e4m3, got {format.name} with {format.scale.name}"
    if format.block[1] not in _BLOCKS:
        return f"needs blocks of {' or '.join(map(str, _BLOCKS))} along k, got {format}"
    if format.block[0] is WHOLE:
        return f"needs blocks that end along the kept axes, got {format}"
    return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Side:
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

    def groups(self, static: "_Static") -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Axes of batch, kept and k."""
        axes = tuple(range(len(self.shape)))
        batch, rest = axes[: static.num_batch], axes[static.num_batch :]
        if self.k_first:
            return batch, rest[static.num_k :], rest[: static.num_k]
        return batch, rest[: -static.num_k], rest[-static.num_k :]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Static:
    """All that one product knows before it is traced."""

    lhs: _Side
    rhs: _Side
    num_batch: int
    num_k: int
    block: int
    alpha_shape: tuple[int, ...]
    out_dtype: np.dtype

    @property
    def sides(self) -> tuple[_Side, _Side]:
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


def scaled_matmul(lhs: Operand, rhs: Operand, call: MatmulCall) -> jax.Array:
    """The product `[*batch, *m, *n]`, by the handler."""
    formats = [f for f in (call.lhs_format, call.rhs_format) if f is not None]
    left, left_scales = arrays(lhs, call.contracting_axes("lhs")[-1])
    right, right_scales = arrays(rhs, call.contracting_axes("rhs")[-1])
    alpha = jnp.ones((1,) * call.num_batch, jnp.float32)
    for operand in (lhs, rhs):
        if isinstance(operand, MXArray) and operand.tensor_scale is not None:
            alpha = alpha * operand.tensor_scale.reshape((1,) * call.num_batch)
    static = _Static(
        lhs=_side(left, lhs, call.lhs_k_first),
        rhs=_side(right, rhs, call.rhs_k_first),
        num_batch=call.num_batch,
        num_k=call.num_contracting,
        block=block_size(formats[0]),
        alpha_shape=alpha.shape,
        out_dtype=np.dtype(call.out_dtype),
    )
    return _product(static)(left, left_scales, right, right_scales, alpha)


def arrays(operand: Operand, contracting: int) -> tuple[jax.Array, jax.Array]:
    """Elements and scales; blocks that span rows too get a scale for each row."""
    if not isinstance(operand, MXArray):
        known = operand.dtype in _DTYPES
        return operand if known else operand.astype(jnp.float32), jnp.zeros((0,), jnp.uint8)
    scales = operand.scales
    for axis, size in operand.blocks:
        if axis % operand.ndim != contracting:
            assert isinstance(size, int), operand.blocks
            repeated = jnp.repeat(scales, size, axis)
            scales = lax.slice_in_dim(repeated, 0, operand.shape[axis], axis=axis)
    return operand.codes, scales


def _side(array: jax.Array, operand: Operand, k_first: bool) -> _Side:
    quantized = isinstance(operand, MXArray)
    return _Side(
        shape=array.shape,
        k_first=k_first,
        element=operand.format.element.name if quantized else "none",
        scale=operand.format.scale.name if quantized else "none",
    )


@functools.lru_cache(maxsize=1024)
def _product(static: _Static) -> Any:
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
    static: _Static,
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
    static: _Static, side: _Side, array: jax.Array, scales: jax.Array
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


def _batch(static: _Static, size: int, in_batched: Any, *operands: jax.Array) -> jax.Array:
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
    return _product(more)(*lifted)


# Partitioning -------------------------------------------------------------------------------------
#
# Batch and kept axes may be sharded any way; a contracting axis is gathered: its shards may cut
# blocks, and codes are a quarter of what their values would be.


def _factors(static: _Static) -> tuple[list[list[str]], list[str]]:
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


def _sharding_rule(static: _Static) -> str:
    operands, out = _factors(static)
    return f"{', '.join(' '.join(names) for names in operands)} -> {' '.join(out)}"


def _replicated(static: _Static) -> tuple[str, ...]:
    operands, out = _factors(static)
    names = dict.fromkeys(name for operand in operands for name in operand)
    return tuple(name for name in names if name not in out)


def _partition(static: _Static, mesh: Any, operands: Any, result: Any) -> Any:
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
