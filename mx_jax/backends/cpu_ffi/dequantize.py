"""Dequantizing by the compiled handler."""

import jax
import jax.numpy as jnp
import numpy as np

from mx_jax.backends.base import DequantizeCall
from mx_jax.backends.cpu_ffi.quantize import facts, flat_blocks, rejects_blocks
from mx_jax.codecs.blocks import Blocks
from mx_jax.formats import BlockFormat
from mx_jax.mxarray import MXArray

TARGET = "mx_jax_cpu_dequantize"


def rejects(call: DequantizeCall) -> str | None:
    """Why the handler does not take a call, or None."""
    if call.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        return f"gives float32, bfloat16 or float16, got dtype={call.dtype}"
    return rejects_blocks(call.blocks)


def dequantize(x: MXArray, call: DequantizeCall) -> jax.Array:
    """The values of x in `call.dtype`, by the handler."""
    operands = [x.codes, x.scales]
    if x.tensor_scale is not None:
        operands.append(x.tensor_scale)
    result = jax.ShapeDtypeStruct(x.shape, call.dtype)
    return jax.ffi.ffi_call(TARGET, result, vmap_method="broadcast_all")(
        *operands,
        **attributes(x.format, x.blocks),
        has_tensor_scale=x.tensor_scale is not None,
        packed=False,
    )


def attributes(format: BlockFormat, blocks: Blocks) -> dict[str, object]:
    """What the handler is told about an array, besides shapes and dtypes."""
    of = format.scale.element
    return {
        "blocks": flat_blocks(blocks),
        "element": facts(format.element),
        "kind": format.scale.kind,
        "scale_element": np.zeros(0, np.int32) if of is None else facts(of),
    }
