"""XLA's own block-scaled product on GPUs, `xla.scaled_dot`: one kernel that reads codes and scales.

XLA writes it in Triton: tensor cores take both operands as they are, or the kernel decodes them on
their way. Where XLA has no kernel for a product it fails, or it dequantizes; so `NATIVE` lists what
it has been seen to compile, and nothing else is offered.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap

from mx_jax.axes import Axes
from mx_jax.backends import calls, sums
from mx_jax.backends.calls import MatmulCall, Operand, RaggedCall
from mx_jax.backends.sums import SumScale
from mx_jax.backends.target import Backend, Offer, Target
from mx_jax.codecs import float32, packing
from mx_jax.codecs.float32 import power_of_two, select
from mx_jax.codecs.scale import E8M0_BIAS, E8M0_NAN, scale_to_float32
from mx_jax.formats import E2M1, E4M3, E4M3_SCALE, E5M2, E8M0, BlockFormat, ElementFormat
from mx_jax.formats.element import ScaleFormat, known_element, known_scale
from mx_jax.mxarray import MXArray
from mx_jax.packed import Layout, PackedMXArray

Version = tuple[int, ...]
# What an operand is: an element under a scale for each block, or None for bfloat16.
Kind = tuple[ElementFormat, ScaleFormat, int] | None

MXFP8_E4M3: Kind = (E4M3, E8M0, 32)
MXFP8_E5M2: Kind = (E5M2, E8M0, 32)
MXFP4: Kind = (E2M1, E8M0, 32)
NVFP4: Kind = (E2M1, E4M3_SCALE, 16)
_MXFP8 = (MXFP8_E4M3, MXFP8_E5M2)


class Native(NamedTuple):
    """Products that XLA was seen to compile to one kernel that reads codes.

    Attributes:
      name: as `explain` has it.
      jax: the first version of JAX.
      capabilities: of the GPUs.
      pairs: kinds of lhs and rhs.
    """

    name: str
    jax: Version
    capabilities: tuple[tuple[int, int], ...]
    pairs: tuple[tuple[Kind, Kind], ...]


# FP8, elements and scales, is converted by instructions that Ada has first: before, XLA aborts.
_FROM_ADA = ((8, 9), (9, 0), (10, 0), (10, 3), (11, 0), (12, 0), (12, 1))
_FROM_AMPERE = ((8, 0), (8, 6), (8, 7), *_FROM_ADA)
_BY_MXFP8 = tuple((lhs, rhs) for lhs in (*_MXFP8, None) for rhs in _MXFP8)
_BY_BFLOAT16 = tuple((lhs, None) for lhs in _MXFP8)
_WITH_MXFP4 = tuple(pair for own in _MXFP8 for pair in ((own, MXFP4), (MXFP4, own)))
# Each row comes from compiles that tests/gpu/test_compile_scaled.py repeats.
NATIVE: tuple[Native, ...] = (
    Native("MXFP8", (0, 10, 2), _FROM_ADA, _BY_MXFP8),
    Native("MXFP8 by bfloat16", (0, 10, 2), _FROM_ADA, _BY_BFLOAT16),
    Native("MXFP8 and MXFP4", (0, 12, 0), _FROM_ADA, _WITH_MXFP4),
    Native("MXFP4", (0, 12, 0), _FROM_AMPERE, ((MXFP4, MXFP4), (None, MXFP4), (MXFP4, None))),
    Native("NVFP4", (0, 12, 0), _FROM_ADA, ((NVFP4, NVFP4), (None, NVFP4), (NVFP4, None))),
)


def kind_of(format: BlockFormat | None) -> Kind | str:
    """What an operand of a format is to XLA, or why it is nothing."""
    if format is None:
        return None
    element, scale = known_element(format.element), known_scale(format.scale)
    if element is None or scale is None:
        return f"multiplies the library's own formats, got {format.name} of other facts"
    kept, block = format.block
    if kept != 1 or not isinstance(block, int):
        return f"needs blocks along the contracted axis alone, got {format.name}"
    return element, scale, block


def row_of(
    call: MatmulCall, target: Target, jax_version: Version = jax.__version_info__
) -> Native | str:
    """The row that a product is in, or why in none."""
    kinds: list[Kind] = []
    for _, own in call.sides:
        if isinstance(kind := kind_of(own.format), str):
            return kind
        kinds.append(kind)
    rows = [row for row in NATIVE if tuple(kinds) in row.pairs]
    text = f"{call.lhs.text} by {call.rhs.text}"
    if not rows:
        return f"XLA compiles no block-scaled product of {text}"
    here = [row for row in rows if target.compute_capability in row.capabilities]
    if not here:
        capability = target.compute_capability
        return f"XLA was not seen to compile {text} for compute capability {capability}"
    row = min(here, key=lambda row: row.jax)
    if jax_version < row.jax:
        first, got = (".".join(map(str, version)) for version in (row.jax, jax_version))
        return f"XLA compiles {text} from JAX {first} on, got {got}"
    return row


# Where XLA, on the GPU, took a dequantized product of its own for the faster one (of an H200): so
# another backend's is, which dequantizes in fewer steps. Rows in groups gain nonetheless.
_DEQUANTIZED_ON = ((9, 0),)


def _rejects_slow(target: Target) -> str | None:
    if target.compute_capability not in _DEQUANTIZED_ON:
        return None
    capability = ".".join(map(str, target.compute_capability))
    return f"was measured slower than a dequantized product on compute capability {capability}"


def _rejects_machine(target: Target) -> str | None:
    if target.platform != "cuda":
        return f"XLA has this product on platform=cuda, got platform={target.platform}"
    devices = max(target.num_devices, target.program_devices)
    if devices > 1:
        return f"XLA compiles it in programs of one device, got num_devices={devices}"
    return None


def _rejects(call: MatmulCall, target: Target) -> str | None:
    """Why not: another machine, or a product that XLA was not seen to compile."""
    reason = _rejects_machine(target) or calls.rejects_symbolic(call)
    if reason is not None:
        return reason
    for side, own in call.sides:
        if own.format is None and own.dtype != jnp.bfloat16:
            return (
                f"takes high precision in bfloat16, got {side}_dtype={own.dtype}, whose product "
                "keeps the caller's precision"
            )
    row = row_of(call, target)
    if isinstance(row, str):
        return row
    for side, own in call.sides:
        if 0 in own.shape:
            return f"multiplies operands that have elements, got {side}_shape={own.shape}"
        k, block = own.shape[own.axes.contracting[-1]], own.format and own.format.block[1]
        if isinstance(block, int) and k % block:
            return f"needs whole blocks of {block} along k, got k={k}"
    return sums.rejects_scale_axes(call, batch=False) or sums.rejects_parts_of_blocks(call)


def _how(call: MatmulCall, target: Target) -> str:
    """The row, in words."""
    row = row_of(call, target)
    assert isinstance(row, Native), row
    return f"XLA's scaled dot, {row.name} from JAX {'.'.join(map(str, row.jax))} on"


# Steps of XLA's kernel along k. Where one operand is bfloat16 XLA 0.12 crashes if the last of
# several is partial, as at k=2880: so it is filled up with zeros.
_STEP = 128


def _padded_k(k: int) -> int:
    return k if k <= _STEP else k + -k % _STEP


# Scales -------------------------------------------------------------------------------------------

# Where XLA's kernel decodes operands, it multiplies bfloat16 elements by bfloat16 scales, and reads
# E8M0's 0 as zero. (It reads NaN as Inf: the block's codes, NaN or zero, make NaN of it.)
# Operands whose scales all lie below this one are moved up, so that the smallest are numbers
# too. It is so small that nothing overflows, whatever bfloat16 the other operand is.
_SMALL = E8M0_BIAS - 40


def centred(scales: jax.Array, element: ElementFormat) -> tuple[jax.Array, jax.Array]:
    """An operand's scales, moved by one power of two where they lie at an end of float32.

    Elements under the largest scale stay below 2^128; those under the smallest become normal
    bfloat16, if all are small. What lies too far below the largest counts as zero: a scale of
    2^-127 beside one of 2^-40. NaN stays NaN.

    Args:
      scales: E8M0, uint8, of any shape.
      element: what they scale.

    Returns:
      Scales that bfloat16 has, as has every element under them; and int32 `[]`: they are
      `2^exponent` times what they were.
    """
    wide = lax.convert_element_type(scales, jnp.int32)
    is_nan = float32.eq(wide, E8M0_NAN)
    finite = select(is_nan, 0, wide)
    top = lax.reduce_max(finite, tuple(range(finite.ndim)))
    most = E8M0_NAN - 1 - element.emax
    up = 1 + element.mantissa_bits - element.emin
    exponent = float32.min(float32.sub(most, top), float32.clip(float32.sub(_SMALL, top), 0, up))
    moved = float32.max(float32.add(wide, exponent), 0)
    stored = select(is_nan, E8M0_NAN, moved)
    return lax.convert_element_type(stored, jnp.uint8), exponent


# Operands -----------------------------------------------------------------------------------------


class Matrices(NamedTuple):
    """One operand as XLA takes it.

    Attributes:
      elements: `[batch, rows, k]`, or `[batch, k, rows]`.
      scales: likewise, of blocks; None of bfloat16.
      exponent: its scales are `2^exponent` times what they stand for, int32 `[]` or
        `[batch, 1, 1]`; None: they are what they are.
      tensor_scale: float32 `[]` or `[batch, 1, 1]`, or None.
      k_first: whether k precedes the rows.
    """

    elements: jax.Array
    scales: jax.Array | None
    exponent: jax.Array | None
    tensor_scale: jax.Array | None
    k_first: bool


def _stacked(array: jax.Array, axes: Axes) -> jax.Array:
    """`[batch, rows, k]`, or `[batch, k, rows]`."""
    matrices = axes.as_matrices(array)
    return matrices.reshape(math.prod(array.shape[: len(axes.batch)]), *matrices.shape[-2:])


def _elements(codes: jax.Array, element: ElementFormat) -> jax.Array:
    """Codes of eight bits as they are, of four in half a byte."""
    if element.bits == 4:
        # Masked, since XLA 0.12 moves a reshape of uint8 behind a cast to uint4, and fails.
        codes = jnp.bitwise_and(codes, 15).astype(jnp.uint4)
    return lax.bitcast_convert_type(codes, element.dtype)


def _matrices(operand: Operand | PackedMXArray, axes: Axes, k: int) -> Matrices:
    """An operand of a product, filled up to k; codes of four bits with k last, as tensor cores read
    them."""
    if isinstance(operand, PackedMXArray):
        return _of_packed(operand)
    k_first = axes.k_first
    if not isinstance(operand, MXArray):
        elements = _filled(_stacked(operand, axes), k, k_first)
        return Matrices(elements, None, None, None, k_first)
    element, block = operand.format.element, operand.format.block[1]
    assert isinstance(block, int), operand.format
    codes = _filled(_stacked(operand.codes, axes), k, k_first)
    scales = _filled(_stacked(operand.scales, axes), k // block, k_first)
    if element.bits == 4 and k_first:
        codes, scales, k_first = codes.swapaxes(1, 2), scales.swapaxes(1, 2), False
    exponent = None
    if operand.format.scale.kind == "exponent":
        scales, exponent = centred(scales, element)
    scales = lax.bitcast_convert_type(scales, operand.format.scale.dtype)
    tensor_scale = operand.tensor_scale
    tensor_scale = None if tensor_scale is None else tensor_scale.reshape(())
    return Matrices(_elements(codes, element), scales, exponent, tensor_scale, k_first)


def _of_packed(packed: PackedMXArray) -> Matrices:
    stacked: Packed = jax.tree.map(lambda x: x.reshape(-1, *x.shape[-2:]), packed.arrays)
    elements = lax.bitcast_convert_type(stacked.codes, packed.format.element.dtype)
    elements = elements.reshape(*stacked.codes.shape[:2], _padded_k(math.prod(packed.k)))
    scales = lax.bitcast_convert_type(stacked.scales, packed.format.scale.dtype)
    tensor_scale = stacked.tensor_scale
    if tensor_scale is not None and tensor_scale.size == 1:
        tensor_scale = tensor_scale.reshape(())
    return Matrices(elements, scales, stacked.exponent, tensor_scale, False)


def _filled(x: jax.Array, k: int, k_first: bool = False) -> jax.Array:
    """`[..., rows, k]`, or `[..., k, rows]`, with zeros up to k."""
    axis = x.ndim - (2 if k_first else 1)
    widths = [(0, k - size if i == axis else 0) for i, size in enumerate(x.shape)]
    return x if x.shape[axis] == k else jnp.pad(x, widths)


# The product --------------------------------------------------------------------------------------


def _spread(scales: jax.Array, elements: jax.Array, axis: int) -> jax.Array:
    """Values under their scales, which bfloat16 has, as they are centred."""
    if scales.dtype == jnp.bfloat16:
        return elements
    if scales.dtype == E8M0.dtype:
        scales = lax.bitcast_convert_type(scales, jnp.uint8)
        factors = scale_to_float32(scales, E8M0)
    else:
        factors = scales.astype(jnp.float32)
    factors = jnp.repeat(factors, elements.shape[axis] // scales.shape[axis], axis)
    values = float32.mul(lax.convert_element_type(elements, jnp.float32), factors)
    return lax.convert_element_type(values, jnp.bfloat16)


@functools.partial(lax.composite, name="xla.scaled_dot")
def _composite(
    lhs: jax.Array,
    rhs: jax.Array,
    lhs_scale: jax.Array,
    rhs_scale: jax.Array,
    *,
    dimension_numbers: Any,
) -> jax.Array:
    """What the composite means, exact in each element: what XLA runs that does not know it."""
    (((left,), (right,)), _) = dimension_numbers
    return lax.dot_general(
        _spread(lhs_scale, lhs, left),
        _spread(rhs_scale, rhs, right),
        dimension_numbers,
        precision=lax.Precision.DEFAULT,
        preferred_element_type=jnp.float32,
    )


@functools.cache
def _dot(k_first: tuple[bool, bool], is_scaled: tuple[bool, bool]) -> Any:
    """Float32 `[batch, m, n]` of elements `[batch, ...]` of two operands, and scales of those that
    have some.

    XLA reads the composite's dimension numbers, which name one batch axis at most: so a `vmap` adds
    to that, or to the rows of the one operand that it batches.
    """
    sides = (0, 1, *(side for side in (0, 1) if is_scaled[side]))

    @custom_vmap
    def dot(*arrays: jax.Array) -> jax.Array:
        if arrays[0].shape[0] == 1:
            arrays = tuple(x[0] for x in arrays)
        batch = (0,) * (arrays[0].ndim - 2)
        contracting = tuple((len(batch) + (not first),) for first in k_first)
        lhs, rhs, *scales = arrays
        given = iter(scales)
        # XLA knows bfloat16 by a constant scale of one.
        one = jnp.ones((1,) * lhs.ndim, jnp.bfloat16)
        both = (next(given) if has_scale else one for has_scale in is_scaled)
        product = _composite(lhs, rhs, *both, dimension_numbers=(contracting, (batch, batch)))
        # XLA 0.12 crashes where it fuses a reshape that merges the batch with the rows.
        return lax.optimization_barrier(product) if batch else product[None]

    @dot.def_vmap
    def _(size: int, in_batched: Sequence[bool], *arrays: jax.Array) -> Any:
        batched = [
            any(own for own, of in zip(in_batched, sides, strict=True) if of == side)
            for side in (0, 1)
        ]
        wide = []
        for x, has_batch, side in zip(arrays, in_batched, sides, strict=True):
            if batched[side]:
                x = x if has_batch else jnp.broadcast_to(x, (size, *x.shape))
                rows = 0 if all(batched) else 2 if k_first[side] else 1
                x = jnp.moveaxis(x, 0, rows)
                x = x.reshape(*x.shape[:rows], -1, *x.shape[rows + 2 :])
            wide.append(x)
        product = dot(*wide)
        axis = 0 if all(batched) else 1 if batched[0] else 2
        split = (*product.shape[:axis], size, -1, *product.shape[axis + 1 :])
        return jnp.moveaxis(product.reshape(split), axis, 0), True

    return dot


def _multiply(lhs: Operand, rhs: Operand | PackedMXArray, call: MatmulCall) -> jax.Array:
    k = _length(call)
    product = _product(_matrices(lhs, call.lhs.axes, k), _matrices(rhs, call.rhs.axes, k))
    shape = call.lhs.shape[: call.num_batch]
    kept = (own.axes.sizes(own.shape)[1] for _, own in call.sides)
    return product.astype(call.out_dtype).reshape(*shape, *(n for sizes in kept for n in sizes))


def _length(call: MatmulCall) -> int:
    """Of k as XLA's kernel sees it."""
    k = math.prod(call.lhs.axes.sizes(call.lhs.shape)[2])
    is_padded = call.rhs.packed_by is not None or None in (call.lhs.format, call.rhs.format)
    return _padded_k(k) if is_padded else k


