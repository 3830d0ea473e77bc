"""Packed weights in products that they were not made for."""

import warnings
from typing import Any

from jax import lax

from mx_jax.axes import Side
from mx_jax.backends.calls import AnyOperand, MatmulCall, RaggedCall
from mx_jax.backends.records import active
from mx_jax.backends.select import Choice
from mx_jax.mxarray import MXArray
from mx_jax.packed import PackedMXArray


def packed_for(
    rhs: AnyOperand, dimension_numbers: lax.DotDimensionNumbers, operation: str = "dot_general"
) -> AnyOperand:
    """A right operand; packed weights unpacked where their layout does not serve the product.

    Unpacking is slow and goes unseen, so it warns, unless the product is going to be refused.

    Args:
      rhs: any operand.
      dimension_numbers: of the product.
      operation: what the warning names.
    """
    if not isinstance(rhs, PackedMXArray):
        return rhs
    (_, contracting), (_, batch) = dimension_numbers
    contracting, batch = (_from_front(axes, rhs.ndim) for axes in (contracting, batch))
    if rhs.serves(contracting, batch):
        return rhs
    blocked = tuple(axis % rhs.ndim for axis, _ in rhs.blocks)
    if contracting and contracting[-1] in blocked:
        num_batch = rhs.ndim - len(rhs.kept) - len(rhs.k)
        first = num_batch + (0 if rhs.k_first else len(rhs.kept))
        _tell(
            f"{operation}: packed weights are unpacked at every call: {rhs!r} is laid out for "
            f"contracting={tuple(range(first, first + len(rhs.k)))}, num_batch={num_batch}, and "
            f"this product has contracting={contracting}, batch={batch}; pack the MXArray with "
            f"pack_weights(..., contracting={contracting}, num_batch={len(batch)})"
        )
    return rhs.unpack()


def unpacked_for(rhs: PackedMXArray, choice: Choice, operation: str = "matmul") -> MXArray:
    """Packed weights for a backend that does not read them; warns, for it is slow and goes unseen.

    Args:
      rhs: packed for another backend.
      choice: the backend that takes the product, and why others do not.
      operation: what the warning names.
    """
    reason = dict(choice.rejections).get(rhs.backend, "it is not asked here")
    _tell(
        f"{operation}: packed weights are unpacked at every call: {rhs!r} belongs to backend "
        f"{rhs.backend}, and {choice.backend.name} takes this product ({rhs.backend}: {reason}); "
        "pass the MXArray, or pack it where the product runs"
    )
    return rhs.unpack()


def tell_of_packing(
    weights: MXArray,
    call: MatmulCall | RaggedCall,
    choice: Choice,
    operation: str = "matmul",
    side: Side = "rhs",
) -> None:
    """Warn who passes stored weights to a backend that lays them out for itself at every call."""
    if choice.offer.lays_out(call) != side:
        return
    if side == "rhs":
        how = "(..., contracting=1, num_batch=1)" if isinstance(call, RaggedCall) else ""
        _tell(
            f"{operation}: weights are laid out for backend {choice.backend.name} at every call, "
            f"which takes longer than a product of few rows: shape={weights.shape}, "
            f"format={weights.format.name}; lay them out once with mx_jax.pack_weights{how}"
        )
    else:
        _tell(
            f"{operation}: the left operand is laid out for backend {choice.backend.name} at every "
            f"call, which takes longer than a product of few rows: shape={weights.shape}, "
            f"format={weights.format.name}; put the weights on the right and pack them once with "
            "mx_jax.pack_weights"
        )


def _tell(text: str) -> None:
    """Warn the caller of our caller; whoever records what is done is told there."""
    recorder = active.value
    if recorder is None:
        warnings.warn(text, stacklevel=4)
    else:
        recorder.entries.append(text)


def _from_front(axes: Any, ndim: int) -> tuple[int, ...]:
    return tuple(int(axis) % ndim for axis in axes)
