"""Weights that come quantized to a product: read as they are packed, or laid out at every call."""

import dataclasses
import warnings
from collections.abc import Sequence
from typing import TypeVar

from mx_jax.backends.calls import AnyOperand, MatmulCall, OperandType, RaggedCall
from mx_jax.backends.target import Offer
from mx_jax.mxarray import MXArray
from mx_jax.packed import PackedMXArray

C = TypeVar("C", bound=MatmulCall | RaggedCall)


def unpacked_for(
    call: C, rhs: PackedMXArray, reason: str = "devices cannot share its layout"
) -> tuple[C, MXArray]:
    """A product's call and right operand where nothing reads its packed weights; warns, since
    unpacking is slow."""
    warnings.warn(
        f"{_operation(call)}: packed weights are unpacked at every call: {rhs!r} belongs to "
        f"backend {rhs.backend}, and {reason}; pass the MXArray, or pack it where the product runs",
        stacklevel=2,
    )
    weights = rhs.unpack()
    return dataclasses.replace(call, rhs=OperandType.of(weights, call.rhs.axes)), weights


def readable(
    call: C,
    lhs: AnyOperand,
    rhs: AnyOperand,
    offer: Offer,
    backend: str,
    rejections: Sequence[tuple[str, str]],
) -> tuple[C, AnyOperand]:
    """A product's call and right operand as the selected backend, of this name and offer, reads
    them; warns of weights that it unpacks, or lays out, at every call."""
    if isinstance(rhs, PackedMXArray):
        if rhs.backend == backend:
            return call, rhs
        why = dict(rejections).get(rhs.backend, "it is not asked here")
        reason = f"{backend} takes this product ({rhs.backend}: {why})"
        return unpacked_for(call, rhs, reason)
    side = offer.lays_out(call) if call.stored else None
    weights = lhs if side == "lhs" else rhs
    if side in call.stored and isinstance(weights, MXArray):
        what, remedy = "weights are", "lay them out once with mx_jax.pack_weights"
        if side == "lhs":
            what = "the left operand is"
            remedy = "put the weights on the right and pack them once with mx_jax.pack_weights"
        elif isinstance(call, RaggedCall):
            remedy += "(..., contracting=1, num_batch=1)"
        warnings.warn(
            f"{_operation(call)}: {what} laid out for backend {backend} at every call, "
            f"which takes longer than a product of few rows: shape={weights.shape}, "
            f"format={weights.format.name}; {remedy}",
            stacklevel=2,
        )
    return call, rhs


def _operation(call: MatmulCall | RaggedCall) -> str:
    return "ragged_dot" if isinstance(call, RaggedCall) else "matmul"
