"""Block scales chosen by the error that they leave, instead of by the largest value alone."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mx_jax.codecs import blocks as block_shapes
from mx_jax.codecs import float32
from mx_jax.codecs.rounding import NEAREST
from mx_jax.codecs.scale import encode_scaled, is_nan_scale
from mx_jax.formats import BlockFormat, ScaleFormat
from mx_jax.formats.block import block_format
from mx_jax.mxarray import MXArray
from mx_jax.ops.quantize import quantize
from mx_jax.reference import scale_rules

# As `amax`, but the tensor scale leaves room for block scales above the one that fits.
AMAX_WITH_ROOM = scale_rules.ScaleRule(
    name="amax_with_room",
    kinds=("element",),
    scales=scale_rules.FromAmax(scale_rules.amax),
    largest_scale=256.0,
)


Axis = int | tuple[int, ...]
# What command lines call the ways to choose codes: by squared error, and `gptq`.
SEARCHED, GPTQ = "mse", "gptq"


@dataclasses.dataclass(frozen=True)
class Search:
    """Where a search begins and which stored scales around that it tries."""

    first: scale_rules.ScaleRule  # whose scales it begins with
    steps: tuple[int, ...]  # added to a stored scale, 0 first: of equal errors the first one wins
    smallest: int  # stored scale that it tries
    largest: int  # likewise


def search_for(scale: ScaleFormat, operation: str) -> Search:
    """What to try for a scale format: an octave up and down of FLOOR's, or of amax's."""
    if scale.kind == "exponent":
        return Search(scale_rules.FLOOR, (0, 1, -1), 0, 254)
    if scale.kind == "element" and scale.element is not None:
        octave = 1 << scale.element.mantissa_bits
        steps = (0, *(sign * step for step in range(1, octave + 1) for sign in (1, -1)))
        # Codes of positive values are in the order of the values; the last one may be NaN.
        return Search(AMAX_WITH_ROOM, steps, octave, scale.element.max_code)
    raise ValueError(
        f"{operation}: tries the neighbours of a stored scale, which takes scales in E8M0 or in a "
        f"float of 8 bits, got scale={scale.name} of kind={scale.kind}; quantize by a scale_rule"
    )


def contracted(axis: int | Sequence[int], ndim: int) -> tuple[int, ...]:
    """The axes that a product contracts, counted from the front."""
    return tuple(range(ndim)[each] for each in ((axis,) if isinstance(axis, int) else axis))


def search_scales(
    w: jax.typing.ArrayLike,
    format: BlockFormat | str,
    *,
    axis: int | Sequence[int] = 0,
    tensor_scale: jax.typing.ArrayLike | None = None,
) -> MXArray:
    """Quantize with the scale of each block that leaves the smallest squared error.

    Tries the stored scales up to an octave around the one that the block's largest value asks for,
    and takes the first with the smallest `sum (q - w)^2`; under a tensor scale that it chooses
    also around those of a plain cast, so that it never loses more than that. Larger ones clip
    nothing and are coarse; smaller ones clip the largest values and are finer for all others.

    Args:
      w: weights, float32, bfloat16 or float16, of any shape.
      format: a format with E8M0 or E4M3 scales, or its name.
      axis: the axis that a product contracts, or several; blocks lie along the last.
      tensor_scale: of NVFP4, as `quantize` takes it; default: by w's largest value.

    Returns:
      An `MXArray`. Its scales may depend on the order of a float sum where two errors are equal but
      for rounding; its codes are the nearest ones under them.

    Raises:
      ValueError: a format with other scales.

    Examples:
      >>> import jax, mx_jax
      >>> from mx_jax import calibrate
      >>> w = jax.random.normal(jax.random.key(0), (256, 64))
      >>> plain = mx_jax.quantize(w, "nvfp4", axis=0).dequantize()
      >>> searched = calibrate.search_scales(w, "nvfp4").dequantize()
      >>> bool(((searched - w) ** 2).sum() < 0.8 * ((plain - w) ** 2).sum())
      True
    """
    w, format = jnp.asarray(w), block_format(format)
    search = search_for(format.scale, "search_scales")
    where: dict[str, Any] = dict(axis=contracted(axis, w.ndim)[-1], tensor_scale=tensor_scale)
    best = _search(w, quantize(w, format, scale_rule=search.first, **where), search)
    if not format.tensor_scale or tensor_scale is not None:
        return best
    # A tensor scale with room for larger block scales may leave small blocks coarser ones.
    plain = _search(w, quantize(w, format, **where), search)
    better = _squared_error(plain, w) < _squared_error(best, w)
    return jax.tree.map(functools.partial(jnp.where, better), plain, best)


def _squared_error(q: MXArray, w: jax.Array) -> jax.Array:
    """`sum (q - w)^2` over the blocks that are finite, up to a power of two of w's largest."""
    exact = w.astype(jnp.float32)
    largest = jnp.max(jnp.where(jnp.isfinite(exact), jnp.abs(exact), 0), initial=0)
    lost = ((q.dequantize(jnp.float32) - exact) / power_of_two_up_to(largest)) ** 2
    return jnp.sum(jnp.where(jnp.isnan(lost), 0, lost))


