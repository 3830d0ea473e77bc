"""float8 products with delayed scaling: scales come from the amaxes of earlier steps.

The state is explicit. Its "gradient" is its next value, as Flax's `overwrite_with_gradient`
collection wants it: a training step writes it back instead of handing it to the optimizer.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from mx_jax.axes import ProductAxes, Side
from mx_jax.backends.calls import AnyOperand, Operand
from mx_jax.backends.target import follow
from mx_jax.codecs.explicit_axes import explicit_mesh, varying
from mx_jax.codecs.rounding import NEAREST
from mx_jax.codecs.scale import encode_scaled, true_divide
from mx_jax.formats import F32, WHOLE, BlockFormat, ElementFormat
from mx_jax.mxarray import MXArray
from mx_jax.ops.dense import HIGH_PRECISION, DenseProduct, Taken, Task
from mx_jax.ops.dot_general import canonicalize, check_dimension_numbers
from mx_jax.ops.product import (
    AnyProduct,
    CotangentAval,
    Primal,
    Product,
    no_derivative,
    note_cast,
    run_product,
)
from mx_jax.ops.programs import QUANTIZED
from mx_jax.ops.sharded_operands import product_spec
from mx_jax.ops.tags import GRADIENT, SIDES, Free, watching
from mx_jax.ops.watched import watched
from mx_jax.packed import Quantized


class DelayedState(NamedTuple):
    """Scale of one tensor, float32 `[1]`, and earlier amaxes, float32 `[h]`, the latest first."""

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


class Scaling(NamedTuple):
    """How a history becomes a scale: by the largest amax, or by the latest alone."""

    margin: int = 0  # powers of two between the largest value and the format's
    most_recent: bool = False


# What tags call it.
_RULE = "delayed"

# Flax's and TransformerEngine's default.
MAX = Scaling()


def delayed_dot_general(
    lhs: jax.Array,
    rhs: jax.Array,
    dimension_numbers: lax.DotDimensionNumbers,
    states: DelayedStates,
    elements: Elements,
    out_dtype: jax.typing.DTypeLike,
    scaling: Scaling = MAX,
) -> tuple[jax.Array, DelayedStates]:
    """`jax.lax.dot_general` of float8 operands whose scales were known before the step.

    Each tensor is quantized tensor-wise with `scale = 2^margin * amax / element max`, where amax is
    the largest of its history, or the latest. The gradient with respect to `states` is their next
    value; below shard_map, amaxes are those of all shards.

    Returns:
      The product, and states, equal to the given, for the next product of the step by them.
    """
    # Autodiff adds up what several products say of one state; along this chain each hands on the
    # larger of its own amaxes and its successors'.
    if (mesh := explicit_mesh(lhs, rhs)) is not None:
        # As in `dot_general`: types say where arrays are sharded, the compiler what moves.
        dimension_numbers = check_dimension_numbers(lhs, rhs, dimension_numbers)
        with jax.sharding.use_abstract_mesh(mesh):
            out = product_spec(lhs, rhs, dimension_numbers, None, HIGH_PRECISION)
            run: Any = jax.sharding.auto_axes(
                lambda lhs, rhs, states: delayed_dot_general(
                    lhs, rhs, dimension_numbers, states, elements, out_dtype, scaling
                ),
                axes=mesh.explicit_axes,
                out_sharding=(out, PartitionSpec()),
            )
            return run(lhs, rhs, states)
    left, right, axes, empty, _ = canonicalize(lhs, rhs, dimension_numbers)
    product = DelayedProduct(
        elements=elements, scaling=scaling, axes=axes, out_dtype=np.dtype(out_dtype)
    )
    with follow(left, right):
        run = watched if watching.value else run_product
        result, states = run(product, Primal.of(left), Primal.of(right), states)
    return lax.squeeze(result, empty), states


@functools.partial(jax.jit, static_argnums=(2, 3))
def next_state(
    x: jax.Array, state: DelayedState, element: ElementFormat, scaling: Scaling = MAX
) -> DelayedState:
    """The scale to use now, from the amaxes so far, and the history with x's amax in front."""
    # Zeros, Inf or NaN in the history keep the scale; so does an amax whose scale is not normal.
    # A state may have a dtype of its own, such as Flax's `fp32_max_grad`.
    before, history = (lax.convert_element_type(leaf, jnp.float32) for leaf in state)
    amax = history[0] if scaling.most_recent else jnp.max(history)
    fresh = true_divide(amax, element.max) * 2.0**scaling.margin
    usable = (fresh > 0) & jnp.isfinite(fresh)
    newest = _max_like(jnp.max(jnp.abs(x.astype(jnp.float32))), history)
    scale = jnp.where(usable, fresh, before)
    return DelayedState(scale, jnp.roll(history, 1).at[0].set(newest))


def _max_like(value: jax.Array, state: jax.Array) -> jax.Array:
    """The largest over vmap's lanes and shard_map's shards that share a state."""
    # With `check_vma=False` JAX does not say what differs: all axes of the mesh count then.
    axes = frozenset(jax.sharding.get_abstract_mesh().manual_axes)
    if any(varying(lax.axis_index(axis)) for axis in axes):
        axes = varying(value) - varying(state)
    value = lax.pmax(value, tuple(sorted(axes))) if axes else value
    return _max_of_lanes(value, state)


@jax.custom_batching.custom_vmap
def _max_of_lanes(value: jax.Array, state: jax.Array) -> jax.Array:
    del state
    return value


