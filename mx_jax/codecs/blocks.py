"""Shape algebra of blocks: cutting blocked axes in two, joining them, checking what they need.

`blocks` pairs axes counted from the end with block sizes, e.g. `((-2, 16), (-1, 16))`; other axes
have blocks of one. Counted from the end, pairs stay valid under `vmap` and `scan`; stored, an axis
that holds exactly one block stays blocked.
"""

from typing import Any, ClassVar, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mx_jax.codecs.explicit_axes import join_axes, split_axes
from mx_jax.codecs.lowering import lowering
from mx_jax.formats import WHOLE, BlockFormat, BlockSize, Whole

Blocks = tuple[tuple[int, BlockSize], ...]
Shape = tuple[Any, ...]
# A register of a TPU has so many columns.
_LANES = 128
# A product that spreads scales takes this times as many multiplications as there are elements.
_MOST_BLOCKS = 512


class Blocked(Protocol):
    """What modules below `MXArray` read of one."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def codes(self) -> jax.Array: ...
    @property
    def scales(self) -> jax.Array: ...
    @property
    def tensor_scale(self) -> jax.Array | None: ...
    @property
    def format(self) -> BlockFormat: ...
    @property
    def blocks(self) -> Blocks: ...
    @property
    def primal(self) -> jax.Array | None: ...


def block_extent(size: BlockSize, length: int) -> int:
    """Positions of one block along an axis of that length; a WHOLE block takes them all."""
    return max(length, 1) if size is WHOLE else int(size)


def num_blocks(size: BlockSize, length: int) -> int:
    """How many blocks cover an axis: `ceil(length / size)`."""
    return -(-length // block_extent(size, length))


def scales_shape(shape: tuple[int, ...], blocks: Blocks) -> tuple[int, ...]:
    """Shape of the scales of a tensor: blocked axes count blocks, others keep their length."""
    counts = list(shape)
    for axis, size in blocks:
        counts[axis] = num_blocks(size, shape[axis])
    return tuple(counts)


def split(x: jax.Array, blocks: Blocks, *, fill: bool = False) -> tuple[jax.Array, tuple[int, ...]]:
    """x with each blocked axis as (blocks, position), zero-padded, and the axes inside blocks."""
    # Zeros do not change a block's amax (MX v1.0, 5.2). So an axis that is shorter than its block
    # stays as it is, unless `fill` is asked for: padded, it could take any multiple of its memory.
    sizes = {axis % x.ndim: size for axis, size in blocks}
    padding = [(0, 0)] * x.ndim
    shape: list[int] = []
    inside: list[int] = []
    for axis, length in enumerate(x.shape):
        if axis not in sizes:
            shape.append(length)
            continue
        extent, count = block_extent(sizes[axis], length), num_blocks(sizes[axis], length)
        if isinstance(length, int) and 0 < length < extent and not fill:
            extent = length
        padding[axis] = (0, count * extent - length)
        shape += [count, extent]
        inside.append(len(shape) - 1)
    if any(high for _, high in padding):
        x = jnp.pad(x, padding)
    return split_axes(x, shape, inside), tuple(inside)


def merge(y: jax.Array, shape: tuple[int, ...], inside: tuple[int, ...]) -> jax.Array:
    """Undo `split`: join (blocks, position) axes and drop the padding down to `shape`."""
    joined: list[int] = []
    for axis, length in enumerate(y.shape):
        if axis in inside:
            joined[-1] *= length
        else:
            joined.append(length)
    y = join_axes(y, joined, inside)
    if y.shape == shape:
        return y
    return y[tuple(slice(length) for length in shape)]


def spread(scales: jax.Array, inside: tuple[int, ...]) -> jax.Array:
    """Give block scales an axis of one wherever `split` made an axis inside blocks."""
    return jnp.expand_dims(scales, inside)


def is_minor(scales: jax.Array, like: jax.Array) -> bool:
    """Whether split blocks lie along the last axis, whose registers on TPUs they do not fill."""
    shape = like.shape[-2:]
    known = all(isinstance(n, int) for n in shape) and like.ndim > 2
    return known and scales.shape[-1] == 1 < shape[-1] and shape[-1] % _LANES != 0


def merge_minor(x: jax.Array) -> jax.Array:
    """Join the last two axes, which `split` made of one."""
    shape = (*x.shape[:-2], x.shape[-2] * x.shape[-1])
    return join_axes(x, shape, (x.ndim - 1,))


def spread_minor(powers: jax.Array, size: int) -> jax.Array:
    """Powers of two in bfloat16's range, or zeros, `[..., blocks, 1]`, as `[..., blocks * size]`.

    TPUs copy `[..., blocks, size]` to another layout and back. By a product with a matrix of zeros
    and ones, which is exact; or, where devices may share it, or it is large, by transposes.
    """
    powers = lax.squeeze(powers, (powers.ndim - 1,)).astype(jnp.bfloat16)
    count = powers.shape[-1]
    if lowering.value.on_one_device and count <= _MOST_BLOCKS:
        of_block = lax.broadcasted_iota(jnp.int32, (count, count * size), 1) // size
        place = lax.broadcasted_iota(jnp.int32, (count, count * size), 0)
        places = lax.convert_element_type(lax.eq(of_block, place), jnp.bfloat16)
        return jnp.dot(powers, places, preferred_element_type=jnp.float32)
    # As a second-minor axis, positions are rows of a register.
    rows = jnp.expand_dims(jnp.moveaxis(powers, -1, 0), 1)
    shape = (count, size, *rows.shape[2:])
    spread = join_axes(jnp.broadcast_to(rows, shape), (count * size, *shape[2:]), (1,))
    return jnp.moveaxis(spread, 0, -1).astype(jnp.float32)


def violation(x: Blocked) -> str | None:
    """The first rule that static facts of an MXArray's parts break, with what they are, or None."""
    format, blocks, tensor_scale = x.format, x.blocks, x.tensor_scale
    for name, array, dtype in (
        ("codes", x.codes, np.dtype("uint8")),
        ("scales", x.scales, format.scale.storage_dtype),
    ):
        actual = getattr(array, "dtype", type(array).__name__)
        if actual != dtype:
            return f"{name} must be {dtype.name}, got {name}.dtype={actual}"
    shape = x.codes.shape
    if len(dict(blocks)) != len(blocks):
        return f"each axis may have blocks once, got blocks={blocks}"
    for axis, size in blocks:
        if not -len(shape) <= axis < 0:
            return (
                "blocks must lie along axes counted from the end, "
                f"got blocks={blocks}, codes.shape={shape}"
            )
        if size not in format.block:
            return f"blocks must be the format's, block={format.block}, got blocks={blocks}"
        if not isinstance(size, Whole) and size < 1:
            return f"blocks must be positive, got blocks={blocks}"
    expected = scales_shape(shape, blocks)
    if _differ(x.scales.shape, expected):
        return (
            f"scales must have one entry a block, scales.shape={expected}, got "
            f"scales.shape={x.scales.shape}, codes.shape={shape}, blocks={blocks}"
        )
    if tensor_scale is None:
        return "tensor_scale is missing, got tensor_scale=None" if format.tensor_scale else None
    if not format.tensor_scale:
        return f"the format has no tensor scale, got tensor_scale.shape={tensor_scale.shape}"
    if tensor_scale.dtype != np.dtype("float32"):
        return f"tensor_scale must be float32, got tensor_scale.dtype={tensor_scale.dtype}"
    return tensor_scale_shape(tensor_scale.shape, shape, blocks)


