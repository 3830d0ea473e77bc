"""Attention of one token by the compiled handler, over rows of keys and values as they lie."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mx_jax.backends.calls import AttendCall
from mx_jax.backends.cpu_ffi import library
from mx_jax.backends.cpu_ffi.handler import Handler, hashable
from mx_jax.backends.cpu_ffi.one_device import dispatch
from mx_jax.reference import attention

TARGET = "mx_jax_cpu_attend"


def rejects(call: AttendCall) -> str | None:
    """Why the handler does not take a call, or None."""
    loaded = library.load()
    if isinstance(loaded, str) or TARGET not in loaded.targets:
        return "was built without attention; build it again"
    if call.tokens != 1:
        return f"attends with one token, XLA's dot with several, got tokens={call.tokens}"
    if set(call.dtypes) != {np.dtype(jnp.float32)}:
        return f"attends in float32, got dtypes={tuple(map(str, call.dtypes))}"
    return None


def attend(
    shared: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    position: jax.typing.ArrayLike,
    call: AttendCall,
) -> jax.Array:
    """What the reference gives, within rounding; rows beyond position are not read."""
    handler = Handler(
        target=TARGET,
        axes="*b m q d, *b m n d, *b m n e, *b 1 -> *b m q e",
        dtypes=(np.dtype(jnp.float32),),
        attributes=hashable({"scale": np.float32(call.queries[-1] ** -0.5)}),
    )
    plain = functools.partial(attention.attend, tokens=call.tokens)
    either: Any = dispatch.value or lax.platform_dependent
    return either(
        shared,
        keys,
        values,
        jnp.asarray(position),
        cpu=lambda *operands: handler(*operands[:-1], operands[-1].astype(jnp.int32).reshape(1))[0],
        default=plain,
    )
