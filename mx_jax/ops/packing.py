"""Weights quantized once, and laid out once, for many products."""

import dataclasses
import warnings
from collections.abc import Sequence

import numpy as np
from jax import lax
from jax.core import Tracer

from mx_jax.axes import Axes
from mx_jax.backends.calls import OperandType, PackCall
from mx_jax.backends.select import select
from mx_jax.backends.target import on_devices_of
from mx_jax.codecs.blocks import check_parts
from mx_jax.codecs.straight_through import parted_codes
from mx_jax.mxarray import MXArray
from mx_jax.ops.arguments import as_axes, as_axis, as_recipe
from mx_jax.packed import PackedMXArray, Quantized
from mx_jax.specs import MatmulRecipe


def pack_weights(
    weights: MXArray | PackedMXArray,
    *,
    contracting: int | Sequence[int] | None = None,
    num_batch: int = 0,
    recipe: MatmulRecipe | str | None = None,
) -> MXArray | PackedMXArray:
    """Weights in the order in which this machine's kernels read them, for any number of products.

    A product of few rows, as in decoding, is bound by reading its weights; packed, they are read in
    one stream, FP4 at half a byte a code, FP6 at three quarters. The result goes wherever
    the MXArray went as the right operand: `matmul`, `dot_general`, `einsum`, a layer's kernel.
    Products by `recipe` have the same bits, but for float8 whose scales are whole along k: on CPUs
    those leave the sums. It belongs to this kind of machine and carries no gradient: train and save
    the MXArray.

    One layout serves activations of every kind; TPUs have one for those in high precision.

    Args:
      weights: blocked along the axis that products contract; any other axes are kept.
      contracting: the axes that products contract, if there are several; blocks lie along the last.
      num_batch: how many leading axes are batch axes of the products, as in a stack of layers.
      recipe: of the products, or its name, where it is known; None: weights in any layout that
        serves all.

    Returns:
      A `PackedMXArray`; or weights themselves, where no backend here has a layout of its own for
      them, or where they lie on several devices, each of which multiplies its part as it is.

    Raises:
      TypeError: weights are not an MXArray, recipe is none, or an axis is no int.
      ValueError: axes out of range, repeated, or without the blocks; an MXArray whose parts do not
        fit together.

    Examples:
      >>> import jax.numpy as jnp, mx_jax
      >>> w = mx_jax.pack_weights(mx_jax.quantize(jnp.ones((64, 3)), "mxfp4", axis=0))
      >>> recipe = mx_jax.recipes.weight_only("mxfp4")
      >>> mx_jax.matmul(jnp.ones((2, 64)), w, recipe=recipe)[0]
      Array([64., 64., 64.], dtype=float32)
    """
    if isinstance(weights, PackedMXArray):
        return weights
    if not isinstance(weights, MXArray):
        raise TypeError(
            f"pack_weights: needs an MXArray, got weights of type {type(weights).__name__}; "
            "quantize it first"
        )
    check_parts(weights, "pack_weights")
    num_batch = as_axis(num_batch, "pack_weights", "num_batch")
    if recipe is not None:
        recipe = as_recipe(recipe, "pack_weights")
    activations = None if recipe is None else recipe.output.lhs
    call = PackCall(
        weights=OperandType.of(weights, _axes(weights, contracting, num_batch)),
        blocks=weights.blocks,
        lhs_format=None if activations is None else activations.format,
        dtype=np.dtype(weights.dtype),
    )
    codes = parted_codes(weights)
    if weights.primal is not None:
        weights = dataclasses.replace(weights, codes=codes, primal=None)
    sharding = None if isinstance(codes, Tracer) else getattr(codes, "sharding", None)
    if sharding is not None and len(sharding.device_set) > 1:
        return weights
    with on_devices_of(weights):
        return select(call).offer.run(weights, call)


def _axes(weights: MXArray, contracting: int | Sequence[int] | None, num_batch: int) -> Axes:
    """The weights' axes in the product, each group in ascending order."""
    blocked = tuple(axis % weights.ndim for axis, _ in weights.blocks)
    if contracting is None:
        axes = blocked
    else:
        several = contracting if isinstance(contracting, Sequence) else (contracting,)
        checked = as_axes(several, "pack_weights", "contracting")
        if not all(-weights.ndim <= axis < weights.ndim for axis in checked):
            raise ValueError(
                f"pack_weights: axis out of range, got contracting={contracting}, "
                f"shape={weights.shape}"
            )
        axes = tuple(sorted(axis % weights.ndim for axis in checked))
    if not 0 <= num_batch < weights.ndim or any(axis < num_batch for axis in axes):
        raise ValueError(
            "pack_weights: the contracted axes must come after the batch axes, got "
            f"num_batch={num_batch}, contracting={axes}, shape={weights.shape}"
        )
    if len(set(axes)) != len(axes) or not axes or axes[-1] not in blocked:
        raise ValueError(
            "pack_weights: each contracted axis counts once, and blocks lie along the last, got "
            f"contracting={axes}, blocks along axis={', '.join(map(str, blocked))}"
        )
    batch, rest = tuple(range(num_batch)), range(num_batch, weights.ndim)
    return Axes(batch, tuple(axis for axis in rest if axis not in axes), axes)


def packed_for(
    rhs: PackedMXArray, dimension_numbers: lax.DotDimensionNumbers, operation: str = "dot_general"
) -> Quantized:
    """Packed weights; those that do not serve the product unpacked, with a warning."""
    (_, contracting), (_, batch) = dimension_numbers
    contracting, batch = (tuple(int(x) % rhs.ndim for x in axes) for axes in (contracting, batch))
    if rhs.serves(contracting, batch):
        return rhs
    blocked = tuple(axis % rhs.ndim for axis, _ in rhs.blocks)
    if contracting and contracting[-1] in blocked:
        num_batch = rhs.ndim - len(rhs.kept) - len(rhs.k)
        first = num_batch + (0 if rhs.k_first else len(rhs.kept))
        warnings.warn(
            f"{operation}: packed weights are unpacked at every call: {rhs!r} is laid out for "
            f"contracting={tuple(range(first, first + len(rhs.k)))}, num_batch={num_batch}, and "
            f"this product has contracting={contracting}, batch={batch}; pack the MXArray with "
            f"pack_weights(..., contracting={contracting}, num_batch={len(batch)})",
            stacklevel=3,
        )
    return rhs.unpack()
