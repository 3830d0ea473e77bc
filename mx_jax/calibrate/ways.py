"""What `convert.weights` takes as `by`: how a weight's codes are chosen."""

import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from typing import Protocol

import jax

from mx_jax.calibrate.gptq import gptq
from mx_jax.calibrate.scales import search_scales
from mx_jax.formats import BlockFormat
from mx_jax.mxarray import MXArray

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
      mx_jax.calibrate.ways.UncalibratedWarning: calibrate.Gptq: no moment for 'up'; its ...
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
