"""Attention of one token by the compiled handlers, over rows of keys and values as they lie."""

import jax
import jax.numpy as jnp
import numpy as np

from mx_jax.backends.calls import AttendCall
from mx_jax.backends.cpu_ffi import handler
from mx_jax.backends.cpu_ffi.casts import format_attributes, rejects_parts
from mx_jax.formats import Whole
from mx_jax.packed import PackedRows, Rows

TARGET = "mx_jax_cpu_attend"
OF_CODES = "mx_jax_cpu_attend_codes"


def rejects(call: AttendCall) -> str | None:
    """Why the handlers do not take a call, or None."""
    if call.tokens != 1:
        return f"attends with one token, XLA's dot with several, got tokens={call.tokens}"
    if set(call.dtypes) != {np.dtype(jnp.float32)}:
        return f"attends in float32, got dtypes={tuple(map(str, call.dtypes))}"
    return None if call.format is None else rejects_parts(call.format)


def attend(
    shared: jax.Array, keys: Rows, values: Rows, position: jax.typing.ArrayLike, call: AttendCall
) -> jax.Array:
    """What the reference gives, within rounding; rows beyond position are not read."""
    at = jnp.asarray(position).astype(jnp.int32).reshape(1)
    scale = {"scale": np.float32(call.queries[-1] ** -0.5)}
    if not isinstance(keys, PackedRows) or not isinstance(values, PackedRows):
        assert not isinstance(keys, PackedRows) and not isinstance(values, PackedRows), call
        axes = "*b m q d, *b m n d, *b m n e, *b 1 -> *b m q e"
        operands = (shared, keys, values, at)
        return handler.call(TARGET, axes, *operands, dtypes=("float32",), attributes=scale)[0]
    # Codes of four bits are read two a byte, others one.
    is_packed, block = keys.format.element.bits == 4, keys.format.block[1]
    codes = [x.codes if is_packed else x.unpacked().codes for x in (keys, values)]
    tensor_scales = [x.tensor_scale for x in (keys, values) if x.tensor_scale is not None]
    of_scales = ["*b 1 1 1" if x.size == 1 else "*b m n 1" for x in tensor_scales]
    given = ("*b m q d", "*b m n bk", "*b m n sk", "*b m n bv", "*b m n sv", "*b 1", *of_scales)
    size = keys.features if isinstance(block, Whole) else block
    return handler.call(
        OF_CODES,
        # Features of an axis of their own: those of queries are contracted.
        f"{', '.join(given)} -> *b m q e",
        *(shared, codes[0], keys.scales, codes[1], values.scales, at, *tensor_scales),
        dtypes=("float32",),
        attributes=format_attributes(keys.format)
        | scale
        | {"block": np.int64(size), "is_packed": is_packed},
        sizes={"e": keys.features},
    )[0]
