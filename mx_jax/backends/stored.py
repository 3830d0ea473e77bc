"""Weights that came packed for one backend, to a product that another one takes."""

import dataclasses
import warnings
from typing import TypeVar

from mx_jax.backends.calls import MatmulCall, OperandType, RaggedCall
from mx_jax.mxarray import MXArray
from mx_jax.packed import PackedMXArray

C = TypeVar("C", bound=MatmulCall | RaggedCall)


def unpacked_for(
    call: C, rhs: PackedMXArray, reason: str = "devices cannot share its layout"
) -> tuple[C, MXArray]:
    """A product's call and right operand where nothing reads its packed weights; warns, since
    unpacking is slow."""
    operation = "ragged_dot" if isinstance(call, RaggedCall) else "matmul"
    warnings.warn(
        f"{operation}: packed weights are unpacked at every call: {rhs!r} belongs to "
        f"backend {rhs.backend}, and {reason}; pass the MXArray, or pack it where the product runs",
        stacklevel=2,
    )
    weights = rhs.unpack()
    return dataclasses.replace(call, rhs=OperandType.of(weights, call.rhs.axes)), weights
