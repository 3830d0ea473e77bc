"""Which products the compiled handlers take, and what they call formats."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from mx_jax.backends.calls import MatmulCall
from mx_jax.backends.cpu_ffi import library
from mx_jax.backends.sums import rejects_parts_of_blocks, rejects_scale_axes
from mx_jax.formats import E4M3_SCALE, E8M0, MXFP8_E4M3, MXFP8_E5M2, WHOLE, BlockFormat
from mx_jax.formats.element import known_element, known_scale

# The handlers of products: of codes as they are, and of packed weights.
MATMUL = "mx_jax_cpu_matmul"
PACKED_MATMUL = "mx_jax_cpu_matmul_packed"

ELEMENTS = ("e4m3", "e5m2", "e2m3", "e3m2", "e2m1", "int8")
_BLOCKS = (16, 32)
_INT8 = ("e2m1", "e2m3", "int8")
_INT16 = (*_INT8, "e3m2")
# Elements that an instruction set multiplies faster than float32, both operands alike.
_FAST: dict[str, tuple[tuple[str, ...], ...]] = {
    "dotprod": (_INT8,),
    "i8mm": (_INT8,),
    "avx512_vnni": (_INT8, _INT16),
    "avx512_bf16": (_INT8, (*ELEMENTS, "bfloat16")),
}
# Rows of the smaller operand up to which float32 panels win over XLA's dot of dequantized
# operands: beyond them its dot, which needs no panels of codes, is faster. Measured.
_FLOAT32_ROWS = {"portable": 8, "dotprod": 8, "i8mm": 8, "avx2": 96}
_FLOAT32_ROWS_OF_OTHERS = 512
DTYPES = tuple(map(jnp.dtype, ("float32", "bfloat16", "float16")))


def rejects(call: MatmulCall) -> str | None:
    """Why the handler does not take a call, or None."""
    loaded = library.load()
    assert not isinstance(loaded, str), loaded
    if call.rhs.packed_by == "cpu_ffi" and plain_format(call.rhs.format) is not None:
        call = plain_call(call)
    if call.out_dtype not in DTYPES:
        return f"gives float32, bfloat16 or float16, got out_dtype={call.out_dtype}"
    if (reason := rejects_scale_axes(call, batch=True)) is not None:
        return reason
    formats = [f for f in (call.lhs.format, call.rhs.format) if f is not None]
    for format in formats:
        if (reason := rejects_format(format)) is not None:
            return reason
    if max(map(block_rows, formats), default=1) > 1:
        reason = rejects_parts_of_blocks(call, "kept")
        if reason is not None:
            return reason
    blocks = {format.block[1] for format in formats}
    if len(blocks) > 1:
        return f"needs one block size, got lhs={call.lhs.format}, rhs={call.rhs.format}"
    return _rejects_size(call, loaded.isa)


def _rejects_size(call: MatmulCall, isa: str) -> str | None:
    """Why XLA's own dot is the faster one, or None."""
    sides = ((call.lhs.format, call.lhs.dtype), (call.rhs.format, call.rhs.dtype))
    elements = [str(dtype) if format is None else names(format)[0] for format, dtype in sides]
    if any(all(e in fast for e in elements) for fast in _FAST.get(isa, ())):
        return None
    limit = _FLOAT32_ROWS.get(isa, _FLOAT32_ROWS_OF_OTHERS)
    m, n = call.lhs.rows, call.rhs.rows
    # Symbolic rows may be few, and every number of them is multiplied rightly.
    if not isinstance(m, int) or not isinstance(n, int) or min(m, n) <= limit:
        return None
    return (
        f"multiplies these in float32 on {isa}, where XLA's dot of dequantized operands is faster "
        f"beyond {limit} rows, got m={m}, n={n}"
    )


def block_size(format: BlockFormat) -> int:
    """Positions of one block along k, of a format that is taken."""
    size = format.block[1]
    assert isinstance(size, int), format
    return size


def block_rows(format: BlockFormat | None) -> int:
    """Kept positions of one block, of a format that is taken."""
    rows = 1 if format is None else format.block[0]
    assert isinstance(rows, int), format
    return rows


def rejects_format(format: BlockFormat) -> str | None:
    """Why operands of a format are not taken, or None."""
    element = known_element(format.element)
    if element is None or element.name not in ELEMENTS:
        return f"multiplies elements in {', '.join(ELEMENTS)}, got {format.element.name}"
    if known_scale(format.scale) not in (E8M0, E4M3_SCALE):
        return f"needs scales in e8m0 or e4m3, got {format.name} with {format.scale.name}"
    if format.block[1] not in _BLOCKS:
        return f"needs blocks of {' or '.join(map(str, _BLOCKS))} along k, got {format}"
    if format.block[0] is WHOLE:
        return f"needs blocks that end along the kept axes, got {format}"
    return None


def plain_format(format: BlockFormat | None) -> BlockFormat | None:
    """MXFP8 of the same elements; None of what is not float8 under scales that leave the sums."""
    if format is None or format.block not in ((1, WHOLE), (WHOLE, WHOLE)):
        return None
    if not format.is_known or not format.scale.is_float32:
        return None
    alike = (MXFP8_E4M3, MXFP8_E5M2)
    return next((own for own in alike if own.element == known_element(format.element)), None)


def plain_call(call: MatmulCall) -> MatmulCall:
    """The product of codes, whose sums scales are multiplied into; by packed weights."""
    lhs, rhs = call.lhs, dataclasses.replace(call.rhs, format=plain_format(call.rhs.format))
    if plain_format(lhs.format) is not None:
        lhs = dataclasses.replace(lhs, format=None, dtype=np.dtype(jnp.bfloat16))
    return dataclasses.replace(call, lhs=lhs, rhs=rhs, out_dtype=np.dtype(np.float32))


def names(format: BlockFormat | None) -> tuple[str, str]:
    """What the handler calls the element and the scale of a format that it takes."""
    if format is None:
        return "none", "none"
    element, scale = known_element(format.element), known_scale(format.scale)
    assert element is not None and scale is not None, format
    return element.name, scale.name
