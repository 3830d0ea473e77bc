"""Products by the compiled handlers, of codes as they are or of packed weights, dense or in groups.

Float8 under float32 scales is decoded by a handler, and multiplied by XLA's float32 dot; integers
under whole-axis scales are multiplied as MXINT8's where an instruction set has them. Many rows
that an instruction set would multiply in float32 are decoded too: which backend takes a product,
and whether packed weights are read, depends on no instruction set. XLA's ragged product
multiplies masked rows by every group's matrix on CPUs, g times the work: here a loop multiplies
each tile of a group's rows by the one matrix that is its group's.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mx_jax.axes import Axes, Side
from mx_jax.backends.calls import (
    AnyOperand,
    AttendCall,
    DequantizeCall,
    MatmulCall,
    Operand,
    OperandType,
    RaggedCall,
    rejects_symbolic,
)
from mx_jax.backends.cpu_ffi import casts, handler, library, weights
from mx_jax.backends.cpu_ffi.casts import format_attributes, rejects_parts
from mx_jax.backends.cpu_ffi.weights import block_of, plain_format
from mx_jax.backends.sums import (
    SumScale,
    rejects_parts_of_blocks,
    rejects_scale_axes,
    row_scales,
    scaled,
)
from mx_jax.codecs import blocks as block_shapes
from mx_jax.codecs.blocks import Blocks
from mx_jax.codecs.explicit_axes import vary_alike
from mx_jax.codecs.scale import E8M0_BIAS, scale_to_float32
from mx_jax.formats import INTEGER8, MXINT8, WHOLE, BlockFormat, Whole
from mx_jax.formats.element import known_element
from mx_jax.mxarray import MXArray, decode
from mx_jax.packed import PackedMXArray, PackedRows, Rows, unpacked
from mx_jax.reference.matmul import scaled_matmul

# The handlers: of codes as they are, and of packed weights.
MATMUL = "mx_jax_cpu_matmul"
PACKED_MATMUL = "mx_jax_cpu_matmul_packed"

# By how many times the smallest subnormal an element's largest is, as FitsInt8 and FitsInt16 of
# custom_calls/products/elements.h ask.
_INTEGERS = {e.name: e.max / e.smallest_subnormal for e in weights.ELEMENTS}
_INT8 = {name for name, largest in _INTEGERS.items() if largest <= 127}
_INT16 = {name for name, largest in _INTEGERS.items() if largest <= 4095}
# Elements that an instruction set multiplies faster than float32, both operands alike.
_FAST: dict[str, tuple[set[str], ...]] = {
    "dotprod": (_INT8,),
    "avx512_bf16": (_INT8, {*_INTEGERS, "bfloat16"}),
} | dict.fromkeys(("avx2", "avx2_vnni", "avx512_vnni"), (_INT8, _INT16))
# Rows of the smaller operand up to which float32 panels win over XLA's dot of decoded operands:
# above them its dot, which needs no panels of codes, is faster. Measured.
FLOAT32_ROWS = {"portable": 8, "dotprod": 8, "avx2": 192, "avx2_vnni": 192}
FLOAT32_ROWS |= dict.fromkeys(("avx512", "avx512_vnni", "avx512_bf16"), 512)


def rejects(call: MatmulCall) -> str | None:
    """Why a product is neither multiplied nor decoded here, or None."""
    reason = _rejects_kernels(call)
    return None if reason is None or _is_decoded(call) else reason


def _rejects_kernels(call: MatmulCall) -> str | None:
    """Why the handlers of products do not take a call of any number of rows, or None."""
    if call.rhs.packed_by == "cpu_ffi" and plain_format(call.rhs.format) is not None:
        call = _of_codes_alone(call)
    if call.out_dtype not in casts.DTYPES:
        return f"gives float32, bfloat16 or float16, got out_dtype={call.out_dtype}"
    if (reason := rejects_scale_axes(call, batch=True)) is not None:
        return reason
    formats = [f for f in (call.lhs.format, call.rhs.format) if f is not None]
    for format in formats:
        if (reason := weights.rejects_format(format)) is not None:
            return reason
    if any(block_of(format)[0] > 1 for format in formats):
        reason = rejects_parts_of_blocks(call, "kept")
        if reason is not None:
            return reason
    if len({format.block[1] for format in formats}) > 1:
        return f"needs one block size, got lhs={call.lhs.format}, rhs={call.rhs.format}"
    return None


def describe(call: MatmulCall | RaggedCall) -> str:
    """How a product is computed, where it is not by the handlers of products."""
    tile = _tile_call(call) if isinstance(call, RaggedCall) else call
    return "" if _is_decoded(tile) else _why_decoded(tile)


def _why_decoded(call: MatmulCall) -> str:
    """Why XLA's dot multiplies what kernels could, in words, or nothing."""
    loaded = library.load()
    assert not isinstance(loaded, str), loaded
    isa, limit = loaded.isa, FLOAT32_ROWS[loaded.isa]
    m, n = call.lhs.rows, call.rhs.rows
    # Symbolic rows may be few, and every number of them is multiplied rightly.
    if not isinstance(m, int) or not isinstance(n, int) or min(m, n) <= limit:
        return ""
    if call.rhs.packed_by == "cpu_ffi" and plain_format(call.rhs.format) is not None:
        call = _of_codes_alone(call)
    elements = [
        str(operand.dtype) if operand.format is None else weights.names(operand.format)[0]
        for _, operand in call.sides
    ]
    if any(fast.issuperset(elements) for fast in _FAST.get(isa, ())):
        return ""
    return f"by XLA's dot: {isa} would multiply in float32, which is slower above {limit} rows"


