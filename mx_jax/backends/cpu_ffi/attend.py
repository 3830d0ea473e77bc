"""Attention of one token by the compiled handlers, over rows of keys and values as they lie."""

import jax
import jax.numpy as jnp
import numpy as np

from mx_jax.backends.calls import AttendCall
from mx_jax.backends.cpu_ffi.casts import format_attributes, rejects_parts
from mx_jax.backends.cpu_ffi.handler import Handler, hashable
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
    shared: jax.Array,
    keys: Rows,
    values: Rows,
    position: jax.typing.ArrayLike,
    call: AttendCall,
) -> jax.Array:
    """What the reference gives, within rounding; rows beyond position are not read."""
    at = jnp.asarray(position).astype(jnp.int32).reshape(1)
    scale = {"scale": np.float32(call.queries[-1] ** -0.5)}
    dtypes = (np.dtype(jnp.float32),)
    if isinstance(keys, PackedRows) and isinstance(values, PackedRows):
        operands = _codes(keys), keys.scales, _codes(values), values.scales
        tensor_scales = [x.tensor_scale for x in (keys, values) if x.tensor_scale is not None]
        of_scales = ["*b 1 1 1" if x.size == 1 else "*b m n 1" for x in tensor_scales]
        given = ("*b m q d", "*b m n bk", "*b m n sk", "*b m n bv", "*b m n sv", "*b 1")
        handler = Handler(
            target=OF_CODES,
            # Features of an axis of their own: those of queries are contracted.
            axes=f"{', '.join([*given, *of_scales])} -> *b m q e",
            dtypes=dtypes,
            attributes=hashable(scale | _attributes(keys)),
            sizes=(("e", keys.features),),
        )
        return handler(shared, *operands, at, *tensor_scales)[0]
    assert not isinstance(keys, PackedRows) and not isinstance(values, PackedRows), call
    axes = "*b m q d, *b m n d, *b m n e, *b 1 -> *b m q e"
    handler = Handler(target=TARGET, axes=axes, dtypes=dtypes, attributes=hashable(scale))
    return handler(shared, keys, values, at)[0]


def _codes(rows: PackedRows) -> jax.Array:
    """Codes as the handler reads them: of four bits two a byte, of others one."""
    return rows.codes if _is_packed(rows) else rows.unpacked().codes


def _is_packed(rows: PackedRows) -> bool:
    return rows.format.element.bits == 4


def _attributes(rows: PackedRows) -> dict[str, object]:
    block = rows.format.block[1]
    size = rows.features if isinstance(block, Whole) else block
    told = {"block": np.int64(size), "is_packed": _is_packed(rows)}
    return told | format_attributes(rows.format)
