"""Which casts the kernels take, and how an array becomes the matrix that they cast."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from mx_jax.backends.calls import QuantizeBothCall, QuantizeCall, ValuesCall
from mx_jax.backends.target import Target
from mx_jax.codecs.blocks import scales_shape
from mx_jax.codecs.rounding import NEAREST
from mx_jax.mxarray import MXArray

# JAX's names of TPUs without bfloat16 arithmetic, where plain JAX is faster.
_WIDENING = ("TPU v2", "TPU v3", "TPU v4", "TPU v5")
_BLOCK, _ROWS, _COLUMNS = 32, 8, 256


def rejects(call: QuantizeCall, target: Target) -> str | None:
    """Why a cast is not taken."""
    if (target.device_kind or "").startswith(_WIDENING):
        return f"needs bfloat16 arithmetic, as TPUs have from v6e on, got {target.device_kind}"
    if call.dtype != jnp.bfloat16:
        return f"reads bfloat16, two numbers a word, got dtype={call.dtype}"
    element, shape = call.format.element, call.shape
    signed = element.has_negative_zero if element.kind == "float" else not element.negative_extra
    if call.format.scale.kind != "exponent" or not signed:
        return f"needs the elements and E8M0 scales of MX formats, got {call.format.name}"
    if call.scale_rule.kernel_threshold(element) is None or call.rounding != NEAREST:
        return (
            "needs a rule of one threshold, and rounding to nearest, got "
            f"{call.scale_rule.name}, {call.rounding.name}"
        )
    if len(shape) < 2 or call.blocks not in (((-1, _BLOCK),), ((-2, _BLOCK),)):
        return f"needs blocks of {_BLOCK} along axis -1 or -2, got blocks={call.blocks}"
    rows = math.prod(shape[:-1])
    whole = call.blocks[0][0] == -1 or shape[-2] % _BLOCK == 0
    if rows % _ROWS or shape[-1] % _COLUMNS or not whole or not rows * shape[-1]:
        return (
            f"needs whole tiles of {_ROWS} rows and {_COLUMNS} columns, and whole blocks, got "
            f"shape={shape}"
        )
    return None


def rejects_both(call: QuantizeBothCall, target: Target) -> str | None:
    """Why a pair of casts is not taken."""
    if call.first.blocks == call.second.blocks:
        return f"needs casts along axes -1 and -2, got blocks={call.first.blocks} twice"
    return rejects(call.first, target) or rejects(call.second, target)


def rejects_values(call: ValuesCall, target: Target) -> str | None:
    """Why values are not taken."""
    if call.beside is None:
        return rejects(call.cast, target)
    return rejects_both(QuantizeBothCall(first=call.cast, second=call.beside), target)


def quantize(
    x: jax.Array, bits: None, tensor_scale: None, call: QuantizeCall, interpret: bool
) -> MXArray:
    """One cast."""
    return _arrays(x, (call,), interpret)[0]


def quantize_both(
    x: jax.Array, bits: object, tensor_scale: None, call: QuantizeBothCall, interpret: bool
) -> tuple[MXArray, ...]:
    """Two casts."""
    return _arrays(x, (call.first, call.second), interpret)


def values(x: jax.Array, call: ValuesCall, interpret: bool) -> jax.Array:
    """What codes would stand for."""
    calls = (call.cast,) if call.beside is None else (call.cast, call.beside)
    return _cast(x, calls, interpret, values=True)[0][0].reshape(x.shape)


def _arrays(x: jax.Array, calls: Sequence[QuantizeCall], interpret: bool) -> tuple[MXArray, ...]:
    found = zip(calls, _cast(x, calls, interpret, values=False), strict=True)
    return tuple(
        MXArray(
            codes=codes.reshape(x.shape),
            scales=scales.reshape(scales_shape(x.shape, call.blocks)),
            format=call.format,
            blocks=call.blocks,
            dtype=x.dtype,
        )
        for call, (codes, scales) in found
    )


def _cast(
    x: jax.Array, calls: Sequence[QuantizeCall], interpret: bool, *, values: bool
) -> list[list[jax.Array]]:
    """The kernel's results for each cast."""
    from mx_jax.backends.pallas_tpu.cast_kernels import cast
    from mx_jax.backends.pallas_tpu.words import Coding

    codings: dict[int, Any] = {}
    for call in calls:
        threshold = call.scale_rule.kernel_threshold(call.format.element)
        assert threshold is not None, call
        # Of a pattern of bfloat16, whose fraction has 7 bits of float32's 23.
        carry = (1 << 7) - min(-(-threshold >> 16), 1 << 7)
        codings[call.blocks[0][0]] = Coding(call.format.element, carry, values)
    matrix = x.reshape(-1, x.shape[-1])

    # A batch is more rows of whole blocks.
    @jax.custom_batching.custom_vmap
    def run(matrix: jax.Array) -> list[jax.Array]:
        return cast(matrix, codings.get(-2), codings.get(-1), interpret)

    @run.def_vmap
    def _(size: int, in_batched: object, matrix: jax.Array) -> Any:
        found = run(matrix.reshape(-1, matrix.shape[-1]))
        return [y.reshape(size, -1, y.shape[-1]) for y in found], [True] * len(found)

    found = run(matrix)
    count = 1 if values else 2
    parts = {axis: [found.pop(0) for _ in range(count)] for axis in (-2, -1) if axis in codings}
    return [parts[call.blocks[0][0]] for call in calls]