def _of_codes_alone(call: MatmulCall) -> MatmulCall:
    """The product of codes, whose sums scales are multiplied into; by packed weights."""
    lhs, rhs = call.lhs, dataclasses.replace(call.rhs, format=plain_format(call.rhs.format))
    if plain_format(lhs.format) is not None:
        lhs = dataclasses.replace(lhs, format=None, dtype=np.dtype(jnp.bfloat16))
    return dataclasses.replace(call, lhs=lhs, rhs=rhs, out_dtype=np.dtype(np.float32))


def _is_decoded(call: MatmulCall) -> bool:
    """Whether all that is quantized is float8 under float32 scales, and not packed."""
    return all(
        operand.format is None
        or (
            operand.format.scale.is_float32
            and operand.packed_by is None
            and casts.rejects_dequantize(_dequantize_call(operand, operand.format)) is None
        )
        for _, operand in call.sides
    )


def _dequantize_call(
    operand: OperandType, format: BlockFormat, blocks: Blocks = ()
) -> DequantizeCall:
    where = {"blocks": blocks or operand.axes.blocks(format), "scale_axes": operand.scale_axes}
    return DequantizeCall(shape=operand.shape, dtype=np.dtype(np.float32), format=format, **where)


def multiply(lhs: Operand, rhs: Operand | PackedMXArray, call: MatmulCall) -> jax.Array:
    """The product `[*batch, *m, *n]`. Packed weights give the bits that they give unpacked."""
    if isinstance(rhs, PackedMXArray) or not _is_decoded(call):
        return _multiply_codes(call, lhs, rhs)
    integers = _in_blocks(call)
    if (
        isinstance(lhs, MXArray)
        and isinstance(rhs, MXArray)
        and integers
        and not _why_decoded(integers)
    ):
        sums = _by_codes(integers, _under_ones(lhs, integers.lhs), _under_ones(rhs, integers.rhs))
        scales = row_scales("lhs", lhs, call), row_scales("rhs", rhs, call)
        return scaled(sums, *scales).astype(call.out_dtype)
    return _by_dot(call, lhs, rhs)


def _by_dot(call: MatmulCall, lhs: Operand, rhs: Operand) -> jax.Array:
    """The product by XLA's dot of values that the handler decodes, which compiles in no time."""
    numbers = call.dimension_numbers
    return scaled_matmul(lhs, rhs, numbers, call.out_dtype, call.precision, _decoded)


def _decoded(x: MXArray, dtype: np.dtype, *, exponent: int, lifted: bool) -> jax.Array:
    """As `mxarray.decode`, by the handler where it takes the array."""
    call = _dequantize_call(OperandType.of(x, Axes.ordered()), x.format, x.blocks)
    if casts.rejects_dequantize(call) is not None:
        return decode(x, dtype, exponent=exponent, lifted=lifted)
    return casts.dequantize(x, call, exponent)


def _in_blocks(call: MatmulCall) -> MatmulCall | None:
    """The product of the same codes as MXINT8, of integers under scales that leave the sums."""
    for _, operand in call.sides:
        format = operand.format
        if format is None or format.block != (1, WHOLE):
            return None
        if known_element(format.element) != INTEGER8:
            return None
    lhs, rhs = (dataclasses.replace(operand, format=MXINT8) for _, operand in call.sides)
    return dataclasses.replace(call, lhs=lhs, rhs=rhs, out_dtype=np.dtype(np.float32))


