"""XLA's own dots: of 8-bit codes under whole-axis scales, and of bfloat16 with float32 sums.

With one scale s_a for a row of lhs and s_b for a row of rhs, `C = (sum of a_code b_code) / s_a /
s_b`: the codes go to the platform's matrix units as they are. All else is decoded to bfloat16.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

from mx_jax.axes import Axes, Side
from mx_jax.backends import calls, sums
from mx_jax.backends.calls import MatmulCall, Operand, RaggedCall
from mx_jax.backends.sums import SumScale
from mx_jax.backends.target import Backend, Offer, Target
from mx_jax.codecs import blocks
from mx_jax.codecs import element as element_codec
from mx_jax.codecs.explicit_axes import split_axes
from mx_jax.codecs.float32 import clip, power_of_two, select
from mx_jax.codecs.lowering import lowering, platform_dependent
from mx_jax.codecs.scale import E8M0_BIAS, E8M0_NAN, scale_to_float32
from mx_jax.formats import WHOLE, BlockFormat, ElementFormat
from mx_jax.mxarray import MXArray, decode
from mx_jax.reference.matmul import grouped_dot
from mx_jax.sharding.movement import reduced_in

# Codes by codes -----------------------------------------------------------------------------------

# Of so many products of two codes of -128, int32 holds the sum.
_MOST_INTEGERS = (1 << 17) - 1
_NAMES = {"float": "float8", "int": "int8"}


def _rejects_codes(call: MatmulCall, target: Target) -> str | None:
    """Why not: units that do not multiply such codes, an operand that has not whole-axis scales."""
    if not target.multiplies:
        return f"XLA's dot has no native units for 8 bits on {_described(target)}"
    formats = []
    for side, operand in call.sides:
        format = operand.format
        if format is None:
            return f"needs two operands in 8 bits, got {side} in high precision"
        if format.element.bits != 8:
            return f"needs elements of 8 bits, got {side}={format.name}"
        if not format.is_known:
            return f"multiplies the library's own codes, got {side}={format.name} of other facts"
        if format.block[1] is not WHOLE:
            return f"needs one scale along the contracting axis, got {side}={format.name}"
        formats.append(format)
    lhs, rhs = formats
    if lhs.element.kind != rhs.element.kind:
        return f"multiplies elements of one kind, got lhs={lhs.name}, rhs={rhs.name}"
    if (kind := lhs.element.kind) not in target.multiplies:
        return f"XLA's dot has no native units for {_NAMES[kind]} on {_described(target)}"
    k = [call.lhs.shape[axis] for axis in call.lhs.axes.contracting]
    symbolic = any(not isinstance(size, int) for size in k)
    if kind == "int" and (symbolic or math.prod(k) > _MOST_INTEGERS):
        return f"adds up at most {_MOST_INTEGERS} products in int32, got k={k}"
    return None


def _described(target: Target) -> str:
    named = {"compute_capability": target.compute_capability, "device_kind": target.device_kind}
    known = [f"{name}={value}" for name, value in named.items() if value is not None]
    return ", ".join([f"platform={target.platform}", *known])


def _multiply_codes(lhs: Operand, rhs: Operand, call: MatmulCall) -> jax.Array:
    """The dot of the codes over the scales of the kept axes."""
    assert isinstance(lhs, MXArray) and isinstance(rhs, MXArray)
    # On GPUs, XLA lets float8 products accumulate fast exactly when the precision is DEFAULT. On
    # TPUs it makes the same of both.
    precision = lax.Precision.DEFAULT if call.fast_accumulation else lax.Precision.HIGHEST
    sums_type = jnp.int32 if lhs.format.element.kind == "int" else _shared_dtype(call)

    def dot(
        left: jax.Array,
        right: jax.Array,
        dimensions: lax.DotDimensionNumbers = call.dimension_numbers,
    ) -> Any:
        return lax.dot_general(
            left, right, dimensions, precision=precision, preferred_element_type=sums_type
        )

    def dot_k_last(left: jax.Array, right: jax.Array) -> jax.Array:
        # In the order that Hopper's units read, the only one for 8 bits. XLA would transpose by
        # itself, in fusions of its own; so the cast writes both orders at once.
        left, right = _k_last(left, call.lhs.axes), _k_last(right, call.rhs.axes)
        batch, k = tuple(range(call.num_batch)), len(call.lhs.axes.contracting)
        left_k, right_k = (tuple(range(x.ndim - k, x.ndim)) for x in (left, right))
        return dot(left, right, ((left_k, right_k), (batch, batch)))

    def dot_of_stored(left: jax.Array, right: jax.Array) -> jax.Array:
        # Else XLA encodes them again for each tile of the product, and reads x for each cast.
        return dot(*lax.optimization_barrier((left, right)))

    elements = lhs.elements, rhs.elements
    product = platform_dependent(*elements, cuda=dot_k_last, tpu=dot_of_stored, default=dot)
    if sums_type == jnp.int32:
        # Of codes as integers, each so many units.
        unit = math.prod(x.format.element.smallest_subnormal for x in (lhs, rhs))
        product = product.astype(jnp.float32) * unit
    scales = sums.row_scales("lhs", lhs, call), sums.row_scales("rhs", rhs, call)
    return sums.scaled(product.astype(jnp.float32), *scales).astype(call.out_dtype)


def _k_last(elements: jax.Array, axes: Axes) -> jax.Array:
    """`[*batch, *kept, *contracting]`, in this order in memory."""
    order = (*axes.batch, *axes.kept, *axes.contracting)
    if order == tuple(range(elements.ndim)):
        return elements
    rows = Layout(major_to_minor=tuple(range(elements.ndim)))
    elements = lax.transpose(with_layout_constraint(elements, rows), order)
    return lax.optimization_barrier(with_layout_constraint(elements, rows))


# `jax.lax.dot_general` on arrays of 8 bits, where matrix units multiply them as they are.
XLA = Backend(
    name="xla",
    epsilon_bound=2.0,
    table=(Offer(call=MatmulCall, rejects=_rejects_codes, run=_multiply_codes),),
)


# By bfloat16 -------------------------------------------------------------------------------------

AnyProduct = MatmulCall | RaggedCall
# Of fewer rows each value is read once, by a kernel that decodes it.
_FEW = 32
HOW = "XLA bfloat16 dot, float32 sums"
_NO_CPU = "for accelerators, whose units multiply bfloat16, got platform=cpu"
_DIGITS = 8


def bfloat16_holds(format: BlockFormat) -> bool:
    """Whether bfloat16 has all digits of an element times what stays with it inside a sum."""
    # A tensor scale leaves the sum, float32 scales leave that of their block: the element is left.
    digits = format.significand_bits
    return (format.element.significand_bits if digits is None else digits) <= _DIGITS


def _rejects(call: AnyProduct, target: Target) -> str | None:
    """Why not: a CPU, an operand that bfloat16 does not hold, scales inside the sums."""
    if target.platform == "cpu":
        return _NO_CPU
    for side, operand in (("lhs", call.lhs), ("rhs", call.rhs)):
        if operand.format is None and operand.dtype != jnp.bfloat16:
            return (
                f"needs operands that bfloat16 holds, got {side}_dtype={operand.dtype}, whose "
                "product keeps the caller's precision"
            )
        if operand.format is None:
            continue
        if not bfloat16_holds(operand.format):
            return (
                f"needs element times block scale in {_DIGITS} binary digits, got {side}="
                f"{operand.format.name}, significand_bits={operand.format.significand_bits}"
            )
        if isinstance(call, RaggedCall) and operand.scale_axes:
            return (
                f"needs scales that leave the sums of a whole group, got {side}={operand.text}, "
                f"a tensor scale for each position of axes={operand.scale_axes}"
            )
        if set(operand.scale_axes) & set(operand.axes.contracting):
            return (
                f"needs one tensor scale along the contracted axes, got {side} with one for each "
                f"position of axes={operand.scale_axes}"
            )
    return None


def _block_size(operand: calls.OperandType | MXArray) -> int | None:
    """The size of blocks whose float32 scales change along the contracted axis, if they do."""
    format = operand.format
    if format is None or not format.scale.is_float32 or format.block[1] is WHOLE:
        return None
    return int(format.block[1])


def _is_highest(call: AnyProduct) -> bool:
    """Whether what the caller asks for is float32's precision, in one of JAX's ways."""
    precisions = call.precision if isinstance(call.precision, tuple) else (call.precision,)
    return any(
        precision is not None and lax.Precision(precision) == lax.Precision.HIGHEST
        for precision in precisions
    )


def _rejects_exact(call: AnyProduct, target: Target) -> str | None:
    """As `_rejects`; and no blocks under float32 scales, which leave no sum."""
    for side, operand in (("lhs", call.lhs), ("rhs", call.rhs)):
        if _block_size(operand) is not None:
            return f"needs blocks' scales of few digits, not of float32, got {side}={operand.text}"
    return _rejects(call, target)


def _rejects_rounded(call: AnyProduct, target: Target) -> str | None:
    """As `_rejects`; no blocks under float32 scales, or all of their digits asked for."""
    if _block_size(call.lhs) is None and _block_size(call.rhs) is None:
        return (
            "rounds values of blocks under float32 scales, got "
            f"lhs={call.lhs.text}, rhs={call.rhs.text}"
        )
    if _is_highest(call):
        return "rounds values to bfloat16, got precision='highest'"
    return _rejects(call, target)


def block_values(operand: Operand) -> tuple[jax.Array, float]:
    """Bfloat16 values without tensor scales and float32 scales that leave the sums; a power of two
    that sums lack."""
    if not isinstance(operand, MXArray):
        return operand, 1.0
    if _block_size(operand) is not None:
        # Rounded: element times scale has more digits. The largest float32 would round to Inf.
        values = (decode(operand, jnp.float32) * 2.0**-calls.HEADROOM).astype(jnp.bfloat16)
        return values, 2.0**calls.HEADROOM
    if operand.format.scale.is_float32:
        values = element_codec.decode(operand.codes, operand.format.element, jnp.bfloat16)
        return values, 1.0
    if operand.format.scale.kind == "exponent":
        codes, inside = blocks.split(operand.codes, operand.blocks)
        scales = blocks.spread(operand.scales, inside)
        on_tpus, elsewhere = (
            functools.partial(decode, element=operand.format.element)
            for decode in (_under_exponent_on_tpus, _under_exponent)
        )
        values = platform_dependent(codes, scales, tpu=on_tpus, default=elsewhere)
        return blocks.merge(values, operand.shape, inside), 2.0**calls.HEADROOM
    return decode(sums.without_tensor_scale(operand), jnp.bfloat16), 1.0


def _values(lhs: Operand, rhs: Operand, call: AnyProduct) -> tuple[jax.Array, jax.Array, float]:
    """Both operands' `block_values`, and what their sums lack."""
    (left, left_factor), (right, right_factor) = block_values(lhs), block_values(rhs)
    if min(call.lhs.rows, call.rhs.rows) > _FEW:
        # Inside of a product XLA would decode them for each tile, and compile for minutes.
        # Each by itself: what products share stays the same to XLA.
        left, right = (
            platform_dependent(x, tpu=lax.optimization_barrier, default=lambda x: x)
            for x in (left, right)
        )
    return left, right, left_factor * right_factor