def power_of_two_up_to(x: jax.Array) -> jax.Array:
    """The largest one up to x: relative to it, squares stay in float32's range."""
    return float32.from_bits(jnp.maximum(float32.float32_bits(x) & float32.INF, float32.HIDDEN))


@functools.partial(jax.jit, static_argnums=2)
def _search(w: jax.Array, first: MXArray, search: Search) -> MXArray:
    pieces, inside = block_shapes.split(w, first.blocks)
    tensor_scale = first.tensor_scale
    if tensor_scale is not None:
        tensor_scale = block_shapes.spread(tensor_scale, inside)
    start = block_shapes.spread(first.scales, inside)

    magnitudes = float32.float32_bits(pieces) & float32.ABS
    amax = jnp.max(magnitudes, axis=inside, keepdims=True, initial=0)
    data = scale_rules.BlockData(pieces, inside, amax, first.format, tensor_scale)
    unit = power_of_two_up_to(float32.from_bits(amax))

    def attempt(best: tuple[jax.Array, jax.Array], step: jax.Array):
        least, chosen = best
        moved = jnp.clip(start.astype(jnp.int32) + step, search.smallest, search.largest)
        scales = jnp.where(is_nan_scale(start, first.format.scale), start, moved.astype(jnp.uint8))
        error = scale_rules.squared_error(data, scales, unit)
        better = error < least
        return (jnp.where(better, error, least), jnp.where(better, scales, chosen)), None

    nothing = jnp.full(start.shape, jnp.inf, jnp.float32)
    (_, scales), _ = lax.scan(attempt, (nothing, start), jnp.asarray(search.steps, jnp.int32))
    how = {"tensor_scale": tensor_scale, "rounding": NEAREST, "random_bits": None}
    codes = encode_scaled(pieces, scales, first.format, **how)
    return dataclasses.replace(
        first, codes=block_shapes.merge(codes, w.shape, inside), scales=lax.squeeze(scales, inside)
    )


class Way(Protocol):
    """From a weight to its codes.

    Examples:
      >>> import jax.numpy as jnp, mx_jax
      >>> from mx_jax import convert
      >>> def rounded_up(names, w, format, axis, looked_up):
      ...     return mx_jax.quantize(w, format, axis=axis, scale_rule="ceil")
      >>> params = {"up": {"kernel": jnp.full((64, 8), 5.0)}}
      >>> rules = convert.Rule(".*", mx_jax.recipes.weight_only("mxfp4"))
      >>> up = convert.weights(params, rules, by=rounded_up, pack=False)["up"]
      >>> up["kernel"].scale_values[0, :2]
      Array([2, 2], dtype=float8_e8m0fnu)
    """

    def __call__(
        self, names: Sequence[str], w: jax.Array, format: BlockFormat, axis: Axis, looked_up: bool
    ) -> MXArray:
        """Quantize one weight.

        Args:
          names: paths that rules know its layer by.
          w: of one layer, without the axes of a stack.
          format: to quantize to.
          axis: that the product contracts, or several; blocks lie along the last.
          looked_up: whether it is a table that rows are looked up in.
        """
        ...