def check_parts(x: Blocked, operation: str) -> None:
    """Raise ValueError unless the parts of an MXArray fit together."""
    # The constructor cannot ask: transformations rebuild pytrees with anything for leaves. So every
    # operation asks when it is given an MXArray.
    reason = violation(x)
    if reason is not None:
        raise ValueError(
            f"{operation}: a malformed MXArray, format={x.format.name}: {reason}; make it with "
            "mx_jax.quantize"
        )


def tensor_scale_shape(scale_shape: Shape, shape: Shape, blocks: Blocks) -> str | None:
    """Why a tensor scale is not one for all, or one a position of axes without blocks; or None."""
    blocked = {axis % len(shape) for axis, _ in blocks}
    wanted = [1 if axis in blocked else length for axis, length in enumerate(shape)]
    pairs = zip(scale_shape, wanted, strict=False)
    if len(scale_shape) == len(shape) and all(n == 1 or not _differ((n,), (w,)) for n, w in pairs):
        return None
    return (
        "tensor_scale must have an axis for each of codes, of length 1, or of the same length "
        f"where no blocks lie, got tensor_scale.shape={scale_shape}, codes.shape={shape}, "
        f"blocks={blocks}"
    )


def varying_axes(tensor_scale: jax.Array | None) -> tuple[int, ...]:
    """The axes along which a tensor scale is not one number for all; none if it is None."""
    shape = () if tensor_scale is None else tensor_scale.shape
    return tuple(axis for axis, length in enumerate(shape) if length != 1)


def _differ(left: Shape, right: Shape) -> bool:
    """Whether two shapes cannot be one; symbolic sizes may be anything."""
    if len(left) != len(right):
        return True
    pairs = zip(left, right, strict=True)
    return any(isinstance(a, int) and isinstance(b, int) and a != b for a, b in pairs)