def _under_exponent(codes: jax.Array, scales: jax.Array, element: ElementFormat) -> jax.Array:
    """Bfloat16 values under E8M0 scales, times 2^-2: exact from 2^-124 on, Inf as in float32."""
    # Multiplied twice, each time by a normal power of two; GPUs have subnormals, and multiply the
    # two first, once a block. In few operations, and none on the scales alone that XLA would give a
    # kernel of its own.
    scales = scales.astype(jnp.int32)
    exponent = scales - (E8M0_BIAS + calls.HEADROOM)
    half = exponent >> 1
    first = select(scales == E8M0_NAN, jnp.nan, power_of_two(half))
    second = power_of_two(exponent - half)

    def at_once(values: jax.Array, first: jax.Array, second: jax.Array) -> jax.Array:
        return values * (first * second)

    def in_turn(values: jax.Array, first: jax.Array, second: jax.Array) -> jax.Array:
        return values * first * second

    decoded = platform_dependent(
        codes,
        tpu=functools.partial(element_codec.decode_as_tpus, element=element),
        default=functools.partial(element_codec.decode, element=element),
    )
    operands = decoded, first, second
    values = platform_dependent(*operands, cuda=at_once, rocm=at_once, default=in_turn)
    return values.astype(jnp.bfloat16)


