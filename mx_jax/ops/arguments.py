"""What the differentiable products take: operands, dtypes, dimension numbers."""

import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mx_jax.backends.calls import AnyOperand
from mx_jax.codecs.blocks import check_parts
from mx_jax.mxarray import MXArray
from mx_jax.ops.checks import QUANTIZABLE
from mx_jax.packed import PackedMXArray, Quantized
from mx_jax.specs import MatmulRecipe


def as_operand(x: Any, side: str, recipe: MatmulRecipe, operation: str = "matmul") -> AnyOperand:
    """An MXArray as it is, anything else as an array that the recipe can take.

    Packed weights of which shard_map handed on a part have the part's sizes.

    Raises:
      TypeError: what is no array of numbers, or of another byte order; a dtype that cannot be
        quantized, unless nothing is.
      ValueError: an MXArray whose parts do not fit together.
    """
    if isinstance(x, MXArray):
        check_parts(x, f"{operation}: {side}")
    if isinstance(x, Quantized):
        return x.local() if isinstance(x, PackedMXArray) else x
    dtype = getattr(x, "dtype", None)
    array = x if isinstance(x, jax.Array) else _as_array(x, side, operation)
    name = np.dtype(dtype if dtype is not None else array.dtype).name
    if name in QUANTIZABLE or recipe.is_high_precision:
        return array
    raise TypeError(
        f"{operation}: {side} must be float32, bfloat16, float16 or an MXArray, got dtype={name}, "
        f"shape={array.shape}; convert it first, e.g. {side}.astype(jnp.float32)"
    )


def _as_array(x: Any, side: str, operation: str) -> jax.Array:
    if isinstance(x, np.ndarray | np.generic) and not x.dtype.isnative:
        raise TypeError(
            f"{operation}: {side} must have this machine's byte order, got dtype={x.dtype.str}, "
            f"shape={x.shape}; convert it first, e.g. "
            f"{side}.astype({side}.dtype.newbyteorder('='))"
        )
    try:
        return jnp.asarray(x)
    except jax.errors.JAXTypeError:
        # About tracers: JAX says it best.
        raise
    except (TypeError, ValueError):
        kind = type(x).__name__
        described = f"{kind} of dtype={x.dtype}" if isinstance(x, np.ndarray) else kind
        raise TypeError(
            f"{operation}: {side} must be an array of numbers or an MXArray, got {side} of type "
            f"{described}; pass what jnp.asarray takes"
        ) from None


def goes_to_lax(recipe: MatmulRecipe, lhs: AnyOperand, rhs: AnyOperand) -> bool:
    """Whether nothing is quantized: neither by the recipe, nor as it comes."""
    return recipe.is_high_precision and not any(isinstance(x, Quantized) for x in (lhs, rhs))


def check_out_dtype(dtype: Any, operation: str) -> None:
    """Raise TypeError unless a quantized product may have the dtype; None stands for a default."""
    if dtype is None or jnp.issubdtype(dtype, jnp.floating):
        return
    raise TypeError(
        f"{operation}: the product of quantized operands is floating point, got "
        f"preferred_element_type={jnp.dtype(dtype).name}; use float32, bfloat16 or float16, and "
        "convert the result"
    )


def dtype_of_product(wanted: Any, lhs: Any, rhs: Any, operation: str) -> np.dtype:
    """The dtype of a quantized product: what is wanted, checked, or the operands' common dtype."""
    check_out_dtype(wanted, operation)
    return np.dtype(jnp.result_type(lhs.dtype, rhs.dtype) if wanted is None else wanted)


def check_depth(dimension_numbers: Any) -> lax.DotDimensionNumbers:
    """Dimension numbers as tuples of ints.

    Raises:
      ValueError: they are not nested as `jax.lax.dot_general` takes them.
      TypeError: an axis is no integer.
    """
    try:
        (lhs_k, rhs_k), (lhs_batch, rhs_batch) = dimension_numbers
        groups = [tuple(group) for group in (lhs_k, rhs_k, lhs_batch, rhs_batch)]
    except (TypeError, ValueError):
        raise ValueError(
            "dot_general: dimension_numbers must be ((lhs_contracting, rhs_contracting), "
            "(lhs_batch, rhs_batch)), each a sequence of axes, got "
            f"dimension_numbers={dimension_numbers!r}; for matrices, (((1,), (0,)), ((), ()))"
        ) from None
    try:
        lhs_k, rhs_k, lhs_batch, rhs_batch = (tuple(map(operator.index, group)) for group in groups)
    except TypeError:
        raise TypeError(
            f"dot_general: axes must be integers, got dimension_numbers={dimension_numbers!r}"
        ) from None
    return (lhs_k, rhs_k), (lhs_batch, rhs_batch)