def _under_ones(x: MXArray, operand: OperandType) -> MXArray:
    """Integers as MXINT8, whose unit is 2^-6, under scales of 2^6."""
    blocks = operand.axes.blocks(MXINT8)
    shape = block_shapes.scales_shape(x.shape, blocks)
    scales = jnp.full(shape, E8M0_BIAS + MXINT8.element.mantissa_bits, jnp.uint8)
    return dataclasses.replace(x, scales=scales, format=MXINT8, blocks=blocks, primal=None)


def _multiply_codes(call: MatmulCall, lhs: Operand, rhs: Operand | PackedMXArray) -> jax.Array:
    """The product by the handlers, or of many rows by XLA's dot."""
    if _why_decoded(call):
        return _by_dot(call, lhs, unpacked(rhs))
    if isinstance(rhs, PackedMXArray):
        return _by_packed(call, lhs, rhs)
    return _by_codes(call, lhs, rhs)


def _by_codes(call: MatmulCall, lhs: Operand, rhs: Operand) -> jax.Array:
    """The product of codes as they are, by the handler."""
    (_, block), *_ = (
        block_of(operand.format) for _, operand in call.sides if operand.format is not None
    )
    left, right = _matrices(lhs, call.lhs.axes, "lhs"), _matrices(rhs, call.rhs.axes, "rhs")
    (product,) = handler.call(
        MATMUL,
        [*left.operands, *right.operands],
        [(f"*lr {left.kept} {right.kept}", call.out_dtype)],
        attributes=left.attributes | right.attributes | {"block": np.int32(block)},
    )
    return product


class _Matrices(NamedTuple):
    """One operand as the handler takes it."""

    operands: tuple[tuple[jax.Array, str], ...]  # elements, scales and tensor scales, with axes
    kept: str  # axes that the handler takes as one
    attributes: dict[str, object]


def _matrices(operand: Operand, axes: Axes, side: Side) -> _Matrices:
    format = operand.format if isinstance(operand, MXArray) else None
    together, block = block_of(format)
    batch, letter = ("*l", "m") if side == "lhs" else ("*r", "n")
    kept = " ".join(f"{letter}{index}" for index in range(len(axes.kept)))
    k = " ".join(f"k{index}" for index in range(len(axes.contracting)))

    def in_order(k: str, kept: str) -> str:
        return f"{batch} ({k}) ({kept})" if axes.k_first else f"{batch} ({kept}) ({k})"

    if isinstance(operand, MXArray):
        elements, scales, tensor_scale = operand.codes, operand.scales, operand.tensor_scale
        rows = f"{kept}/{together}" if kept and together != 1 else kept
        scale_axes = in_order(f"{k}/{block}", rows)
    else:
        elements = operand if operand.dtype in casts.DTYPES else operand.astype(jnp.float32)
        scales, tensor_scale, scale_axes = jnp.zeros((0,), jnp.uint8), None, "0"
    # Another batch than the elements': one matrix's scale may stand for all.
    batch_of_scales = "*s" if side == "lhs" else "*t"
    element, scale = weights.names(format)
    return _Matrices(
        operands=(
            (elements, in_order(k, kept)),
            (scales, scale_axes),
            _tensor_scale(tensor_scale, batch_of_scales + " 1" * (operand.ndim - len(axes.batch))),
        ),
        kept=f"({kept})",
        attributes={
            f"{side}_element": element,
            f"{side}_scale": scale,
            f"{side}_k_first": axes.k_first,
            f"{side}_block_rows": np.int32(together),
        },
    )


def _tensor_scale(scale: jax.Array | None, axes: str) -> tuple[jax.Array, str]:
    """An operand, which is empty where there is none."""
    return (jnp.zeros((0,), jnp.float32), "0") if scale is None else (scale, axes)


def _by_packed(call: MatmulCall, lhs: Operand, rhs: PackedMXArray) -> jax.Array:
    """The product by packed weights, by the handler."""
    if rhs.layout == weights.ROWS:
        return _by_rows(call, lhs, rhs)
    left, (element, scale) = _matrices(lhs, call.lhs.axes, "lhs"), weights.names(rhs.format)
    panels = (rhs.arrays.bytes, f"*r n/{weights.PANEL_ROWS} bytes")
    (product,) = handler.call(
        PACKED_MATMUL,
        [*left.operands, panels, _tensor_scale(rhs.arrays.tensor_scale, "*t")],
        [(f"*lr {left.kept} n", call.out_dtype)],
        attributes=left.attributes
        | {"rhs_element": element, "rhs_scale": scale, "block": np.int32(block_of(rhs.format)[1])},
        sizes={"n": math.prod(rhs.kept)},
    )
    return product.reshape(*product.shape[:-1], *rhs.kept)


