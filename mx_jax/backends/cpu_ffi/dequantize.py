"""Dequantizing by the compiled handler."""

import jax
import jax.numpy as jnp
import numpy as np

from mx_jax.backends.calls import DequantizeCall
from mx_jax.backends.cpu_ffi.cast_axes import (
    cast_axes,
    facts,
    flat_blocks,
    rejects_blocks,
    rejects_parts,
)
from mx_jax.backends.cpu_ffi.handler import Handler, hashable
from mx_jax.codecs.blocks import Blocks
from mx_jax.formats import BlockFormat
from mx_jax.mxarray import MXArray

TARGET = "mx_jax_cpu_dequantize"


def rejects(call: DequantizeCall) -> str | None:
    """Why the handler does not take a call, or None."""
    if call.scale_axes != tuple(range(len(call.scale_axes))):
        return f"needs tensor scales of the first axes, got them along axes={call.scale_axes}"
    if call.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        return f"gives float32, bfloat16 or float16, got dtype={call.dtype}"
    if call.saturates and call.format.element.has_inf:
        return f"keeps Inf as it is, got saturates=True with {call.format.name}, which has Inf"
    return rejects_parts(call.format) or rejects_blocks(call.blocks)


def dequantize(x: MXArray, call: DequantizeCall) -> jax.Array:
    """The values of x in `call.dtype`, by the handler."""
    operands = [operand for operand in (x.codes, x.scales, x.tensor_scale) if operand is not None]
    axes = cast_axes(x.blocks)
    given = (axes.elements, *axes.scales, axes.tensor_scale)[: len(operands)]
    has_tensor_scale = x.tensor_scale is not None
    handler = Handler(
        target=TARGET,
        axes=f"{', '.join(given)} -> {axes.elements}",
        dtypes=(np.dtype(call.dtype),),
        attributes=hashable(
            attributes(x.format, x.blocks) | {"has_tensor_scale": has_tensor_scale}
        ),
    )
    (values,) = handler(*operands)
    if call.saturates and call.format.scale.kind == "exponent":
        # No element is Inf: what is, was beyond the dtype.
        largest = jnp.finfo(call.dtype).max
        values = jnp.minimum(jnp.maximum(values, -largest), largest)
    return values


def attributes(format: BlockFormat, blocks: Blocks) -> dict[str, object]:
    """What the handler is told about an array, besides shapes and dtypes."""
    return {"blocks": flat_blocks(blocks)} | format_attributes(format)


def format_attributes(format: BlockFormat) -> dict[str, object]:
    """What a handler that decodes is told of a format."""
    of = format.scale.element
    return {
        "element": facts(format.element),
        "kind": format.scale.kind,
        "scale_element": np.zeros(0, np.int32) if of is None else facts(of),
    }