def _product(left: Matrices, right: Matrices) -> jax.Array:
    """One kernel: tensor scales and powers of two multiply its float32 sums `[batch, m, n]`."""
    scales = [x.scales for x in (left, right) if x.scales is not None]
    dot = _dot((left.k_first, right.k_first), (left.scales is not None, right.scales is not None))
    product = dot(left.elements, right.elements, *scales)
    exponents = [x.exponent for x in (left, right) if x.exponent is not None]
    if exponents:
        total = lax.neg(functools.reduce(float32.add, exponents))
        product = float32.mul(product, power_of_two(total))
    factors = (x.tensor_scale for x in (left, right))
    return sums.scaled(product, *(SumScale(scale) for scale in factors if scale is not None))


# Rows in groups -----------------------------------------------------------------------------------

# Few rows are as fast as one: what takes the time is reading the matrices.
_FEW_ROWS = 32
# A matrix that is picked is read and written before the kernel reads it.
_PICKED = 3


def _at_a_time(call: RaggedCall) -> MatmulCall:
    """The product of some rows of each group, in a batch of the groups' matrices.

    Of twice as many rows as groups have on average; of the groups that can have rows at all, if
    those are few.
    """
    rows, k = call.lhs.shape
    groups = min(call.num_groups, rows)
    if _PICKED * groups > call.num_groups:
        groups = call.num_groups
    each = min(rows, max(_FEW_ROWS, 2 * -(-rows // max(groups, 1))))
    lhs = dataclasses.replace(call.lhs, shape=(groups, each, k), axes=call.lhs.axes.in_batch())
    rhs = dataclasses.replace(call.rhs, shape=(groups, *call.rhs.shape[1:]))
    return MatmulCall(lhs=lhs, rhs=rhs, out_dtype=call.out_dtype)


def _rejects_groups(call: RaggedCall, target: Target) -> str | None:
    """As `_rejects`, of the products that it takes; rows are kept."""
    if call.contracts_rows:
        return "multiplies rows by their group's matrix, got rows that are contracted"
    return calls.rejects_symbolic(call) or _rejects(_at_a_time(call), target)


def _how_groups(call: RaggedCall, target: Target) -> str:
    product = _at_a_time(call)
    return f"{_how(product, target)}, {product.lhs.shape[1]} rows of each group at a time"


def _multiply_groups(
    lhs: Operand, rhs: Operand | PackedMXArray, group_sizes: jax.Array, call: RaggedCall
) -> jax.Array:
    """Each group's first rows by one kernel that reads every matrix once; then the next ones.

    So XLA multiplies twice as many rows as there are where groups are about equal, and not all rows
    by each matrix, as it does in `lax.ragged_dot`.
    """
    product = _at_a_time(call)
    (groups, each, _), num_rows, k = product.lhs.shape, call.lhs.shape[0], _length(product)
    if groups < call.num_groups:
        # Those that have rows come first, in their order.
        picked = jnp.argsort(group_sizes == 0, stable=True)[:groups]
        group_sizes, rhs = group_sizes[picked], _taken(lambda x: x[picked], rhs)
    right = _matrices(rhs, product.rhs.axes, k)
    ends = jnp.cumsum(group_sizes)
    starts = ends - group_sizes
    row = jnp.arange(num_rows)
    group = jnp.searchsorted(ends, row, side="right", method="compare_all")
    place = row - jnp.append(starts, 0)[group]

    def multiply(done: jax.Array, out: jax.Array) -> jax.Array:
        """With the rows of each group that follow the first `done`."""
        own = done + jnp.arange(each)
        # Rows `[g, m, k]` of `[p, k]`, zeros beyond them.
        source = jnp.where(own < group_sizes[:, None], starts[:, None] + own, num_rows)
        take = functools.partial(jnp.take, indices=source, axis=0, mode="fill", fill_value=0)
        found = _product(_matrices(_taken(take, lhs), product.lhs.axes, k), right)
        found = found.astype(call.out_dtype).reshape(groups * each, -1)
        here = (group < groups) & (done <= place) & (place < done + each)
        found = jnp.take(found, group * each + place - done, axis=0, mode="clip")
        return jnp.where(here[:, None], found, out)

    out = jnp.zeros((num_rows, call.rhs.rows), call.out_dtype)
    if each == num_rows:
        return multiply(jnp.int32(0), out)
    most = jnp.max(group_sizes)
    return lax.while_loop(
        lambda state: state[0] < most,
        lambda state: (state[0] + each, multiply(*state)),
        (jnp.int32(0), out),
    )[1]


def _taken(take: Callable[[jax.Array], jax.Array], operand: Any) -> Any:
    """Some rows, or some groups' matrices, of an operand: its tensor scale is theirs."""
    if not isinstance(operand, MXArray):
        return jax.tree.map(take, operand)
    return dataclasses.replace(operand, codes=take(operand.codes), scales=take(operand.scales))


# Weights ------------------------------------------------------------------------------------------


class Packed(NamedTuple):
    """Weights as the product reads them: codes at their width, scales that need no look at all.

    k is filled up with zeros, as XLA's kernel wants it.

    Attributes:
      codes: uint8 `[*batch, rows, bytes of k]`.
      scales: uint8 `[*batch, rows, blocks]`, `centred`.
      exponent: as `Matrices` has it, int32 `[*batch, 1, 1]`; None for scales that are not E8M0.
      tensor_scale: float32 `[*batch, 1, 1]`, or None.
    """

    codes: jax.Array
    scales: jax.Array
    exponent: jax.Array | None
    tensor_scale: jax.Array | None


def _rejects_packing(call: calls.PackCall, target: Target) -> str | None:
    """Why not: weights that no row has, or axes that make no matrices."""
    reason = _rejects_machine(target) or call.rejects_layout()
    # In a batch they are those of groups.
    reason = reason or (None if call.weights.axes.batch else _rejects_slow(target))
    if reason is not None:
        return reason
    weights, bfloat16 = call.weights, np.dtype(jnp.bfloat16)
    if call.lhs_format is None and call.dtype != bfloat16:
        return f"packs for activations in bfloat16, got weights of dtype={call.dtype}"
    dtype = bfloat16 if call.lhs_format is None else None
    given = calls.OperandType(
        shape=weights.shape, axes=weights.axes, format=call.lhs_format, dtype=dtype
    )
    return _rejects(MatmulCall(lhs=given, rhs=weights, out_dtype=np.dtype(np.float32)), target)


def _pack(x: MXArray, call: calls.PackCall) -> PackedMXArray:
    """Weights with k last, their scales centred, and codes under NaN that multiply to NaN."""
    axes, element = call.weights.axes, call.format.element
    batch, kept, k = axes.sizes(x.shape)
    codes, scales = axes.as_matrices(x.codes), axes.as_matrices(x.scales)
    if axes.k_first:
        codes, scales = codes.swapaxes(-1, -2), scales.swapaxes(-1, -2)
    block, exponent = codes.shape[-1] // scales.shape[-1], None
    if call.format.scale.kind == "exponent":
        centre = functools.partial(centred, element=element)
        for _ in batch:
            centre = jax.vmap(centre)
        moved, exponent = centre(scales)
        exponent = exponent[..., None, None]
        is_nan, is_lost = scales == E8M0_NAN, moved != scales + exponent
        spread = functools.partial(jnp.repeat, repeats=block, axis=-1)
        codes = jnp.where(spread(is_lost), jnp.uint8(0), codes)
        nan_code = jnp.uint8(element.nan_code or 0)
        codes = jnp.where(spread(is_nan), nan_code, codes)
        scales = moved
    tensor_scale = x.tensor_scale
    if tensor_scale is not None:
        tensor_scale = jnp.broadcast_to(
            tensor_scale.reshape((1,) * (len(batch) + 2)), (*batch, 1, 1)
        )
    length = _padded_k(codes.shape[-1])
    codes, scales = _filled(codes, length), _filled(scales, length // block)
    arrays = Packed(packing.pack(codes, element.bits), scales, exponent, tensor_scale)
    return PackedMXArray(
        arrays=arrays,
        layout=WIDTH,
        kept=kept,
        k=k,
        k_first=axes.k_first,
        format=call.format,
        dtype=x.dtype,
    )


def _stored(arrays: Packed, packed: PackedMXArray) -> tuple[jax.Array, jax.Array]:
    """Codes, one a byte, and scales as they were."""
    k, block, scales = math.prod(packed.k), packed.format.block[1], arrays.scales
    assert isinstance(block, int)
    codes = packing.unpack(arrays.codes, packed.format.element.bits, _padded_k(k))[..., :k]
    scales = scales[..., : k // block]
    if arrays.exponent is None:
        return codes, scales
    wide = scales.astype(jnp.int32)
    wide = jnp.where(wide == E8M0_NAN, wide, jnp.maximum(wide - arrays.exponent, 0))
    return codes, wide.astype(jnp.uint8)


def _unpack(packed: PackedMXArray) -> MXArray:
    """The array that was packed; blocks that count as zero are zeros."""
    arrays, format, batch = packed.arrays, packed.format, packed.batch
    *first, last = packed.k
    block = format.block[1]
    assert isinstance(block, int)
    codes, scales = _stored(arrays, packed)
    codes = packed.arrange(codes, batch, packed.k)
    scales = packed.arrange(scales, batch, (*first, last // block))
    tensor_scale = arrays.tensor_scale
    if tensor_scale is not None:
        tensor_scale = tensor_scale.reshape(*batch, *(1,) * (codes.ndim - len(batch)))
    return MXArray(
        codes=codes,
        scales=scales,
        tensor_scale=tensor_scale,
        format=format,
        blocks=packed.blocks,
        dtype=packed.dtype,
    )


def _take(packed: PackedMXArray, indices: jax.Array) -> MXArray:
    """Rows `[*indices, k]`, and nothing else unpacked."""
    arrays: Packed = packed.arrays
    codes, scales = (
        jnp.take(x, indices, axis=0, mode="clip") for x in (arrays.codes, arrays.scales)
    )
    codes, scales = _stored(arrays._replace(codes=codes, scales=scales), packed)
    tensor_scale = arrays.tensor_scale
    if tensor_scale is not None:
        tensor_scale = tensor_scale.reshape((1,) * codes.ndim)
    return MXArray(
        codes=codes,
        scales=scales,
        tensor_scale=tensor_scale,
        format=packed.format,
        blocks=((-1, packed.format.block[1]),),
        dtype=packed.dtype,
    )


# Codes at their width, k last.
WIDTH = Layout(
    backend="xla_scaled",
    batch=lambda arrays: arrays.codes.shape[:-2],
    unpack=_unpack,
    take=_take,
)

# The bound is wider than the reference's: tensor cores add as they like.
XLA_SCALED = Backend(
    name="xla_scaled",
    epsilon_bound=4.0,
    table=(
        Offer(
            call=MatmulCall,
            rejects=lambda call, target: _rejects_slow(target) or _rejects(call, target),
            run=_multiply,
            describes=_how,
        ),
        Offer(
            call=RaggedCall, rejects=_rejects_groups, run=_multiply_groups, describes=_how_groups
        ),
        Offer(call=calls.PackCall, rejects=_rejects_packing, run=_pack),
    ),
)
