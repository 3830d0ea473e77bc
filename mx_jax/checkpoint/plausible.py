"""Whether what was read looks like weights: its numbers, and what is out of the ordinary."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mx_jax.checkpoint.scales import decoded, effective_scales
from mx_jax.codecs import blocks
from mx_jax.mxarray import MXArray
from mx_jax.packed import Quantized, unpacked

# Trained weights lie well within these; a tensor scale that is taken the other way around, or
# twice, does not.
_LARGEST, _SMALLEST = 1e3, 1e-6
_MANY_ZEROS, _MANY_SATURATED = 0.9, 0.5
# Bytes that are no scales spread over all of E8M0.
_OCTAVES = 40
_CHUNK = 1 << 20
# Fewer blocks than these may well have one scale.
_BLOCKS = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plausibility:
    """What a tensor looks like.

    Attributes:
      amax: largest finite magnitude.
      zeros: share of values that are zero.
      saturated: share of codes with the largest magnitude that their format has; 0 of plain arrays.
      not_finite: number of values that are NaN or infinite.
      octaves: from the smallest to the largest scale of blocks that are not all zero, in powers of
        two; 0 of plain arrays.
      warnings: what is out of the ordinary, in words; empty of ordinary weights.

    Examples:
      >>> import jax.numpy as jnp, mx_jax
      >>> q = mx_jax.quantize(jnp.full((2, 32), 4e4), "mxfp4")
      >>> found = mx_jax.checkpoint.plausibility(q)
      >>> found.amax, found.zeros, found.not_finite
      (32768.0, 0.0, 0)
      >>> print(found.warnings[0])
      the largest value is 3.28e+04, which few weights have: is a scale of it taken the ...
    """

    amax: float
    zeros: float
    saturated: float
    not_finite: int
    octaves: float
    warnings: tuple[str, ...]


def plausibility(x: Quantized | jax.Array | np.ndarray) -> Plausibility:
    """Look at a tensor that was read: its largest value, zeros, saturation, and what is odd.

    Nothing here is an error. `read` refuses what cannot be; this finds what may be but seldom is.

    Args:
      x: quantized, or a plain array of numbers.

    Examples:
      >>> import jax.numpy as jnp, mx_jax
      >>> from mx_jax import checkpoint
      >>> found = checkpoint.plausibility(mx_jax.quantize(jnp.zeros((2, 32)), "mxfp4"))
      >>> found.zeros, found.warnings
      (1.0, ('all values are zero',))
    """
    if not isinstance(x, Quantized):
        flat = np.asarray(x).reshape(-1)
        parts = (flat[at : at + _CHUNK].astype(np.float64) for at in range(0, flat.size, _CHUNK))
        return _look(parts, x.size, 0.0, 0.0, [])
    given = unpacked(x)
    magnitude = np.bincount(
        (np.asarray(given.codes) & (given.format.element.sign_code - 1)).ravel(), minlength=256
    )
    saturated = magnitude[given.format.element.max_code] / max(given.size, 1)
    octaves, odd = _scales(given)
    return _look(decoded(given), given.size, float(saturated), octaves, odd)


def _look(parts: Any, size: int, saturated: float, octaves: float, odd: list[str]) -> Plausibility:
    amax, zeros, finite = 0.0, 0, 0
    for values in parts:
        good = np.abs(values[np.isfinite(values)])
        amax = max(amax, float(good.max(initial=0)))
        zeros += int((good == 0).sum())
        finite += good.size
    share = zeros / max(size, 1)
    warnings = list(odd)
    if finite < size:
        warnings.insert(0, f"{size - finite} of {size} values are NaN or infinite")
    if size and zeros == size:
        warnings.append("all values are zero")
    elif share > _MANY_ZEROS:
        warnings.append(f"{share:.1%} of the values are zero")
    if amax > _LARGEST or 0 < amax < _SMALLEST:
        warnings.append(
            f"the largest value is {amax:.3g}, which few weights have: is a scale of it taken the "
            "other way around, or twice?"
        )
    if saturated > _MANY_SATURATED:
        warnings.append(f"{saturated:.1%} of the codes have the largest magnitude of their format")
    return Plausibility(
        amax=amax,
        zeros=share,
        saturated=saturated,
        not_finite=size - finite,
        octaves=octaves,
        warnings=tuple(warnings),
    )


def _holds_values(x: MXArray) -> np.ndarray:
    """Which blocks are not all zero, of the scales' shape: the scale of the others says nothing."""
    magnitudes = np.asarray(x.codes) & (x.format.element.sign_code - 1)
    pieces, inside = blocks.split(jnp.asarray(magnitudes != 0), x.blocks)
    return np.asarray(pieces.any(axis=inside))


def _scales(x: MXArray) -> tuple[float, list[str]]:
    """Octaves that the scales span, and what is odd about them."""
    scales = effective_scales(x)
    odd = []
    bad = int((~np.isfinite(scales) | (scales < 0)).sum())
    if bad:
        odd.append(f"{bad} of {scales.size} scales are NaN, infinite or negative")
    used = scales[np.isfinite(scales) & (scales > 0) & _holds_values(x)]
    octaves = float(np.log2(used.max() / used.min())) if used.size else 0.0
    if octaves > _OCTAVES:
        odd.append(f"the scales span {octaves:.0f} octaves: are they scales of this format?")
    if scales.size >= _BLOCKS and used.size == scales.size and octaves == 0:
        odd.append(f"all {scales.size} scales are equal")
    return octaves, odd
