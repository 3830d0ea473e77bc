"""JAX's own block-scaled product, `jax.lax.scaled_dot`, on GPUs whose tensor cores have one.

XLA compiles it to one kernel that reads codes and scales. Where it has no kernel for a product it
fails, or it dequantizes; so `NATIVE` lists what it has been seen to compile, and nothing else is
offered. On GPUs before Blackwell XLA decodes operands on their way, as an H200 was measured more
slowly than the dot of operands that were decoded before.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap

from mx_jax.axes import Axes
from mx_jax.backends import calls, sums
from mx_jax.backends.calls import MatmulCall, Operand
from mx_jax.backends.sums import SumScale
from mx_jax.backends.target import Backend, Offer, Target
from mx_jax.codecs import float32
from mx_jax.codecs.float32 import power_of_two, select
from mx_jax.codecs.scale import E8M0_BIAS, E8M0_NAN
from mx_jax.formats import E2M1, E4M3, E4M3_SCALE, E5M2, E8M0, BlockFormat, ElementFormat
from mx_jax.formats.element import ScaleFormat, known_element, known_scale
from mx_jax.mxarray import MXArray

# What an operand is: an element under a scale for each block.
Kind = tuple[ElementFormat, ScaleFormat, int]

MXFP8_E4M3: Kind = (E4M3, E8M0, 32)
MXFP8_E5M2: Kind = (E5M2, E8M0, 32)
MXFP4: Kind = (E2M1, E8M0, 32)
NVFP4: Kind = (E2M1, E4M3_SCALE, 16)
_MXFP8 = (MXFP8_E4M3, MXFP8_E5M2)

# By the kinds of lhs and rhs, the first version of JAX that was seen to compile their product to
# one kernel, for each of these capabilities: tests/gpu/test_compile.py compiles them again.
NATIVE: dict[tuple[Kind, Kind], tuple[int, ...]] = {
    **{(lhs, rhs): (0, 10, 2) for lhs in _MXFP8 for rhs in _MXFP8},
    **{pair: (0, 12, 0) for mxfp8 in _MXFP8 for pair in ((mxfp8, MXFP4), (MXFP4, mxfp8))},
    (MXFP4, MXFP4): (0, 12, 0),
    (NVFP4, NVFP4): (0, 12, 0),
}
CAPABILITIES = ((10, 0), (10, 3), (11, 0), (12, 0), (12, 1))


def kind_of(format: BlockFormat | None) -> Kind | str:
    """What an operand of a format is to XLA, or why it is nothing."""
    if format is None:
        return "multiplies two quantized operands, got one in high precision"
    element, scale = known_element(format.element), known_scale(format.scale)
    if element is None or scale is None:
        return f"multiplies the library's own formats, got {format.name} of other facts"
    kept, block = format.block
    if kept != 1 or not isinstance(block, int):
        return f"needs blocks along the contracted axis alone, got {format.name}"
    return element, scale, block


def rejects(call: MatmulCall, target: Target) -> str | None:
    """Why not: another machine, or a product that XLA was not seen to compile."""
    if target.platform != "cuda":
        return f"XLA has this product on platform=cuda, got platform={target.platform}"
    if target.compute_capability not in CAPABILITIES:
        known, got = ", ".join(map(_dotted, CAPABILITIES)), _dotted(target.compute_capability)
        return f"tensor cores have this product on compute capability {known}, got {got}"
    devices = max(target.num_devices, target.program_devices)
    if devices > 1:
        return f"XLA compiles it in programs of one device, got num_devices={devices}"
    return (
        calls.rejects_symbolic(call)
        or _rejects_formats(call)
        or _rejects_shapes(call)
        or sums.rejects_scale_axes(call, batch=False)
        or sums.rejects_parts_of_blocks(call)
    )


def _rejects_formats(call: MatmulCall) -> str | None:
    lhs, rhs = kind_of(call.lhs.format), kind_of(call.rhs.format)
    if isinstance(lhs, str) or isinstance(rhs, str):
        return lhs if isinstance(lhs, str) else str(rhs)
    text, version = f"{call.lhs.text} by {call.rhs.text}", NATIVE.get((lhs, rhs))
    if version is None:
        return f"XLA compiles no block-scaled product of {text}"
    if jax.__version_info__ < version:
        got = _dotted(jax.__version_info__)
        return f"XLA compiles {text} from JAX {_dotted(version)} on, got {got}"
    return None


def _rejects_shapes(call: MatmulCall) -> str | None:
    for side, operand in call.sides:
        if 0 in operand.shape:
            return f"multiplies operands that have elements, got {side}_shape={operand.shape}"
        k, block = (
            operand.shape[operand.axes.contracting[-1]],
            operand.format and operand.format.block[1],
        )
        if isinstance(block, int) and k % block:
            return f"needs whole blocks of {block} along k, got k={k}"
    return None


def _dotted(numbers: Sequence[int] | None) -> str:
    return "none" if numbers is None else ".".join(map(str, numbers))


# Operands -----------------------------------------------------------------------------------------

# JAX's own code, which runs where XLA has no kernel, multiplies bfloat16 elements by bfloat16
# scales, and XLA's, where it decodes operands, reads E8M0's 0 as zero. (It reads NaN as Inf: the
# block's codes, NaN or zero, make NaN of it.) Operands whose scales all lie below this one are
# moved up, so that the smallest are numbers too. It is so small that nothing overflows.
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


class Matrices(NamedTuple):
    """One operand as XLA takes it.

    Attributes:
      elements: `[batch, rows, k]`, or `[batch, k, rows]`.
      scales: likewise, of blocks.
      exponent: its scales are `2^exponent` times what they stand for, int32 `[]`; None: they are
        what they are.
      tensor_scale: float32 `[]`, or None.
      k_first: whether k precedes the rows.
    """

    elements: jax.Array
    scales: jax.Array
    exponent: jax.Array | None
    tensor_scale: jax.Array | None
    k_first: bool

    @classmethod
    def of(cls, operand: Operand, axes: Axes) -> "Matrices":
        """Codes of four bits with k last, as tensor cores read them."""
        assert isinstance(operand, MXArray)
        element, scale, k_first = operand.format.element, operand.format.scale, axes.k_first
        codes, scales = _stacked(operand.codes, axes), _stacked(operand.scales, axes)
        if element.bits == 4 and k_first:
            codes, scales, k_first = codes.swapaxes(1, 2), scales.swapaxes(1, 2), False
        exponent = None
        if scale.kind == "exponent":
            scales, exponent = centred(scales, element)
        tensor = operand.tensor_scale
        return cls(
            elements=_elements(codes, element),
            scales=lax.bitcast_convert_type(scales, scale.dtype),
            exponent=exponent,
            tensor_scale=None if tensor is None else tensor.reshape(()),
            k_first=k_first,
        )


def _stacked(array: jax.Array, axes: Axes) -> jax.Array:
    """`[batch, rows, k]`, or `[batch, k, rows]`."""
    matrices = axes.merge_groups(array)
    return matrices.reshape(math.prod(array.shape[: len(axes.batch)]), *matrices.shape[-2:])


def _elements(codes: jax.Array, element: ElementFormat) -> jax.Array:
    """Codes of eight bits as they are, of four in half a byte."""
    if element.bits == 4:
        # Masked, since XLA 0.12 moves a reshape of uint8 behind a cast to uint4, and fails.
        codes = jnp.bitwise_and(codes, 15).astype(jnp.uint4)
    return lax.bitcast_convert_type(codes, element.dtype)


# The product --------------------------------------------------------------------------------------


@functools.cache
def _dot(k_first: tuple[bool, bool]) -> Any:
    """Float32 `[batch, m, n]` of the elements and scales of both operands.

    XLA reads one batch axis at most: so a `vmap` adds to that, or to the rows of the one operand
    that it batches.
    """

    @custom_vmap
    def dot(*arrays: jax.Array) -> jax.Array:
        # XLA 0.12 crashes where it fuses a reshape that merges the batch with the rows.
        is_batch = arrays[0].shape[0] > 1
        lhs, rhs, lhs_scale, rhs_scale = arrays if is_batch else (x[0] for x in arrays)
        batch = (0,) * is_batch
        axes: Any = tuple((is_batch + (not first),) for first in k_first), (batch, batch)
        product = lax.scaled_dot(
            lhs,
            rhs,
            lhs_scale=lhs_scale,
            rhs_scale=rhs_scale,
            dimension_numbers=axes,
            preferred_element_type=jnp.float32,
        )
        return lax.optimization_barrier(product) if is_batch else product[None]

    @dot.def_vmap
    def _(size: int, in_batched: Sequence[bool], *arrays: jax.Array) -> Any:
        batched = [in_batched[side] or in_batched[2 + side] for side in (0, 1)]
        wide = []
        for x, has_batch, side in zip(arrays, in_batched, (0, 1, 0, 1), strict=True):
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


def _multiply(lhs: Operand, rhs: Operand, call: MatmulCall) -> jax.Array:
    """Tensor scales and powers of two multiply the float32 sums, in the same kernel."""
    both = Matrices.of(lhs, call.lhs.axes), Matrices.of(rhs, call.rhs.axes)
    left, right = both
    dot = _dot((left.k_first, right.k_first))
    product = dot(left.elements, right.elements, left.scales, right.scales)
    exponents = [x.exponent for x in both if x.exponent is not None]
    if exponents:
        total = lax.neg(functools.reduce(float32.add, exponents))
        product = float32.mul(product, power_of_two(total))
    factors = (SumScale(x.tensor_scale) for x in both if x.tensor_scale is not None)
    product = sums.scaled(product, *factors)
    kept = (operand.axes.sizes(operand.shape)[1] for _, operand in call.sides)
    shape = *call.lhs.shape[: call.num_batch], *(n for sizes in kept for n in sizes)
    return product.astype(call.out_dtype).reshape(shape)


# The bound is wider than the reference's: tensor cores add as they like.
XLA_SCALED = Backend(
    name="xla_scaled",
    epsilon_bound=4.0,
    table=(Offer(call=MatmulCall, rejects=rejects, run=_multiply, label="JAX's scaled dot"),),
)
