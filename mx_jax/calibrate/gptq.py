"""GPTQ, in which later features make up for earlier ones.

Source: Frantar et al., arXiv 2210.17323; blocks one after the other, so that the scale of each is
chosen for what those before have made of it.
"""

import dataclasses
import functools
import math
import warnings
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from scipy.linalg import solve_triangular

from mx_jax.calibrate.scales import (
    Axis,
    Search,
    check_moment,
    contracted,
    power_of_two_up_to,
    search_for,
    search_scales,
)
from mx_jax.codecs import float32
from mx_jax.codecs.rounding import NEAREST
from mx_jax.codecs.scale import decode_scaled, encode_scaled, is_nan_scale
from mx_jax.formats import BlockFormat, block_format
from mx_jax.mxarray import MXArray
from mx_jax.ops.quantize import quantize

# Outputs that are rounded at a time: with all scales that are tried, they fit a cache.
COLUMNS = 4096


def gptq(
    w: jax.typing.ArrayLike,
    format: BlockFormat | str,
    moment: jax.typing.ArrayLike,
    *,
    axis: int | Sequence[int] = 0,
    damping: float = 0.05,
    tensor_scale: jax.typing.ArrayLike | None = None,
) -> MXArray:
    """Quantize weights so that the product with typical inputs loses least, feature by feature.

    Feature i becomes `q_i`, the nearest codes to what it is by then; the features after it take
    `-(w_i - q_i) U_ij / U_ii`, where `U^T U` is the Cholesky factorization of the inverse of
    `H = E[x x^T] + damping * mean(diag E[x x^T]) * 1`. Blocks come in the order of their part of
    H's diagonal, largest first, and the features of each likewise (the "act-order" of the authors'
    code). A block's scale is chosen when its turn comes: of those that `search_scales` tries around
    what the block is by then, the first with the smallest `sum (w_i - q_i)^2 / U_ii^2`.

    Args:
      w: weights, float32, bfloat16 or float16, of any shape.
      format: a format with E8M0 or E4M3 scales, or its name.
      moment: `[k, k]`, symmetric, the sum or the mean of `x x^T` over inputs x: see `moments`.
      axis: the axis of length k, which a product contracts, or the axes whose lengths multiply to
        k; blocks lie along the last.
      damping: above 0; how far H is moved towards one that knows nothing. About k over the number
        of inputs x is best for other inputs than those.
      tensor_scale: of NVFP4, as `quantize` takes it; default: by w's largest value.

    Returns:
      An `MXArray` of w's shape, with blocks along the last of the axes.

    Raises:
      ValueError: a moment of another shape, not finite or not positive semidefinite; damping not
        above 0; a format with other scales, or with blocks along two axes.

    Examples:
      >>> import jax, jax.numpy as jnp, mx_jax
      >>> from mx_jax import calibrate
      >>> mix, w = jax.random.normal(jax.random.key(0), (2, 64, 64))
      >>> x = jax.random.normal(jax.random.key(1), (256, 64)) @ mix
      >>> fitted = calibrate.gptq(w, "mxfp4", x.T @ x)
      >>> plain = mx_jax.quantize(w, "mxfp4", axis=0)
      >>> before, after = (calibrate.output_error(w, q, x.T @ x) for q in (plain, fitted))
      >>> after < 0.6 * before
      True
    """
    w, format = jnp.asarray(w), block_format(format)
    if format.block[0] != 1:
        raise ValueError(
            "gptq: rounds feature by feature, which takes blocks along one axis, got "
            f"format={format.name} with block={format.block}; search_scales takes it"
        )
    axes = contracted(axis, w.ndim)
    sizes = [w.shape[each] for each in axes]
    hessian = check_moment(moment, "gptq")
    if len(hessian) != math.prod(sizes):
        raise ValueError(
            "gptq: moment must have one row and one column for each feature, got "
            f"moment.shape={hessian.shape} for an axis of length={math.prod(sizes)}"
        )
    if not w.size:
        return quantize(w, format, axis=axes[-1], tensor_scale=tensor_scale)
    if not damping > 0:
        raise ValueError(f"gptq: damping must be above 0, got damping={damping}")
    # Of mean diagonal 1 + damping; features that were never there count as if independent.
    mean = np.diag(hessian).mean()
    hessian = (hessian + hessian.T) / (2 * mean) if mean > 0 else np.zeros_like(hessian)
    hessian += damping * np.eye(len(hessian))
    search = search_for(format.scale, "gptq")
    first = quantize(w, format, axis=axes[-1], scale_rule=search.first, tensor_scale=tensor_scale)
    ((_, size),) = first.blocks
    block = size if isinstance(size, int) else sizes[-1]
    # Blocks are whole: features that lack at the end of the last axis are zero, and alone.
    missing = -sizes[-1] % block
    whole = [*sizes[:-1], sizes[-1] + missing]
    there = np.arange(math.prod(whole)).reshape(whole)[..., : sizes[-1]].ravel()
    filled, activity = np.eye(math.prod(whole)), np.zeros(math.prod(whole))
    filled[np.ix_(there, there)], activity[there] = hessian, np.diag(hessian)
    by_block = activity.reshape(-1, block)
    blocks = np.argsort(-by_block.sum(1), kind="stable")
    inside = np.argsort(-by_block, axis=1, kind="stable")
    order = (np.arange(0, len(filled), block)[:, None] + inside)[blocks].ravel()
    factor = _factor(filled[np.ix_(order, order)])

    padding = [(0, missing if each == axes[-1] else 0) for each in range(w.ndim)]
    # `[features, outputs]`, features counted along the axes in their order.
    rows = jnp.moveaxis(jnp.pad(w, padding), axes, range(len(axes))).reshape(len(order), -1)
    rows = rows.astype(jnp.float32)[order]
    over = None if first.tensor_scale is None else first.tensor_scale.reshape(())
    parts = [
        _round(rows[:, n : n + COLUMNS], factor, over, first.format, block, search)
        for n in range(0, rows.shape[1], COLUMNS)
    ]
    codes, scales = (jnp.concatenate(each, 1) for each in zip(*parts, strict=True))

    def as_weights(x: jax.Array, places: np.ndarray, extent: int) -> jax.Array:
        kept = (n for each, n in enumerate(w.shape) if each not in axes)
        x = x[np.argsort(places)].reshape(*sizes[:-1], -1, *kept)
        x = lax.slice_in_dim(x, 0, extent, axis=len(axes) - 1)
        return jnp.moveaxis(x, range(len(axes)), axes)

    return dataclasses.replace(
        first,
        codes=as_weights(codes, order, sizes[-1]),
        scales=as_weights(scales, blocks, whole[-1] // block),
    )


def _factor(hessian: np.ndarray) -> tuple[jax.Array, jax.Array]:
    """U with rows over their diagonal, what later features take of an error; and 1 / U_ii^2."""
    try:
        # H = R R^T with R upper triangular, so the factor of its inverse is that of R.
        backwards = np.linalg.cholesky(hessian[::-1, ::-1])[::-1, ::-1]
        upper = solve_triangular(backwards, np.eye(len(hessian)))
    except np.linalg.LinAlgError:
        raise ValueError(
            "gptq: moment must be positive semidefinite, as a sum of x x^T is; raise damping if it "
            "is one but for rounding"
        ) from None
    diagonal = np.diag(upper)
    return jnp.asarray(upper / diagonal[:, None], jnp.float32), jnp.asarray(
        diagonal**-2, jnp.float32
    )


@functools.partial(jax.jit, static_argnums=(3, 4, 5))
def _round(
    w: jax.Array,
    factor: tuple[jax.Array, jax.Array],
    tensor_scale: jax.Array | None,
    format: BlockFormat,
    size: int,
    search: Search,
) -> tuple[jax.Array, jax.Array]:
    """Codes `[k, n]` and scales `[k / size, n]` of the rows of w, block by block."""
    steps, (upper, importance) = jnp.asarray(search.steps, jnp.int32)[:, None], factor

    def block(w: jax.Array, begin: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        before = lax.dynamic_slice_in_dim(w, begin, size)
        start = quantize(
            before, format, axis=0, scale_rule=search.first, tensor_scale=tensor_scale
        ).scales
        scales = jnp.clip(start.astype(jnp.int32) + steps, search.smallest, search.largest)
        scales = jnp.where(is_nan_scale(start, format.scale), start, scales.astype(jnp.uint8))
        reach = lax.dynamic_slice_in_dim(upper, begin, size)
        weights = lax.dynamic_slice_in_dim(importance, begin, size)
        inside = lax.dynamic_slice_in_dim(reach, begin, size, axis=1)
        unit = power_of_two_up_to(jnp.max(jnp.abs(before), 0, keepdims=True))

        def row(i: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            now, lost, codes, loss = state
            here = now[i]
            code = encode_scaled(
                here, scales, format, tensor_scale=tensor_scale, rounding=NEAREST, random_bits=None
            )
            error = here - float32.from_bits(decode_scaled(code, scales, format, tensor_scale))
            # A block that holds NaN or Inf is lost, and harms no other.
            error = jnp.where(jnp.isfinite(error), error, 0)
            now = now - inside[i][:, None, None] * error[None]
            loss = loss + weights[i] * (error / unit) ** 2
            return now, lost.at[i].set(error), codes.at[i].set(code), loss

        # One of each for each scale that is tried.
        now = jnp.broadcast_to(before[:, None], (size, *scales.shape))
        state = now, now, jnp.zeros(now.shape, jnp.uint8), jnp.zeros(scales.shape)
        _, lost, codes, loss = lax.fori_loop(0, size, row, state)
        best = jnp.argmin(loss, 0)[None]
        lost, codes = (
            jnp.take_along_axis(each, best[None], 1).squeeze(1) for each in (lost, codes)
        )
        # Rows of this block and before change too, but are not read any more.
        w = w - jnp.matmul(reach.T, lost, precision="highest")
        return w, (codes, jnp.take_along_axis(scales, best, 0).squeeze(0))

    _, (codes, scales) = lax.scan(block, w, jnp.arange(0, w.shape[0], size))
    return codes.reshape(w.shape), scales


class UncalibratedWarning(UserWarning):
    """A weight for which there is no moment.

    Examples:
      >>> import warnings, jax.numpy as jnp, mx_jax
      >>> from mx_jax import calibrate, convert
      >>> params = {"up": {"kernel": jnp.ones((64, 8))}}
      >>> rules = convert.Rule(".*", mx_jax.recipes.weight_only("mxfp4"))
      >>> with warnings.catch_warnings():
      ...     warnings.simplefilter("error", calibrate.UncalibratedWarning)
      ...     convert.weights(params, rules, by=calibrate.Gptq({}))
      Traceback (most recent call last):
      mx_jax.calibrate.gptq.UncalibratedWarning: calibrate.Gptq: no moment for 'up'; its ...
    """


@dataclasses.dataclass(frozen=True, eq=False)
class Gptq:
    """By `gptq`, with the moment of each layer.

    A weight without a moment gets its scales by squared error, with an `UncalibratedWarning` unless
    it is a table that rows are looked up in. A table with a moment, that of its `attend`, is
    rounded for the product: its rows are a little further from what they were.

    Attributes:
      moments: by path of the layer: see `calibrate.moments`.
      damping: as `gptq` takes it.

    Examples:
      >>> import jax, mx_jax
      >>> from mx_jax import calibrate, convert
      >>> w, x = jax.random.normal(jax.random.key(0), (2, 64, 64))
      >>> rules = convert.Rule(".*", mx_jax.recipes.weight_only("mxfp4"))
      >>> way = calibrate.Gptq({"up": x.T @ x})
      >>> up = convert.weights({"up": {"kernel": w}}, rules, by=way, pack=False)["up"]
      >>> alone = calibrate.gptq(w, "mxfp4", x.T @ x)
      >>> bool((up["kernel"].codes == alone.codes).all())
      True
    """

    moments: Mapping[str, jax.typing.ArrayLike]
    damping: float = 0.05

    def __call__(
        self, names: Sequence[str], w: jax.Array, format: BlockFormat, axis: Axis, looked_up: bool
    ) -> MXArray:
        """See `Way`."""
        known = (self.moments[name] for name in names if name in self.moments)
        moment = next(known, None)
        if moment is None:
            if not looked_up:
                warnings.warn(
                    f"calibrate.Gptq: no moment for {names[0]!r}; its scales are chosen by squared "
                    "error",
                    UncalibratedWarning,
                    stacklevel=2,
                )
            return search_scales(w, format, axis=axis)
        return gptq(w, format, moment, axis=axis, damping=self.damping)