def _by_rows(call: MatmulCall, lhs: Operand, rhs: PackedMXArray) -> jax.Array:
    """The product by weights in rows: that by their codes, and then the scales."""
    values = scale_to_float32(rhs.arrays.scales, rhs.format.scale)
    rows = rhs.kept if values.shape[-1] == math.prod(rhs.kept) else (1,) * len(rhs.kept)
    ones = (1,) * len(call.lhs.axes.kept)
    values = values.reshape(*values.shape[:-1], *ones, *rows)
    scales = [SumScale(values, rhs.format.scale.kind == "divisor")]
    # Activations in float8 are multiplied as the bfloat16 numbers that their codes are.
    if isinstance(lhs, MXArray) and plain_format(lhs.format) is not None:
        scales.append(row_scales("lhs", lhs, call))
        lhs = lhs.elements.astype(jnp.bfloat16)
    sums = _by_packed(_of_codes_alone(call), lhs, weights.codes_alone(rhs))
    return scaled(sums, *scales).astype(call.out_dtype)


# Groups -------------------------------------------------------------------------------------------

# Rows of a tile: about as many as a group has, within what keeps a matrix's decoding worth while
# and rows of other groups few; contracted ones in whole blocks.
_FEWEST_ROWS, _FEWEST_CONTRACTED, _MOST_ROWS = 16, 32, 256


