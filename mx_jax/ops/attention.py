"""Causal attention by whichever backend has it as one call."""

import functools
from typing import Any

import jax
import numpy as np

from mx_jax.backends.calls import AttendCall
from mx_jax.backends.primitive import choose_if_any
from mx_jax.backends.reference import REFERENCE
from mx_jax.formats import BlockFormat
from mx_jax.ops.quantize import dequantize
from mx_jax.packed import PackedRows, Rows
from mx_jax.reference import matmul


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def attend_matrices(
    tokens: int, shared: jax.Array, keys: Rows, values: Rows, position: jax.typing.ArrayLike
) -> jax.Array:
    """`softmax(q k^T / sqrt(features)) v`: see `mx_jax.reference.matmul.attend`.

    Codes that no kernel of attention reads are decoded by whichever backend does that.
    """
    if _format(keys) != _format(values):
        keys, values = _decoded(keys), _decoded(values)
    call = AttendCall(
        queries=shared.shape,
        keys=keys.shape,
        dtypes=tuple(np.dtype(x.dtype) for x in (shared, keys, values)),
        tokens=tokens,
        format=_format(keys),
    )
    choice = choose_if_any(call)
    if call.format is not None and (choice is None or choice.backend == REFERENCE):
        return attend_matrices(tokens, shared, _decoded(keys), _decoded(values), position)
    if choice is None:
        return matmul.attend(shared, keys, values, position, tokens)
    return choice.offer.run(shared, keys, values, position, call)


def _format(rows: Rows) -> BlockFormat | None:
    return rows.format if isinstance(rows, PackedRows) else None


def _decoded(rows: Rows) -> jax.Array:
    return dequantize(rows.unpacked()) if isinstance(rows, PackedRows) else rows


@attend_matrices.defjvp
def _(
    tokens: int,
    primals: tuple[jax.Array, Rows, Rows, jax.Array],
    tangents: tuple[jax.Array, Rows, Rows, jax.Array],
) -> Any:
    """Kernels have no derivatives; plain JAX has."""
    plain = functools.partial(matmul.attend, tokens=tokens)
    return jax.jvp(plain, primals, tangents)