def _under_exponent_on_tpus(
    codes: jax.Array, scales: jax.Array, element: ElementFormat
) -> jax.Array:
    """The same, in blocks along the last axis by one product more an element, and no copies."""
    if not blocks.underfills_lanes(scales, codes):
        return _under_exponent(codes, scales, element)
    # Of 255 scales float32 has 254 as normal numbers. What is below 2^-124 may count as zero: so
    # may all under 2^-127 but for large elements. Theirs are scaled up, and 2^127, which is one too
    # many then, is told by its sign. NaN is told by zero.
    up = int(element.max >= 2.0**3)
    exponent = scales.astype(jnp.int32) - E8M0_BIAS + up
    powers = power_of_two(clip(exponent, -126, 127))
    powers = select(exponent > 127, -powers * up, powers)
    powers = select(scales == E8M0_NAN, 0.0, powers)
    powers = blocks.spread_minor(powers, codes.shape[-1])
    factor = 2.0 ** -(calls.HEADROOM + up)
    factors = select(powers < 0, -2 * factor, factor) if up else factor
    values = element_codec.decode_as_tpus(blocks.merge_minor(codes), element) * factors
    values = select(powers == 0, jnp.nan, values * powers).astype(jnp.bfloat16)
    return split_axes(values, codes.shape, (codes.ndim - 1,))


