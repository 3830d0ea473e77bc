"""Weights that come quantized to a product: read as they are packed, or laid out at every call."""

import dataclasses
import warnings
from typing import Any

from mx_jax.backends.calls import MatmulCall, OperandType, RaggedCall
from mx_jax.mxarray import MXArray
from mx_jax.packed import PackedMXArray

ProductCall = MatmulCall | RaggedCall


def unpacked_for(
    call: Any, rhs: PackedMXArray, reason: str = "devices cannot share its layout"
) -> tuple[Any, MXArray]:
    """A product's call and right operand where nothing reads its packed weights; warns, since
    unpacking is slow."""
    warnings.warn(
        f"{_operation(call)}: packed weights are unpacked at every call: {rhs!r} belongs to "
        f"backend {rhs.backend}, and {reason}; pass the MXArray, or pack it where the product runs",
        stacklevel=2,
    )
    weights = rhs.unpack()
    return dataclasses.replace(call, rhs=OperandType.of(weights, call.rhs.axes)), weights


def readable(choice: Any, call: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
    """A product's call and right operand as the selected backend reads them; warns of weights that
    it unpacks, or lays out, at every call."""
    if isinstance(rhs, PackedMXArray):
        if rhs.backend == choice.backend.name:
            return call, rhs
        why = dict(choice.rejections).get(rhs.backend, "it is not asked here")
        reason = f"{choice.backend.name} takes this product ({rhs.backend}: {why})"
        return unpacked_for(call, rhs, reason)
    side = choice.offer.lays_out(call) if call.stored else None
    weights = lhs if side == "lhs" else rhs
    if side in call.stored and isinstance(weights, MXArray):
        what, remedy = "weights are", "lay them out once with mx_jax.pack_weights"
        if side == "lhs":
            what = "the left operand is"
            remedy = "put the weights on the right and pack them once with mx_jax.pack_weights"
        elif isinstance(call, RaggedCall):
            remedy += "(..., contracting=1, num_batch=1)"
        warnings.warn(
            f"{_operation(call)}: {what} laid out for backend {choice.backend.name} at every call, "
            f"which takes longer than a product of few rows: shape={weights.shape}, "
            f"format={weights.format.name}; {remedy}",
            stacklevel=2,
        )
    return call, rhs


def _operation(call: ProductCall) -> str:
    return "ragged_dot" if isinstance(call, RaggedCall) else "matmul"