@dataclasses.dataclass(frozen=True)
class SearchedScales:
    """By `search_scales`, which needs no data.

    Examples:
      >>> import jax, mx_jax
      >>> from mx_jax import calibrate, convert
      >>> params = {"up": {"kernel": jax.random.normal(jax.random.key(0), (64, 8))}}
      >>> rules = convert.Rule(".*", mx_jax.recipes.weight_only("nvfp4"))
      >>> up = convert.weights(params, rules, by=calibrate.SearchedScales(), pack=False)["up"]
      >>> up["kernel"].format.name
      'nvfp4'
    """

    def __call__(
        self, names: Sequence[str], w: jax.Array, format: BlockFormat, axis: Axis, looked_up: bool
    ) -> MXArray:
        """See `Way`."""
        return search_scales(w, format, axis=axis)


def output_error(
    w: jax.typing.ArrayLike,
    quantized: MXArray,
    moment: jax.typing.ArrayLike,
    *,
    axis: int | Sequence[int] = 0,
) -> float:
    """How much of a product's output the quantized weights lose: `|x (q - w)|^2 / |x w|^2`.

    Args:
      w: weights.
      quantized: the same weights, quantized.
      moment: `[k, k]`, the sum or the mean of `x x^T` over inputs x, as `moments` gives it.
      axis: the axis of length k, or the axes whose lengths multiply to k.

    Returns:
      A float, at least 0; computed in float64. Where the product is zero: 0, or infinite where the
      quantized one is not.

    Raises:
      ValueError: a moment that is no square matrix, not finite or not positive semidefinite as far
        as these weights show it.

    Examples:
      >>> import jax, jax.numpy as jnp, mx_jax
      >>> from mx_jax import calibrate
      >>> w = jax.random.normal(jax.random.key(0), (64, 32))
      >>> error = calibrate.output_error(w, mx_jax.quantize(w, "mxfp8_e4m3", axis=0), jnp.eye(64))
      >>> 0 < error < 0.002
      True
    """
    # In float64: squares of float32's small and large values leave its range.
    exact, rounded = (
        np.asarray(jnp.asarray(x, jnp.float32), np.float64)
        for x in (w, quantized.dequantize(jnp.float32))
    )
    weights = check_moment(moment, "output_error")
    axes = contracted(axis, exact.ndim)

    def power(of: np.ndarray) -> float:
        length = math.prod(of.shape[each] for each in axes)
        rows = np.moveaxis(of, axes, range(len(axes))).reshape(length, -1)
        terms = rows * (weights @ rows)
        if (total := float(terms.sum())) < -1e-9 * np.abs(terms).sum():
            raise ValueError(
                "output_error: moment must be positive semidefinite, as a sum of x x^T is, got an "
                f"output whose square is {total}"
            )
        return max(total, 0.0)

    lost, whole = power(rounded - exact), power(exact)
    return lost / whole if whole else math.inf if lost else 0.0


def check_moment(moment: jax.typing.ArrayLike, operation: str) -> np.ndarray:
    """A sum or mean of `x x^T` as float64; ValueError for what cannot be one."""
    array = np.array(moment, np.float64)
    if array.ndim != 2 or array.shape[0] != array.shape[1] or not np.isfinite(array).all():
        raise ValueError(
            f"{operation}: moment must be finite and have one row and one column for each feature, "
            f"got moment.shape={array.shape}, finite={bool(np.isfinite(array).all())}"
        )
    if (smallest := np.diag(array).min(initial=0)) < 0:
        raise ValueError(
            f"{operation}: moment must be positive semidefinite, as a sum of x x^T is, got "
            f"{smallest} on its diagonal"
        )
    return array