def _tile_call(call: RaggedCall) -> MatmulCall:
    """The product of one tile."""
    num_rows, across = call.lhs.shape
    in_a_group = -(-num_rows // max(call.num_groups, 1))
    rows = 1 << max(in_a_group - 1, 0).bit_length()
    fewest = _FEWEST_CONTRACTED if call.contracts_rows else _FEWEST_ROWS
    rows = min(max(rows, fewest), _MOST_ROWS, num_rows)
    lhs = dataclasses.replace(call.lhs, shape=(rows, across))
    if call.contracts_rows:
        rhs = dataclasses.replace(call.rhs, shape=(rows, call.rhs.shape[1]))
        return MatmulCall(lhs=lhs, rhs=rhs, out_dtype=jnp.dtype(jnp.float32))
    scale_axes = tuple(axis - 1 for axis in call.rhs.scale_axes if axis)
    axes = Axes.ordered(k_first=call.rhs.axes.k_first)
    rhs = dataclasses.replace(call.rhs, shape=call.rhs.shape[1:], axes=axes, scale_axes=scale_axes)
    return MatmulCall(lhs=lhs, rhs=rhs, out_dtype=call.out_dtype, precision=call.precision)


def rejects_groups(call: RaggedCall) -> str | None:
    """Why no handler takes the product of a tile, or None."""
    format, reason = call.lhs.format, rejects_symbolic(call) or _rejects_kernels(_tile_call(call))
    if reason is None and not call.contracts_rows and block_of(format)[0] > 1:
        return f"multiplies groups whose blocks have one row, got lhs={call.lhs.text}"
    return reason


def multiply_groups(
    lhs: Operand, rhs: AnyOperand, group_sizes: jax.Array, call: RaggedCall
) -> jax.Array:
    """The product, by tiles. Packed weights give the bits that they give unpacked."""
    num_rows, across = call.lhs.shape
    n = call.rhs.shape[2 if call.rhs.axes.k_first and not call.contracts_rows else 1]
    if call.contracts_rows:
        zeros = jnp.zeros((call.num_groups, across, n), jnp.float32)
    else:
        zeros = jnp.zeros((num_rows, n), call.out_dtype)
    if 0 in (*call.lhs.shape, *call.rhs.shape):
        return zeros.astype(call.out_dtype)
    tile = _tile_call(call)
    rows = tile.lhs.shape[0]
    # Where each group's rows end, and up to which step its tiles go.
    ends = jnp.cumsum(group_sizes, dtype=jnp.int32)
    last = jnp.cumsum(-(-group_sizes // rows), dtype=jnp.int32)

    def add_tile(step: jax.Array, out: jax.Array) -> jax.Array:
        group = jnp.searchsorted(last, step, side="right", method="compare_all")
        end = ends[group]
        before = jnp.where(group > 0, last[group - 1], 0)
        start = jnp.where(group > 0, ends[group - 1], 0) + (step - before) * rows
        # The last tile of all reads rows again that came before it: what is sliced has one size.
        first = jnp.minimum(start, num_rows - rows)
        row = first + jnp.arange(rows, dtype=jnp.int32)
        counts = (row >= start) & (row < end)

        def of_tile(x: jax.Array) -> jax.Array:
            # Blocks along the rows are whole in a tile, and begin with it.
            block = num_rows // x.shape[0]
            return lax.dynamic_slice_in_dim(x, first // block, rows // block)

        def only(x: jax.Array) -> jax.Array:
            """Zeros, under scales of no NaN, in the rows that do not count."""
            x = of_tile(x)
            counted = counts.reshape(x.shape[0], -1)[:, :1]
            return jnp.where(counted, x, jnp.zeros((), x.dtype))

        if call.contracts_rows:
            so_far = lax.dynamic_index_in_dim(out, group, keepdims=False)
            added = so_far + _multiply_codes(tile, _each(lhs, only), _each(rhs, only))
            return lax.dynamic_update_index_in_dim(out, added, group, 0)
        matrix = _each(rhs, lambda x: lax.dynamic_index_in_dim(x, group, keepdims=False))
        product = _multiply_codes(tile, _each(lhs, of_tile), matrix)
        product = jnp.where(counts[:, None], product, lax.dynamic_slice_in_dim(out, first, rows))
        return lax.dynamic_update_slice_in_dim(out, product, first, 0)

    start, *_ = vary_alike((zeros, *jax.tree.leaves((lhs, rhs, group_sizes))))
    return lax.fori_loop(0, last[-1], add_tile, start).astype(call.out_dtype)


def _each(x: AnyOperand, change: Callable[[jax.Array], jax.Array]) -> Any:
    """The same of codes and scales, or of values; one tensor scale stays, others are indexed."""
    if isinstance(x, PackedMXArray):
        return dataclasses.replace(x, arrays=jax.tree.map(change, x.arrays))
    if not isinstance(x, MXArray):
        return change(x)
    scale = x.tensor_scale
    if scale is not None and scale.ndim > 2:
        scale = scale[0] if scale.shape[0] == 1 else change(scale)
    return MXArray(
        codes=change(x.codes),
        scales=change(x.scales),
        tensor_scale=scale,
        format=x.format,
        blocks=x.blocks,
        dtype=x.dtype,
    )


# Attention of one token, over rows of keys and values as they lie -------------------------------

ATTEND = "mx_jax_cpu_attend"
ATTEND_CODES = "mx_jax_cpu_attend_codes"


def rejects_attention(call: AttendCall) -> str | None:
    """Why the handlers do not take a call, or None."""
    if call.tokens != 1:
        return f"attends with one token, XLA's dot with several, got tokens={call.tokens}"
    if set(call.dtypes) != {np.dtype(jnp.float32)}:
        return f"attends in float32, got dtypes={tuple(map(str, call.dtypes))}"
    return None if call.format is None else rejects_parts(call.format)


def attend(
    shared: jax.Array, keys: Rows, values: Rows, position: jax.typing.ArrayLike, call: AttendCall
) -> jax.Array:
    """What the reference gives, within rounding; rows after position are not read."""
    at = jnp.asarray(position).astype(jnp.int32).reshape(1)
    scale = {"scale": np.float32(call.queries[-1] ** -0.5)}
    if not isinstance(keys, PackedRows) or not isinstance(values, PackedRows):
        assert not isinstance(keys, PackedRows) and not isinstance(values, PackedRows), call
        operands = (shared, "*b m q d"), (keys, "*b m n d"), (values, "*b m n e"), (at, "*b 1")
        return handler.call(ATTEND, operands, [("*b m q e", "float32")], attributes=scale)[0]
    # Codes of four bits are read two a byte, others one.
    is_packed, block = keys.format.element.bits == 4, keys.format.block[1]
    codes = [x.codes if is_packed else x.unpacked().codes for x in (keys, values)]
    tensor_scales = [x.tensor_scale for x in (keys, values) if x.tensor_scale is not None]
    size = keys.features if isinstance(block, Whole) else block
    return handler.call(
        ATTEND_CODES,
        [
            (shared, "*b m q d"),
            (codes[0], "*b m n bk"),
            (keys.scales, "*b m n sk"),
            (codes[1], "*b m n bv"),
            (values.scales, "*b m n sv"),
            (at, "*b 1"),
            *((x, "*b 1 1 1" if x.size == 1 else "*b m n 1") for x in tensor_scales),
        ],
        # The features of values; those of queries are contracted.
        [("*b m q e", "float32")],
        attributes=format_attributes(keys.format)
        | scale
        | {"block": np.int64(size), "is_packed": is_packed},
        sizes={"e": keys.features},
    )[0]
