"""float8 products with delayed scaling: scales come from the amaxes of earlier steps.

The state is explicit. Its "gradient" is its next value, as Flax's `overwrite_with_gradient`
collection wants it: a training step writes it back instead of handing it to the optimizer.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mx_jax.codecs.explicit_axes import explicit_sharding
from mx_jax.codecs.rounding import NEAREST
from mx_jax.codecs.scale import encode_scaled, true_divide
from mx_jax.formats import F32, WHOLE, BlockFormat, ElementFormat
from mx_jax.mxarray import MXArray
from mx_jax.ops.canonical import Groups, canonicalize, restore
from mx_jax.ops.matmul import quantized_matmul
from mx_jax.specs import MatmulSpec

_AS_THEY_ARE = MatmulSpec(lhs=None, rhs=None)


class DelayedState(NamedTuple):
    """Scale state of one tensor.

    Attributes:
      scale: float32 `[1]`, the scale of the latest step: `value = code * scale`.
      amax_history: float32 `[h]`, amaxes of earlier steps, the latest first.
    """

    scale: jax.Array
    amax_history: jax.Array


class DelayedStates(NamedTuple):
    """States of the three tensors that a product and its gradients quantize."""

    lhs: DelayedState
    rhs: DelayedState
    cotangent: DelayedState


class Elements(NamedTuple):
    """Element formats of the three tensors."""

    lhs: ElementFormat
    rhs: ElementFormat
    cotangent: ElementFormat


class _Static(NamedTuple):
    elements: Elements
    groups: Groups
    lhs_dtype: np.dtype
    rhs_dtype: np.dtype
    out_dtype: np.dtype


def delayed_dot_general(
    lhs: jax.Array,
    rhs: jax.Array,
    dimension_numbers: lax.DotDimensionNumbers,
    states: DelayedStates,
    elements: Elements,
    out_dtype: jax.typing.DTypeLike,
) -> jax.Array:
    """`jax.lax.dot_general` of float8 operands whose scales were known before the step.

    Each tensor is quantized tensor-wise with `scale = max(amax_history) / element max`. The
    gradient with respect to `states` is their next value.

    Args:
      lhs: values.
      rhs: values.
      dimension_numbers: as `jax.lax.dot_general` takes them.
      states: of the operands and of the incoming cotangent.
      elements: float8 formats of the same three.
      out_dtype: dtype of the product.

    Returns:
      The product.
    """
    dtypes = (np.dtype(lhs.dtype), np.dtype(rhs.dtype), np.dtype(out_dtype))
    lhs_, rhs_, groups = canonicalize(lhs, rhs, dimension_numbers)
    product: Any = _product(_Static(elements, groups.filled(), *dtypes), lhs_, rhs_, states)
    return restore(product, groups)


@functools.partial(jax.jit, static_argnums=2)
def next_state(x: jax.Array, state: DelayedState, element: ElementFormat) -> DelayedState:
    """The scale to use now, from the amaxes so far, and the history with x's amax in front.

    A history of zeros, or with Inf or NaN in it, keeps the scale.
    """
    amax = jnp.max(state.amax_history)
    fresh = true_divide(amax, element.max)
    usable = (amax > 0) & jnp.isfinite(amax)
    newest = jnp.max(jnp.abs(x.astype(jnp.float32)))
    history = jnp.roll(state.amax_history, 1).at[0].set(newest)
    return DelayedState(jnp.where(usable, fresh, state.scale), history)


@functools.partial(jax.jit, static_argnums=2)
def _quantize(x: jax.Array, scale: jax.Array, element: ElementFormat) -> MXArray:
    """x with one given scale; what is larger than it reaches saturates."""
    format = BlockFormat(
        name=f"float8_delayed_{element.name}", element=element, scale=F32, block=(WHOLE, WHOLE)
    )
    scales = scale.reshape((1,) * x.ndim)
    codes = encode_scaled(x, scales, format, tensor_scale=None, rounding=NEAREST, random_bits=None)
    return MXArray(
        codes=codes,
        scales=scales,
        format=format,
        blocks=tuple((axis, WHOLE) for axis in range(-x.ndim, 0)),
        dtype=np.dtype(x.dtype),
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(static: _Static, lhs: Any, rhs: Any, states: DelayedStates) -> jax.Array:
    return _product_fwd(static, lhs, rhs, states)[0]


def _product_fwd(static, lhs, rhs, states):
    new_lhs = next_state(lhs, states.lhs, static.elements.lhs)
    new_rhs = next_state(rhs, states.rhs, static.elements.rhs)
    lhs = _quantize(lhs, new_lhs.scale, static.elements.lhs)
    rhs = _quantize(rhs, new_rhs.scale, static.elements.rhs)
    out = quantized_matmul(lhs, rhs, _AS_THEY_ARE, static.groups, static.out_dtype, None, None)
    return out, (lhs, rhs, new_lhs, new_rhs, states.cotangent)


def _product_bwd(static, saved, g):
    lhs, rhs, new_lhs, new_rhs, state = saved
    new_g = next_state(g, state, static.elements.cotangent)
    g = _quantize(g, new_g.scale, static.elements.cotangent)
    # One scale a tensor holds along any axis: the forward's codes serve both gradients.
    lhs_bar = _gradient(static.groups.grad_lhs(), g, rhs, static.lhs_dtype, lhs)
    rhs_bar = _gradient(static.groups.grad_rhs(), g, lhs, static.rhs_dtype, rhs)
    return lhs_bar, rhs_bar, DelayedStates(new_lhs, new_rhs, new_g)


_product.defvjp(_product_fwd, _product_bwd)


def _gradient(
    order: tuple[Groups, bool], g: MXArray, other: MXArray, dtype: np.dtype, like: MXArray
) -> jax.Array:
    groups, g_is_lhs = order
    operands = (g, other) if g_is_lhs else (other, g)
    sharding = explicit_sharding(like.codes)
    return quantized_matmul(*operands, _AS_THEY_ARE, groups, dtype, None, None, sharding)