def _multiply(lhs: Operand, rhs: Operand, call: MatmulCall) -> jax.Array:
    left, right, factor = _values(lhs, rhs, call)
    of_sums: list[SumScale] = []
    for operand, (side, _) in zip((lhs, rhs), call.sides, strict=True):
        if not isinstance(operand, MXArray) or _block_size(operand) is not None:
            continue
        if operand.format.scale.is_float32:
            of_sums.append(sums.row_scales(side, operand, call))
        else:
            of_sums += sums.tensor_scale(side, operand, call)
    # Of bfloat16 there is nothing to split, whatever `jax_default_matmul_precision` says.
    product = lax.dot_general(
        left,
        right,
        call.dimension_numbers,
        precision=lax.Precision.DEFAULT,
        preferred_element_type=_shared_dtype(call),
    )
    product = sums.scaled(product.astype(jnp.float32), *of_sums)
    return (product if factor == 1.0 else product * factor).astype(call.out_dtype)


def _shared_dtype(call: MatmulCall) -> Any:
    """Of a dot's sums: what XLA splits between devices they add up in the dtype that it has."""
    dtype = reduced_in(call.out_dtype, call.reduce_dtype)
    # In float16 sums that lack their scales might be out of range.
    return jnp.float32 if lowering.value.on_one_device or dtype == jnp.float16 else dtype


def _multiply_groups(
    lhs: Operand, rhs: Operand, group_sizes: jax.Array, call: RaggedCall
) -> jax.Array:
    left, right, factor = _values(lhs, rhs, call)
    product = grouped_dot(
        left, right, group_sizes, call.contracting, lax.Precision.DEFAULT, jnp.float32
    )
    sides: tuple[tuple[Side, Operand], ...] = ("lhs", lhs), ("rhs", rhs)
    scales = (_scale_of_groups(side, x, group_sizes, call) for side, x in sides)
    product = sums.scaled(product, *(scale for scale in scales if scale is not None))
    return (product * factor).astype(call.out_dtype)


def _scale_of_groups(
    side: Side, operand: Operand, group_sizes: jax.Array, call: RaggedCall
) -> SumScale | None:
    """The scale that leaves the sums: of the tensor, or of a row, a matrix, a group's rows."""
    # What has no group has scale 1: its sums are zeros, whatever its scale is.
    if not isinstance(operand, MXArray) or _block_size(operand) is not None:
        return None
    scale = operand.format.scale
    if not scale.is_float32:
        tensor = operand.tensor_scale
        return None if tensor is None else SumScale(tensor.reshape(()))
    values = scale_to_float32(operand.scales, scale)
    ends, num_rows = jnp.cumsum(group_sizes), call.lhs.shape[0]
    if call.contracts_rows:
        first = jnp.take(values, ends - group_sizes, axis=0, mode="clip")
        values = jnp.where((group_sizes > 0)[:, None], first, 1)
        values = jnp.expand_dims(values, 2 if side == "lhs" else 1)
    else:
        group = jnp.searchsorted(ends, jnp.arange(num_rows), side="right", method="compare_all")
        if side == "rhs":
            of_columns = jnp.squeeze(values, call.rhs.axes.contracting)
            of_columns = jnp.broadcast_to(of_columns, (call.num_groups, of_columns.shape[1]))
            values = jnp.take(of_columns, group, axis=0, mode="clip")
        values = jnp.where((group < call.num_groups)[:, None], values, 1)
    return SumScale(values, scale.kind == "divisor")


# The bound is wider than the reference's: matrix units add as they like, and scales that leave the
# sums round twice each.
XLA_BFLOAT16 = Backend(
    name="xla_bfloat16",
    epsilon_bound=4.0,
    table=(
        Offer(call=MatmulCall, rejects=_rejects_exact, run=_multiply, label=HOW),
        Offer(call=RaggedCall, rejects=_rejects_exact, run=_multiply_groups, label=HOW),
    ),
)


ROUNDED = "XLA bfloat16 dot of values rounded to bfloat16, each within 2^-8; float32 sums"

# Blocks of DeepSeek's recipes: element times float32 scale has 28 binary digits. One dot of what
# bfloat16 keeps of them costs what bfloat16's costs; exactly, the reference multiplies float32.
XLA_ROUNDED = Backend(
    name="xla_rounded",
    epsilon_bound=4.0,
    value_error=2.0**-8,
    table=(
        Offer(call=MatmulCall, rejects=_rejects_rounded, run=_multiply, label=ROUNDED),
        Offer(call=RaggedCall, rejects=_rejects_rounded, run=_multiply_groups, label=ROUNDED),
    ),
)