@_max_of_lanes.def_vmap
def _max_of_lanes_vmap(
    axis_size: int, in_batched: Sequence[bool], value: jax.Array, state: jax.Array
) -> tuple[jax.Array, bool]:
    value_batched, state_batched = in_batched
    if state_batched:
        # Lanes with states of their own are from here on parts of one value.
        if not value_batched:
            value = jnp.broadcast_to(value, (axis_size, *value.shape))
        return _max_of_lanes(value, state), True
    return _max_of_lanes(jnp.max(value, axis=0) if value_batched else value, state), False


@functools.partial(jax.jit, static_argnums=2)
def _quantize(x: jax.Array, scale: jax.Array, element: ElementFormat) -> MXArray:
    """x with one given scale; what is larger than it reaches saturates."""
    format = BlockFormat(
        name=f"float8_delayed_{element.name}", element=element, scale=F32, block=(WHOLE, WHOLE)
    )
    scales = scale.reshape((1,) * x.ndim)
    codes = encode_scaled(x, scales, format, tensor_scale=None, rounding=NEAREST, random_bits=None)
    result = MXArray(
        codes=codes,
        scales=scales,
        format=format,
        blocks=tuple((axis, WHOLE) for axis in range(-x.ndim, 0)),
        dtype=np.dtype(x.dtype),
    )
    return checkpoint_name(result, QUANTIZED)


def _multiply(
    lhs: AnyOperand, rhs: AnyOperand, axes: ProductAxes, out_dtype: np.dtype
) -> jax.Array:
    product = DenseProduct(recipe=HIGH_PRECISION, axes=axes, out_dtype=out_dtype)
    task = Task(lhs, rhs, HIGH_PRECISION.fwd, axes)
    return product.multiply(Taken(task, (lhs, rhs)), out_dtype)


class _Saved(NamedTuple):
    """The states before the step, and the operands' next ones."""

    states: DelayedStates
    lhs: DelayedState
    rhs: DelayedState


@dataclasses.dataclass(frozen=True, kw_only=True)
class DelayedProduct(Product[tuple[jax.Array, DelayedStates], DelayedStates, _Saved]):
    """A product of operands with scales of their states, and the states again."""

    elements: Elements
    scaling: Scaling
    axes: ProductAxes
    out_dtype: np.dtype

    def forward(
        self,
        lhs: AnyOperand,
        rhs: AnyOperand,
        extra: DelayedStates,
        stored: tuple[Side, ...] = (),
    ) -> tuple[jax.Array, DelayedStates]:
        """The product, of operands quantized here unless `keep` did it."""
        if not isinstance(lhs, MXArray) or not isinstance(rhs, MXArray):
            lhs, rhs, _ = self.keep(lhs, rhs, extra)
        return _multiply(lhs, rhs, self.axes, self.out_dtype), extra

    def keep(
        self, lhs: AnyOperand, rhs: AnyOperand, extra: DelayedStates
    ) -> tuple[MXArray, MXArray, _Saved]:
        assert not isinstance(lhs, Quantized) and not isinstance(rhs, Quantized)
        left, new_lhs = self._quantize(lhs, extra.lhs, self.elements.lhs)
        right, new_rhs = self._quantize(rhs, extra.rhs, self.elements.rhs)
        note_cast("lhs", lhs, left, _RULE, self.axes.lhs.block_axis)
        note_cast("rhs", rhs, right, _RULE, self.axes.rhs.block_axis)
        return left, right, _Saved(extra, new_lhs, new_rhs)

    def cotangents(
        self, g: tuple[jax.Array, DelayedStates], saved: _Saved, both: bool
    ) -> tuple[tuple[MXArray, MXArray], DelayedStates]:
        """g quantized once, for one scale a tensor holds along any axis; and the next states."""
        del both
        (own, later), states = g, saved.states
        codes, new_g = self._quantize(own, states.cotangent, self.elements.cotangent)
        for side in SIDES:
            note_cast("lhs", own, codes, _RULE, self.axes.of_g(side).block_axis, GRADIENT[side])

        def next_or_later(new: jax.Array, later: jax.Array, state: jax.Array) -> jax.Array:
            largest = jnp.maximum(new, lax.convert_element_type(later, jnp.float32))
            return lax.convert_element_type(largest, state.dtype)

        # Of the step's later products where those are larger.
        news = DelayedStates(saved.lhs, saved.rhs, new_g)
        return (codes, codes), jax.tree.map(next_or_later, news, later, states)

    def gradient(
        self, side: Side, g: Operand, other: AnyOperand, aval: CotangentAval, saved: _Saved
    ) -> jax.Array:
        """The forward's codes serve both gradients."""
        del saved
        axes, g_is_lhs = self.axes.cotangent(side)
        left, right = (g, other) if g_is_lhs else (other, g)
        return _multiply(left, right, axes, aval.dtype)

    def in_high_precision(self) -> AnyProduct:
        return DenseProduct(
            recipe=HIGH_PRECISION,
            axes=self.axes,
            out_dtype=np.dtype(np.float32),
            precision=lax.Precision.HIGHEST,
        )

    def free(self, side: Side | None) -> tuple[Free, ...]:
        return self.in_high_precision().free(side)

    def _quantize(
        self, x: jax.Array, state: DelayedState, element: ElementFormat
    ) -> tuple[MXArray, DelayedState]:
        x = no_derivative(x)
        new = next_state(x, state, element, self.scaling)
        return _quantize(x, new.scale, element), new
