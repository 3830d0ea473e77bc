"""GPTQ, in which later features make up for earlier ones; and what `convert.weights` takes as `by`.

Source: Frantar et al., arXiv 2210.17323; scales fixed beforehand, so that features may be taken in
any order although blocks share one (the "static groups" of its authors' code).
"""

import dataclasses
import functools
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from scipy.linalg import solve_triangular

from mx_jax.calibrate.scales import by_feature, check_moment, contracted, search_scales
from mx_jax.codecs import float32
from mx_jax.codecs.rounding import NEAREST
from mx_jax.codecs.scale import decode_scaled, encode_scaled
from mx_jax.formats import BlockFormat, block_format
from mx_jax.mxarray import MXArray

# Features whose errors reach the rest in one product.
BATCH = 64


def gptq(
    w: jax.typing.ArrayLike,
    format: BlockFormat | str,
    moment: jax.typing.ArrayLike,
    *,
    axis: int | Sequence[int] = 0,
    damping: float = 0.01,
    by_activity: bool = True,
    tensor_scale: jax.typing.ArrayLike | None = None,
) -> MXArray:
    """Quantize weights so that the product with typical inputs loses least, feature by feature.

    Feature i becomes `q_i`, the nearest codes to what it is by then; the features after it take
    `-(w_i - q_i) U_ij / U_ii`, where `U^T U` is the Cholesky factorization of the inverse of
    `H = E[x x^T] + damping * mean(diag E[x x^T]) * 1`. Scales are those of `search_scales` with the
    diagonal of H as importance.

    Args:
      w: weights, float32, bfloat16 or float16, of any shape.
      format: a format with E8M0 or E4M3 scales, or its name.
      moment: `[k, k]`, symmetric, the sum or the mean of `x x^T` over inputs x: see `moments`.
      axis: the axis of length k, which a product contracts, or the axes whose lengths multiply to
        k; blocks lie along the last.
      damping: above 0; how far H is moved towards one that knows nothing.
      by_activity: take the features in the order of the diagonal of H, largest first (the
        "act-order" of the authors' code), instead of as they lie.
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
      >>> found = calibrate.gptq(w, "mxfp4", x.T @ x)
      >>> plain = mx_jax.quantize(w, "mxfp4", axis=0)
      >>> before, after = (calibrate.output_error(w, q, x.T @ x) for q in (plain, found))
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
    if not damping > 0:
        raise ValueError(f"gptq: damping must be above 0, got damping={damping}")
    # Of mean diagonal 1 + damping; features that were never there count as if independent.
    mean = np.diag(hessian).mean()
    hessian = (hessian + hessian.T) / (2 * mean) if mean > 0 else np.zeros_like(hessian)
    hessian += damping * np.eye(len(hessian))
    diagonal = np.diag(hessian)
    importance = diagonal.astype(np.float32)
    start = search_scales(w, format, axis=axes, importance=importance, tensor_scale=tensor_scale)
    order = np.argsort(-diagonal, kind="stable") if by_activity else np.arange(len(diagonal))
    ordered = hessian[np.ix_(order, order)]
    try:
        # H = R R^T with R upper triangular, so the factor of its inverse is that of R.
        backwards = np.linalg.cholesky(ordered[::-1, ::-1])[::-1, ::-1]
        upper = solve_triangular(backwards, np.eye(len(ordered)))
    except np.linalg.LinAlgError:
        raise ValueError(
            "gptq: moment must be positive semidefinite, as a sum of x x^T is; raise damping if it "
            "is one but for rounding"
        ) from None
    # U with rows over their diagonal: what the features after i take of i's error.
    factor = (upper / np.diag(upper)[:, None]).astype(np.float32)

    ((_, size),) = start.blocks
    extent = sizes[-1] if not isinstance(size, int) else size
    scales = jnp.repeat(start.scales, extent, axis=axes[-1])
    scales = by_feature(lax.slice_in_dim(scales, 0, sizes[-1], axis=axes[-1]), axes)
    whole = None if start.tensor_scale is None else start.tensor_scale.reshape(1, 1)
    rows = by_feature(w, axes).astype(jnp.float32)
    codes = _round(rows[order], scales[order], factor, whole, start.format)
    kept = (n for each, n in enumerate(w.shape) if each not in axes)
    codes = codes[np.argsort(order)].reshape(*sizes, *kept)
    return dataclasses.replace(start, codes=jnp.moveaxis(codes, range(len(axes)), axes))


@functools.partial(jax.jit, static_argnums=4)
def _round(
    w: jax.Array,
    scales: jax.Array,
    factor: jax.Array,
    tensor_scale: jax.Array | None,
    format: BlockFormat,
) -> jax.Array:
    """Codes `[k, n]` of the rows of w, one after the other."""
    # Rows come in batches: errors reach a batch's own rows at once, and all later ones in one
    # product at its end.
    length = w.shape[0]
    missing = -length % BATCH
    w, scales = (jnp.pad(of, ((0, missing), (0, 0)), mode="edge") for of in (w, scales))
    factor = jnp.pad(factor, ((0, missing), (0, missing)))

    def row(index: jax.Array, state: tuple[jax.Array, jax.Array, jax.Array], batch: jax.Array):
        now, lost, codes = state
        scale = lax.dynamic_slice_in_dim(scales, batch * BATCH + index, 1)
        here = lax.dynamic_slice_in_dim(now, index, 1)
        code = encode_scaled(
            here, scale, format, tensor_scale=tensor_scale, rounding=NEAREST, random_bits=None
        )
        error = here - float32.from_bits(decode_scaled(code, scale, format, tensor_scale))
        # A block that holds NaN or Inf is lost, and harms no other.
        error = jnp.where(jnp.isfinite(error), error, 0)
        own = lax.dynamic_slice(factor, (batch * BATCH + index, batch * BATCH), (1, BATCH))
        return (
            now - own.T * error,
            lax.dynamic_update_slice_in_dim(lost, error, index, 0),
            lax.dynamic_update_slice_in_dim(codes, code, index, 0),
        )

    def batch_of(w: jax.Array, batch: jax.Array) -> tuple[jax.Array, jax.Array]:
        now = lax.dynamic_slice_in_dim(w, batch * BATCH, BATCH)
        state = now, jnp.zeros_like(now), jnp.zeros(now.shape, jnp.uint8)
        _, lost, codes = lax.fori_loop(0, BATCH, functools.partial(row, batch=batch), state)
        # Rows of this batch and before change too, but are not read any more.
        reach = lax.dynamic_slice_in_dim(factor, batch * BATCH, BATCH)
        return w - jnp.matmul(reach.T, lost, precision="highest"), codes

    _, codes = lax.scan(batch_of, w, jnp.arange((length + missing) // BATCH))
    return codes.reshape(-1, w.shape[1])[:length]


# Ways to store weights --------------------------------------------------------------------------

Axis = int | tuple[int, ...]
# What command lines call the ways here.
SEARCHED, GPTQ = "mse", "gptq"


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


@dataclasses.dataclass(frozen=True, eq=False)
class Gptq:
    """By `gptq`, with each layer's own moment.

    A weight without a moment gets its scales by squared error, with an `UncalibratedWarning` unless
    it is a table that rows are looked up in. A table with a moment, that of its `attend`, is
    rounded for the product: its rows are a little further from what they were.

    Attributes:
      moments: by path of the layer: see `calibrate.moments`.
      damping: as `gptq` takes it.
      by_activity: as `gptq` takes it.

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
    damping: float = 0.01
    by_activity: bool = True

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
        options = {"damping": self.damping, "by_activity": self.by_activity}
        return gptq(w, format, moment, axis=axis, **options)
