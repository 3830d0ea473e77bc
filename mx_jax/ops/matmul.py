"""One quantized product in canonical order: quantize, select a backend, run it."""

from typing import Any, NamedTuple, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mx_jax.backends.base import AnyOperand, MatmulCall, Operand
from mx_jax.backends.select import current_target, select
from mx_jax.codecs.blocks import Blocks
from mx_jax.codecs.invariants import varying_axes
from mx_jax.mxarray import MXArray
from mx_jax.ops.canonical import Groups
from mx_jax.ops.quantize import operand_blocks, quantize_operand
from mx_jax.ops.unpacking import unpacked_for
from mx_jax.packed import PackedMXArray, Quantized, unpacked
from mx_jax.reference import hadamard
from mx_jax.specs import MatmulSpec, OperandSpec, unscale


def quantized_matmul(
    lhs: AnyOperand,
    rhs: AnyOperand,
    spec: MatmulSpec,
    groups: Groups,
    out_dtype: np.dtype,
    precision: Any,
    key: jax.Array | None,
    out_sharding: Any = None,
) -> jax.Array:
    """Two canonical operands to `[*batch, *m, *n]`: quantize, select a backend, run it.

    Args:
      lhs: values, quantized here as spec.lhs says, or an MXArray, taken as it is.
      rhs: likewise, by spec.rhs.
      spec: formats of the two operands.
      groups: sizes and order of the axis groups.
      out_dtype: dtype of the product.
      precision: for high-precision operands.
      key: PRNG key if the spec rounds stochastically.
      out_sharding: of the product, on a mesh with explicit axes.

    Returns:
      `[*batch, *m, *n]`.
    """
    given = lhs, rhs
    lhs, rhs = prepare_operands(lhs, rhs, spec, groups, key)
    call = MatmulCall(
        lhs_shape=lhs.shape,
        rhs_shape=rhs.shape,
        num_batch=groups.batch,
        num_contracting=groups.k,
        lhs_k_first=groups.lhs_k_first,
        rhs_k_first=groups.rhs_k_first,
        lhs_format=lhs.format if isinstance(lhs, Quantized) else None,
        rhs_format=rhs.format if isinstance(rhs, Quantized) else None,
        lhs_dtype=None if isinstance(lhs, Quantized) else np.dtype(lhs.dtype),
        rhs_dtype=None if isinstance(rhs, Quantized) else np.dtype(rhs.dtype),
        out_dtype=out_dtype,
        precision=precision,
        fast_accumulation=spec.fast_accumulation,
        out_sharding=out_sharding,
        lhs_scale_axes=_scale_axes(lhs),
        rhs_scale_axes=_scale_axes(rhs),
    )
    return unscaled(_run(lhs, rhs, call), *given, spec)


def _scale_axes(operand: AnyOperand) -> tuple[int, ...]:
    """Axes along which an operand's tensor scale varies; packed weights had theirs looked at."""
    return varying_axes(operand.tensor_scale) if isinstance(operand, MXArray) else ()


def _run(lhs: AnyOperand, rhs: AnyOperand, call: MatmulCall) -> jax.Array:
    if isinstance(lhs, Quantized) or isinstance(rhs, Quantized):
        choice = select(call, current_target())
        backend = choice.backend
        if isinstance(rhs, PackedMXArray):
            if rhs.backend == backend.name:
                return backend.packed_matmul(unpacked(lhs), rhs, call)
            rhs = unpacked_for(rhs, choice)
        return backend.scaled_matmul(unpacked(lhs), rhs, call)
    return lax.dot_general(
        lhs,
        rhs,
        call.dimension_numbers,
        precision=call.precision,
        preferred_element_type=call.out_dtype,
        out_sharding=call.out_sharding,
    )


class Place(NamedTuple):
    """Where the groups of one canonical operand are.

    Attributes:
      batch: number of batch axes.
      kept: number of kept axes.
      k: number of contracting axes.
      k_first: whether the contracting axes precede the kept ones.
    """

    batch: int
    kept: int
    k: int
    k_first: bool

    @property
    def block_axis(self) -> int:
        """The last contracting axis, counted from the end."""
        return -self.kept - 1 if self.k_first else -1

    def blocks(self, spec: OperandSpec) -> Blocks:
        """Blocks of the operand there."""
        return operand_blocks(spec.format, *self)


