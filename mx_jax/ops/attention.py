"""Causal attention by whichever backend has it as one call."""

import functools
from typing import Any

import jax
import numpy as np

from mx_jax.backends.calls import AttendCall
from mx_jax.backends.select import find
from mx_jax.reference import attention


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def attend_matrices(
    tokens: int, shared: jax.Array, keys: jax.Array, values: jax.Array, position: Any
) -> jax.Array:
    """`softmax(q k^T / sqrt(features)) v`: see `mx_jax.reference.attention.attend`."""
    call = AttendCall(
        queries=shared.shape,
        keys=keys.shape,
        dtypes=tuple(np.dtype(x.dtype) for x in (shared, keys, values)),
        tokens=tokens,
    )
    choice = find(call)
    if choice is None:
        return attention.attend(shared, keys, values, position, tokens)
    return choice.offer.run(shared, keys, values, position, call)


@attend_matrices.defjvp
def _(tokens: int, primals: Any, tangents: Any) -> Any:
    """Kernels have no derivatives; plain JAX has."""
    plain = functools.partial(attention.attend, tokens=tokens)
    return jax.jvp(plain, primals, tangents)
