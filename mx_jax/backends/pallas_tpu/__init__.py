"""Kernels for TPUs in Pallas: casts, and few rows by weights. Which calls they take, and how.

Nothing here has run on a TPU. libtpu compiles every kernel, Pallas' interpreter has its bits, and
what is on by default is faster by the schedule that libtpu makes: `benchmarks/results/tpu`.
Pallas is imported when a call is taken.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from mx_jax.backends import calls
from mx_jax.backends.calls import QuantizeBothCall, QuantizeCall, ValuesCall
from mx_jax.backends.target import Backend, Late, Offer, Target
from mx_jax.codecs.blocks import scales_shape
from mx_jax.codecs.rounding import NEAREST
from mx_jax.mxarray import MXArray

_weights = Late(f"{__name__}.weights")

# JAX's names of TPUs without bfloat16 arithmetic, where plain JAX is faster.
_WIDENING = ("TPU v2", "TPU v3", "TPU v4", "TPU v5")
_BLOCK, _ROWS, _COLUMNS = 32, 8, 256

Casts = QuantizeCall | QuantizeBothCall | ValuesCall

# Casts --------------------------------------------------------------------------------------------


def _rejects_cast(call: QuantizeCall, target: Target) -> str | None:
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


def _casts_of(call: Casts) -> tuple[QuantizeCall, ...]:
    """The cast or casts of a call."""
    if isinstance(call, QuantizeBothCall):
        return call.first, call.second
    if isinstance(call, ValuesCall):
        return (call.cast,) if call.beside is None else (call.cast, call.beside)
    return (call,)


def _rejects_casts(call: Casts, target: Target) -> str | None:
    """Why a cast, a pair of casts or values are not taken."""
    first, *others = _casts_of(call)
    if any(first.blocks == other.blocks for other in others):
        return f"needs casts along axes -1 and -2, got blocks={first.blocks} twice"
    reasons = (_rejects_cast(cast, target) for cast in (first, *others))
    return next(filter(None, reasons), None)


def _quantize(x: jax.Array, bits: object, tensor_scale: None, call: Casts, interpret: bool) -> Any:
    """One cast, or two."""
    casts = _casts_of(call)
    arrays = tuple(
        MXArray(
            codes=codes.reshape(x.shape),
            scales=scales.reshape(scales_shape(x.shape, cast.blocks)),
            format=cast.format,
            blocks=cast.blocks,
            dtype=x.dtype,
        )
        for cast, (codes, scales) in zip(
            casts, _cast(x, casts, interpret, values=False), strict=True
        )
    )
    return arrays if isinstance(call, QuantizeBothCall) else arrays[0]


def _values(x: jax.Array, call: ValuesCall, interpret: bool) -> jax.Array:
    """What codes would stand for."""
    return _cast(x, _casts_of(call), interpret, values=True)[0][0].reshape(x.shape)


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
        results = run(matrix.reshape(-1, matrix.shape[-1]))
        return [y.reshape(size, -1, y.shape[-1]) for y in results], [True] * len(results)

    results = run(matrix)
    count = 1 if values else 2
    parts = {axis: [results.pop(0) for _ in range(count)] for axis in (-2, -1) if axis in codings}
    return [parts[call.blocks[0][0]] for call in calls]


# The backend --------------------------------------------------------------------------------------


def _multiply(*operands: Any) -> Any:
    from mx_jax.backends.pallas_tpu import columns

    return columns.multiply(*operands)


def backend_for(*, interpret: bool = False) -> Backend:
    """The backend; for tests on a machine without a TPU, by Pallas' interpreter."""

    def offer(
        call: type[calls.Call], rejects: Callable[..., str | None], run: Callable[..., Any]
    ) -> Offer:
        def reason(call: Any, target: Target) -> str | None:
            if not interpret and target.platform != "tpu":
                return f"needs platform=tpu, got platform={target.platform}"
            if not interpret and target.num_devices > 1:
                return (
                    "runs on one device or below jax.shard_map: jit does not split a kernel, got "
                    f"num_devices={target.num_devices}"
                )
            return calls.rejects_symbolic(call) or rejects(call, target)

        label = "faster by libtpu's schedule, not run"
        return Offer(call=call, rejects=reason, run=lambda *x: run(*x, interpret), label=label)

    table = (
        offer(QuantizeCall, _rejects_casts, _quantize),
        offer(QuantizeBothCall, _rejects_casts, _quantize),
        offer(ValuesCall, _rejects_casts, _values),
        offer(calls.MatmulCall, lambda *x: _weights.rejects(*x), _multiply),
        offer(
            calls.PackCall,
            lambda *x: _weights.rejects_pack(*x),
            lambda *x: _weights.pack(*x),
        ),
    )
    return Backend(name="pallas_tpu", epsilon_bound=2.0, table=table)


PALLAS_TPU = backend_for()