def lhs_place(groups: Groups) -> Place:
    """Where lhs's groups are."""
    return Place(groups.batch, groups.m, groups.k, groups.lhs_k_first)


def rhs_place(groups: Groups) -> Place:
    """Where rhs's groups are."""
    return Place(groups.batch, groups.n, groups.k, groups.rhs_k_first)


def prepare_operands(
    lhs: AnyOperand, rhs: AnyOperand, spec: MatmulSpec, groups: Groups, key: jax.Array | None
) -> tuple[AnyOperand, AnyOperand]:
    """Both operands as the product takes them: transformed, and quantized by their specs.

    Each operand draws from its own key; a transform's signs, which both share, from a third.
    """
    lhs_key, rhs_key, sign_key = operand_keys(key)
    left, right = lhs_place(groups), rhs_place(groups)
    if spec.transform is not None:
        signs = hadamard.draw_signs(spec.transform, sign_key)
        lhs = _transform(lhs, signs, left.block_axis)
        rhs = _transform(rhs, signs, right.block_axis)
    return prepare(lhs, spec.lhs, left, lhs_key), prepare(rhs, spec.rhs, right, rhs_key)


def operand_keys(key: jax.Array | None) -> tuple[Any, Any, Any]:
    """Keys of the left operand, of the right one, and of the signs."""
    if key is None:
        return None, None, None
    lhs_key, rhs_key, sign_key = jax.random.split(key, 3)
    return lhs_key, rhs_key, sign_key


def _transform(operand: AnyOperand, signs: jax.Array, axis: int) -> jax.Array:
    if isinstance(operand, Quantized):
        raise ValueError(
            "matmul: the recipe transforms its operands before quantizing, which an MXArray no "
            f"longer allows, got format={operand.format.name}, shape={operand.shape}; pass "
            "dequantize(), or a recipe without transform"
        )
    return hadamard.apply(operand, signs, axis)


@overload
def prepare(
    operand: Operand, spec: OperandSpec | None, place: Place, key: jax.Array | None
) -> Operand: ...


@overload
def prepare(
    operand: AnyOperand, spec: OperandSpec | None, place: Place, key: jax.Array | None
) -> AnyOperand: ...


def prepare(
    operand: AnyOperand, spec: OperandSpec | None, place: Place, key: jax.Array | None
) -> AnyOperand:
    """One operand, quantized by its spec unless it is or stays what it was."""
    if spec is None or isinstance(operand, Quantized):
        return operand
    return quantize_operand(
        prescaled(operand, spec),
        spec,
        place.blocks(spec),
        key if spec.rounding.random_bits else None,
    )


def prescaled(x: jax.Array, spec: OperandSpec) -> jax.Array:
    """What an operand's spec quantizes: x times its prescale, in x's dtype."""
    if spec.prescale == 1.0:
        return x
    product = x * jnp.asarray(spec.prescale, x.dtype)
    # XLA would hand on float32 where float32 is read next, and other bits with it.
    return product if x.dtype == jnp.float32 else lax.optimization_barrier(product)


def unscaled(product: jax.Array, lhs: AnyOperand, rhs: AnyOperand, spec: MatmulSpec) -> jax.Array:
    """A product without the prescales of its operands, as they were before quantizing.

    An operand that came quantized never had one.
    """
    pairs = ((lhs, spec.lhs), (rhs, spec.rhs))
    factor = unscale(*(own for x, own in pairs if not isinstance(x, Quantized)))
    if factor == 1.0:
        return product
    # 16/9 is 1.78125 in bfloat16: every gradient would be 0.2 % too long.
    wide = jnp.promote_types(product.dtype, jnp.float32)
    return (product.astype(wide) * jnp.asarray(factor, wide)).astype(product.dtype)
